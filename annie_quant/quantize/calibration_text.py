"""Read a job's conversations as calibration samples, and record which of them are used.

A row is used whole or not at all: a row that is cut at its end has lost the answer that it is there for. The longest row that is
used has `--calib-tokens` tokens, by default the model's context, or fewer where the hidden states of all rows would take more than
half of the free memory. Fewer than half of the conversations are an error, not a result.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from annie_quant.checkpoint.chat_template import ConversationRefused
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.core.errors import UsageError
from annie_quant.core.progress import Progress
from annie_quant.core.untrusted import JsonObject, integer
from annie_quant.data.behaviours import (
    GIVEN_MIXTURE,
    NO_ANSWER,
    THINKS,
    Mixture,
    behaviour_of,
    ordered,
)
from annie_quant.data.logs import Problems
from annie_quant.data.rows import place_of, read_conversations
from annie_quant.documents import Behaviour, CalibrationUse
from annie_quant.offline.caches import common_prefix
from annie_quant.offline.prompts import (
    NO_ASSISTANT_MESSAGE,
    AnswerNotLocated,
    ScoredAnswer,
    Template,
    answers_of_row,
)
from annie_quant.quantize.backend import device_and_dtype, free_memory_bytes
from annie_quant.quantize.calibration_samples import CONTENT, PROMPT, THINKING, CalibrationSample
from annie_quant.quantize.own_answers import OwnAnswers, own_answers
from annie_quant.quantize.shared_text import distinct_positions
from annie_quant.quantize.strategy import Job, StrategyOptions

# Hidden states of all rows: a layer's inputs and outputs of two streams (rounding.py).
STATE_COPIES = 4
MEMORY_SHARE = 0.5
MIN_SHARE_OF_ROWS = 0.5
NO_THINKING = "thinking is on in these rows, and the chat template has none"
MIN_PREFIX = 16  # tokens; shorter ones are markup that all conversations begin with


AnswersOf = Callable[[Template, Sequence[ScoredAnswer]], OwnAnswers]


@dataclass(frozen=True)
class CalibrationText:
    """The samples that are used, and the record of what was used."""

    samples: list[CalibrationSample]
    use: CalibrationUse


@dataclass(frozen=True)
class RowLimit:
    """The most tokens of a row, and where that number comes from."""

    tokens: int
    reason: str

    def __str__(self) -> str:
        return f"longer than {self.reason} of {self.tokens:,} tokens"


def read_answers(job: Job[StrategyOptions], progress: Progress) -> CalibrationText:
    """Return one sample per assistant's answer, with its prompt, and report what is used.

    The answers are the model's own (own_answers.py), unless the job takes those of the file.
    """
    if job.answers == "given":
        return _read(job, progress)

    def own(template: Template, given: Sequence[ScoredAnswer]) -> OwnAnswers:
        return own_answers(job.model, template, given, progress)

    text = _read(job, progress, own=own)
    progress.message(f"the answers: {text.use.behaviour_line()}")
    return text


def read_whole_conversations(job: Job[StrategyOptions], progress: Progress) -> CalibrationText:
    """Return one sample per conversation, whose tokens all have one kind, and report what is used."""
    return _read(job, progress, whole=True)


def _read(
    job: Job[StrategyOptions],
    progress: Progress,
    whole: bool = False,
    own: AnswersOf | None = None,
) -> CalibrationText:
    every = read_conversations(job.conversations)
    rows = read_conversations(every, job.calib_samples)
    positions = stored_positions(job)
    text = text_of_rows(job.model, rows, job.calib_tokens, whole, positions, own, job.mixture)
    text.use.in_file = len(every)
    progress.message(f"calibration: {text.use.line()}")
    return text


def stored_positions(job: Job[StrategyOptions]) -> int:
    """Return affordable_positions as the first run of an interrupted job measured them, so that a rerun uses the same rows."""
    file = job.measurements("affordable_positions.json")
    positions: int | None = file.load()
    if positions is None:
        positions = affordable_positions(ModelFolder(job.model))
        file.save(positions)
    return positions


def text_of_rows(
    model: Path,
    rows: Sequence[JsonObject],
    calib_tokens: int | None = None,
    whole: bool = False,
    positions: int | None = None,
    own: AnswersOf | None = None,
    mixture: Mixture = GIVEN_MIXTURE,
    with_open: bool = False,
) -> CalibrationText:
    """Return the samples of conversations that the limits allow, one per answer.

    calib_tokens: most tokens of a row; None: the model's context, or what memory allows.
    whole: one sample per conversation.
    own: returns the model's own answers; None: the answers stay as they are given.
    positions: that memory holds, by default those that are free now.
    mixture: how much the answers count, by their behaviour.
    with_open: without `own`, a prompt that has no answer yet is a sample, too; an estimate counts it.
    Raises UsageError where fewer than half of the conversations can be used.
    """
    template = Template(model)
    samples: list[CalibrationSample] = []
    given: list[ScoredAnswer] = []
    row_of: list[int] = []
    not_located = Problems()
    for number, row in enumerate(rows):
        try:
            if whole:
                samples.append(conversation_sample(template, row, number))
            else:
                answers = answers_of_row(template, row, with_open or own is not None)
                given += answers
                row_of += [number] * len(answers)
        except AnswerNotLocated as error:
            not_located.add(str(error), place_of(row))
        if row.get("thinking") and not template.thinks:
            not_located.add(NO_THINKING, place_of(row), unit="thoughts")
    answered = own(template, given) if own else OwnAnswers(given)
    for number, answer in zip(row_of, answered.answers, strict=True):
        if answer.target or with_open:
            samples.append(answer_sample(template, answer, number))
    if answered.n_unanswered:
        reason = f"the model's own answer has more than {answered.limit:,} tokens"
        not_located.add(reason, n=answered.n_unanswered, unit="prompts without an answer")
    limit = limit_of(model, samples, calib_tokens, positions)
    used = [sample for sample in samples if len(sample.ids) <= limit.tokens]
    weights = mixture.weights([sample.behaviour for sample in used])
    used = [replace(sample, weight=w) for sample, w in zip(used, weights, strict=True)]
    use = use_of(samples, used, len(rows), limit, not_located)
    if not whole:
        use.behaviours = _described(used, mixture)
    if own:
        use.given_answers = answered.n_kept
        use.endless_answers = answered.n_endless
        use.own_answers = answered.n_own
    if use.conversations < MIN_SHARE_OF_ROWS * len(rows):
        raise UsageError(f"only {use.line()}", remedy(samples, limit, not_located))
    return CalibrationText(used, use)


def samples_of_rows(
    model: Path, rows: Sequence[JsonObject], calib_tokens: int | None = None
) -> list[CalibrationSample]:
    """Return the samples of text_of_rows."""
    return text_of_rows(model, rows, calib_tokens).samples


def answer_sample(template: Template, scored: ScoredAnswer, number: int) -> CalibrationSample:
    """Return an answer of conversation `number` with its prompt as one sample."""
    answer_kinds = [kind + 1 for kind in template.classes(scored.target, scored.thinking)]
    ids = (*scored.prompt, *scored.target)[:-1]
    kinds = (PROMPT,) * (len(scored.prompt) - 1) + tuple(answer_kinds)
    decides = tuple(template.decisions(scored.target, scored.thinking))
    behaviour = NO_ANSWER
    if scored.target:
        behaviour = behaviour_of(template.calls(scored), scored.after_result, scored.offered)
    return CalibrationSample(scored.category, ids, kinds, scored.target, decides, number, behaviour)


def _described(used: Sequence[CalibrationSample], mixture: Mixture) -> list[Behaviour]:
    """Return what the answers that are used do, next to what gates ask for and logs show."""
    counts = Counter(sample.behaviour for sample in used)
    weights = {sample.behaviour: sample.weight for sample in used}
    rows = [
        Behaviour(
            name,
            answers=counts[name],
            gates=mixture.gates.get(name, 0),
            logs=mixture.logs.get(name, 0),
            weight=round(weights.get(name, 1.0), 4),
        )
        for name in ordered({*counts, *mixture.gates, *mixture.logs})
    ]
    thinking = sum(THINKING in sample.kinds for sample in used)
    return [*rows, Behaviour(THINKS, answers=thinking)] if thinking else rows


def conversation_sample(template: Template, row: JsonObject, number: int) -> CalibrationSample:
    """Return a conversation as one sample."""
    thinking = bool(row.get("thinking")) and template.thinks
    try:
        text = template.render(row["messages"], row.get("tools"), thinking, False)
    except ConversationRefused as error:
        raise AnswerNotLocated(f"the chat template refuses it: {error.reason}") from None
    ids = tuple(template.ids(text))
    if not ids:
        raise AnswerNotLocated("the chat template renders no text")
    return CalibrationSample("", ids, (CONTENT,) * len(ids), (), row=number)


# ---- the limit


def limit_of(
    model: Path,
    samples: Sequence[CalibrationSample],
    calib_tokens: int | None,
    positions: int | None,
) -> RowLimit:
    """Return `calib_tokens`; without it the model's context, or fewer tokens where the states of all rows do not fit."""
    if calib_tokens is not None:
        return RowLimit(calib_tokens, "--calib-tokens")
    folder = ModelFolder(model)
    context = integer(folder.text_config.get("max_position_embeddings"))
    longest = max((len(sample.ids) for sample in samples), default=1)
    limit = RowLimit(context or longest, "the model's context")
    positions = affordable_positions(folder) if positions is None else positions
    fitting = [sample for sample in samples if len(sample.ids) <= limit.tokens]
    if distinct_positions(sample.ids for sample in fitting) <= positions:
        return limit
    lengths = sorted({len(sample.ids) for sample in fitting})
    low = 0
    high = len(lengths) - 1
    while low < high:
        middle = (low + high) // 2
        shorter = (sample.ids for sample in fitting if len(sample.ids) <= lengths[middle + 1])
        if distinct_positions(shorter) <= positions:
            low = middle + 1
        else:
            high = middle
    return RowLimit(lengths[low], "what half of the free memory holds,")


def affordable_positions(folder: ModelFolder) -> int:
    """Return how many tokens may have their hidden states in memory."""
    _, dtype = device_and_dtype(folder)
    hidden_size = integer(folder.text_config.get("hidden_size")) or 1
    return int(MEMORY_SHARE * free_memory_bytes() / (STATE_COPIES * hidden_size * dtype.itemsize))


def remedy(samples: Sequence[CalibrationSample], limit: RowLimit, not_located: Problems) -> str:
    """Return what a user can do so that more conversations are used."""
    longest = max((len(sample.ids) for sample in samples), default=0)
    if any(reason == NO_ASSISTANT_MESSAGE for _, reason in not_located.counts):
        return "--answers own lets the model answer prompts that have no answer"
    if longest > limit.tokens and limit.reason.startswith("what"):
        return f"--calib-samples with fewer conversations, or --calib-tokens {longest}"
    if longest > limit.tokens:
        return f"--calib-tokens {longest} takes all of them"
    return "; ".join(not_located.lines()) or "annie-quant data makes conversations with answers"


# ---- what was used


def use_of(
    samples: Sequence[CalibrationSample],
    used: Sequence[CalibrationSample],
    rows: int,
    limit: RowLimit,
    not_located: Problems,
) -> CalibrationUse:
    """Return the record of the conversations that are used, each with its longest sample, and of those that are not."""
    conversations = longest_per_row(used)
    lengths = [len(ids) for ids in conversations.values()]
    too_long = len(longest_per_row(samples)) - len(conversations)
    later = sum(s.row in conversations for s in samples) - len(used)
    left_out = list(not_located.lines())
    if too_long:
        left_out.append(f"{too_long} {limit} (--calib-tokens)")
    if later:
        left_out.append(f"{later} later answers {limit} (--calib-tokens)")
    prefix, sharing = most_shared_prefix(sorted(conversations.values()))
    return CalibrationUse(
        conversations=len(conversations),
        of=rows,
        tokens=sum(lengths),
        computed=distinct_positions(sample.ids for sample in used),
        longest=max(lengths, default=0),
        limit=limit.tokens,
        prefix=prefix,
        prefix_conversations=sharing,
        left_out=left_out,
    )


def longest_per_row(samples: Iterable[CalibrationSample]) -> dict[int, tuple[int, ...]]:
    """Return row → the tokens of its longest sample."""
    longest: dict[int, tuple[int, ...]] = {}
    for sample in samples:
        if len(sample.ids) > len(longest.get(sample.row, ())):
            longest[sample.row] = sample.ids
    return longest


def most_shared_prefix(ordered: Sequence[tuple[int, ...]]) -> tuple[int, int]:
    """Return (tokens, rows) of the prefix by which sharing saves the most tokens; zeros where none is worth a mention.

    ordered: rows in lexicographic order.
    """
    best = (0, 0)
    waiting: list[tuple[int, int]] = []  # (first row, shared tokens) of prefixes that may go on
    shared = [common_prefix(a, b) for a, b in itertools.pairwise(ordered)]
    for end, length in enumerate([*shared, 0]):
        first = end
        while waiting and waiting[-1][1] >= length:
            first, tokens = waiting.pop()
            rows = end - first + 1
            if tokens * (rows - 1) > best[0] * (best[1] - 1):
                best = tokens, rows
        waiting.append((first, length))
    return best if best[0] >= MIN_PREFIX else (0, 0)

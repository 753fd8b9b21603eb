"""Do the calibration answers belong to their questions? The bf16 model scores them as they are, and shuffled among the questions.

belong      the answers are far likelier with their own questions
shuffled    they are not likelier at all, although the model distinguishes these questions: its own answers are far likelier with
            their own questions
undecided   the model does not distinguish them (near-identical rows, or a model that was not fine-tuned on such rows), or the
            answers are only somewhat likelier
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
from scipy.stats import wilcoxon

from annie_quant.data.rows import read_conversations
from annie_quant.judge import Case, Workload
from annie_quant.pipeline.stages import StageResult, Stages, silence_transformers
from annie_quant.progress import Progress
from annie_quant.schema import Labels, LabelScores

Row = dict[str, Any]  # a conversation
Score = Callable[[Sequence[Row]], list[float]]  # nats per token of each row's answer
LABEL_ROWS = 48
OWN_TOKENS = 64  # of the model's own answers
# Answers that belong to their questions are far likelier under the fine-tune than the same answers shuffled. A ratio of 0.8 in
# nats per token is far from both cases (tiny-annie: 0.02 to 0.9 if they belong, 1.0 to 1.0 if they do not).
MAX_BELONGING_RATIO = 0.8
LEVEL = 0.05


class LabelsResult(StageResult):
    labels: Labels


def with_shuffled_answers(rows: Sequence[Row], seed: int = 0) -> list[Row]:
    """Return the conversations with their last answers shuffled among them; no answer stays with its own question."""
    order = list(range(len(rows)))
    random.Random(seed).shuffle(order)
    source = dict(zip(order, order[1:] + order[:1], strict=True))
    return [{**row, "messages": [*row["messages"][:-1], rows[source[i]]["messages"][-1]]} for i, row in enumerate(rows)]


def first_answers(rows: Sequence[Row]) -> list[Row]:
    """Return each conversation up to its first answer, which may be a tool call."""
    result = []
    for row in rows:
        end = next(i for i, m in enumerate(row["messages"]) if m["role"] == "assistant")
        result.append({**row, "messages": row["messages"][: end + 1]})
    return result


def last_answers(rows: Sequence[Row]) -> list[Row]:
    """Return each conversation with all user messages and the last answer alone."""
    return [
        {**row, "messages": [*(m for m in row["messages"] if m["role"] in ("system", "user")), row["messages"][-1]]}
        for row in rows
    ]


def check_labels(stages: Stages) -> Labels:
    """Score the first and the last answers of the calibration data under bf16, as they are and shuffled."""

    def work(progress: Progress) -> LabelsResult:
        from annie_quant.evaluate.pair import ModelPair

        silence_transformers()
        rows = read_conversations(stages.conversations, LABEL_ROWS)
        with ModelPair(stages.model, stages.model, cache=stages.dir / "eval", progress=progress) as pair:
            labels = judge_labels(rows, lambda part: score(pair, part), lambda part: own_answers(pair, part))
        return LabelsResult(labels.verdict, labels)

    return stages.stage("labels", stages.data_inputs(), [], work, LabelsResult).labels


def judge_labels(rows: Sequence[Row], score: Score, own: Callable[[Sequence[Row]], Sequence[Row]]) -> Labels:
    """Decide from scores. own: the rows with the model's own first answers; only asked for where the rows do not belong."""
    parts = {"first": first_answers(rows), "last": last_answers(rows)}
    scores = {name: (score(part), score(with_shuffled_answers(part))) for name, part in parts.items()}
    means = {name: LabelScores(*(float(np.mean(side)) for side in pair)) for name, pair in scores.items()}
    verdict: Literal["belong", "shuffled", "undecided"] = "belong"
    if not all(far_likelier(pair) for pair in means.values()):
        verdict = "undecided"
        worst = [scores[name] for name, mean in means.items() if not far_likelier(mean)]
        if not all(likelier(*pair) for pair in worst):
            answers = own(parts["first"])
            control = LabelScores(float(np.mean(score(answers))), float(np.mean(score(with_shuffled_answers(answers)))))
            verdict = "shuffled" if far_likelier(control) else "undecided"
    return Labels(means["first"], means["last"], verdict == "belong", verdict)


def note(labels: Labels, from_logs: bool) -> str | None:
    """Return what a user must know about the answers; None where they belong. from_logs: another model may have written them."""
    if labels.verdict == "belong":
        return None
    scores = "; ".join(
        f"{name} answers {part.original:.2f} nats per token as they are, {part.shuffled:.2f} shuffled"
        for name, part in (("first", labels.first), ("last", labels.last))
    )
    if labels.verdict != "shuffled":
        return f"labels undecided: the bf16 model does not distinguish these rows ({scores})"
    if from_logs:
        return (
            f"the calibration answers are not this model's ({scores}): either another model wrote the log, or answers and "
            "questions are mixed up. Calibration uses them all the same; the gates use bf16's own answers. Better: a log of "
            "this model (annie-quant record)"
        )
    return (
        f"SHUFFLED LABELS: the calibration answers do not belong to their questions ({scores}). "
        "Make the data again (annie-quant data)"
    )


def far_likelier(scores: LabelScores) -> bool:
    return scores.original < MAX_BELONGING_RATIO * scores.shuffled


def likelier(original: Sequence[float], shuffled: Sequence[float]) -> bool:
    """Return whether the answers are surely likelier with their own questions (Wilcoxon's signed-rank test, one-sided)."""
    if len(original) != len(shuffled):
        return False
    differences = np.subtract(original, shuffled)
    return bool(np.any(differences)) and wilcoxon(differences, alternative="less").pvalue < LEVEL


def score(pair: Any, rows: Sequence[Row]) -> list[float]:
    """Return the nats per token of each row's answers under the reference. pair: evaluate.pair.ModelPair."""
    from annie_quant.evaluate.kl import FIELDS
    from annie_quant.evaluate.prompts import conversation_answers

    compared = pair.compare(conversation_answers(pair.template, rows))
    column = FIELDS.index("nll_reference")
    return [float(compared[i].fields[:, column].mean()) for i in sorted(compared) if len(compared[i].fields)]


def own_answers(pair: Any, rows: Sequence[Row]) -> list[Row]:
    """Return the rows with the model's own answers."""
    from annie_quant.evaluate.verification import message_of

    cases = tuple(
        Case(id=str(i), messages=tuple(row["messages"][:-1]), tools=tuple(row.get("tools") or ()))
        for i, row in enumerate(rows)
    )
    workload = Workload(
        name="own answers",
        description="",
        persona=None,
        system=None,
        tools=None,
        thinking=False,
        max_tokens=OWN_TOKENS,
        temperature=0.0,
        gates=(),
        cases=cases,
    )
    answered = {
        a.request.case.id: pair.template.answer(a.request, a.completion)
        for a in pair.reference.answer([workload], pair.progress)
    }
    return [{**row, "messages": [*row["messages"][:-1], message_of(answered[str(i)])]} for i, row in enumerate(rows)]

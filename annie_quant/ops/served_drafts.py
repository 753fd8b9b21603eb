"""Drafts that a running server accepts, per position, compared with the prediction for its own answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from annie_quant.bench.backend import Backend
from annie_quant.bench.counters import PositionCounters, metrics_page, position_counters
from annie_quant.checkpoint import ModelFolder
from annie_quant.core.errors import AnnieError
from annie_quant.core.untrusted import JsonObject
from annie_quant.ops import server_checks
from annie_quant.ops.doctor import CheckResult, fault, note, ok

DRAFTS = "drafts"
N_DRAFTED = 48  # tokens per answer
_N_PROMPTS = 12


class _Timings(msgspec.Struct):
    """llama.cpp's counts up to an event of its stream. predicted_ms: of the tokens after the first."""

    predicted_ms: float = 0.0
    draft_n: int = 0
    draft_n_accepted: int = 0


class StreamedTokens(msgspec.Struct):
    """One event of llama.cpp's /completion. stop: it is the last one, without tokens."""

    tokens: list[int] = []
    stop: bool = False
    timings: _Timings = msgspec.field(default_factory=_Timings)


@dataclass(frozen=True)
class ServedStep:
    """A step: the tokens of the answer before it, and the drafts that it verified and accepted."""

    tokens_before: int
    drafted: int
    accepted: int


@dataclass(frozen=True)
class DraftedSteps:
    """An answer of llama.cpp with its steps. seconds: of all tokens after the first."""

    tokens: list[int]
    steps: list[ServedStep]
    seconds: float


def drafted_steps(
    root: str,
    prompts: Sequence[Sequence[int]],
    n_tokens: int,
    headers: Mapping[str, str] | None = None,
    options: Mapping[str, object] | None = None,
) -> list[DraftedSteps]:
    """Return llama.cpp's greedy answers with their steps, which its stream has with timings_per_token.

    options: further fields of each request.
    """
    more: JsonObject = {"stream": True, "timings_per_token": True, "return_tokens": True}
    more |= options or {}
    bodies = [server_checks.native_body(prompt, n_tokens) | more for prompt in prompts]
    replies = server_checks.post(root + server_checks.NATIVE, bodies, headers)
    return [read_steps(reply.body) for reply in replies if reply.status == 200]


def read_steps(body: bytes) -> DraftedSteps:
    """Return the answer in an event stream of llama.cpp."""
    tokens: list[int] = []
    steps: list[ServedStep] = []
    seconds = 0.0
    drafted = 0
    accepted = 0
    for line in body.splitlines():
        if not line.startswith(b"data: {"):
            continue
        event = msgspec.json.decode(line[len(b"data: ") :], type=StreamedTokens)
        counts = event.timings
        seconds = max(seconds, counts.predicted_ms / 1e3)
        if not event.stop and counts.draft_n > drafted:
            step = ServedStep(
                len(tokens), counts.draft_n - drafted, counts.draft_n_accepted - accepted
            )
            steps.append(step)
            drafted = counts.draft_n
            accepted = counts.draft_n_accepted
        if not event.stop:
            tokens += event.tokens
    return DraftedSteps(tokens, steps, seconds)


@dataclass(frozen=True)
class PositionCounts:
    """Per position from 1 on, the steps in which such a draft could count, and in which it was accepted.

    by_answer: (tokens before, drafts that could count, accepted ones) of each step; [] where only counts are known.
    """

    steps: int
    offered: list[int]
    accepted: list[int]
    by_answer: list[list[tuple[int, int, int]]] = field(default_factory=list)

    @property
    def shares(self) -> list[float]:
        """Share of accepted drafts per position."""
        pairs = zip(self.offered, self.accepted, strict=True)
        return [accepted / max(1, offered) for offered, accepted in pairs]


def count_positions(answers: Sequence[DraftedSteps]) -> PositionCounts:
    """Return the counts of llama.cpp's answers. A draft of an answer's last token, or after it, does not count."""
    all_steps = [step for answer in answers for step in answer.steps]
    drafts = max((step.drafted for step in all_steps), default=0)
    offered = [0] * drafts
    accepted = [0] * drafts
    by_answer = []
    for answer in answers:
        steps = []
        for step in answer.steps:
            within = max(0, min(step.drafted, len(answer.tokens) - step.tokens_before - 1))
            steps.append((step.tokens_before, within, min(step.accepted, within)))
            for k in range(within):
                offered[k] += 1
                accepted[k] += step.accepted > k
        by_answer.append(steps)
    return PositionCounts(sum(map(len, by_answer)), offered, accepted, by_answer)


def check_drafts(
    root: str,
    checkpoint: Path,
    served: server_checks.Served,
    headers: Mapping[str, str] | None = None,
    numerics: str | None = None,
) -> CheckResult:
    """Compare the accepted drafts per position with the prediction, and name the cause of a gap.

    numerics: profile that the server computes, where it is known.
    """
    prompts = served.prompts[:_N_PROMPTS]
    if served.family == "llama.cpp":
        answers = drafted_steps(root, prompts, N_DRAFTED, headers)
        counts = count_positions(answers)
        tokens = [answer.tokens for answer in answers]
    else:
        counts, tokens = _counted(root, prompts, headers)
    if not any(counts.offered):
        why = "it was started without speculative decoding, or reports none"
        return note(DRAFTS, "the server drafts nothing", why)
    return _finding(checkpoint, prompts, tokens, counts, numerics)


def _counted(
    root: str, prompts: Sequence[Sequence[int]], headers: Mapping[str, str] | None
) -> tuple[PositionCounts, list[list[int]]]:
    """Return vLLM's counters of answers that do not end, and the answers' tokens."""
    server = Backend("server", root, headers=headers or {})
    before = _positions(server)
    model = server_checks.model_name(root, headers)
    more = {"logprobs": 0, "return_tokens_as_token_ids": True, "ignore_eos": True}
    bodies = [server_checks.openai_body(model, prompt, N_DRAFTED) | more for prompt in prompts]
    replies = server_checks.post(root + server_checks.OPENAI, bodies, headers)
    after = _positions(server)
    tokens = []
    for reply in replies:
        try:
            tokens.append(server_checks.read_answer(reply.body, root).tokens)
        except AnnieError:
            tokens.append([])
    if before is None or after is None or not after.accepted:
        return PositionCounts(0, [], []), tokens
    steps = int(after.steps - before.steps)
    earlier = [*before.accepted, *[0.0] * len(after.accepted)]
    accepted = [int(a - b) for a, b in zip(after.accepted, earlier, strict=False)]
    return PositionCounts(steps, [steps] * len(accepted), accepted), tokens


def _positions(server: Backend) -> PositionCounters | None:
    return position_counters(metrics_page(server) or "")


def _finding(
    checkpoint: Path,
    prompts: Sequence[Sequence[int]],
    tokens: Sequence[Sequence[int]],
    counts: PositionCounts,
    numerics: str | None,
) -> CheckResult:
    """Return the finding for what a server accepted of its drafts in its own answers."""
    from annie_quant.offline import draft_diagnosis
    from annie_quant.offline.draft_head import has_head
    from annie_quant.offline.hidden_states import DraftedAnswer

    message = f"{_percents(counts.shares)} of drafts accepted per position in {counts.steps} steps"
    folder = ModelFolder(checkpoint)
    used = [i for i, answer in enumerate(tokens) if len(answer) > 1]
    answers = [DraftedAnswer("", prompts[i], tokens[i]) for i in used]
    by_answer = [counts.by_answer[i] for i in used] if counts.by_answer else []
    served = draft_diagnosis.AcceptedDrafts(counts.offered, counts.accepted, by_answer)
    if not has_head(folder) or not answers:
        why = "nothing is predicted: the checkpoint has no head, or the server returns no tokens"
        return (
            note(DRAFTS, message, why)
            if sum(counts.accepted)
            else fault(DRAFTS, message, why, "--checkpoint with the folder that is served")
        )
    result = draft_diagnosis.diagnose_folder(folder, answers, served, numerics)
    predicted = _percents([share.value for share in result.predicted.accepted])
    message = f"{message}, predicted {predicted}"
    if not result.cause:
        return ok(DRAFTS, message)
    if result.in_checkpoint:
        fix = "annie-quant draft DIR --base BASE grafts and tunes the base's head"
        return fault(DRAFTS, message, f"the checkpoint itself: {result.cause}", fix)
    fix = "annie-quant audit DIR --source BF16 compares the head's tensors; serve the checkpoint as it is"
    if result.cause == draft_diagnosis.AS_STORED:
        why = "no fault of a head that is known here explains it: another draft model, or sampling"
        return fault(DRAFTS, message, why, "start the server with the checkpoint's own head")
    return fault(DRAFTS, message, f"as if {result.cause}", fix)


_TEMPLATE = "template"
_GREETING = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello?"}]


def check_template(
    root: str, checkpoint: Path, headers: Mapping[str, str] | None = None
) -> list[CheckResult]:
    """Compare how llama.cpp and the checkpoint's template render a conversation; [] for a server that does not show it.

    Another template moves prompts away from those that the head was tuned on: it accepts less, with the right head.
    """
    from annie_quant.offline.prompts import Template

    body = {"messages": _GREETING, "chat_template_kwargs": {"enable_thinking": False}}
    (reply,) = server_checks.post(f"{root}/apply-template", [body], headers)
    try:
        served = msgspec.json.decode(reply.body, type=dict[str, str])["prompt"]
    except (msgspec.MsgspecError, KeyError):
        return []
    own = Template(checkpoint).render(_GREETING, None, False)
    if served.strip() == own.strip():
        return [ok(_TEMPLATE, "a conversation is rendered as by the checkpoint's template")]
    why = "prompts are not those that the model and its draft head were tuned on: fewer drafts are accepted"
    fix = "start the server with the checkpoint's chat_template.jinja"
    return [fault(_TEMPLATE, "another template than the checkpoint's", why, fix)]


def _percents(shares: Sequence[float]) -> str:
    return " ".join(f"{100 * share:.0f}" for share in shares) + " %"

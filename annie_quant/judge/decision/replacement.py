"""Could the candidate replace the incumbent? The drop-in checklist (R49) and the recommendation (R51).

What a benchmark cannot know stays undecided. A recommendation is never based on decode speed alone: gates come first, then
what a user or the machine gains or loses.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from annie_quant.documents import (
    Aggregates,
    Comparison,
    GateVerdict,
    Outcome,
    PairedGate,
    RequestRecord,
    ServedSide,
    SpeedGate,
    Standing,
    Verdict,
)
from annie_quant.judge.decision import rule
from annie_quant.judge.decision.judged import by_title, deciding_gates
from annie_quant.judge.decision.roles import label_of, with_candidate_second
from annie_quant.judge.metrics import METRICS, three_digits
from annie_quant.judge.pairing import deciding_by_prompt, pair_by_prompt
from annie_quant.judge.statistics import LEVEL

MARGIN = 0.05  # of the incumbent's median or memory: smaller differences are neither gain nor loss
# A checklist item that is not met, in a word for the badge.
SHORT = {
    "answers no later": "slower",
    "answers no worse": "worse answers",
    "fits the memory budget": "too large",
    "calls tools": "tool calls",
    "speaks the OpenAI API": "failed requests",
}
BUDGET_BYTES = 110e9  # for everything that runs on the machine (R50)


@dataclass(frozen=True)
class ChecklistItem:
    """One requirement of a drop-in replacement, and what decides it in this run."""

    item: str
    verdict: Outcome
    evidence: str


@dataclass(frozen=True)
class Recommendation:
    """What to do with the candidate, in one sentence, with reasons.

    badge: the same in a few words.
    """

    action: Literal["switch", "stay", "wait"]
    sentence: str
    reasons: list[str]
    badge: str = ""


class GainOrLoss(NamedTuple):
    """What a switch changes.

    short: the same in a word, for the badge.
    """

    text: str
    short: str


@dataclass(frozen=True)
class AnswerPairs:
    """The candidate's answers compared with the incumbent's on the same prompts (rule.py), and the reverse: what is better."""

    worse: dict[str, PairedGate]
    better: dict[str, PairedGate]

    def named(self, verdict: GateVerdict) -> list[str]:
        """Return the titles of the gates of the candidate that have this verdict against the incumbent."""
        return [
            rule.title(gate)
            for gate, pair in rule.deciding(self.worse).items()
            if pair.verdict == verdict
        ]


def pair_answers(
    records: Sequence[RequestRecord], candidate: str, incumbent: str, sampled: Collection[str] = ()
) -> AnswerPairs:
    """Pair two backends' answers.

    sampled: workloads with a temperature, whose repeats are separate answers.
    """
    greedy = {r.workload for r in records} - set(sampled)
    sides = ([r for r in records if r.backend == name] for name in (candidate, incumbent))
    ours, theirs = (deciding_by_prompt(rows, greedy) for rows in sides)
    (worse, pooled), (better, _) = (
        pair_by_prompt(theirs, ours, bf16=False),
        pair_by_prompt(ours, theirs, bf16=False),
    )
    return AnswerPairs(
        rule.judge_gates({"served": worse}, {"served": pooled})[0]["served"],
        rule.judge_gates({"served": better})[0]["served"],
    )


def served_as(aggregates: Aggregates, name: str | None) -> str | None:
    """Return the backend with this name, or the first that serves the model with this name."""
    return next(
        (backend for backend, side in aggregates.served.items() if name in (backend, side.model)),
        None,
    )


def outcome(aggregates: Aggregates, verdict: Verdict) -> Standing:
    """Return the run's outcome, also that of a run of version 0.1.0, which has no more than `passed`."""
    if not verdict.sentence:
        return "undecided"
    if verdict.outcome is not None:
        return verdict.outcome
    if not verdict.passed:
        return "loses"
    name = verdict.candidate
    tables = [
        side.gates
        for backend, side in aggregates.served.items()
        if name in (None, backend, side.model)
    ]
    tables += [
        s.gates
        for model, sides in aggregates.offline.items()
        if name in (None, model)
        for s in sides.values()
    ]
    results = [result for gates in tables for result in gates.values() if not result.advisory]
    return "undecided" if any(result.verdict == "undecided" for result in results) else "keeps"


# ---- checklist


def checklist(
    aggregates: Aggregates,
    candidate: str,
    incumbent: str | None,
    records: Sequence[RequestRecord],
    with_thinking: Collection[str],
    answers: AnswerPairs | None = None,
) -> list[ChecklistItem]:
    """Check what a replacement needs.

    candidate, incumbent: backends.
    records: measured ones.
    with_thinking: workloads.

    answers: pair_answers of the two; None where the records are not there.
    """
    side = aggregates.served[candidate]
    own = [r for r in records if r.backend == candidate]
    items = [
        _api(own),
        _gate(side, "tool_call", "calls tools"),
        _thinking(side, [r for r in own if r.workload in with_thinking and not r.answer.error]),
        _memory(side),
    ]
    if incumbent is not None:
        items += [_latency(aggregates, candidate, incumbent), _quality(answers)]
    launch = ChecklistItem(
        "the start script can launch it",
        "undecided",
        "annie-quant serve MODEL_DIR --dry-run prints the command",
    )
    return [*items, launch]


def _api(records: Sequence[RequestRecord]) -> ChecklistItem:
    succeeded = sum(not r.answer.error for r in records)
    verdict: Outcome = (
        "undecided" if not records else "pass" if succeeded == len(records) else "fail"
    )
    return ChecklistItem(
        "speaks the OpenAI API",
        verdict,
        f"{succeeded} of {len(records)} chat completions succeeded",
    )


def _gate(side: ServedSide, gate: str, item: str) -> ChecklistItem:
    result = side.gates.get(gate)
    if result is None:
        return ChecklistItem(item, "undecided", "not measured in this run")
    pair = side.paired.get(gate)
    text = (
        f"; {pair.lost} lost and {pair.won} won against {side.judged_by}"
        if pair and side.judged_by
        else ""
    )
    return ChecklistItem(item, result.verdict, f"{result.passes} of {result.n}, served{text}")


def _thinking(side: ServedSide, records: Sequence[RequestRecord]) -> ChecklistItem:
    """Off means that nothing leaks; on means that reasoning is received, separate from the answer."""
    off = _gate(side, "thinking_leak", "thinking can be switched")
    evidence = f"off: no leak in {off.evidence}"
    if not records:
        return ChecklistItem(off.item, "fail" if off.verdict == "fail" else "undecided", evidence)
    received = sum(bool(r.answer.reasoning) for r in records)
    evidence += f"; on: reasoning was received in {received} of {len(records)}"
    return ChecklistItem(off.item, off.verdict if received == len(records) else "fail", evidence)


def peak_bytes(side: ServedSide) -> int | None:
    """Return the highest memory of a side; None where it was not measured."""
    return side.memory_bytes.highest if side.memory_bytes else None


def _memory(side: ServedSide) -> ChecklistItem:
    item, peak = "fits the memory budget", peak_bytes(side)
    if peak is None:
        return ChecklistItem(item, "undecided", "memory was not measured")
    evidence = f"{_gigabytes(peak)} at its highest, of {_gigabytes(BUDGET_BYTES)} for everything"
    return ChecklistItem(item, "pass" if peak < BUDGET_BYTES else "fail", evidence)


def _latency(aggregates: Aggregates, candidate: str, incumbent: str) -> ChecklistItem:
    """No later: the interval of the paired difference ends below 5 % of the incumbent's median."""
    item = "answers no later"
    for row in _compared(aggregates, candidate, incumbent):
        if row.metric != "ttft_content_ms" or row.low is None or row.high is None:
            continue
        verdict: Outcome = "undecided"
        if row.high <= MARGIN * (row.median_a or 0.0):
            verdict = "pass"
        elif row.low > 0 and row.significant:
            verdict = "fail"
        interval = f"({row.low:+.3g} to {row.high:+.3g}), paired, {row.n_prompts} prompts"
        evidence = f"{row.median_difference:+.3g} ms {interval}"
        return ChecklistItem(item, verdict, f"{METRICS[row.metric].title} {evidence}")
    return ChecklistItem(item, "undecided", "no paired comparison of the two over all workloads")


def _quality(answers: AnswerPairs | None) -> ChecklistItem:
    """No worse: the candidate keeps every gate of the incumbent on the same prompts."""
    item = "answers no worse"
    if answers is None or not rule.deciding(answers.worse):
        return ChecklistItem(
            item, "undecided", "the answers of the two were not compared prompt by prompt"
        )
    n, bad = len(rule.deciding(answers.worse)), ("loses", "undecided")
    for verdict, outcome in rule.OUTCOMES.items():
        if verdict in bad and (names := answers.named(verdict)):
            return ChecklistItem(
                item, outcome, f"{verdict} {', '.join(names)} on the same prompts, of {n} gates"
            )
    return ChecklistItem(item, "pass", f"{n} gates kept on the same prompts")


# ---- recommendation


def recommendation(
    aggregates: Aggregates,
    candidate: str,
    incumbent: str | None,
    items: Sequence[ChecklistItem],
    answers: AnswerPairs | None = None,
) -> Recommendation:
    """Recommend what to do with the candidate.

    candidate, incumbent: backends.
    items, answers: checklist, pairs of the two.
    """
    name = label_of(aggregates, candidate)
    gates = [
        g for g in deciding_gates(aggregates, candidate) if not isinstance(g.result, SpeedGate)
    ]
    failed = by_title([g for g in gates if g.outcome == "fail"])
    undecided = list(
        dict.fromkeys(f"{g.title} ({g.where})" for g in gates if g.outcome == "undecided")
    )
    opening = "gates kept" if any(g.compared for g in gates) else "gates passed"
    evidence = [f"{item.item}: {item.evidence}" for item in items if item.verdict != "pass"]
    if failed:
        titles = list(dict.fromkeys(g.title for g in gates if g.outcome == "fail"))
        verb = "loses" if gates[0].compared else "fails"
        sentence = f"Do not switch to {name}: it {verb} {'; '.join(failed[: rule.SHOWN])}."
        return Recommendation(
            "stay", sentence, evidence, f"{verb} {', '.join(titles[: rule.SHOWN])}: do not switch"
        )
    if incumbent is None:
        sentence = f"{name} fails nothing, but nothing was measured that it could replace."
        return Recommendation("wait", sentence, evidence, opening)
    other = label_of(aggregates, incumbent)
    gains, losses, speed = gains_and_losses(aggregates, candidate, incumbent, answers)
    reasons = [
        *(f"gain: {g.text}" for g in gains),
        *(f"loss: {x.text}" for x in losses),
        *speed,
        *evidence,
    ]
    if undecided:
        open_gates = ", ".join(undecided[: rule.SHOWN])
        sentence = (
            f"Wait: {name} fails nothing, but {open_gates} cannot be decided with so few answers."
        )
        return Recommendation("wait", sentence, reasons, "undecided: too few answers")
    verb = opening.split()[1].replace("kept", "keeps").replace("passed", "passes")
    lost = [item.item for item in items if item.verdict == "fail"]
    worse = list(
        dict.fromkeys([*(SHORT.get(item, item) for item in lost), *(loss.short for loss in losses)])
    )
    if lost:
        sentence = f"Stay with {other}: {name} {verb} its gates, but not on: {', '.join(lost)}."
        return Recommendation(
            "stay", sentence, reasons, f"{opening}; stay with {other}: {', '.join(worse)}"
        )
    if gains and not losses:
        sentence = f"Switch to {name}: it {verb} every gate and gains without a loss."
        return Recommendation("switch", sentence, reasons, f"{opening}; switch")
    if gains:
        sentence = f"Switch to {name} only if its gains outweigh its losses; it {verb} every gate."
        return Recommendation(
            "wait", sentence, reasons, f"{opening}; gains, but {', '.join(worse)}"
        )
    why = (
        "decode speed alone does not justify a switch"
        if speed
        else "it brings nothing that was measured here"
    )
    badge = f"{opening}; stay with {other}: {', '.join(worse) or 'no gain'}"
    return Recommendation(
        "stay", f"Stay with {other}: {name} {verb} every gate, but {why}.", reasons, badge
    )


def gains_and_losses(
    aggregates: Aggregates, candidate: str, incumbent: str, answers: AnswerPairs | None = None
) -> tuple[list[GainOrLoss], list[GainOrLoss], list[str]]:
    """Return (gains, losses, speed): significant paired differences, gates that one of the two loses, memory.

    Decode speed is separate: it is neither a gain nor a loss by itself.
    """
    gains, losses, speed = list[GainOrLoss](), list[GainOrLoss](), list[str]()
    for row in _compared(aggregates, candidate, incumbent):
        metric = METRICS.get(row.metric)
        if metric is None or not row.significant:
            continue
        change, before = row.median_difference or 0.0, row.median_a or 0.0
        text = f"{metric.title} {three_digits(change, '+')} of {three_digits(before)} {metric.unit}, {row.n_prompts} prompts"
        if metric.user_latency and abs(change) > MARGIN * abs(before):
            (gains if change < 0 else losses).append(
                GainOrLoss(text, "faster" if change < 0 else "slower")
            )
        elif metric.name == "decode_tok_s":
            speed.append(f"{text} (no reason by itself)")
    side, other = aggregates.served[candidate], aggregates.served[incumbent]
    for texts, pairs in ((losses, answers.worse), (gains, answers.better)) if answers else ():
        for gate, pair in rule.deciding(pairs).items():
            if rule.is_loss(pair, rule.loss_limit(gate), LEVEL):
                # In `better` the candidate is the reference: what the incumbent lost against it is won.
                lost, won = (pair.lost, pair.won) if texts is losses else (pair.won, pair.lost)
                text = f"{rule.title(gate)} {lost} lost and {won} won of {pair.n}"
                texts.append(GainOrLoss(text, text))
    ours, before_bytes = peak_bytes(side), peak_bytes(other)
    if ours and before_bytes and abs(ours - before_bytes) > MARGIN * before_bytes:
        text = f"memory {_gigabytes(ours)} against {_gigabytes(before_bytes)}"
        smaller = ours < before_bytes
        (gains if smaller else losses).append(GainOrLoss(text, "smaller" if smaller else "larger"))
    return gains, losses, speed


def _compared(aggregates: Aggregates, candidate: str, incumbent: str) -> list[Comparison]:
    """Complete comparisons of the two over all workloads, the candidate second."""
    return [
        with_candidate_second(row, candidate)
        for row in aggregates.comparisons
        if row.workload == "all"
        and {row.a, row.b} == {candidate, incumbent}
        and None not in (row.median_a, row.median_b, row.median_difference)
    ]


def _gigabytes(size_bytes: float) -> str:
    return f"{size_bytes / 1e9:.3g} GB" if size_bytes >= 1e9 else f"{size_bytes / 1e6:.3g} MB"

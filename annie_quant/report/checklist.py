"""The drop-in checklist (R49): what a replacement of the served model needs, measured in one run.

What a benchmark cannot know stays undecided. The checklist decides nothing; the verdict does.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from annie_quant.documents import Aggregates, Outcome, PairedGate, RequestRecord, ServedSide
from annie_quant.judge import decision
from annie_quant.judge.decision import wording
from annie_quant.judge.metrics import METRICS
from annie_quant.judge.pairing import deciding_by_prompt, pair_by_prompt

BUDGET_BYTES = 110e9  # for everything that runs on the machine (R50)
MAX_LATER_SHARE = 0.05  # of the incumbent's median time to the first token


@dataclass(frozen=True)
class ChecklistItem:
    """One requirement of a drop-in replacement, and what decides it in this run."""

    item: str
    verdict: Outcome
    evidence: str


def pair_answers(
    records: Sequence[RequestRecord], candidate: str, incumbent: str, sampled: Collection[str] = ()
) -> dict[str, PairedGate]:
    """Return the gates of the candidate's answers, compared with the incumbent's on the same prompts.

    sampled: workloads with a temperature, whose repeats are separate answers.
    """
    greedy = {r.workload for r in records} - set(sampled)
    ours = deciding_by_prompt([r for r in records if r.backend == candidate], greedy)
    theirs = deciding_by_prompt([r for r in records if r.backend == incumbent], greedy)
    gates, pooled = pair_by_prompt(theirs, ours, bf16=False)
    return decision.judge_gates({"served": gates}, {"served": pooled})[0]["served"]


def checklist(
    aggregates: Aggregates,
    candidate: str,
    incumbent: str | None,
    records: Sequence[RequestRecord],
    with_thinking: Collection[str],
    answers: dict[str, PairedGate] | None = None,
) -> list[ChecklistItem]:
    """Return what a replacement needs, with what this run shows of it.

    candidate, incumbent: backends.
    records: measured ones.
    with_thinking: workloads.
    answers: pair_answers of the two; None where the records are missing.
    """
    side = aggregates.served[candidate]
    own = [r for r in records if r.backend == candidate]
    thinking = [r for r in own if r.workload in with_thinking and not r.answer.error]
    items = [_api(own), _gate(side, "tool_call", "calls tools"), _thinking(side, thinking)]
    items.append(_memory(side))
    if incumbent is not None:
        items += [_latency(aggregates, candidate, incumbent), _quality(answers)]
    items.append(
        ChecklistItem(
            "the start script can launch it",
            "undecided",
            "annie-quant serve MODEL_DIR --dry-run prints the command",
        )
    )
    return items


def _api(records: Sequence[RequestRecord]) -> ChecklistItem:
    succeeded = sum(not r.answer.error for r in records)
    verdict: Outcome = "undecided"
    if records:
        verdict = "pass" if succeeded == len(records) else "fail"
    evidence = f"{succeeded} of {len(records)} chat completions succeeded"
    return ChecklistItem("speaks the OpenAI API", verdict, evidence)


def _gate(side: ServedSide, gate: str, item: str) -> ChecklistItem:
    result = side.gates.get(gate)
    if result is None:
        return ChecklistItem(item, "undecided", "not measured in this run")
    evidence = f"{result.passes} of {result.n}, served"
    pair = side.paired.get(gate)
    if pair and side.judged_by:
        evidence += f"; {pair.lost} lost and {pair.won} won against {side.judged_by}"
    return ChecklistItem(item, result.verdict, evidence)


def _thinking(side: ServedSide, records: Sequence[RequestRecord]) -> ChecklistItem:
    """Off means that nothing leaks; on means that reasoning is received, separate from the answer."""
    off = _gate(side, "thinking_leak", "thinking can be switched")
    evidence = f"off: no leak in {off.evidence}"
    if "thinking_leak" not in side.gates:
        evidence = f"off: {off.evidence}"
    if not records:
        return ChecklistItem(off.item, "fail" if off.verdict == "fail" else "undecided", evidence)
    received = sum(bool(r.answer.reasoning) for r in records)
    evidence += f"; on: reasoning was received in {received} of {len(records)}"
    return ChecklistItem(off.item, off.verdict if received == len(records) else "fail", evidence)


def _memory(side: ServedSide) -> ChecklistItem:
    item = "fits the memory budget"
    peak = decision.peak_bytes(side)
    if peak is None:
        return ChecklistItem(item, "undecided", "memory was not measured")
    evidence = f"{_gigabytes(peak)} at its highest, of {_gigabytes(BUDGET_BYTES)} for everything"
    return ChecklistItem(item, "pass" if peak < BUDGET_BYTES else "fail", evidence)


def _latency(aggregates: Aggregates, candidate: str, incumbent: str) -> ChecklistItem:
    """No later: the interval of the paired difference ends below 5 % of the incumbent's median."""
    item = "answers no later"
    row = decision.compared_with(aggregates, candidate, incumbent, "ttft_content_ms")
    if row is None or row.low is None or row.high is None or row.workload != "all":
        missing = "no paired comparison of the two over all workloads"
        return ChecklistItem(item, "undecided", missing)
    verdict: Outcome = "undecided"
    if row.high <= MAX_LATER_SHARE * (row.median_a or 0.0):
        verdict = "pass"
    elif row.low > 0 and row.significant:
        verdict = "fail"
    interval = f"({row.low:+.3g} to {row.high:+.3g}), paired, {row.n_prompts} prompts"
    evidence = f"{METRICS[row.metric].title} {row.median_difference:+.3g} ms {interval}"
    return ChecklistItem(item, verdict, evidence)


def _quality(answers: dict[str, PairedGate] | None) -> ChecklistItem:
    """No worse: the candidate keeps every gate of the incumbent on the same prompts."""
    item = "answers no worse"
    gates = decision.deciding_pairs(answers or {})
    if not gates:
        missing = "the answers of the two were not compared prompt by prompt"
        return ChecklistItem(item, "undecided", missing)
    for verdict in ("loses", "undecided"):
        titles = [wording.title(gate) for gate, pair in gates.items() if pair.verdict == verdict]
        if titles:
            evidence = f"{verdict} {', '.join(titles)} on the same prompts, of {len(gates)} gates"
            return ChecklistItem(item, wording.OUTCOMES[verdict], evidence)
    return ChecklistItem(item, "pass", f"{len(gates)} gates kept on the same prompts")


def _gigabytes(size_bytes: float) -> str:
    return f"{size_bytes / 1e9:.3g} GB" if size_bytes >= 1e9 else f"{size_bytes / 1e6:.3g} MB"

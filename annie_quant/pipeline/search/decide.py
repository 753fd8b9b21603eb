"""When a strategy is dropped before all its prompts were asked, and when it has passed.

A strategy is looked at after few prompts and again after all of them. At the early look it is dropped when

- no outcome of the prompts that are left could make a gate pass (exact, it costs no error probability), or
- the gate's interval lies below its threshold at the confidence 1 - 0.05 / looks (Bonferroni over the looks of a gate, so
  that a strategy that holds the threshold is dropped wrongly in at most 5 % of searches a gate).

It passes only at the last look, by the gates' own rules (spec/bench.md), which the early looks cannot make easier.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from annie_quant import judge
from annie_quant.judge.gates import GATES
from annie_quant.judge.rules import decide
from annie_quant.judge.sample import applying
from annie_quant.pipeline.stages import failing

ALPHA = 0.05
FIRST_LOOK = 30  # prompts a gate


def looks(n: int) -> list[int]:
    """Prompts a gate at each look, the last one being n."""
    return [FIRST_LOOK, n] if n >= 2 * FIRST_LOOK else [n]


def final_counts(workloads: Sequence[Any]) -> Counter[str]:
    """How many answers each gate will have judged when all the cases were asked."""
    counts: Counter[str] = Counter()
    for workload in workloads:
        for case in workload.cases:
            counts += applying(workload, case)
    return counts


def cannot_pass(gate: str, row: Mapping[str, Any], in_all: int, n_looks: int) -> str | None:
    """Why this gate will not pass any more, seen at an early look; None where it still may."""
    threshold = GATES[gate].threshold
    passes, n = row["passes"], row["n"]
    left = max(0, in_all - n)
    best = decide(passes + left, n + left, threshold)
    if best.verdict != "pass":
        return f"{gate} {passes} of {n}: even if the other {left} all passed, it could not"
    if threshold.kind != "zero":
        confidence = 1 - ALPHA / n_looks
        high = judge.wilson(passes, n, confidence)[1]
        if high < best.threshold:
            return f"{gate} {passes} of {n}: below {best.threshold:.0%} at {confidence:.1%} confidence"
    return None


def early(sides: Mapping[str, Any], counts: Mapping[str, int], n_looks: int) -> list[str]:
    """Reasons to drop a strategy at an early look; sides: numerics → {"gates"}."""
    found = []
    for numerics, side in sides.items():
        for gate, row in side["gates"].items():
            if not row["advisory"] and (why := cannot_pass(gate, row, counts[gate], n_looks)):
                found.append(f"{numerics.upper()}: {why}")
    return found


def lacking(sides: Mapping[str, Any], required: Sequence[str]) -> list[str]:
    """The numerics that are asked for and that no server can give this checkpoint."""
    return [f"{kind.upper()} is not to be had: the checkpoint is weight-only" for kind in required if kind not in sides]


def final(sides: Mapping[str, Any], required: Sequence[str]) -> list[str]:
    """Reasons why a strategy has not passed at the last look; empty when it has."""
    found = lacking(sides, required)
    for numerics, side in sides.items():
        for gate in failing(side["gates"]):
            row = side["gates"][gate]
            more = f", {row['n_to_decide']} prompts would decide" if row.get("n_to_decide") else ""
            found.append(f"{numerics.upper()}: {gate} {row['passes']} of {row['n']}, {row['verdict']}{more}")
    return found

"""When the search drops a strategy before all its prompts were judged, and when it accepts one.

A strategy is looked at after few prompts and again after all of them. At the early look it is dropped where

- no outcome of the remaining prompts could make a gate pass (exact, without an error probability), or
- a gate's interval is below its threshold at the confidence 1 - 0.05 / looks (Bonferroni over the looks of a gate, so that a
  strategy at the threshold is dropped wrongly in at most 5 % of searches per gate).

It is accepted only at the last look, by the gates' own rules, which the early looks cannot make easier.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from annie_quant.judge.gate_rule import decide
from annie_quant.judge.gates import GATES
from annie_quant.judge.statistics import LEVEL, wilson
from annie_quant.schema import GateResult, Outcome

Gates = Mapping[str, GateResult]
FIRST_LOOK = 30  # prompts per gate


def looks(n: int) -> list[int]:
    """Return the prompts per gate at each look; the last one is n."""
    return [FIRST_LOOK, n] if n >= 2 * FIRST_LOOK else [n]


def failing(gates: Gates, outcomes: Sequence[Outcome] = ("fail", "undecided")) -> list[str]:
    """Return the deciding gates that do not pass."""
    return [name for name, result in gates.items() if result.verdict in outcomes and not result.advisory]


def cannot_pass(gate: str, result: GateResult, in_all: int, n_looks: int) -> str | None:
    """Return why a gate will not pass any more, seen at an early look; None where it still may.

    in_all: how many answers it will have judged at the last look.
    """
    threshold = GATES[gate].threshold
    passes, n = result.passes, result.n
    left = max(0, in_all - n)
    if decide(passes + left, n + left, threshold).verdict != "pass":
        return f"{gate} {passes} of {n}: even if the other {left} all passed, it could not"
    if threshold.kind != "zero":
        confidence = 1 - LEVEL / n_looks
        if wilson(passes, n, confidence)[1] < threshold.limit:
            return f"{gate} {passes} of {n}: below {threshold.limit:.0%} at {confidence:.1%} confidence"
    return None


def early_reasons(sides: Mapping[str, Gates], counts: Mapping[str, int], n_looks: int) -> list[str]:
    """Return reasons to drop a strategy at an early look. sides: by numerics. counts: answers per gate at the last look."""
    return [
        f"{numerics.upper()}: {reason}"
        for numerics, gates in sides.items()
        for gate, result in gates.items()
        if not result.advisory and (reason := cannot_pass(gate, result, counts[gate], n_looks))
    ]


def missing_numerics(sides: Mapping[str, Gates], required: Sequence[str]) -> list[str]:
    """Return a reason for each required numerics that no server can give this checkpoint."""
    return [f"{kind.upper()} is not available: the checkpoint is weight-only" for kind in required if kind not in sides]


def final_reasons(sides: Mapping[str, Gates], required: Sequence[str]) -> list[str]:
    """Return reasons why a strategy is not accepted at the last look; empty where it is."""
    reasons = missing_numerics(sides, required)
    for numerics, gates in sides.items():
        for gate in failing(gates):
            result = gates[gate]
            more = f", {result.n_to_decide} prompts would decide" if result.n_to_decide else ""
            reasons.append(f"{numerics.upper()}: {gate} {result.passes} of {result.n}, {result.verdict}{more}")
    return reasons

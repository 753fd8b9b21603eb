"""When the search drops a strategy before all its prompts were judged, and when it accepts one.

A strategy is looked at after few prompts and again after all of them. At the early look it is dropped where

- a gate has lost so many answers that it could not keep even if no other prompt changed, or
- a gate loses by the rule (decision/rule.py) with its level divided by the number of looks (Bonferroni).

It is accepted only at the last look, where every gate must keep under every required numerics.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from annie_quant.documents import GateResult, Member, Outcome, PairedGate, PairedVerdict, SearchNumerics
from annie_quant.judge.decision.rule import CONFIDENCE, MARGIN, is_loss, loss_limit, title
from annie_quant.judge.gates import GATES, decides
from annie_quant.judge.statistics import LEVEL, score_interval

Gates = Mapping[str, GateResult]
Sides = Mapping[str, SearchNumerics | Member]  # by numerics, or by member of their ensembles
FIRST_LOOK = 30  # prompts per gate


def looks(n: int) -> list[int]:
    """Return the prompts per gate at each look; the last one is n."""
    return [FIRST_LOOK, n] if n >= 2 * FIRST_LOOK else [n]


def failing(gates: Gates, outcomes: Sequence[Outcome] = ("fail", "undecided")) -> list[str]:
    """Return the deciding gates whose verdict is one of `outcomes`."""
    return [name for name, result in gates.items() if result.verdict in outcomes and not result.advisory]


def cannot_keep(gate: str, pair: PairedGate, in_all: int, n_looks: int) -> str | None:
    """Return why a gate will not keep any more, seen at an early look; None where it still may.

    in_all: how many prompts it will have at the last look.
    """
    counts = f"{title(gate)} lost {pair.lost} and won {pair.won} of {pair.n}"
    if GATES[gate].margin == 0 and pair.lost and not pair.won:
        return f"{counts}: none may be lost"
    margin = GATES[gate].margin or MARGIN
    n = max(in_all, pair.n)
    if score_interval(pair.lost, pair.won, n, CONFIDENCE)[0] <= -margin:
        return f"{counts}: even without a change in the other {n - pair.n}, it could not keep"
    if pair.low <= -margin and is_loss(pair, loss_limit(gate), LEVEL / n_looks):
        return f"{counts}: a loss (p {pair.p_holm:.2g}, adjusted)"
    return None


def early_reasons(sides: Sides, counts: Mapping[str, int], n_looks: int) -> list[str]:
    """Return reasons to drop a strategy at an early look.

    counts: prompts per gate at the last look.
    """
    return [
        f"{numerics.upper()}: {reason}"
        for numerics, side in sides.items()
        for gate, pair in side.paired.items()
        if decides(gate) and (reason := cannot_keep(gate, pair, counts[gate], n_looks))
    ]


def missing_numerics(sides: Mapping[str, object], required: Sequence[str]) -> list[str]:
    """Return a reason for each required numerics that no server can give this checkpoint."""
    return [f"{kind.upper()} is not available: the checkpoint is weight-only" for kind in required if kind not in sides]


def final_reasons(verdict: PairedVerdict, sides: Mapping[str, object], required: Sequence[str]) -> list[str]:
    """Return reasons why a strategy is not accepted at the last look; empty where it is, which needs the verdict "keeps"."""
    reasons = missing_numerics(sides, required)
    if verdict.verdict != "keeps":
        reasons += verdict.reasons or [verdict.sentence]
    return reasons

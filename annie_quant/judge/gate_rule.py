"""The absolute requirements: thresholds of the original plan for few answers, Wilson intervals from 100 answers on.

rate    a share that must pass. n < 100: at least this share of at least `least_n` answers; n >= 100: the lower 95 % bound is
        at or above it.
zero    no fault is accepted. One fault fails at any n; a pass needs `least_n` answers.
all     every answer must pass. n < 100: all of at least `least_n`; n >= 100: the lower bound is at or above 0.95.

A rate fails, at any n, when the upper bound is below it. Where there is a reference, judge/decision/paired.py decides, and the
requirement is reported next to it.

What n cannot decide is "undecided", with the n that would decide it at the observed rate (R30).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from annie_quant.judge import paired
from annie_quant.judge.statistics import wilson
from annie_quant.schema import GateResult, Outcome

LARGE_N = 100
ALL_RATE = 0.95


@dataclass(frozen=True)
class Threshold:
    """least_n: how many answers decide, where they are few. rate: the share that must pass; only for kind "rate"."""

    kind: Literal["rate", "zero", "all"]
    least_n: int
    rate: float = 1.0

    @property
    def limit(self) -> float:
        """The share that the interval is compared with."""
        return {"rate": self.rate, "zero": 1.0, "all": ALL_RATE}[self.kind]


def decide(passes: int, n: int, threshold: Threshold) -> GateResult:
    """Decide one gate from the number of answers that passed."""
    low, high = wilson(passes, n)
    result = GateResult(passes=passes, n=n, low=low, high=high, threshold=threshold.limit)
    if n < LARGE_N:
        _decide_few(result, threshold)
    elif threshold.kind == "zero":
        result.rule = f"n >= {LARGE_N}: none seen; the true share of faults is below {1 - low:.2%} (95 %)"
        result.verdict = "pass" if passes == n else "fail"
    else:
        result.rule = f"n >= {LARGE_N}: lower 95 % Wilson bound >= {threshold.limit:.0%}"
        result.verdict = _outside(low, high, threshold.limit)
        if result.verdict == "undecided":
            result.n_to_decide = n_to_decide(passes / n, threshold.limit, n)
    return result


def _decide_few(result: GateResult, threshold: Threshold) -> None:
    passes, n, least_n = result.passes, result.n, threshold.least_n
    result.rule = (
        f"n < {LARGE_N}: "
        + {
            "rate": f"at least {threshold.rate:.0%} of at least {least_n}",
            "zero": f"none seen in at least {least_n}",
            "all": f"every one of at least {least_n}",
        }[threshold.kind]
    )
    needed = math.ceil(threshold.rate * n - 1e-9) if threshold.kind == "rate" else n  # 0.6 * 10 is 6.000000000000001
    if threshold.kind == "zero" and passes < n:
        result.verdict = "fail"
    elif n >= least_n and passes >= needed:
        result.verdict = "pass"
    elif n and result.high < threshold.limit:
        result.verdict = "fail"
    else:
        result.n_to_decide = least_n if n < least_n else n_to_decide(passes / n, threshold.limit, n)


def _outside(low: float, high: float, limit: float) -> Outcome:
    return "pass" if low >= limit else "fail" if high < limit else "undecided"


def n_to_decide(rate: float, limit: float, n: int = 1) -> int | None:
    """Return the smallest number of answers, from n on, whose interval excludes `limit` if the rate stays the same.

    None where the rate equals the limit, or is so near that a million answers would not decide.
    """

    def decided(count: int) -> bool:
        return _outside(*wilson(rate * count, count), limit) != "undecided"

    return None if abs(rate - limit) < 1e-12 else paired.least_n(decided, n)

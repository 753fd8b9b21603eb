"""When a gate passes: the founding thresholds for small n, intervals for n of 100 and more (spec/bench.md).

rate    a share that must be kept: n < 100, at least the founding share of at least the founding number of answers;
        n >= 100, Wilson's lower bound at or above the founding share.
zero    nothing of the kind may be seen: one fault fails at any n; a pass needs the founding number of answers.
all     all of them: n < 100, every one of at least the founding number; n >= 100, lower bound at or above 0.95.
What n cannot decide is "undecided", with the n that would decide it at the rate seen.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from annie_quant.judge.statistics import wilson
from annie_quant.schema import GateResult, Outcome

LARGE_N = 100
ALL_RATE = 0.95
_FAR = 1_000_000


@dataclass(frozen=True)
class Threshold:
    """kind: "rate", "zero" or "all". founding_n answers decided in the founding documents; `rate` had to pass."""

    kind: str
    founding_n: int
    rate: float = 1.0


def judged(fault: str | None) -> bool | None:
    """A gate's fault as a check: None does not apply, "" passes."""
    return None if fault is None else not fault


def decide(passes: int, n: int, threshold: Threshold) -> GateResult:
    """Decide one gate from the number of answers that passed."""
    low, high = wilson(passes, n)
    verdict, rule, needed = (
        _LARGE[threshold.kind](passes, n, low, high, threshold) if n >= LARGE_N else _small(passes, n, threshold)
    )
    return GateResult(
        passes=passes,
        n=n,
        low=low,
        high=high,
        threshold={"rate": threshold.rate, "zero": 1.0, "all": ALL_RATE}[threshold.kind],
        rule=rule,
        verdict=verdict,
        n_to_decide=needed,
    )


def _small(passes: int, n: int, threshold: Threshold) -> tuple[Outcome, str, int | None]:
    least = threshold.founding_n
    # 0.6 * 10 is 6.000000000000001 in floating point.
    wanted = math.ceil(threshold.rate * n - 1e-9)
    rule = {
        "rate": f"n < {LARGE_N}: at least {threshold.rate:.0%} of at least {least}",
        "zero": f"n < {LARGE_N}: none seen in at least {least}",
        "all": f"n < {LARGE_N}: every one of at least {least}",
    }[threshold.kind]
    if threshold.kind != "rate" and passes < n:
        return "fail", rule, None
    if n < least:
        # Even so few can settle a rate when too many have failed for the founding number to be saved.
        if threshold.kind == "rate" and passes + (least - n) < math.ceil(threshold.rate * least - 1e-9):
            return "fail", rule, None
        return "undecided", rule, least
    return ("pass" if passes >= wanted else "fail"), rule, None


def _large_rate(passes: int, n: int, low: float, high: float, threshold: Threshold) -> tuple[Outcome, str, int | None]:
    return _bounds(passes, n, low, high, threshold.rate)


def _large_all(passes: int, n: int, low: float, high: float, threshold: Threshold) -> tuple[Outcome, str, int | None]:
    return _bounds(passes, n, low, high, ALL_RATE)


def _large_zero(passes: int, n: int, low: float, high: float, threshold: Threshold) -> tuple[Outcome, str, int | None]:
    rule = f"n >= {LARGE_N}: none seen; the true share of faults is below {1 - low:.2%} (95 %)"
    return ("pass" if passes == n else "fail"), rule, None


def _bounds(passes: int, n: int, low: float, high: float, rate: float) -> tuple[Outcome, str, int | None]:
    rule = f"n >= {LARGE_N}: lower 95 % Wilson bound >= {rate:.0%}"
    if low >= rate:
        return "pass", rule, None
    if high < rate:
        return "fail", rule, None
    return "undecided", rule, n_to_decide(passes / n, rate, n)


def n_to_decide(seen: float, rate: float, n: int = 1) -> int | None:
    """The smallest number of answers, from n on, whose interval leaves `rate` if the share seen keeps.

    None when the share seen is the rate itself, or so near that a million answers would not do.
    """

    def decided(count: int) -> bool:
        low, high = wilson(seen * count, count)
        return low >= rate or high < rate

    if abs(seen - rate) < 1e-12 or not decided(_FAR):
        return None
    below, above = n, _FAR
    while above - below > 1:
        middle = (below + above) // 2
        below, above = (below, middle) if decided(middle) else (middle, above)
    return above


_LARGE = {"rate": _large_rate, "zero": _large_zero, "all": _large_all}

"""Statistics of paired outcomes: the same prompts answered by a checkpoint and by its reference.

`lost`: prompts that only the reference passes. `won`: prompts that only the checkpoint passes. The others say nothing about the
difference (won - lost) / n, but n sets its precision.

The absolute requirements: thresholds of the original plan for few answers, Wilson intervals from 100 answers on.

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
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import Literal

from annie_quant.documents import GateResult, Outcome
from annie_quant.judge.statistics import wilson

MOST_N = 1_000_000


def score_interval(lost: float, won: float, n: float, confidence: float = 0.9) -> tuple[float, float]:
    """Return Tango's score interval of (won - lost) / n (Tango 1998, Statistics in Medicine 17: 891-908); (-1, 1) for n = 0.

    Both bounds are differences whose score test, with the other probabilities at their maximum likelihood under that
    difference, has the normal quantile of the confidence.
    """
    if min(lost, won) < 0 or lost + won > n * (1 + 1e-9):
        raise ValueError(f"lost and won must be counts with a sum up to n, got {lost}, {won} of {n}")
    if n == 0:
        return -1.0, 1.0
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    observed = (won - lost) / n
    return _root(lost, won, n, -1.0, observed, z), _root(lost, won, n, observed, 1.0, -z)


def _root(lost: float, won: float, n: float, low: float, high: float, target: float) -> float:
    """The difference between low and high at which the score, which falls with the difference, has the value `target`."""
    for _ in range(60):
        middle = (low + high) / 2
        if _score(lost, won, n, middle) > target:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _score(lost: float, won: float, n: float, difference: float) -> float:
    b = lost + won + (won - lost - 2 * n) * difference
    c = lost * difference * (1 - difference)
    p_lost = max((b + math.sqrt(max(b * b + 8 * n * c, 0.0))) / (4 * n), 0.0, -difference)
    variance = n * (2 * p_lost + difference - difference * difference)
    excess = won - lost - n * difference
    if variance <= 1e-15 * n:
        return 0.0 if abs(excess) < 1e-12 * n else math.copysign(math.inf, excess)
    return excess / math.sqrt(variance)


@lru_cache(maxsize=4096)
def mcnemar(lost: int, won: int) -> float:
    """Return the exact p of McNemar's test towards a loss (one-sided): P(Binomial(lost + won, 1/2) <= won)."""
    n = lost + won
    term = total = 1  # binomial coefficients of n over 0, 1, ... won
    for i in range(1, won + 1):
        term = term * (n - i + 1) // i
        total += term
    return total / 2**n


@lru_cache(maxsize=4096)
def two_sided(lost: int, won: int) -> float:
    """Return the exact p of McNemar's test towards a change in either direction."""
    return min(1.0, 2 * min(mcnemar(lost, won), mcnemar(won, lost)))


@lru_cache(maxsize=4096)
def excess_loss(lost: int, n: int, margin: float, won: int = 0) -> float:
    """Return the p of a loss above the margin (one-sided).

    For gates that compare with the reference's own answer: "as many lost as won" (McNemar's hypothesis) is false for two runs of
    one model too. won: prompts whose answer a harmless change of the reference's arithmetic changes, and the checkpoint does not.
    Without any it is exact, P(Binomial(n, margin) >= lost); else that of the score test of (won - lost) / n = -margin.
    """
    from scipy.stats import binom

    if not n:
        return 1.0
    return NormalDist().cdf(_score(lost, won, n, -margin)) if won else float(binom.sf(lost - 1, n, margin))


@lru_cache(maxsize=4096)
def detectable_excess(n: int, margin: float, level: float, power: float = 0.8) -> float | None:
    """Return the smallest share of lost answers that excess_loss finds with this power; None where n is too small."""
    import numpy as np
    from scipy.stats import binom

    counts = np.arange(n + 1)
    significant = counts[binom.sf(counts - 1, n, margin) <= level]
    if not len(significant):
        return None
    # P(Binomial(n, loss) >= k) grows with the loss; it has the power at a quantile of a beta distribution.
    return float(binom_rate(int(significant[0]), n, power))


def binom_rate(k: int, n: int, power: float) -> float:
    """Return the rate at which P(Binomial(n, rate) >= k) is `power`."""
    from scipy.stats import beta

    return float(beta.ppf(power, k, n - k + 1))


@lru_cache(maxsize=4096)
def detectable_loss(n: int, discordant: float, level: float, power: float = 0.8) -> float | None:
    """Return the smallest loss of the pass rate that McNemar's exact test finds with this power; None where n is too small.

    discordant: share of prompts whose outcome changes in each direction for no reason. level: one-sided.
    """
    if _power(n, discordant, 1.0 - 2 * discordant, level) < power:
        return None
    low, high = 0.0, 1.0 - 2 * discordant
    while high - low > 1e-4:
        middle = (low + high) / 2
        if _power(n, discordant, middle, level) >= power:
            high = middle
        else:
            low = middle
    return high


def _power(n: int, discordant: float, loss: float, level: float) -> float:
    """The probability that McNemar's exact test is significant towards a loss: lost and won are multinomial."""
    import numpy as np
    from scipy.stats import binom

    changed = 2 * discordant + loss
    if n == 0 or changed <= 0:
        return 0.0
    counts = np.arange(n + 1)
    # The largest number of wins that is still significant: P(Binomial(k, 1/2) <= wins) <= level; -1 where none is.
    wins = binom.ppf(level, counts, 0.5)
    wins = np.where(binom.cdf(wins, counts, 0.5) > level, wins - 1, wins)
    chance = binom.cdf(wins, counts, discordant / changed)
    return float(np.sum(binom.pmf(counts, n, min(1.0, changed)) * np.where(wins < 0, 0.0, chance)))


def least_n(decided: Callable[[int], bool], n: int) -> int | None:
    """Return the smallest number of prompts above n for which `decided` holds, if it holds from there on; None up to MOST_N."""
    if not decided(MOST_N):
        return None
    below, above = n, MOST_N
    while above - below > 1:
        middle = (below + above) // 2
        below, above = (below, middle) if decided(middle) else (middle, above)
    return above


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

    return None if abs(rate - limit) < 1e-12 else least_n(decided, n)

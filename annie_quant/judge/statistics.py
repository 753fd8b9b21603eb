"""Statistics: intervals of rates and medians, comparison of paired figures and outcomes, adjustment for many comparisons.

Tokens and repeats of one prompt are not independent, so the prompt is the unit: each prompt gives
one value per side, the median of its repeats.

Of paired outcomes, `lost` are the prompts that only the reference passes and `won` those that only
the checkpoint passes. The others say nothing about the difference (won - lost) / n, but n sets its
precision.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Hashable, Mapping, Sequence
from functools import lru_cache
from statistics import NormalDist
from typing import TYPE_CHECKING

from annie_quant.documents import PairedResult

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Numbers = Floats | NDArray[np.int64] | NDArray[np.int_]

LEVEL = 0.05
POWER = 0.8
Z = NormalDist().inv_cdf(1 - LEVEL / 2)  # of two-sided 95 % intervals
EXACT_PROMPTS = 12  # up to this many prompts the permutation test is exact


def wilson(passes: float, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """Return Wilson's score interval for `passes` of `n` (Wilson 1927); (0, 1) when n is 0."""
    if not 0 <= passes <= n:
        raise ValueError(f"passes must be in 0..n, got {passes} of {n}")
    if n == 0:
        return 0.0, 1.0
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    p = passes / n
    scale = 1 + z * z / n
    centre = (p + z * z / (2 * n)) / scale
    half = z / scale * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    # At 0 and n the formula gives exactly 0 and 1; rounding would miss them.
    return (0.0 if passes == 0 else max(0.0, centre - half)), (
        1.0 if passes == n else min(1.0, centre + half)
    )


def median_interval(
    values: Sequence[float] | Floats, confidence: float = 0.95, resamples: int = 4999, seed: int = 0
) -> tuple[float, float] | tuple[None, None]:
    """Return the percentile bootstrap interval of the median of independent values; (None, None) for fewer than two.

    The resampled medians are drawn from their exact distribution, without resampling: the sorted
    indices of a resample are order statistics of n uniform numbers, rounded down, and the middle
    one is Beta distributed.
    """
    import numpy as np

    data = np.sort(np.asarray(values, dtype=np.float64))
    n = data.size
    if n < 2:
        return None, None
    rng = np.random.default_rng(seed)
    half = (n + 1) // 2
    lower = rng.beta(half, n - half + 1, resamples)
    medians = data[np.minimum((lower * n).astype(np.int64), n - 1)]
    if n % 2 == 0:
        # Given the lower middle value, the upper one is the smallest of the n - half numbers above
        # it.
        upper = lower + (1 - lower) * (1 - rng.random(resamples) ** (1 / (n - half)))
        medians = (medians + data[np.minimum((upper * n).astype(np.int64), n - 1)]) / 2
    low, high = np.percentile(medians, [50 - 50 * confidence, 50 + 50 * confidence])
    return float(low), float(high)


def paired(a: Mapping[Hashable, Sequence[float]], b: Mapping[Hashable, Sequence[float]]) -> Floats:
    """Return float64 [n_prompts, 2]: each shared prompt's median on both sides, in a's order."""
    import numpy as np

    rows = [
        (statistics.median(a[p]), statistics.median(b[p]))
        for p in a
        if p in b and len(a[p]) and len(b[p])
    ]
    return np.asarray(rows, dtype=np.float64).reshape(-1, 2)


def compare(
    a: Mapping[Hashable, Sequence[float]],
    b: Mapping[Hashable, Sequence[float]],
    *,
    confidence: float = 0.95,
    resamples: int = 4999,
    seed: int = 0,
) -> PairedResult:
    """Compare two sides over the prompts that both have.

    a, b: prompt → values. The interval is the percentile bootstrap of the median of the paired
    differences. p is two-sided: an exact sign-flip permutation test of their mean for up to 12
    prompts, Wilcoxon's signed-rank test above. Fewer than two prompts give no interval and no p.
    """
    import numpy as np

    pairs = paired(a, b)
    n = len(pairs)
    result = PairedResult(n_prompts=n, too_few=least_p(n) >= LEVEL)
    if n == 0:
        return result
    differences = pairs[:, 1] - pairs[:, 0]
    result.median_a = float(np.median(pairs[:, 0]))
    result.median_b = float(np.median(pairs[:, 1]))
    result.median_difference = float(np.median(differences))
    if n < 2:
        return result
    result.low, result.high = median_interval(differences, confidence, resamples, seed)
    result.p, result.test = _test(differences)
    result.n_to_decide = prompts_to_decide(
        float(np.std(differences, ddof=1)), float(differences.mean())
    )
    return result


def _test(differences: Floats) -> tuple[float, str]:
    import numpy as np
    from scipy.stats import permutation_test, wilcoxon

    if not np.any(differences):
        return 1.0, "all differences are zero"
    if len(differences) <= EXACT_PROMPTS:
        result = permutation_test(
            (differences,), np.mean, permutation_type="samples", n_resamples=np.inf, vectorized=True
        )
        return float(result.pvalue), "exact sign-flip permutation"
    return float(wilcoxon(differences).pvalue), "wilcoxon signed-rank"


def least_p(n_prompts: int) -> float:
    """Return the smallest p that n prompts can give in the sign-flip test: 2 / 2^n."""
    return min(1.0, 2.0 ** (1 - n_prompts))


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Return p-values after Holm's step-down adjustment (Holm 1979), in the same order; None stays None, uncounted."""
    ranked = sorted((p, i) for i, p in enumerate(p_values) if p is not None)
    adjusted: list[float | None] = [None] * len(p_values)
    largest = 0.0
    for rank, (p, index) in enumerate(ranked):
        largest = max(largest, min(1.0, (len(ranked) - rank) * p))
        adjusted[index] = largest
    return adjusted


def hommel(p_values: Sequence[float]) -> list[float]:
    """Return p-values after Hommel's adjustment (Hommel 1988, Biometrika 75: 383-386), in the same order.

    Each is the largest Simes p of all sets of hypotheses that contain its own. None is above Holm's
    or Hochberg's, and of equal p-values none is multiplied: several gates that one fault fails
    count once. The error rate holds where the tests are independent or positively dependent.
    """
    import numpy as np

    order = np.argsort(np.asarray(p_values, dtype=np.float64), kind="stable")
    p = np.asarray(p_values, dtype=np.float64)[order]
    result = np.empty(len(p))
    adjusted = p.copy()
    for size in range(2, len(p) + 1):
        # The set of this size with the largest Simes p: the hypothesis, and the largest of the
        # others.
        others = (size * p[len(p) - size + 1 :] / np.arange(2, size + 1)).min()
        simes = np.minimum(size * p, others)
        simes[len(p) - size :] = simes[len(p) - size]  # these are in one set, the `size` largest
        adjusted = np.maximum(adjusted, simes)
    result[order] = adjusted
    return [float(value) for value in result]


def prompts_to_decide(differences_sd: float, difference: float) -> int | None:
    """Return about how many prompts would show `difference` with a power of 80 % (normal approximation, paired)."""
    if difference == 0 or not math.isfinite(difference) or not math.isfinite(differences_sd):
        return None
    z = NormalDist().inv_cdf(1 - LEVEL / 2) + NormalDist().inv_cdf(POWER)
    return max(6, math.ceil((z * differences_sd / abs(difference)) ** 2))


# ---- paired outcomes

MAX_N_TO_DECIDE = 20_000  # prompts per gate; nobody evaluates more
CONFIDENCE = 0.9  # of the interval of a difference: 5 % per bound


@lru_cache(1 << 16)  # a search and a simulation ask for few different counts
def score_interval(
    lost: float, won: float, n: float, confidence: float = CONFIDENCE
) -> tuple[float, float]:
    """Return Tango's score interval of (won - lost) / n (Tango 1998, Statistics in Medicine 17: 891-908); (-1, 1) for n = 0.

    Both bounds are differences whose score test, with the other probabilities at their maximum
    likelihood under that difference, has the normal quantile of the confidence.
    """
    if min(lost, won) < 0 or lost + won > n * (1 + 1e-9):
        raise ValueError(
            f"lost and won must be counts with a sum up to n, got {lost}, {won} of {n}"
        )
    if n == 0:
        return -1.0, 1.0
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    observed = (won - lost) / n
    return _root(lost, won, n, -1.0, observed, z), _root(lost, won, n, observed, 1.0, -z)


def _root(lost: float, won: float, n: float, low: float, high: float, target: float) -> float:
    """Return the difference between low and high at which the score, which falls with the difference, has the value `target`."""
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _score(lost, won, n, middle) > target else (low, middle)
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
def mid_p(lost: int, won: int) -> float:
    """Return McNemar's mid-p towards a loss: the observed counts have half of their weight (Lancaster 1961); 1 without changes."""
    n = lost + won
    return mcnemar(lost, won) - math.comb(n, won) / 2 ** (n + 1) if n else 1.0


@lru_cache(maxsize=4096)
def two_sided(lost: int, won: int) -> float:
    """Return the exact p of McNemar's test towards a change in either direction."""
    return min(1.0, 2 * min(mcnemar(lost, won), mcnemar(won, lost)))


@lru_cache(maxsize=4096)
def excess_loss(lost: int, n: int, margin: float, won: int = 0) -> float:
    """Return the p of a loss above the margin (one-sided).

    For gates that compare with the reference's own answer: "as many lost as won" (McNemar's
    hypothesis) is false for two runs of one model too.

    won: prompts whose answer a harmless change of the reference's arithmetic changes, and the
        checkpoint does not. Without any it is exact, P(Binomial(n, margin) >= lost); else that of
        the score test of (won - lost) / n = -margin.
    """
    from scipy.special import ndtr
    from scipy.stats import binom

    if not n:
        return 1.0
    # NormalDist.cdf is 0 below -8.3.
    return float(ndtr(_score(lost, won, n, -margin)) if won else binom.sf(lost - 1, n, margin))


@lru_cache(maxsize=4096)
def detectable_excess(n: int, margin: float, level: float) -> float | None:
    """Return the smallest share of lost answers that excess_loss finds with a power of 80 %; None where n is too small."""
    import numpy as np
    from scipy.stats import beta, binom

    counts = np.arange(n + 1)
    significant = counts[binom.sf(counts - 1, n, margin) <= level]
    if not len(significant):
        return None
    # P(Binomial(n, loss) >= k) grows with the loss; it has the power at a quantile of a beta
    # distribution.
    return float(beta.ppf(POWER, significant[0], n - significant[0] + 1))


@lru_cache(maxsize=4096)
def detectable_loss(n: int, discordant: float, level: float) -> float | None:
    """Return the smallest loss of the pass rate that McNemar's exact test finds with a power of 80 %; None where n is too small.

    discordant: share of prompts whose outcome changes in each direction for no reason.
    level: one-sided.
    """
    if _power(n, discordant, 1.0 - 2 * discordant, level) < POWER:
        return None
    low = 0.0
    high = 1.0 - 2 * discordant
    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (
            (low, middle) if _power(n, discordant, middle, level) >= POWER else (middle, high)
        )
    return high


def _power(n: int, discordant: float, loss: float, level: float) -> float:
    """Return the probability that McNemar's exact test is significant towards a loss: lost and won are multinomial."""
    import numpy as np
    from scipy.stats import binom

    changed = 2 * discordant + loss
    if n == 0 or changed <= 0:
        return 0.0
    counts = np.arange(n + 1)
    # The largest number of wins that is still significant: P(Binomial(k, 1/2) <= wins) <= level; -1
    # where none is.
    wins = binom.ppf(level, counts, 0.5)
    wins = np.where(binom.cdf(wins, counts, 0.5) > level, wins - 1, wins)
    chance = binom.cdf(wins, counts, discordant / changed)
    return float(np.sum(binom.pmf(counts, n, min(1.0, changed)) * np.where(wins < 0, 0.0, chance)))


def _scores(lost: Numbers, won: Numbers, n: Numbers, difference: float) -> Floats:
    """Return `_score` of many counts."""
    import numpy as np

    b = lost + won + (won - lost - 2 * n) * difference
    c = lost * difference * (1 - difference)
    root = np.sqrt(np.maximum(b * b + 8 * n * c, 0.0))
    p_lost = np.maximum((b + root) / (4 * n), max(0.0, -difference))
    variance = n * (2 * p_lost + difference - difference * difference)
    excess = won - lost - n * difference
    certain = np.where(np.abs(excess) < 1e-12 * n, 0.0, np.copysign(np.inf, excess))
    has_variance = variance > 1e-15 * n
    return np.where(has_variance, excess / np.sqrt(np.where(has_variance, variance, 1.0)), certain)


@lru_cache(maxsize=4096)
def paired_n_to_decide(
    lost: int,
    won: int,
    n: int,
    margin: float,
    limit: float | None,
    level: float,
    excess: bool = False,
) -> int | None:
    """Return the smallest number of prompts above n from which on every number decides a gate.

    The rates stay as observed: the interval is that of the exact shares, and p is that of whole
    prompts, lost ones rounded down and won ones up. Because of this rounding a larger number may
    leave open what a smaller one decides; such a number is not returned.

    margin: the gate keeps where the interval's lower bound is above -margin.
    limit: the gate loses where the upper bound is below it and p below the level; None: where p is.
    level: of p, one-sided.
    excess: p is that of a loss above the margin (`excess_loss`) instead of McNemar's.

    Returns None where MAX_N_TO_DECIDE prompts do not decide.
    """
    import numpy as np
    from scipy.special import bdtr, bdtrc, ndtr

    numbers = np.arange(n + 1, MAX_N_TO_DECIDE + 1, dtype=np.int64)
    if not len(numbers):
        return None
    z = NormalDist().inv_cdf(0.5 + CONFIDENCE / 2)
    shares = (lost * numbers / n, won * numbers / n, numbers)
    whole_lost = lost * numbers // n
    whole_won = -(-won * numbers // n)
    if not excess:
        p = bdtr(whole_won, whole_lost + whole_won, 0.5)
    elif won:
        p = ndtr(_scores(whole_lost, whole_won, numbers, -margin))
    else:
        p = bdtrc(whole_lost - 1, numbers, margin)
    loses = p < level
    if limit is not None:
        loses &= _scores(*shares, limit) < -z
    open_numbers = numbers[~(loses | (_scores(*shares, -margin) > z))]
    if not len(open_numbers):
        return n + 1
    last = int(open_numbers[-1])
    return last + 1 if last < MAX_N_TO_DECIDE else None

"""Statistics: intervals of rates and medians, paired comparison of two sides, adjustment for many comparisons.

Tokens and repeats of one prompt are not independent, so the prompt is the unit: each prompt gives one value per side, the
median of its repeats.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Hashable, Mapping, Sequence
from statistics import NormalDist
from typing import Any

from annie_quant.documents import PairedResult

LEVEL = 0.05
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
    return (0.0 if passes == 0 else max(0.0, centre - half)), (1.0 if passes == n else min(1.0, centre + half))


def median_interval(
    values: Sequence[float],
    confidence: float = 0.95,
    resamples: int = 4999,
    seed: int = 0,
) -> tuple[float, float] | tuple[None, None]:
    """Return the percentile bootstrap interval of the median of independent values; (None, None) for fewer than two.

    The resampled medians are drawn from their exact distribution, without resampling: the sorted indices of a resample are
    order statistics of n uniform numbers, rounded down, and the middle one is Beta distributed.
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
        # Given the lower middle value, the upper one is the smallest of the n - half numbers above it.
        upper = lower + (1 - lower) * (1 - rng.random(resamples) ** (1 / (n - half)))
        medians = (medians + data[np.minimum((upper * n).astype(np.int64), n - 1)]) / 2
    low, high = np.percentile(medians, [50 - 50 * confidence, 50 + 50 * confidence])
    return float(low), float(high)


def paired(a: Mapping[Hashable, Sequence[float]], b: Mapping[Hashable, Sequence[float]]) -> Any:
    """Return float64 [n_prompts, 2]: each shared prompt's median on both sides, in a's order."""
    import numpy as np

    rows = [(statistics.median(a[p]), statistics.median(b[p])) for p in a if p in b and len(a[p]) and len(b[p])]
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

    a, b: prompt → values. The interval is the percentile bootstrap of the median of the paired differences. p is two-sided:
    an exact sign-flip permutation test of their mean for up to 12 prompts, Wilcoxon's signed-rank test above. Fewer than two
    prompts give no interval and no p.
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
    result.n_to_decide = prompts_to_decide(float(np.std(differences, ddof=1)), float(differences.mean()))
    return result


def _test(differences: Any) -> tuple[float, str]:
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


def hochberg(p_values: Sequence[float]) -> list[float]:
    """Return p-values after Hochberg's step-up adjustment (Hochberg 1988, Biometrika 75: 800-802), in the same order.

    None is above Holm's, and of equal p-values none is multiplied: several gates that one fault fails count once. The error rate
    holds where the tests are independent or positively dependent.
    """
    adjusted = [0.0] * len(p_values)
    smallest = 1.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda i: -p_values[i]), 1):
        smallest = min(smallest, rank * p_values[index])
        adjusted[index] = smallest
    return adjusted


def prompts_to_decide(differences_sd: float, difference: float, power: float = 0.8, level: float = LEVEL) -> int | None:
    """Return about how many prompts would show `difference` with this power (normal approximation, paired)."""
    if difference == 0 or not math.isfinite(difference) or not math.isfinite(differences_sd):
        return None
    z = NormalDist().inv_cdf(1 - level / 2) + NormalDist().inv_cdf(power)
    return max(6, math.ceil((z * differences_sd / abs(difference)) ** 2))

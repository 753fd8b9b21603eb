"""Intervals: Wilson's for a rate, the percentile bootstrap for a median."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import Any


def wilson(passes: float, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval for `passes` of `n` (Wilson 1927); (0, 1) when n is 0."""
    if not 0 <= passes <= n:
        raise ValueError(f"passes must lie in 0..n, got {passes} of {n}")
    if n == 0:
        return 0.0, 1.0
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    p = passes / n
    scale = 1 + z * z / n
    centre = (p + z * z / (2 * n)) / scale
    half = z / scale * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    # At the ends the formula is exact and rounding alone would leave them.
    return (0.0 if passes == 0 else max(0.0, centre - half)), (1.0 if passes == n else min(1.0, centre + half))


def median_interval(
    values: Sequence[float],
    confidence: float = 0.95,
    resamples: int = 4999,
    seed: int = 0,
) -> tuple[float, float] | tuple[None, None]:
    """Percentile bootstrap interval of the median of independent values; (None, None) for fewer than two.

    The resampled medians are drawn from their exact distribution instead of from resamples: a resample's sorted indices
    are the order statistics of n uniform numbers, cut to whole numbers, and the middle ones are Beta distributed.
    """
    import numpy as np

    data = np.sort(np.asarray(values, dtype=np.float64))
    n = data.size
    if n < 2:
        return None, None
    rng = np.random.default_rng(seed)
    middle = (n + 1) // 2
    lower = rng.beta(middle, n - middle + 1, resamples)
    medians = data[_indices(lower, n)]
    if n % 2 == 0:
        # Given the middle one, the next is the least of the n - middle numbers that remain above it.
        upper = lower + (1 - lower) * (1 - rng.random(resamples) ** (1 / (n - middle)))
        medians = (medians + data[_indices(upper, n)]) / 2
    low, high = np.percentile(medians, [50 - 50 * confidence, 50 + 50 * confidence])
    return float(low), float(high)


def _indices(uniform: Any, n: int) -> Any:
    import numpy as np

    return np.minimum((uniform * n).astype(np.int64), n - 1)

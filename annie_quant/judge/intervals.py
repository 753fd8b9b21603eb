"""Intervals: Wilson's for a rate, the percentile bootstrap for a median."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist


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
    """Percentile bootstrap interval of the median of independent values; (None, None) for fewer than two."""
    import numpy as np
    from scipy.stats import bootstrap

    data = np.asarray(values, dtype=np.float64)
    if data.size < 2:
        return None, None
    if np.all(data == data[0]):
        return float(data[0]), float(data[0])
    result = bootstrap(
        (data,),
        np.median,
        confidence_level=confidence,
        n_resamples=resamples,
        method="percentile",
        vectorized=True,
        rng=np.random.default_rng(seed),
        batch=max(1, 2_000_000 // data.size),
    )
    return float(result.confidence_interval.low), float(result.confidence_interval.high)

"""Two backends over the same prompts: paired differences, the prompt as the unit, Holm over what is compared.

Tokens and repeats of one prompt are not independent; each prompt gives one value a side (the median of its repeats).
"""

from __future__ import annotations

import statistics
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

LEVEL = 0.05


def paired(a: Mapping[Hashable, Sequence[float]], b: Mapping[Hashable, Sequence[float]]) -> Any:
    """float64 [n_prompts, 2]: each prompt's median on both sides, in a's order; prompts of one side alone drop out."""
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
) -> dict[str, Any]:
    """{prompt: values} of two sides → n_prompts, median_a, median_b, median_difference (b - a), low, high, p.

    low and high: percentile bootstrap of the median of the paired differences. p: two-sided, an exact sign-flip
    permutation test of their mean for up to 12 prompts, Wilcoxon's signed-rank test above. Fewer than two prompts give
    no interval and no p. n_to_decide: about how many prompts would show the difference that was seen (power 0.8).
    too_few: so few prompts that no difference, however large, could be significant.
    """
    import numpy as np

    from annie_quant.judge.intervals import median_interval

    pairs = paired(a, b)
    n = len(pairs)
    row: dict[str, Any] = {
        "n_prompts": n,
        "median_a": None,
        "median_b": None,
        "median_difference": None,
        "low": None,
        "high": None,
        "p": None,
        "test": None,
        "n_to_decide": None,
        "too_few": least_p(n) >= LEVEL,
    }
    if n == 0:
        return row
    differences = pairs[:, 1] - pairs[:, 0]
    row |= {
        "median_a": float(np.median(pairs[:, 0])),
        "median_b": float(np.median(pairs[:, 1])),
        "median_difference": float(np.median(differences)),
    }
    if n < 2:
        return row
    row["low"], row["high"] = median_interval(differences, confidence, resamples, seed)
    row["p"], row["test"] = _test(differences)
    row["n_to_decide"] = prompts_to_decide(float(np.std(differences, ddof=1)), float(differences.mean()))
    return row


def _test(differences: Any) -> tuple[float, str]:
    import numpy as np
    from scipy.stats import permutation_test, wilcoxon

    if not np.any(differences):
        return 1.0, "all differences are zero"
    if len(differences) <= 12:
        result = permutation_test(
            (differences,), np.mean, permutation_type="samples", n_resamples=np.inf, vectorized=True
        )
        return float(result.pvalue), "exact sign-flip permutation"
    return float(wilcoxon(differences).pvalue), "wilcoxon signed-rank"


def least_p(n_prompts: int) -> float:
    """The smallest p that n prompts can give at all in the sign-flip test: 2 / 2^n."""
    return min(1.0, 2.0 ** (1 - n_prompts))


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Holm's step-down adjustment (Holm 1979), in the order given; None stays None and does not count."""
    ranked = sorted((p, i) for i, p in enumerate(p_values) if p is not None)
    adjusted: list[float | None] = [None] * len(p_values)
    worst = 0.0
    for rank, (p, index) in enumerate(ranked):
        worst = max(worst, min(1.0, (len(ranked) - rank) * p))
        adjusted[index] = worst
    return adjusted


def prompts_to_decide(differences_sd: float, difference: float, power: float = 0.8, level: float = LEVEL) -> int | None:
    """About how many prompts would show `difference` with the stated power (normal approximation, paired)."""
    import math
    from statistics import NormalDist

    if difference == 0 or not math.isfinite(difference) or not math.isfinite(differences_sd):
        return None
    z = NormalDist().inv_cdf(1 - level / 2) + NormalDist().inv_cdf(power)
    return max(6, math.ceil((z * differences_sd / abs(difference)) ** 2))

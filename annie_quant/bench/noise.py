"""Noise of a run: how large a difference two identical servers would show (A/A of each side).

Every prompt that a backend answered more than once is an A/A measurement of it. Where each prompt is measured once, the plan
sends a tenth of them (BenchConfig.noise_share) a second time. The floor of a comparison is what 95 % of A/A comparisons with
its prompts and repeats stay below, from resampled residuals. tests/perf/bench_rules.py simulates how often the rule errs.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from annie_quant.documents import Comparison, NoiseFloor, RequestRecord
from annie_quant.judge.metrics import COMPARED, metric_value
from annie_quant.judge.statistics import compare, paired

RepeatedValues = Mapping[Hashable, Sequence[float]]

FLOOR_SHARE = 0.95  # of A/A comparisons stay below the floor
FLOOR_RESAMPLES = 499
MIN_RESIDUALS = 10  # of a workload; with fewer, those of all its side's workloads are used
SMOOTH_DRAWS = 20_000
MAX_RESAMPLED_PROMPTS = 200  # the floor of more prompts is scaled by the square root


def measured_values(records: Iterable[RequestRecord], metric: str) -> dict[Hashable, list[float]]:
    """Return one value per request by prompt, in order; of a list of values (ITL) its median."""
    values: dict[Hashable, list[float]] = defaultdict(list)
    for record in records:
        value = metric_value(record, metric)
        if isinstance(value, list):
            value = statistics.median(value)
        if value is not None:
            values[record.prompt].append(float(value))
    return values


def noise_floors(
    records: Sequence[RequestRecord], labels: Mapping[str, Sequence[RequestRecord]], seed: int
) -> list[NoiseFloor]:
    """Return the floors of one backend, by label of workload and load, and by metric.

    A metric that was never measured twice has no floor.

    records: all timed requests of the backend
    labels: the same by label; "all" may be among them
    """
    rows = []
    for metric in COMPARED:
        everything = residuals(measured_values(records, metric).values())
        for label, own in labels.items():
            by_prompt = measured_values(own, metric)
            pool = residuals(by_prompt.values())
            if len(pool) < MIN_RESIDUALS:
                pool = everything
            if len(pool) >= MIN_RESIDUALS and by_prompt:
                rows.append(
                    _floor(
                        label,
                        metric,
                        by_prompt,
                        pool,
                        seed,
                    )
                )
    return rows


def residuals(groups: Iterable[Sequence[float]]) -> list[float]:
    """Return the relative deviations of repeated measurements from their prompt's mean, corrected for small groups."""
    rest = []
    for values in groups:
        n = len(values)
        mean = statistics.fmean(values)
        if n > 1 and mean > 0:
            widen = (n / (n - 1)) ** 0.5
            rest += [(value - mean) / mean * widen for value in values]
    return rest


def _floor(
    label: str, metric: str, by_prompt: RepeatedValues, pool: Sequence[float], seed: int
) -> NoiseFloor:
    rng = np.random.default_rng(seed)
    smooth, widen = _smooth_pool(pool, rng)
    prompts = np.array([(statistics.median(v), len(v)) for v in by_prompt.values()])
    n = len(prompts)
    prompts = prompts[rng.permutation(n)[:MAX_RESAMPLED_PROMPTS]]
    medians = prompts[:, :1]
    repeats = int(np.median(prompts[:, 1]))
    draws = rng.choice(smooth, size=(FLOOR_RESAMPLES, len(prompts), 2, repeats))
    sides = np.median(draws, axis=3) * medians
    differences = np.abs(np.median(sides[:, :, 1] - sides[:, :, 0], axis=1))
    scale = (len(prompts) / n) ** 0.5
    first, second = _halves(by_prompt, rng)
    again = compare(first, second, seed=seed)
    return NoiseFloor(
        workload=label,
        metric=metric,
        floor=float(np.quantile(differences, FLOOR_SHARE)) * scale * widen,
        n_prompts=n,
        n_repeated=len(paired(first, second)),
        difference=again.median_difference,
        low=again.low,
        high=again.high,
    )


def _smooth_pool(
    residual: Sequence[float], rng: np.random.Generator
) -> tuple[NDArray[np.float64], float]:
    """Return draws from a kernel estimate of the residuals with their variance, and the factor for few of them.

    Medians of a few discrete values would vary too little. The factor is Student's quantile over the normal one.
    """
    from scipy.stats import norm, t

    values = np.asarray(residual)
    width = 0.9 * len(values) ** -0.2  # Silverman's rule, in standard deviations
    jitter = rng.choice(values, SMOOTH_DRAWS)
    jitter = jitter + rng.normal(0, width * values.std(), SMOOTH_DRAWS)
    quantile = 0.5 + FLOOR_SHARE / 2
    degrees = max(len(values) // 2, 1)
    return jitter / (1 + width * width) ** 0.5, float(t.ppf(quantile, degrees) / norm.ppf(quantile))


def _halves(
    by_prompt: RepeatedValues, rng: np.random.Generator
) -> tuple[RepeatedValues, RepeatedValues]:
    """Divide the repeats of each prompt between two sides at random."""
    first: dict[Hashable, list[float]] = {}
    second: dict[Hashable, list[float]] = {}
    for prompt, values in by_prompt.items():
        if len(values) > 1:
            order = rng.permutation(len(values))
            middle = len(order) // 2
            first[prompt] = [values[i] for i in order[:middle]]
            second[prompt] = [values[i] for i in order[middle:]]
    return first, second


def set_noise(comparisons: Iterable[Comparison], noise: Mapping[str, Sequence[NoiseFloor]]) -> None:
    """Set the noise of each comparison from the floors of its two sides, which are independent."""
    floors: dict[tuple[str, str, str], float] = {}
    for name, rows in noise.items():
        for row in rows:
            floors[name, row.workload, row.metric] = row.floor
    for comparison in comparisons:
        a = floors.get((comparison.a, comparison.workload, comparison.metric))
        b = floors.get((comparison.b, comparison.workload, comparison.metric))
        if a is not None and b is not None:
            comparison.noise = ((a**2 + b**2) / 2) ** 0.5

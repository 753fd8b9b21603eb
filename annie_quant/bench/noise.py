"""The noise floor of a run: how large a difference two identical servers would show (A/A of each side).

Every prompt that a backend answered more than once is an A/A measurement of it. Where each prompt is measured once, the plan
sends a tenth of them (BenchConfig.noise_share) a second time. The floor of a comparison is what 95 % of A/A comparisons with
its prompts and repeats stay below, from resampled residuals; tests/perf/bench_rules.py simulates how often equal sides exceed it.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

from annie_quant.judge.metrics import COMPARED, metric_value
from annie_quant.judge.statistics import compare, paired
from annie_quant.schema import Comparison, NoiseFloor, RequestRecord

CONFIDENCE = 0.95
RESAMPLES = 499
LEAST_RESIDUALS = 10  # of a workload; with fewer, those of all its side's workloads are used
SMOOTHED = 20_000
MOST_PROMPTS = 200  # resampled; the floor of more prompts is scaled by the square root

Values = Mapping[Hashable, Sequence[float]]


def measured(records: Iterable[RequestRecord], metric: str) -> dict[Hashable, list[float]]:
    """Return prompt → one value per request, in order: a list of values (ITL) counts as its median."""
    values: dict[Hashable, list[float]] = defaultdict(list)
    for record in records:
        value = metric_value(record, metric)
        if value is not None:
            values[record.prompt].append(statistics.median(value) if isinstance(value, list) else float(value))
    return values


def floors(
    records: Sequence[RequestRecord], labels: Mapping[str, Sequence[RequestRecord]], seed: int
) -> list[NoiseFloor]:
    """Return the floors of one backend, by label of workload and load, and by metric.

    records: all timed requests of the backend. labels: the same by label; "all" may be among them. A metric that was never
    measured twice has no floor.
    """
    rows = []
    for metric in COMPARED:
        everything = residuals(measured(records, metric).values())
        for label, own in labels.items():
            by_prompt = measured(own, metric)
            near = residuals(by_prompt.values())
            pool = near if len(near) >= LEAST_RESIDUALS else everything
            if len(pool) >= LEAST_RESIDUALS and by_prompt:
                rows.append(_floor(label, metric, by_prompt, pool, seed))
    return rows


def residuals(groups: Iterable[Sequence[float]]) -> list[float]:
    """Return the relative deviations of repeated measurements from their prompt's mean, without its loss of freedom."""
    rest = []
    for values in groups:
        mean = statistics.fmean(values)
        if len(values) > 1 and mean > 0:
            widen = (len(values) / (len(values) - 1)) ** 0.5
            rest += [(value - mean) / mean * widen for value in values]
    return rest


def _floor(label: str, metric: str, by_prompt: Values, pool: Sequence[float], seed: int) -> NoiseFloor:
    import numpy as np

    rng = np.random.default_rng(seed)
    smooth, widen = _smooth_pool(pool, rng)
    sizes = np.array([(statistics.median(v), len(v)) for v in by_prompt.values()])
    n = len(sizes)
    sizes = sizes[rng.permutation(n)[:MOST_PROMPTS]]
    repeats = int(np.median(sizes[:, 1]))
    draws = rng.choice(smooth, size=(RESAMPLES, len(sizes), 2, repeats))
    sides = np.median(draws, axis=3) * sizes[None, :, :1]
    differences = np.abs(np.median(sides[:, :, 1] - sides[:, :, 0], axis=1))
    scale = (len(sizes) / n) ** 0.5
    first, second = _halves(by_prompt, rng)
    again = compare(first, second, seed=seed)
    return NoiseFloor(
        workload=label,
        metric=metric,
        floor=float(np.quantile(differences, CONFIDENCE)) * scale * widen,
        n_prompts=n,
        n_repeated=len(paired(first, second)),
        difference=again.median_difference,
        low=again.low,
        high=again.high,
    )


def _smooth_pool(residual: Sequence[float], rng: Any) -> tuple[Any, float]:
    """Return SMOOTHED draws from a kernel estimate of the residuals with their variance, and the factor for few of them.

    Medians of a few discrete values would vary too little. The factor is Student's quantile over the normal one.
    """
    import numpy as np
    from scipy.stats import norm, t

    values = np.asarray(residual)
    width = 0.9 * len(values) ** -0.2  # Silverman's rule, in standard deviations
    draws = rng.choice(values, SMOOTHED) + rng.normal(0, width * values.std(), SMOOTHED)
    quantile = 0.5 + CONFIDENCE / 2
    return draws / (1 + width * width) ** 0.5, float(t.ppf(quantile, max(len(values) // 2, 1)) / norm.ppf(quantile))


def _halves(by_prompt: Values, rng: Any) -> tuple[dict[Hashable, list[float]], dict[Hashable, list[float]]]:
    """Deal the repeats of each prompt to two sides at random."""
    sides: tuple[dict[Hashable, list[float]], dict[Hashable, list[float]]] = {}, {}
    for prompt, values in by_prompt.items():
        if len(values) > 1:
            order = rng.permutation(len(values))
            for side, part in zip(sides, (order[: len(order) // 2], order[len(order) // 2 :]), strict=True):
                side[prompt] = [values[i] for i in part]
    return sides


def set_noise(comparisons: Iterable[Comparison], noise: Mapping[str, Sequence[NoiseFloor]]) -> None:
    """Set the noise of each comparison from the floors of its two sides, which are independent."""
    table = {(name, row.workload, row.metric): row.floor for name, rows in noise.items() for row in rows}
    for row in comparisons:
        own = [table.get((name, row.workload, row.metric)) for name in (row.a, row.b)]
        known = [floor for floor in own if floor is not None]
        if len(known) == 2:
            row.noise = (sum(floor**2 for floor in known) / 2) ** 0.5

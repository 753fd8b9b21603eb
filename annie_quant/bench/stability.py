"""How steady a run's times are: the noise of equal sides, drift over time, and differences that grow with depth.

tests/perf/bench_rules.py simulates how often each rule errs.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from annie_quant.documents import Comparison, Drift, NoiseFloor, RequestRecord
from annie_quant.judge.metrics import COMPARED, metric_value
from annie_quant.judge.statistics import LEVEL, compare, holm, median_interval, paired

TESTED = ("tpot_ms", "ttft_content_ms")  # for drift and depth
LEAST_SHIFT = 0.02  # smaller changes do not matter, however significant

Values = Mapping[Hashable, Sequence[float]]
Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


def measured_values(records: Iterable[RequestRecord], metric: str) -> dict[Hashable, list[float]]:
    """Return one value per request by prompt, in order; of a list of values (ITL) its median."""
    values: dict[Hashable, list[float]] = defaultdict(list)
    for record in records:
        value = metric_value(record, metric)
        if value is not None:
            values[record.prompt].append(
                statistics.median(value) if isinstance(value, list) else float(value)
            )
    return values


# ---- noise: how large a difference two identical servers would show (A/A of each side)
#
# Every prompt that a backend answered more than once is an A/A measurement of it. Where each prompt is measured once, the plan
# sends a tenth of them (BenchConfig.noise_share) a second time. The floor of a comparison is what 95 % of A/A comparisons with
# its prompts and repeats stay below, from resampled residuals.

CONFIDENCE = 0.95
RESAMPLES = 499
LEAST_RESIDUALS = 10  # of a workload; with fewer, those of all its side's workloads are used
SMOOTHED = 20_000
MOST_PROMPTS = 200  # resampled; the floor of more prompts is scaled by the square root


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
            near = residuals(by_prompt.values())
            pool = near if len(near) >= LEAST_RESIDUALS else everything
            if len(pool) >= LEAST_RESIDUALS and by_prompt:
                rows.append(_floor(label, metric, by_prompt, pool, seed))
    return rows


def residuals(groups: Iterable[Sequence[float]]) -> list[float]:
    """Return the relative deviations of repeated measurements from their prompt's mean, corrected for small groups."""
    rest = []
    for values in groups:
        mean = statistics.fmean(values)
        if len(values) > 1 and mean > 0:
            widen = (len(values) / (len(values) - 1)) ** 0.5
            rest += [(value - mean) / mean * widen for value in values]
    return rest


def _floor(
    label: str, metric: str, by_prompt: Values, pool: Sequence[float], seed: int
) -> NoiseFloor:
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


def _smooth_pool(residual: Sequence[float], rng: np.random.Generator) -> tuple[Floats, float]:
    """Return SMOOTHED draws from a kernel estimate of the residuals with their variance, and the factor for few of them.

    Medians of a few discrete values would vary too little. The factor is Student's quantile over the normal one.
    """
    from scipy.stats import norm, t

    values = np.asarray(residual)
    width = 0.9 * len(values) ** -0.2  # Silverman's rule, in standard deviations
    draws = rng.choice(values, SMOOTHED) + rng.normal(0, width * values.std(), SMOOTHED)
    quantile = 0.5 + CONFIDENCE / 2
    return draws / (1 + width * width) ** 0.5, float(
        t.ppf(quantile, max(len(values) // 2, 1)) / norm.ppf(quantile)
    )


def _halves(
    by_prompt: Values, rng: np.random.Generator
) -> tuple[dict[Hashable, list[float]], dict[Hashable, list[float]]]:
    """Divide the repeats of each prompt between two sides at random."""
    sides: tuple[dict[Hashable, list[float]], dict[Hashable, list[float]]] = {}, {}
    for prompt, values in by_prompt.items():
        if len(values) > 1:
            order = rng.permutation(len(values))
            for side, part in zip(
                sides, (order[: len(order) // 2], order[len(order) // 2 :]), strict=True
            ):
                side[prompt] = [values[i] for i in part]
    return sides


def set_noise(comparisons: Iterable[Comparison], noise: Mapping[str, Sequence[NoiseFloor]]) -> None:
    """Set the noise of each comparison from the floors of its two sides, which are independent."""
    table: dict[tuple[str, str, str], float] = {}
    for name, rows in noise.items():
        for floor in rows:
            table[name, floor.workload, floor.metric] = floor.floor
    for row in comparisons:
        own = [table.get((name, row.workload, row.metric)) for name in (row.a, row.b)]
        known = [floor for floor in own if floor is not None]
        if len(known) == 2:
            row.noise = (sum(floor**2 for floor in known) / 2) ** 0.5


# ---- drift: whether a server became slower or faster during the run, and whether the machine's clocks explain it
#
# A request's deviation is the logarithm of its time less the mean of the same prompt's. Deviations in order of time are put in
# bins, and the largest step between two parts is compared with that of shuffled bins (a change-point test by permutation, as
# Pettitt 1979; it also finds trends). Clock and temperature are then tested at the same split.

MAX_BINS = 24
MIN_BINS = 8
MIN_VALUES_PER_BIN = 4
PERMUTATIONS = 1999
SHIFT_RESAMPLES = 999
EDGE = 0.1  # share of the bins before the first and after the last possible split


def find_drifts(
    records: Sequence[RequestRecord], backends: Iterable[str], seed: int = 0
) -> list[Drift]:
    """Return one row per backend and metric that can be tested: whether its times changed during the run.

    records: all timed requests
    """
    rows = []
    for name in backends:
        own = sorted(
            (r for r in records if r.backend == name and r.timings.started_unix_s is not None),
            key=start_of,
        )
        rows += [row for metric in TESTED if (row := _drift_of(name, metric, own, seed))]
    for row, p in zip(rows, holm([row.p for row in rows]), strict=True):
        row.p_holm = p
        row.significant = p is not None and p < LEVEL and abs(row.shift) >= LEAST_SHIFT
    return rows


def start_of(record: RequestRecord) -> float:
    return record.timings.started_unix_s or 0.0


def _drift_of(name: str, metric: str, records: Sequence[RequestRecord], seed: int) -> Drift | None:
    rows, deviation, groups = deviations(records, metric)
    split = change_point(deviation, groups, seed)
    if split is None:
        return None
    at, p = split
    start = start_of(records[0])
    since = start_of(rows[at])
    shift, low, high = _shift(deviation, groups, at, seed)
    row = Drift(
        backend=name,
        metric=metric,
        n=len(rows),
        after_s=since - start,
        shift=shift,
        low=low,
        high=high,
        p=p,
    )
    for field in ("clock_mhz", "temperature_c", "load_per_core"):
        values = [getattr(r.load, field) for r in rows]
        if None not in values and len(set(values)) > 1:
            row.machine[field] = moved(values, at, seed)
    throttled = [bool(r.load.throttle) for r in rows]
    row.throttled_before = statistics.fmean(throttled[:at])
    row.throttled_after = statistics.fmean(throttled[at:])
    row.throttle = next((str(r.load.throttle) for r in rows[at:] if r.load.throttle), None)
    return row


def deviations(
    records: Sequence[RequestRecord], metric: str
) -> tuple[list[RequestRecord], Floats, Integers]:
    """Return the records that have the metric, float64 log(value) less its group's mean, and int64 groups.

    A group is a prompt that was measured several times, else the workload and turn. Outliers are cut to four deviations.
    """
    values = {}
    for index, record in enumerate(records):
        value = metric_value(record, metric)
        if value and not isinstance(value, list) and value > 0:
            values[index] = math.log(value)
    prompts: dict[Hashable, list[int]] = defaultdict(list)
    for index in values:
        prompts[records[index].prompt, records[index].load.level].append(index)
    groups: dict[Hashable, list[int]] = defaultdict(list)
    for key, members in prompts.items():
        record = records[members[0]]
        groups[key if len(members) > 1 else (record.workload, record.turn, record.load.level)] += (
            members
        )
    group_of = {i: number for number, members in enumerate(groups.values()) for i in members}
    groups_of = np.array([group_of[i] for i in values], dtype=np.int64)
    rest = _centred(np.array(list(values.values())), groups_of)
    if rest.size:
        limit = 4 * 1.4826 * np.median(np.abs(rest - np.median(rest)))
        rest = _centred(np.clip(rest, -limit, limit), groups_of) if limit else rest
    return [records[i] for i in values], rest, groups_of


def _centred(values: Floats, groups: Integers) -> Floats:
    """Return values less the mean of their group."""
    if not values.size:
        return values
    return values - (np.bincount(groups, values) / np.maximum(np.bincount(groups), 1))[groups]


def change_point(deviation: Floats, groups: Integers, seed: int = 0) -> tuple[int, float] | None:
    """Return (index of the first value after the largest step, p); None where no step can be tested.

    Only splits with values of one group on both sides are tested. A step between two loads, which share no group, is part of
    the groups' means.
    """
    edges = _edges(len(deviation))
    bins = len(edges) - 1
    if bins < MIN_BINS:
        return None
    margin = max(2, math.ceil(EDGE * bins))
    splits = edges[margin : bins - margin + 1]
    testable = _divides_a_group(groups, splits)
    if not testable.any():
        return None

    def sizes(rows: Floats) -> Floats:
        return np.abs(steps(rows, margin))[:, testable]

    medians = np.array([np.median(deviation[a:b]) for a, b in itertools.pairwise(edges)])
    largest = sizes(medians[None])[0].argmax()
    p = _permutation_p(medians, lambda rows: sizes(rows).max(axis=1), seed)
    return int(splits[testable][largest]), p


def _divides_a_group(groups: Integers, splits: Integers) -> NDArray[np.bool_]:
    """Return whether each split has values of one group on both sides."""
    index = np.arange(len(groups))
    first = np.full(groups.max() + 1, len(groups))
    last = np.zeros(groups.max() + 1, dtype=int)
    np.minimum.at(first, groups, index)
    np.maximum.at(last, groups, index)
    both_sides: NDArray[np.bool_] = (first < splits[:, None]) & (splits[:, None] <= last)
    return np.any(both_sides, axis=1)


def _permutation_p(means: Floats, statistic: Callable[[Floats], Floats], seed: int) -> float:
    """Return the share of shuffles of the bins with at least the statistic of their true order.

    statistic: from [rows, bins] to one value per row
    """
    shuffled = np.random.default_rng(seed).permuted(np.tile(means, (PERMUTATIONS, 1)), axis=1)
    reached = statistic(shuffled) >= statistic(means[None]) - 1e-12
    return (1 + int(reached.sum())) / (PERMUTATIONS + 1)


def steps(rows: Floats, least: int = 1) -> Floats:
    """Return (mean after - mean before) a split in units of its standard error, [rows, splits].

    least: columns on either side of a split
    """
    bins = rows.shape[1]
    k = np.arange(least, bins - least + 1)
    total = np.cumsum(rows, axis=1)
    before = total[:, k - 1] / k
    after = (total[:, -1:] - total[:, k - 1]) / (bins - k)
    return (after - before) / np.sqrt(1 / k + 1 / (bins - k))


def _shift(deviation: Floats, groups: Integers, at: int, seed: int) -> tuple[float, float, float]:
    """Return the relative change at the split with its 95 % bootstrap interval, bins as units.

    Least squares with one level per group: a prompt that was measured on one side only has no part in it.
    """
    later = _centred((np.arange(len(deviation)) >= at).astype(float), groups)
    edges = _edges(len(deviation))[:-1]
    products = np.add.reduceat(deviation * later, edges)
    squares = np.add.reduceat(later * later, edges)
    picked = np.random.default_rng(seed).integers(0, len(edges), (SHIFT_RESAMPLES, len(edges)))
    below = squares[picked].sum(axis=1)
    draws = np.expm1(products[picked].sum(axis=1)[below > 0] / below[below > 0])
    low, high = np.quantile(draws, [0.025, 0.975])
    return float(np.expm1(products.sum() / squares.sum())), float(low), float(high)


def _edges(count: int) -> Integers:
    """Return the first index of each bin, and the end."""
    bins = min(MAX_BINS, count // MIN_VALUES_PER_BIN)
    return np.linspace(0, count, bins + 1).round().astype(int)


def moved(values: Sequence[float], at: int, seed: int = 0) -> list[float]:
    """Return [median before, median after, p] of a figure of the machine around a split that its own values did not choose.

    The permutation shuffles bins, because a clock keeps its value over many requests.
    """
    data = np.asarray(values, dtype=np.float64)
    edges = _edges(len(data))
    means = np.array([data[a:b].mean() for a, b in itertools.pairwise(edges)])
    k = int(np.searchsorted(edges, at))
    p = _permutation_p(
        means, lambda rows: np.abs(rows[:, k:].mean(axis=1) - rows[:, :k].mean(axis=1)), seed
    )
    return [float(np.median(data[:at])), float(np.median(data[at:])), p]


# ---- depth: whether one backend loses against another only, or more, at a deep context
#
# The ratio of both sides' times for the same prompt is compared between depths: a difference that is the same at all depths is
# the comparison's, one that grows is a separate finding.

LEAST_PROMPTS = 4  # on each side of a comparison of depths; two times four give p = 0.029 at best
STEP = 4  # between two groups of prompt lengths
FIRST = 1024  # tokens: shorter prompts are one group


@dataclass
class DepthRow:
    """How the ratio b / a at a depth differs from that of the shallowest prompts."""

    a: str
    b: str
    metric: str
    depth: int
    ratio: float
    low: float
    high: float
    shallow_depth: int
    shallow: float
    shallow_low: float
    shallow_high: float
    p: float
    n_prompts: int
    p_holm: float | None = None

    @property
    def growth(self) -> float:
        """Relative change of the ratio from shallow to deep prompts."""
        return self.ratio / self.shallow - 1


def depth_of(record: RequestRecord) -> int | None:
    """Return the depth of a request in tokens, rounded down to a group; None where it is unknown.

    It is what the workload aims at, else the server's count of prompt tokens in steps of a factor of four.
    """
    if record.load.depth is not None:
        return record.load.depth
    tokens = record.tokens.prompt_tokens
    if not tokens:
        return None
    return 0 if tokens < FIRST else FIRST * STEP ** int(math.log(tokens / FIRST, STEP))


def compare_depths(
    records: Sequence[RequestRecord], backends: Sequence[str], seed: int = 0
) -> list[DepthRow]:
    """Compare each depth with the shallowest, for each pair of backends.

    records: all timed requests, of which those alone at their server are used
    """
    rows = []
    groups: dict[str, dict[int, list[RequestRecord]]] = {
        name: defaultdict(list) for name in backends
    }
    for record in records:
        depth = depth_of(record)
        if record.load.alone and depth is not None and record.backend in groups:
            groups[record.backend][depth].append(record)
    for (a, b), metric in itertools.product(itertools.combinations(backends, 2), TESTED):
        rows += _compare_pair(a, b, metric, groups[a], groups[b], seed)
    for row, p in zip(rows, holm([row.p for row in rows]), strict=True):
        row.p_holm = p
    return rows


Groups = Mapping[int, Sequence[RequestRecord]]


def _compare_pair(
    a: str, b: str, metric: str, left: Groups, right: Groups, seed: int
) -> list[DepthRow]:
    from scipy.stats import mannwhitneyu

    logs: dict[int, list[float]] = {}
    for depth in sorted(left.keys() & right.keys()):
        ratios = _log_ratios(
            measured_values(left[depth], metric), measured_values(right[depth], metric)
        )
        if len(ratios) >= LEAST_PROMPTS:
            logs[depth] = ratios
    if len(logs) < 2:
        return []
    (shallow, base), *deeper = logs.items()
    short = _ratio_interval(base, seed)
    rows = []
    for depth, ratios in deeper:
        p = float(mannwhitneyu(ratios, base).pvalue)
        row = DepthRow(
            a,
            b,
            metric,
            depth,
            *_ratio_interval(ratios, seed),
            shallow,
            *short,
            p=p,
            n_prompts=len(ratios),
        )
        rows.append(row)
    return rows


def _log_ratios(
    a: Mapping[Hashable, Sequence[float]], b: Mapping[Hashable, Sequence[float]]
) -> list[float]:
    return [math.log(y / x) for x, y in paired(a, b) if x > 0 and y > 0]


def _ratio_interval(ratios: Sequence[float], seed: int) -> tuple[float, float, float]:
    """Return the median ratio and its 95 % interval, from logarithms of ratios."""
    low, high = median_interval(ratios, seed=seed)
    middle = statistics.median(ratios)
    return (
        math.exp(middle),
        math.exp(middle if low is None else low),
        math.exp(middle if high is None else high),
    )

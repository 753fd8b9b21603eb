"""Whether a server became slower or faster during the run, and whether the machine's clocks and temperature explain it.

A request's deviation is the logarithm of its time less the mean of the same prompt's. Deviations in order of time are put
in bins, and the largest step between two parts is compared with that of shuffled bins (a change-point test by permutation, as
Pettitt 1979; it also finds trends). Clock and temperature are then tested at the same split. Simulated in
tests/perf/bench_rules.py: false alarms with independent and with correlated noise, and planted throttling.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

from annie_quant.documents import Confound, Drift, RequestRecord
from annie_quant.judge.metrics import METRICS, metric_value
from annie_quant.judge.statistics import LEVEL, holm

TESTED = ("tpot_ms", "ttft_content_ms")
LEAST_SHIFT = 0.02  # smaller steps do not matter, however significant
MOST_BINS, LEAST_BINS, LEAST_PER_BIN = 24, 8, 4
PERMUTATIONS = 1999
EDGE = 0.1  # share of the bins before the first and after the last possible split


def check(records: Sequence[RequestRecord], backends: Iterable[str], seed: int = 0) -> list[Drift]:
    """Test each backend's times against time; records: all timed requests. One row per backend and metric that can be tested."""
    rows = []
    for name in backends:
        own = sorted((r for r in records if r.backend == name and r.started_unix_s is not None), key=_start)
        rows += [row for metric in TESTED if (row := _test(name, metric, own, seed))]
    for row, p in zip(rows, holm([row.p for row in rows]), strict=True):
        row.p_holm = p
        row.significant = p is not None and p < LEVEL and abs(row.shift) >= LEAST_SHIFT
    return rows


def _start(record: RequestRecord) -> float:
    return record.started_unix_s or 0.0


def _test(name: str, metric: str, records: Sequence[RequestRecord], seed: int) -> Drift | None:
    rows, deviation, groups = deviations(records, metric)
    split = change_point(deviation, seed)
    if split is None:
        return None
    at, p = split
    start, since = _start(records[0]), _start(rows[at])
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
        values = [getattr(r, field) for r in rows]
        if None not in values and len(set(values)) > 1:
            row.machine[field] = moved(values, at, seed)
    throttled = [bool(r.throttle) for r in rows]
    row.throttled_before, row.throttled_after = statistics.fmean(throttled[:at]), statistics.fmean(throttled[at:])
    row.throttle = next((str(r.throttle) for r in rows[at:] if r.throttle), None)
    return row


def deviations(records: Sequence[RequestRecord], metric: str) -> tuple[list[RequestRecord], Any, Any]:
    """Return the records that have the metric, float64 log(value) less its group's mean, and int64 groups.

    A group is a prompt that was measured several times, else the workload and turn. Outliers are cut to four deviations.
    """
    import numpy as np

    values = {}
    for index, record in enumerate(records):
        value = metric_value(record, metric)
        if value and not isinstance(value, list) and value > 0:
            values[index] = math.log(value)
    prompts: dict[Hashable, list[int]] = defaultdict(list)
    for index in values:
        prompts[records[index].prompt, records[index].load].append(index)
    groups: dict[Hashable, list[int]] = defaultdict(list)
    for key, members in prompts.items():
        record = records[members[0]]
        groups[key if len(members) > 1 else (record.workload, record.turn, record.load)] += members
    group_of = {i: number for number, members in enumerate(groups.values()) for i in members}
    groups_of = np.array([group_of[i] for i in values], dtype=np.int64)
    rest = _centred(np.array(list(values.values())), groups_of)
    if rest.size:
        limit = 4 * 1.4826 * np.median(np.abs(rest - np.median(rest)))
        rest = _centred(np.clip(rest, -limit, limit), groups_of) if limit else rest
    return [records[i] for i in values], rest, groups_of


def _centred(values: Any, groups: Any) -> Any:
    """Return values less the mean of their group."""
    import numpy as np

    if not values.size:
        return values
    return values - (np.bincount(groups, values) / np.maximum(np.bincount(groups), 1))[groups]


def change_point(deviation: Any, seed: int = 0) -> tuple[int, float] | None:
    """Return (index of the first value after the largest step, p); None for too few values."""
    import numpy as np

    edges = _edges(len(deviation))
    bins = len(edges) - 1
    if bins < LEAST_BINS:
        return None
    means = np.array([np.median(deviation[a:b]) for a, b in itertools.pairwise(edges)])
    split = _first_split(bins) + int(_steps(means[None])[0].argmax())
    return int(edges[split]), _permutation_p(means, lambda rows: _steps(rows).max(axis=1), seed)


def _permutation_p(means: Any, statistic: Callable[[Any], Any], seed: int) -> float:
    """Return how often shuffled bins have at least the statistic of the bins as they are. statistic: of [rows, bins], per row."""
    import numpy as np

    shuffled = np.random.default_rng(seed).permuted(np.tile(means, (PERMUTATIONS, 1)), axis=1)
    reached = statistic(shuffled) >= statistic(means[None]) - 1e-12
    return (1 + int(reached.sum())) / (PERMUTATIONS + 1)


def _first_split(bins: int) -> int:
    return max(2, math.ceil(EDGE * bins))


def _steps(rows: Any) -> Any:
    """|mean after - mean before| in units of its standard error, [rows, splits]."""
    import numpy as np

    bins = rows.shape[1]
    least = _first_split(bins)
    k = np.arange(least, bins - least + 1)
    total = np.cumsum(rows, axis=1)
    before = total[:, k - 1] / k
    after = (total[:, -1:] - total[:, k - 1]) / (bins - k)
    return np.abs(after - before) / np.sqrt(1 / k + 1 / (bins - k))


def _shift(deviation: Any, groups: Any, at: int, seed: int, resamples: int = 999) -> tuple[float, float, float]:
    """Return the relative change at the split with its 95 % bootstrap interval, bins as units.

    Least squares with one level per group: a prompt that was measured on one side only has no part in it.
    """
    import numpy as np

    later = _centred((np.arange(len(deviation)) >= at).astype(float), groups)
    edges = _edges(len(deviation))[:-1]
    products, squares = np.add.reduceat(deviation * later, edges), np.add.reduceat(later * later, edges)
    picked = np.random.default_rng(seed).integers(0, len(edges), (resamples, len(edges)))
    below = squares[picked].sum(axis=1)
    draws = np.expm1(products[picked].sum(axis=1)[below > 0] / below[below > 0])
    low, high = np.quantile(draws, [0.025, 0.975])
    return float(np.expm1(products.sum() / squares.sum())), float(low), float(high)


def _edges(count: int) -> Any:
    """Return the first index of each bin, and the end."""
    import numpy as np

    bins = min(MOST_BINS, count // LEAST_PER_BIN)
    return np.linspace(0, count, bins + 1).round().astype(int)


def moved(values: Sequence[float], at: int, seed: int = 0) -> list[float]:
    """Return [median before, median after, p] of a figure of the machine around a split that its own values did not choose.

    The permutation shuffles bins, because a clock keeps its value over many requests.
    """
    import numpy as np

    data = np.asarray(values, dtype=np.float64)
    edges = _edges(len(data))
    means = np.array([data[a:b].mean() for a, b in itertools.pairwise(edges)])
    k = int(np.searchsorted(edges, at))
    p = _permutation_p(means, lambda rows: np.abs(rows[:, k:].mean(axis=1) - rows[:, :k].mean(axis=1)), seed)
    return [float(np.median(data[:at])), float(np.median(data[at:])), p]


# ---- findings


def findings(rows: Sequence[Drift]) -> list[Confound]:
    """Return one finding per backend whose times changed significantly."""
    by_backend: dict[str, list[Drift]] = defaultdict(list)
    for row in rows:
        if row.significant:
            by_backend[row.backend].append(row)
    return [_finding(max(some, key=lambda row: abs(row.shift))) for some in by_backend.values()]


def _finding(row: Drift) -> Confound:
    causes, throttles = _causes(row)
    slower = row.shift > 0
    title = METRICS[row.metric].title
    message = (
        f"{row.backend} became {'slower' if slower else 'faster'} {_minutes(row.after_s)} into the run: {title} {row.shift:+.1%} "
        f"[{row.low:+.1%}, {row.high:+.1%}] (p {row.p_holm or row.p:.2g}, {row.n} requests); {causes}"
    )
    code = "throttled" if throttles and slower else "drift"
    return Confound(code=code, severity="fault" if slower else "note", message=message, backends=[row.backend])


def _causes(row: Drift) -> tuple[str, bool]:
    """(what the machine did at the same time, whether it throttled)."""
    sure = {name: figures for name, figures in row.machine.items() if figures[2] < LEVEL}
    clock, heat, load = (sure.get(name) for name in ("clock_mhz", "temperature_c", "load_per_core"))
    slower = row.shift > 0
    parts, throttled = [], False
    if slower and clock and clock[1] < clock[0]:
        parts.append(f"the clock fell from {clock[0]:.0f} to {clock[1]:.0f} MHz (p {clock[2]:.2g})")
        throttled = True
    if slower and heat and heat[1] > heat[0]:
        parts.append(f"the temperature rose from {heat[0]:.0f} to {heat[1]:.0f} °C (p {heat[2]:.2g})")
    if slower and row.throttle and row.throttled_after > row.throttled_before:
        parts.append(f"the driver reports {row.throttle} in {row.throttled_after:.0%} of the later requests")
        throttled = True
    if slower and load and load[1] > load[0]:
        parts.append(f"other work rose from {load[0]:.1f} to {load[1]:.1f} per core (p {load[2]:.2g})")
    if not parts:
        known = "clock_mhz" in row.machine or row.throttle is not None
        return ("clocks and temperature did not change with it" if known else "clocks were not recorded"), False
    return ("the machine throttled: " if throttled else "at the same time ") + ", ".join(parts), throttled


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.1f} minutes" if seconds >= 90 else f"{seconds:.0f} seconds"

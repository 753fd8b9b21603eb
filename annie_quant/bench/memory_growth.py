"""Whether a server's memory grows while it is used, from samples taken during the whole run (memory_trace.json).

The slope is Theil and Sen's (the median of the slopes between bins), so that single peaks do not matter; its interval comes from
resampled bins. The first part of a run is left out: a server fills its cache and pools first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from annie_quant import schema
from annie_quant.schema import Confound, MemoryGrowth

FILE = "memory_trace.json"
SETTLING_SHARE = 0.25  # of the run, left out
BINS, LEAST_BINS = 24, 8
RESAMPLES = 299
LEAST_BYTES = 16 << 20  # over the measured time: less is noise of the allocator
LEAST_SHARE = 0.005  # of the memory in use

Trace = Sequence[tuple[float, float]]  # (seconds, bytes)


def growth(trace: Trace, seed: int = 0) -> MemoryGrowth | None:
    """Return the slope of a server's memory; None for too few samples."""
    import numpy as np

    data = np.asarray(trace, dtype=np.float64).reshape(-1, 2)
    if not len(data):
        return None
    start, end = data[0, 0], data[-1, 0]
    data = data[data[:, 0] >= start + SETTLING_SHARE * (end - start)]
    bins = min(BINS, len(data) // 2)
    if bins < LEAST_BINS:
        return None
    parts = np.array_split(data, bins)
    points = np.array([[part[:, 0].mean(), np.median(part[:, 1])] for part in parts])
    hours = (points[-1, 0] - points[0, 0]) / 3600
    if hours <= 0:
        return None
    rng = np.random.default_rng(seed)
    slopes = [slope(points)]
    for _ in range(RESAMPLES):
        picked = points[np.unique(rng.integers(0, bins, bins))]
        slopes.append(slope(picked))
    low, high = np.quantile(slopes[1:], [0.025, 0.975])
    total = slopes[0] * hours
    level = float(np.median(points[:, 1]))
    grows = bool(low > 0 and total > max(LEAST_BYTES, LEAST_SHARE * level))
    return MemoryGrowth(
        bytes_per_hour=float(slopes[0]),
        low=float(low),
        high=float(high),
        hours=float(hours),
        samples=len(data),
        grows=grows,
    )


def slope(points: object) -> float:
    """Return the median of the slopes between all pairs of points [time in s, bytes], in bytes per hour."""
    import numpy as np

    data = np.asarray(points)
    first, second = np.triu_indices(len(data), 1)
    elapsed = data[second, 0] - data[first, 0]
    return float(np.median((data[second, 1] - data[first, 1])[elapsed > 0] / elapsed[elapsed > 0])) * 3600


def read_traces(folder: Path) -> dict[str, list[tuple[float, float]]]:
    """Return the samples by backend; {} for a run without any."""
    path = folder / FILE
    return schema.decode(dict[str, list[tuple[float, float]]], path) if path.exists() else {}


def check(traces: Mapping[str, Trace], seed: int = 0) -> dict[str, MemoryGrowth]:
    """Return the growth of each backend whose samples suffice."""
    return {name: row for name, trace in traces.items() if (row := growth(trace, seed))}


def findings(rows: Mapping[str, MemoryGrowth]) -> list[Confound]:
    """Return one finding per server whose memory grows."""
    return [
        Confound(
            code="memory_growth",
            severity="fault",
            message=f"{name}: its memory grows by {row.bytes_per_hour / 1e6:.0f} MB per hour [{row.low / 1e6:.0f}, "
            f"{row.high / 1e6:.0f}] over {row.hours:.2g} hours after its start-up: a leak, or a cache without a limit",
            backends=[name],
        )
        for name, row in rows.items()
        if row.grows
    ]

"""Memory of a server: idle, with one request, with five at once, at its peak, and whether it grows during a run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np

from annie_quant import documents
from annie_quant.bench.backend import Backend
from annie_quant.core import host
from annie_quant.documents import MemoryFigures, MemoryGrowth, MemoryLevels

SAMPLE_S = 0.02
RUN_SAMPLE_S = 1.0  # while the benchmark sends its requests
MAX_TRACE = 7200  # samples of a trace; a longer one keeps every second sample, and later ones at that distance
GPU_SAMPLE_S = 1.0  # where there is no NVML, a call of nvidia-smi takes tens of milliseconds


def measure(pid: int, send: Callable[[int], None]) -> MemoryLevels:
    """Measure a process idle, and its peaks while `send(1)` and `send(5)` send one and five requests."""
    idle = sample(pid)
    peaks = []
    for count in (1, 5):
        with PeakMemory(pid) as peak:
            send(count)
        peaks.append(peak.highest)
    return MemoryLevels(idle=idle, one=peaks[0], five=peaks[1])


def sample(pid: int) -> MemoryFigures:
    """Return the memory of a process and its children now."""
    pids = host.process_tree(pid)
    return MemoryFigures(
        process_rss_bytes=host.resident_bytes(pids),
        system_used_bytes=memory.used_bytes if (memory := host.memory()) else None,
        gpu_process_bytes=_gpu(pids),
    )


class PeakMemory:
    """Samples in a thread while the block runs; `highest` holds each figure's peak."""

    def __init__(self, pid: int, every_s: float = SAMPLE_S) -> None:
        self.pid = pid
        self.every_s = every_s
        self.highest = sample(pid)
        self.trace: list[
            tuple[float, float]
        ] = []  # (Unix time in seconds, bytes), evenly spaced over the whole run
        # every _stride-th sample is in the trace
        self._samples = 0
        self._stride = 1
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()
        self._sample()

    def _watch(self) -> None:
        while not self._stop.wait(self.every_s):
            self._sample()

    def _sample(self) -> None:
        now = sample(self.pid)
        self.highest = highest(self.highest, now)
        sizes = (now.gpu_process_bytes, now.process_rss_bytes, now.system_used_bytes)
        size = next((value for value in sizes if value is not None), None)
        if size is not None and self._samples % self._stride == 0:
            self.trace.append((time.time(), float(size)))
        self._samples += 1
        if len(self.trace) >= MAX_TRACE:
            self.trace, self._stride = self.trace[::2], 2 * self._stride


def highest(*samples: MemoryFigures) -> MemoryFigures:
    """Return each figure's largest value; None where no sample has it."""
    names = MemoryFigures.__struct_fields__
    largest = {}
    for name in names:
        sizes = [getattr(sample, name) for sample in samples]
        largest[name] = max((size for size in sizes if size is not None), default=None)
    return MemoryFigures(**largest)


_gpu_bytes: dict[int, int] = {}
_gpu_sampled_s = -GPU_SAMPLE_S


def _gpu(pids: list[int]) -> int | None:
    """GPU memory of the processes, at most GPU_SAMPLE_S old; None where none of them uses a GPU."""
    global _gpu_bytes, _gpu_sampled_s
    if not pids:
        return None
    if time.monotonic() - _gpu_sampled_s > GPU_SAMPLE_S:
        _gpu_bytes = host.gpu_process_bytes()
        _gpu_sampled_s = time.monotonic()
    sizes = [_gpu_bytes[pid] for pid in pids if pid in _gpu_bytes]
    return sum(sizes) if sizes else None


# ---- growth, from samples of the whole run
#
# The slope is Theil and Sen's (the median of the slopes between bins), so that single peaks do not matter; its interval comes from
# resampled bins. The first part of a run is left out: a server fills its cache and pools first.

FILE = "memory_trace.json"
SETTLING_SHARE = 0.25  # of the run, left out
BINS = 24
LEAST_BINS = 8
RESAMPLES = 299
LEAST_BYTES = 16 << 20  # over the measured time: less is noise of the allocator
LEAST_SHARE = 0.005  # of the memory in use

Trace = Sequence[tuple[float, float]]  # (seconds, bytes)


def growth(trace: Trace, seed: int = 0) -> MemoryGrowth | None:
    """Return the slope of a server's memory; None for too few samples."""
    data = np.asarray(trace, dtype=np.float64).reshape(-1, 2)
    if not len(data):
        return None
    start = data[0, 0]
    end = data[-1, 0]
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
    rate = slope(points)
    picked = (np.unique(rng.integers(0, bins, bins)) for _ in range(RESAMPLES))
    low, high = np.quantile([slope(points[places]) for places in picked], [0.025, 0.975]).tolist()
    least = max(LEAST_BYTES, LEAST_SHARE * float(np.median(points[:, 1])))
    grows = bool(low > 0 and rate * hours > least)
    return MemoryGrowth(
        bytes_per_hour=rate, low=low, high=high, hours=float(hours), samples=len(data), grows=grows
    )


def slope(points: object) -> float:
    """Return the median of the slopes between all pairs of points [time in s, bytes], in bytes per hour."""
    from scipy.stats import theilslopes

    times, sizes = np.asarray(points).T
    return float(theilslopes(sizes, times)[0]) * 3600


def read_traces(folder: Path) -> dict[str, list[tuple[float, float]]]:
    """Return the samples by backend; {} for a run without any."""
    path = folder / FILE
    return documents.decode(dict[str, list[tuple[float, float]]], path) if path.exists() else {}


class ServerMemory:
    """The memory of a run's servers, sampled while the block runs.

    backends: those whose process id (`pid` in their meta) is known are sampled.
    folder: the run directory, with memory.json and memory_trace.json.
    """

    def __init__(self, backends: Sequence[Backend], folder: Path) -> None:
        pids = {b.name: int(b.meta["pid"]) for b in backends if b.meta.get("pid")}
        self.path = folder / "memory.json"
        self.folder = folder
        self._stack = ExitStack()
        self.peaks = {name: PeakMemory(pid, every_s=RUN_SAMPLE_S) for name, pid in pids.items()}

    def __enter__(self) -> ServerMemory:
        for peak in self.peaks.values():
            self._stack.enter_context(peak)
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def levels(self) -> dict[str, MemoryLevels]:
        """Return what was measured so far, by backend."""
        return documents.decode(dict[str, MemoryLevels], self.path) if self.path.exists() else {}

    def measure(self, names: Collection[str], send: Callable[[str, int], None]) -> None:
        """Measure those of `names` that memory.json does not have, and add them; `send(name, n)` sends n requests at once."""
        for name, peak in self.peaks.items():
            levels = self.levels()
            if name in names and name not in levels:
                own = measure(peak.pid, partial(send, name))
                own.peak = highest(peak.highest, own.idle, own.one, own.five)
                documents.write(self.path, levels | {name: own})

    def add_traces(self) -> dict[str, Trace]:
        """Add the samples of this execution to memory_trace.json; return all samples by backend."""
        traces: dict[str, Trace] = {**read_traces(self.folder)}
        for name, peak in self.peaks.items():
            traces[name] = [*traces.get(name, ()), *peak.trace]
        if traces:
            documents.write(self.folder / FILE, traces)
        return traces

"""Memory of a server: idle, with one request, with five at once, and at its peak."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from annie_quant import documents
from annie_quant.bench.backend import Backend
from annie_quant.core import host
from annie_quant.documents import MemoryFigures, MemoryLevels

_SAMPLE_S = 0.02
RUN_SAMPLE_S = 1.0  # while the benchmark sends its requests
GPU_SAMPLE_S = 1.0  # where there is no NVML, a call of nvidia-smi takes tens of milliseconds


def measure(pid: int, send: Callable[[int], None]) -> MemoryLevels:
    """Measure a process idle, and its peaks while `send(1)` and `send(5)` send one and five requests."""
    idle = sample(pid)
    peaks = []
    for count in (1, 5):
        with PeakMemory(pid) as peak:
            send(count)
        peaks.append(peak.highest)
    return MemoryLevels(
        idle=idle,
        one=peaks[0],
        five=peaks[1],
    )


def sample(pid: int) -> MemoryFigures:
    """Return the memory of a process and its children now."""
    pids = host.process_tree(pid)
    memory = host.memory()
    return MemoryFigures(
        process_rss_bytes=host.resident_bytes(pids),
        system_used_bytes=memory.used_bytes if memory else None,
        gpu_process_bytes=_gpu(pids),
    )


class PeakMemory:
    """Samples in a thread while the block runs; `highest` holds each figure's peak."""

    def __init__(self, pid: int, every_s: float = _SAMPLE_S) -> None:
        self.pid = pid
        self.every_s = every_s
        self.highest = sample(pid)
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
        self.highest = highest(self.highest, sample(self.pid))


def highest(*samples: MemoryFigures) -> MemoryFigures:
    """Return each figure's largest value; None where no sample has it."""
    largest = {}
    for name in MemoryFigures.__struct_fields__:
        sizes = (getattr(sample, name) for sample in samples)
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


class ServerMemory:
    """The memory of a run's servers, sampled while the block runs.

    backends: those whose process id (`pid` in their meta) is known are sampled.
    folder: the run directory, with memory.json.
    """

    def __init__(self, backends: Sequence[Backend], folder: Path) -> None:
        self.path = folder / "memory.json"
        self._stack = ExitStack()
        self.peaks: dict[str, PeakMemory] = {}
        for backend in backends:
            pid = backend.meta.get("pid")
            if pid:
                self.peaks[backend.name] = PeakMemory(int(pid), every_s=RUN_SAMPLE_S)

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

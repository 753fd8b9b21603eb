"""Memory of a server: idle, with one request, with five at once; each figure by the name of where it comes from.

process_rss_bytes: resident memory of the server's process and its children. system_used_bytes: MemTotal - MemAvailable,
which on unified memory (DGX Spark) holds the GPU's share too. gpu_process_bytes: NVML's figure for those processes,
where it has one.
"""

from __future__ import annotations

import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any

from annie_quant.bench.machine import meminfo

LEVELS = (("one", 1), ("five", 5))
SAMPLE_S = 0.02


def measure(pid: int, load: Callable[[int], None]) -> dict[str, Any]:
    """{"idle" | "one" | "five": {figure: bytes}}, the peak of each while `load(number of requests)` runs."""
    found = {"idle": sample(pid)}
    for name, count in LEVELS:
        with Peak(pid) as peak:
            load(count)
        found[name] = peak.highest
    return found


def sample(pid: int) -> dict[str, int | None]:
    memory = meminfo()
    used = memory["MemTotal"] - memory["MemAvailable"] if {"MemTotal", "MemAvailable"} <= memory.keys() else None
    pids = _family(pid)
    return {"process_rss_bytes": _rss(pids), "system_used_bytes": used, "gpu_process_bytes": _gpu(pids)}


class Peak:
    """Samples in a thread while the block runs; `highest` holds each figure's peak."""

    def __init__(self, pid: int) -> None:
        self.pid, self.highest = pid, sample(pid)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()
        self._take()

    def _watch(self) -> None:
        while not self._stop.wait(SAMPLE_S):
            self._take()

    def _take(self) -> None:
        now = sample(self.pid)
        for name, value in now.items():
            seen = self.highest[name]
            self.highest[name] = value if seen is None else seen if value is None else max(seen, value)


def _family(pid: int) -> list[int]:
    import psutil

    try:
        process = psutil.Process(pid)
        return [pid, *(child.pid for child in process.children(recursive=True))]
    except psutil.Error:
        return []


def _rss(pids: list[int]) -> int | None:
    import psutil

    total = None
    for pid in pids:
        try:
            total = (total or 0) + psutil.Process(pid).memory_info().rss
        except psutil.Error:
            continue
    return total


def _gpu(pids: list[int]) -> int | None:
    """Asked seldom: a call of nvidia-smi takes tens of milliseconds, so a value is kept for a second."""
    if not pids or shutil.which("nvidia-smi") is None:
        return None
    now = time.monotonic()
    if now - _last.get("at", -10.0) > 1.0:
        _last.update(at=now, apps=_compute_apps())
    apps = _last["apps"]
    return sum(apps[p] for p in pids if p in apps) if any(p in apps for p in pids) else None


_last: dict[str, Any] = {}


def _compute_apps() -> dict[int, int]:
    command = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    try:
        out = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    cells = (line.split(",") for line in out.splitlines())
    return {
        int(c[0]): int(c[1]) * 2**20 for c in cells if len(c) == 2 and c[0].strip().isdigit() and c[1].strip().isdigit()
    }

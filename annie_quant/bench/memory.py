"""Memory of a server: idle, with one request, with five at once; each figure by the name of where it comes from.

process_rss_bytes: resident memory of the server's process and its children. system_used_bytes: MemTotal - MemAvailable,
which on unified memory (DGX Spark) holds the GPU's share too. gpu_process_bytes: NVML's figure for those processes,
where it has one. cgroup_bytes: what the kernel charges to the process's control group, which for a container is all of it.
"""

from __future__ import annotations

import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from annie_quant.host import meminfo

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
    pids = _family(pid)
    return {
        "process_rss_bytes": _rss(pids),
        "system_used_bytes": system_used(),
        "gpu_process_bytes": _gpu(pids),
        "cgroup_bytes": _cgroup(pid),
    }


class Peak:
    """Samples in a thread while the block runs; `highest` holds each figure's peak."""

    def __init__(self, pid: int, every_s: float = SAMPLE_S) -> None:
        self.pid, self.every_s, self.highest = pid, every_s, sample(pid)
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
        while not self._stop.wait(self.every_s):
            self._take()

    def _take(self) -> None:
        self.highest = highest(self.highest, sample(self.pid))


def highest(*samples: dict[str, int | None]) -> dict[str, int | None]:
    """Each figure's largest value; None where no sample has it."""
    seen = {name: [value for s in samples if (value := s[name]) is not None] for name in samples[0]}
    return {name: max(values, default=None) for name, values in seen.items()}


def after_stop(timeout_s: float = 30.0, steady_bytes: int = 64 << 20) -> int | None:
    """What the machine uses once it has become steady: two looks a second apart within steady_bytes of each other.

    A stopped server gives its memory back late on unified memory; None where the kernel does not tell.
    """
    deadline, before = time.monotonic() + timeout_s, system_used()
    while before is not None and time.monotonic() < deadline:
        time.sleep(1.0)
        now = system_used()
        if now is None or abs(now - before) <= steady_bytes:
            return now
        before = now
    return before


def system_used() -> int | None:
    """MemTotal - MemAvailable in bytes; None where the kernel does not tell."""
    memory = meminfo()
    return memory["MemTotal"] - memory["MemAvailable"] if {"MemTotal", "MemAvailable"} <= memory.keys() else None


def _cgroup(pid: int) -> int | None:
    """memory.current of the process's own control group (version 2); None in the root group, which holds everything."""
    try:
        line = next(x for x in Path(f"/proc/{pid}/cgroup").read_text().splitlines() if x.startswith("0::"))
        group = line[3:].strip("/")
        return int((Path("/sys/fs/cgroup") / group / "memory.current").read_text()) if group else None
    except (OSError, StopIteration, ValueError):
        return None


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

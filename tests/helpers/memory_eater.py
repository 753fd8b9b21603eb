"""A program that eats memory as a server that loads too much, and the meminfo of a small machine on which it runs."""

from __future__ import annotations

import contextlib
import sys
import threading
from pathlib import Path

import psutil

LIMIT = 600_000_000  # memory of the machine
PIECE = 5_000_000
EATER = """
import os, subprocess, sys, time
size, limit, workers, done = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
if workers:
    words = [sys.executable, "-c", sys.argv[5], str(size), str(limit // workers), "0", done, ""]
    processes = [subprocess.Popen(words) for _ in range(workers)]
    sys.exit(max(process.wait() for process in processes))
eaten = []
while len(eaten) * size < limit:
    eaten.append(b"a" * size)
    time.sleep(0.01)
open(done, "w").close()
sys.exit(9)
"""


def eater(done: Path, workers: int) -> list[str]:
    """Return the command of a program that takes 5 MB per 10 ms, up to LIMIT, where it writes `done` and ends with code 9.

    workers: processes below it that do it, as vLLM's; 0: it does it itself.
    """
    return [
        sys.executable,
        "-c",
        EATER,
        str(PIECE),
        str(LIMIT),
        str(workers),
        str(done),
        EATER,
    ]


class Machine:
    """Keeps a file like /proc/meminfo of a machine with LIMIT bytes that runs only the watched processes.

    least, peak: least available bytes, and largest resident ones.  pids: of all processes that were there.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.least = LIMIT
        self.peak = 0
        self.pids: set[int] = set()
        self._pid = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._keep, daemon=True)
        self._write(LIMIT)

    def watch(self, pid: int) -> None:
        self._pid = pid

    def __enter__(self) -> Machine:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _keep(self) -> None:
        while not self._stop.wait(0.005):
            used = self._resident_bytes() if self._pid else 0
            self.peak = max(self.peak, used)
            self.least = min(self.least, LIMIT - used)
            self._write(max(0, LIMIT - used))

    def _resident_bytes(self) -> int:
        used = 0
        with contextlib.suppress(psutil.Error):
            first = psutil.Process(self._pid)
            for process in [first, *first.children(recursive=True)]:
                self.pids.add(process.pid)
                with contextlib.suppress(psutil.Error):
                    used += process.memory_info().rss
        return used

    def _write(self, available_bytes: int) -> None:
        part = self.path.with_suffix(".part")
        part.write_text(
            f"MemTotal: {LIMIT // 1024} kB\nMemAvailable:   {available_bytes // 1024} kB\n"
        )
        part.replace(self.path)

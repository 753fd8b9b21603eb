"""Progress of work that is counted in bytes: how much, how fast, how long still."""

from __future__ import annotations

import time
from collections.abc import Callable


class Meter:
    """`add` hears bytes of the source as they are done. kept: bytes that an earlier run did; they say nothing of speed."""

    def __init__(self, report: Callable[[str], None], total_bytes: int, kept: int = 0) -> None:
        self.report, self.total, self.kept = report, total_bytes, kept
        self.done = 0
        self.start = time.monotonic()
        if kept:
            report(f"{kept / 1e6:,.0f} of {total_bytes / 1e6:,.0f} MB were done by an earlier run")

    def add(self, size_bytes: int) -> None:
        self.done += size_bytes
        seconds = max(time.monotonic() - self.start, 1e-9)
        speed = self.done / seconds
        left = (self.total - self.kept - self.done) / speed if speed else 0
        self.report(
            f"{(self.kept + self.done) / 1e6:,.0f} of {self.total / 1e6:,.0f} MB, {speed / 1e6:,.0f} MB/s, "
            f"{left:,.0f} s left"
        )

"""Progress of long work: one protocol for every stage, and the two implementations that need no terminal.

A terminal's implementation is `annie_quant.cli.terminal.TerminalTask`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Protocol, runtime_checkable


@runtime_checkable
class Progress(Protocol):
    """What long work reports to.

    Implementations must be cheap: they are called once per request, layer or file.
    """

    def update(self, done: float, total: float | None = None, text: str = "") -> None:
        """Report that `done` of `total` units are finished.

        total: None where it is not known.
        text: describes the state; complete without the two numbers.
        """

    def message(self, text: str) -> None:
        """Report one line that describes the current step."""


class Console(Protocol):
    """What several stages in a row report to: one Progress per stage, and notes between them."""

    def task(self, title: str) -> contextlib.AbstractContextManager[Progress]:
        """Return a context that shows the progress of one stage."""

    def note(self, line: str) -> None:
        """Show one line."""


class Silent:
    """Ignores all reports."""

    def update(self, done: float, total: float | None = None, text: str = "") -> None: ...

    def message(self, text: str) -> None: ...


SILENT = Silent()


class SilentConsole:
    """Ignores all reports of all stages."""

    def task(self, title: str) -> contextlib.AbstractContextManager[Progress]:
        return contextlib.nullcontext(SILENT)

    def note(self, line: str) -> None: ...


class Lines:
    """Passes each message, and the text of each update, to a function that takes one line."""

    def __init__(self, write: Callable[[str], object]) -> None:
        self._write = write

    def update(self, done: float, total: float | None = None, text: str = "") -> None:
        if text:
            self._write(text)

    def message(self, text: str) -> None:
        self._write(text)


def as_progress(report: Progress | Callable[[str], object] | None) -> Progress:
    """Return `report` as a Progress: None is silent, and a function takes one line per report."""
    if report is None:
        return SILENT
    return report if isinstance(report, Progress) else Lines(report)


class ByteProgress:
    """Counts bytes and reports amount (in MB), speed and remaining time.

    done_before: bytes that an earlier, interrupted run finished; they do not count for the speed.
    """

    def __init__(self, progress: Progress, total_bytes: int, done_before: int = 0) -> None:
        self._progress = progress
        self._total = total_bytes
        self._before = done_before
        self._done = 0
        self._start = time.monotonic()
        if done_before:
            progress.message(
                f"{done_before / 1e6:,.0f} of {total_bytes / 1e6:,.0f} MB were finished by an earlier run"
            )

    def add(self, size_bytes: int) -> None:
        """Report `size_bytes` more bytes as finished."""
        self._done += size_bytes
        done_mb = (self._before + self._done) / 1e6
        total_mb = self._total / 1e6
        speed = self._done / max(time.monotonic() - self._start, 1e-9)
        remaining_s = (self._total - self._before - self._done) / speed if speed else 0.0
        text = f"{done_mb:,.0f} of {total_mb:,.0f} MB, {speed / 1e6:,.0f} MB/s, {remaining_s:,.0f} s left"
        self._progress.update(done_mb, total_mb, text)

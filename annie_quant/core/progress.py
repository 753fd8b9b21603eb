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


class RemainingTime:
    """Estimates when a step ends, for what shows its progress.

    The rate is that of the current step: it begins again where the total changes, or where `done` falls to its start.
    """

    def __init__(self) -> None:
        self._total: float | None = (
            None  # until the first update that has one, nothing is estimated
        )
        self._first = 0.0
        self._done = 0.0
        self._start_s = 0.0

    def update(self, done: float, total: float | None) -> None:
        begins_again = done < self._done and done <= self._first
        if total != self._total or begins_again:
            self._total = total
            self._first = done
            self._start_s = time.monotonic()
        self._done = done

    @property
    def seconds(self) -> float | None:
        """The time that is left; None where it is not known."""
        finished = self._done - self._first
        if not self._total or finished <= 0:
            return None
        return (time.monotonic() - self._start_s) / finished * (self._total - self._done)


class Lines:
    """Passes each message, and the text of each update with the time that is left, to a function that takes one line."""

    def __init__(self, write: Callable[[str], object]) -> None:
        self._write = write
        self._remaining = RemainingTime()

    def update(self, done: float, total: float | None = None, text: str = "") -> None:
        self._remaining.update(done, total)
        left_s = self._remaining.seconds
        if text and left_s is not None:
            text = f"{text}, {left_s:,.0f} s left"
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
    """Counts bytes and reports their amount (in MB) and speed.

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
        progress.update(done_before / 1e6, total_bytes / 1e6)

    def add(self, size_bytes: int) -> None:
        """Report `size_bytes` more bytes as finished."""
        self._done += size_bytes
        done_mb = (self._before + self._done) / 1e6
        total_mb = self._total / 1e6
        speed = self._done / max(time.monotonic() - self._start, 1e-9)
        text = f"{done_mb:,.0f} of {total_mb:,.0f} MB, {speed / 1e6:,.0f} MB/s"
        self._progress.update(done_mb, total_mb, text)

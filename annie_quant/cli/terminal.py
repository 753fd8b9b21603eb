"""Terminal output: progress and notes on stderr, tables on stdout; short when stderr is a pipe."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING

import msgspec

from annie_quant.cli.tables import WIDTH
from annie_quant.core import files
from annie_quant.core.progress import RemainingTime
from annie_quant.core.text import printable

if TYPE_CHECKING:
    from rich.console import Console as RichConsole
    from rich.progress import Progress as RichProgress

MAX_CELL = 2000  # characters of a table's cell
MAX_LINE = 20_000  # of an error or a note
HEARTBEAT_S = 20.0  # a log without a new line for longer looks like a stopped program
_STYLES = {
    ("keeps", "Keeps"): "green",
    ("loses", "Loses", "fragile", "Fragile", "misses"): "red",
    ("undecided",): "yellow",
}


def shown(text: object) -> str:
    """Return text for a terminal: printable, with its line breaks and spaces."""
    return printable(str(text), MAX_LINE, lines=True)


def literal(text: object) -> str:
    """Return text for a cell or a description: cleaned for a terminal, and without rich's markup."""
    from rich.markup import escape

    return escape(printable(str(text), MAX_CELL))


def value_text(key: str, value: object) -> str:
    """Return a value as a table shows it.

    key: its name; that of a size ends in "bytes".
    """
    if isinstance(value, Mapping):
        return (
            ", ".join(f"{name} {value_text(str(name), item)}" for name, item in value.items())
            or "none"
        )
    if isinstance(value, (list, tuple)):
        return ", ".join(value_text("", item) for item in value) or "none"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if key.endswith("bytes") and value >= 1000:
        unit, scale = next(
            item for item in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)) if value >= item[1]
        )
        return f"{value / scale:.4g} {unit}" + (
            f" ({value:,} bytes)" if isinstance(value, int) else ""
        )
    return f"{value:.4g}" if isinstance(value, float) else str(value)


class TerminalTask:
    """Progress of one task (annie_quant.core.progress.Progress) as a bar on a terminal; `state` is its last report as a line."""

    def __init__(self, title: str, bar: RichProgress | None = None) -> None:
        self._title = title
        self._bar = bar
        self._task = bar.add_task(literal(title), total=None) if bar else None
        self.state = ""
        self._remaining = RemainingTime()

    @property
    def remaining_s(self) -> float | None:
        """The time that is left; None where it is not known."""
        return self._remaining.seconds

    def update(self, done: float, total: float | None = None, text: str = "") -> None:
        self._remaining.update(done, total)
        share = f"{done:g} of {total:g}" if total else f"{done:g}"
        self._show(", ".join(filter(None, (share, text))), text, done, total)

    def message(self, text: str) -> None:
        self._show(text, text)

    def _show(
        self, state: str, text: str, done: float | None = None, total: float | None = None
    ) -> None:
        self.state = state
        if self._bar is not None and self._task is not None:
            description = (
                f"{literal(self._title)} [dim]{literal(text)}[/]" if text else literal(self._title)
            )
            self._bar.update(self._task, description=description, completed=done, total=total)


@contextlib.contextmanager
def heartbeat(write: Callable[[float], None]) -> Iterator[None]:
    """Write a line every HEARTBEAT_S while the block runs, for a log or a pipe. write: gets the seconds since the start."""
    start = time.monotonic()
    end = threading.Event()

    def beat() -> None:
        with contextlib.suppress(
            OSError, ValueError
        ):  # the pipe's reader has ended, or stderr is closed
            while not end.wait(HEARTBEAT_S):
                write(time.monotonic() - start)

    thread = threading.Thread(target=beat, name="annie-quant heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()


def heartbeat_line(title: str, elapsed_s: float, task: TerminalTask) -> str:
    """Return what a log or a pipe gets of a running task: its state, and when it ends."""
    line = f"… {title}, {elapsed_s:.0f} s"
    if task.state:
        line += f": {task.state}"
    left_s = task.remaining_s
    if not left_s:
        return line
    left = f"{left_s / 60:.0f} min" if left_s > 90 else f"{left_s:.0f} s"
    return f"{line}, about {left} left"


class TerminalConsole:
    """Two rich consoles, created when they are first used."""

    @cached_property
    def err(self) -> RichConsole:
        from rich.console import Console as Rich

        return Rich(stderr=True, highlight=False)

    @cached_property
    def out(self) -> RichConsole:
        from rich.console import Console as Rich

        return Rich(highlight=False)

    def note(self, text: str) -> None:
        """Print a line on stderr."""
        self.err.print(shown(text), markup=False, soft_wrap=True)

    def error(self, message: str, hint: str = "") -> None:
        self.err.print("[red]annie-quant:[/] ", end="")
        self.err.print(shown(message), markup=False, soft_wrap=True)
        if hint:
            self.err.print(f"  → {shown(hint)}", markup=False, soft_wrap=True)

    def line(self, text: str, mark: str = "") -> None:
        """Print a line on stdout: `mark` with rich's markup, then `text` without."""
        if mark:
            self.out.print(f"{mark} ", end="")
        self.out.print(shown(text), markup=False, soft_wrap=True)

    @contextlib.contextmanager
    def task(self, title: str) -> Iterator[TerminalTask]:
        """Show a progress bar while the block runs; on a pipe, print a line every HEARTBEAT_S and one at its end."""
        from rich import progress

        start = time.monotonic()
        if self.err.is_terminal:
            columns = (
                progress.SpinnerColumn(),
                progress.TextColumn("{task.description}"),
                progress.BarColumn(bar_width=24),
                progress.MofNCompleteColumn(),
                progress.TimeElapsedColumn(),
                progress.TimeRemainingColumn(),
            )
            with progress.Progress(*columns, console=self.err, transient=True) as bar:
                yield TerminalTask(title, bar)
        else:
            step = TerminalTask(title)

            def beat(elapsed_s: float) -> None:
                # Not through rich, which on a broken pipe closes stdout, too.
                line = heartbeat_line(title, elapsed_s, step)
                print(shown(line), file=sys.stderr, flush=True)

            with heartbeat(beat):
                yield step
        self.err.print(f"[green]✓[/] {literal(title)} [dim]{time.monotonic() - start:.1f} s[/]")

    @property
    def width(self) -> int:
        """Columns of a table: the terminal's, at least tables.WIDTH; exactly that many on a pipe."""
        return max(WIDTH, self.out.width) if self.out.is_terminal else WIDTH

    def print_lines(self, lines: Iterable[str]) -> None:
        """Print lines on stdout; on a terminal the words of a verdict are coloured."""
        from rich.text import Text

        for line in lines:
            text = Text(shown(line))
            for words, style in _STYLES.items():
                text.highlight_words(words, style)
            self.out.print(text, soft_wrap=True)

    def print_mapping(self, title: str, values: Mapping[str, object]) -> None:
        """Print a table of names and values; numbers with four digits, sizes in decimal units, nothing for None."""
        from rich.table import Table

        table = Table(title=literal(title), title_justify="left", show_header=False)
        for key, value in values.items():
            if value is not None:
                table.add_row(literal(key), literal(value_text(key, value)))
        self.out.print(table if table.row_count else literal(title))

    def print_report(self, path: object) -> None:
        """Print the path of a report."""
        self.err.print(f"report: {shown(path)}", markup=False, soft_wrap=True)


console = TerminalConsole()


def emit(value: object) -> None:
    """Print a typed result, or a mapping with such values, as one JSON object on stdout."""
    text = json.dumps(
        files.finite(msgspec.to_builtins(value, enc_hook=str)), indent=1, ensure_ascii=False
    )
    print("".join(c if c == "\n" or c.isprintable() else json.dumps(c)[1:-1] for c in text))


def echo(text: str, err: bool = False) -> None:
    """Print a line of data, cleaned for a terminal."""
    print(shown(text), file=sys.stderr if err else sys.stdout)


def quiet_engines() -> None:
    """Turn off the progress bars and notes of transformers. Must run before it is imported."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TQDM_DISABLE", "1")

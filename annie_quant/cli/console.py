"""Terminal output: progress and notes on stderr, tables on stdout; short when stderr is a pipe."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from annie_quant.cli.tables import WIDTH, wrap
from annie_quant.printable import printable

MAX_CELL = 2000  # characters of a table's cell
MAX_LINE = 20_000  # of an error or a note
HEARTBEAT_S = 20.0  # a log without a new line for longer looks like a stopped program
STYLES = {
    ("keeps", "Keeps"): "green",
    ("loses", "Loses", "fragile", "Fragile", "misses"): "red",
    ("undecided",): "yellow",
}


def shown(text: Any) -> str:
    """Return text for a terminal: printable, with its line breaks and spaces."""
    return printable(str(text), MAX_LINE, lines=True)


def literal(text: Any) -> str:
    """Return text for a cell or a description: cleaned for a terminal, and without rich's markup."""
    from rich.markup import escape

    return escape(printable(str(text), MAX_CELL))


def value_text(key: str, value: Any) -> str:
    """Return a value as a table shows it. key: its name; that of a size ends in "bytes"."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {value_text(str(name), item)}" for name, item in value.items()) or "none"
    if isinstance(value, (list, tuple)):
        return ", ".join(value_text("", item) for item in value) or "none"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if key.endswith("bytes") and value >= 1000:
        unit, scale = next(item for item in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)) if value >= item[1])
        return (
            f"{value / scale:.4g} {unit} ({value:,} bytes)" if isinstance(value, int) else f"{value / scale:.4g} {unit}"
        )
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def is_secondary_process() -> bool:
    """Whether this is not the first process of a launcher (torchrun, accelerate launch). Only the first one prints,
    except for errors."""
    return os.environ.get("RANK", "0") != "0"


class Step:
    """Progress of one task (annie_quant.progress.Progress) as a bar on a terminal; `state` is its last report as a line."""

    def __init__(self, bar: Any, task: Any, title: str) -> None:
        self._bar, self._task, self._title = bar, task, title
        self.state = ""

    def update(self, done: float, total: float | None = None, text: str = "") -> None:
        share = f"{done:g} of {total:g}" if total else f"{done:g}"
        self.state = ", ".join(filter(None, (share, text)))
        if self._bar is not None:
            description = f"{literal(self._title)} [dim]{literal(text)}[/]" if text else literal(self._title)
            self._bar.update(self._task, completed=done, total=total, description=description)

    def message(self, text: str) -> None:
        self.state = text
        if self._bar is not None:
            self._bar.update(self._task, description=f"{literal(self._title)} [dim]{literal(text)}[/]")


class Heartbeat:
    """A context manager that writes a line every HEARTBEAT_S while the block runs, for a log or a pipe."""

    def __init__(self, write: Callable[[float], None]) -> None:
        """write: gets the seconds since the start."""
        self._write, self._start, self._end = write, time.monotonic(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="annie-quant heartbeat", daemon=True)

    def _run(self) -> None:
        while not self._end.wait(HEARTBEAT_S):
            try:
                self._write(time.monotonic() - self._start)
            except (OSError, ValueError):  # the pipe's reader has ended, or stderr is closed
                return

    def __enter__(self) -> Heartbeat:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()


class Console:
    """Two rich consoles, created when they are first used."""

    def __init__(self) -> None:
        self._err: Any = None
        self._out: Any = None

    @property
    def err(self) -> Any:
        if self._err is None:
            from rich.console import Console as Rich

            self._err = Rich(stderr=True, highlight=False)
        return self._err

    @property
    def out(self) -> Any:
        if self._out is None:
            from rich.console import Console as Rich

            self._out = Rich(highlight=False)
        return self._out

    def note(self, text: str) -> None:
        """Print a line on stderr."""
        if not is_secondary_process():
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
    def task(self, title: str) -> Iterator[Step]:
        """Show a progress bar while the block runs; on a pipe, print a line every HEARTBEAT_S and one at its end."""
        from rich import progress

        if is_secondary_process():
            yield Step(None, None, title)
            return
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
                yield Step(bar, bar.add_task(literal(title), total=None), title)
        else:
            step = Step(None, None, title)

            def beat(elapsed_s: float) -> None:
                # Not through rich, which on a broken pipe closes stdout, too.
                line = f"… {title}, {elapsed_s:.0f} s" + (f": {step.state}" if step.state else "")
                print(shown(line), file=sys.stderr, flush=True)

            with Heartbeat(beat):
                yield step
        self.err.print(f"[green]✓[/] {literal(title)} [dim]{time.monotonic() - start:.1f} s[/]")

    @property
    def width(self) -> int:
        """Columns of a table: the terminal's, at least tables.WIDTH; exactly that many on a pipe."""
        return max(WIDTH, self.out.width) if self.out.is_terminal else WIDTH

    def print_lines(self, lines: Iterable[str]) -> None:
        """Print lines on stdout; on a terminal the words of a verdict are coloured."""
        from rich.text import Text

        if is_secondary_process():
            return
        for line in lines:
            text = Text(shown(line))
            for words, style in STYLES.items():
                text.highlight_words(words, style)
            self.out.print(text, soft_wrap=True)

    def print_mapping(self, title: str, values: Mapping[str, Any]) -> None:
        """Print a table of names and values; numbers with four digits, sizes in decimal units, nothing for None."""
        from rich.table import Table

        table = Table(title=literal(title), title_justify="left", show_header=False)
        for key, value in values.items():
            if value is not None:
                table.add_row(literal(key), literal(value_text(key, value)))
        self.out.print(table if table.row_count else literal(title))

    def print_verdict(self, verdict: Mapping[str, Any]) -> None:
        """Print the stages' times and the verdict's reasons, then, to be read first, its sentence and the report's path."""
        for stage in verdict.get("stages", ()):
            self.err.print(
                f"[dim]{literal(stage['name']):>17}  {stage['seconds']:7.1f} s  {literal(stage.get('summary', ''))}[/]"
            )
        for reason in verdict.get("reasons", ()):
            self.print_lines(wrap(f"- {reason}", self.width))
        self.print_lines(wrap(verdict["sentence"], self.width))
        if verdict.get("report"):
            self.err.print(f"report: {shown(verdict['report'])}", markup=False, soft_wrap=True)

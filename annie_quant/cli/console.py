"""Terminal output: progress and notes on stderr, tables on stdout; short when stderr is a pipe."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping
from typing import Any

MARKS = {"pass": "[green]pass[/]", "fail": "[red]fail[/]", "undecided": "[yellow]undecided[/]"}


def is_secondary_process() -> bool:
    """Whether this is not the first process of a launcher (torchrun, accelerate launch). Only the first one prints,
    except for errors."""
    return os.environ.get("RANK", "0") != "0"


class Step:
    """Progress of one task (annie_quant.progress.Progress) as a bar on a terminal; ignored on a pipe."""

    def __init__(self, bar: Any, task: Any, title: str) -> None:
        self._bar, self._task, self._title = bar, task, title

    def update(self, done: float, total: float | None = None, text: str = "") -> None:
        if self._bar is not None:
            description = f"{self._title} [dim]{text}[/]" if text else self._title
            self._bar.update(self._task, completed=done, total=total, description=description)

    def message(self, text: str) -> None:
        if self._bar is not None:
            self._bar.update(self._task, description=f"{self._title} [dim]{text}[/]")


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
            self.err.print(text, markup=False, soft_wrap=True)

    def error(self, message: str, hint: str = "") -> None:
        self.err.print("[red]annie-quant:[/] ", end="")
        self.err.print(message, markup=False, soft_wrap=True)
        if hint:
            self.err.print(f"  → {hint}", markup=False, soft_wrap=True)

    def line(self, text: str, mark: str = "") -> None:
        """Print a line on stdout: `mark` with rich's markup, then `text` without."""
        if mark:
            self.out.print(f"{mark} ", end="")
        self.out.print(text, markup=False, soft_wrap=True)

    @contextlib.contextmanager
    def task(self, title: str) -> Iterator[Step]:
        """Show a progress bar while the block runs; on a pipe, print one line at its end."""
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        if is_secondary_process():
            yield Step(None, None, title)
            return
        start = time.monotonic()
        if self.err.is_terminal:
            columns = (
                SpinnerColumn(),
                TextColumn("{task.description}"),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
            )
            with Progress(*columns, console=self.err, transient=True) as bar:
                yield Step(bar, bar.add_task(title, total=None), title)
        else:
            yield Step(None, None, title)
        self.err.print(f"[green]✓[/] {title} [dim]{time.monotonic() - start:.1f} s[/]")

    def print_gates(self, sides: Mapping[str, Mapping[str, Any]]) -> None:
        """Print one row per gate and one column per side: passes/n, 95 % interval, verdict."""
        from rich.table import Table

        table = Table(title="Gates (passes / n, 95 % Wilson interval)", title_justify="left")
        table.add_column("gate")
        table.add_column("against")
        for side in sides:
            table.add_column(side, justify="right")
        for gate in dict.fromkeys(g for gates in sides.values() for g in gates):
            cells = []
            for gates in sides.values():
                g = gates.get(gate)
                cells.append(
                    "–"
                    if g is None
                    else f"{g['passes']}/{g['n']} [dim]{g['low']:.2f}–{g['high']:.2f}[/] {MARKS[g['verdict']]}"
                )
            result = next(gates[gate] for gates in sides.values() if gate in gates)
            basis = {"reference": "bf16"}.get(result.get("basis", ""), result.get("basis", ""))
            table.add_row(gate, f"{basis}, informs" if result.get("advisory") else basis, *cells)
        self.out.print(table)

    def print_mapping(self, title: str, values: Mapping[str, Any]) -> None:
        """Print a table of names and values."""
        from rich.table import Table

        table = Table(title=title, title_justify="left", show_header=False)
        for key, value in values.items():
            table.add_row(str(key), ", ".join(map(str, value)) if isinstance(value, list) else str(value))
        self.out.print(table)

    def print_verdict(self, verdict: Mapping[str, Any]) -> None:
        """Print gates, the verdict's sentence and reasons, the stages' times and the report's path."""
        if verdict.get("gates"):
            self.print_gates(verdict["gates"])
        self.line(verdict["sentence"])
        for reason in verdict.get("reasons", ()):
            self.line(f"  · {reason}")
        for stage in verdict.get("stages", ()):
            self.err.print(f"[dim]{stage['name']:>12}  {stage['seconds']:7.1f} s  {stage.get('summary', '')}[/]")
        if verdict.get("report"):
            self.err.print(f"report: {verdict['report']}", markup=False, soft_wrap=True)

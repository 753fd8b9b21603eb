"""What the command line shows: progress and notes on stderr, tables on stdout; quiet when piped."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MARKS = {"pass": "[green]pass[/]", "fail": "[red]fail[/]", "undecided": "[yellow]undecided[/]"}


def follows() -> bool:
    """Whether the first process of a launcher (torchrun, accelerate launch) speaks for this one; errors it says itself."""
    return os.environ.get("RANK", "0") != "0"


class Step:
    """Progress of one task on a terminal: an annie_quant.progress.Progress."""

    def __init__(self, bar: Any, task: Any, title: str) -> None:
        self.bar, self.task, self.title = bar, task, title

    def update(self, done: float, total: float | None = None, text: str = "") -> None:
        if self.bar is not None:
            self.bar.update(
                self.task,
                completed=done,
                total=total,
                description=f"{self.title} [dim]{text}[/]" if text else self.title,
            )

    def message(self, text: str) -> None:
        if self.bar is not None:
            self.bar.update(self.task, description=f"{self.title} [dim]{text}[/]")

    def __call__(self, done: float = 0, total: float | None = None, text: str = "") -> None:
        self.update(done, total, text)

    def say(self, text: str) -> None:
        self.message(text)


class Console:
    """rich, made when it is first used."""

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

    def note(self, line: str) -> None:
        if follows():
            return
        self.err.print(line, markup=False, soft_wrap=True)

    def error(self, message: str, hint: str = "") -> None:
        self.err.print("[red]annie-quant:[/] ", end="")
        self.err.print(message, markup=False, soft_wrap=True)
        if hint:
            self.err.print(f"  → {hint}", markup=False, soft_wrap=True)

    @contextlib.contextmanager
    def task(self, title: str) -> Iterator[Step]:
        """A progress bar while it runs; on a pipe, one line when it is done."""
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        if follows():
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

    def print_gates(self, sides: dict[str, dict[str, Any]]) -> None:
        """Gates down, models across: passes/n, 95 % interval, verdict."""
        from rich.table import Table

        table = Table(title="Gates (passes / n, 95 % Wilson interval)", title_justify="left")
        table.add_column("gate")
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
            table.add_row(gate, *cells)
        self.out.print(table)

    def print_audit(self, path: Path, found: Any, tensors: bool = False) -> None:
        """What it is, who loads it, every tensor if asked for, and the faults."""
        summary = found.to_dict().get("summary", {})
        self.print_mapping(str(path), {k: v for k, v in summary.items() if k != "loads"})
        for line in summary.get("loads", ()):
            self.out.print(f"  {line}", markup=False, soft_wrap=True)
        if tensors:
            self.print_tensors(found.tensors)
        for finding in found.findings:
            self.out.print(f"[red]{finding.code}[/] ", end="")
            self.out.print(f"{finding.tensor or ''}  {finding.message}", markup=False, soft_wrap=True)
        if found.ok:
            self.out.print("[green]sound[/]")

    def print_tensors(self, rows: list[dict[str, Any]]) -> None:
        """A line a tensor of an audit: format, shape, scales, zero blocks, and the error where a source was given."""
        columns = ["name", "format", "shape", "group", "tensor_scale", "input_scale", "scale_min", "scale_max",
                   "zero_blocks", "rel_l2"]  # fmt: skip
        table = [columns, *([_cell(row.get(c)) for c in columns] for row in rows)]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        for line in table:  # whole lines, however narrow the terminal: for paging and searching
            text = "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
            self.out.print(text.rstrip(), markup=False, soft_wrap=True)

    def print_validation(self, result: dict[str, Any]) -> None:
        """The GPU, then a line a check, then whatever was timed or judged besides."""
        self.print_mapping("GPU", result["device"] | result["paths"])
        for check in result["checks"]:
            self.out.print(f"{'[green]✓[/]' if check['ok'] else '[red]✗[/]'} {check['name']}  ", end="")
            self.out.print(check["detail"], markup=False, soft_wrap=True)
        if "bench" in result:
            self.print_mapping("bench", result["bench"])
        if "stack" in result:
            self.print_stack(result["stack"])

    def print_stack(self, found: dict[str, Any]) -> None:
        """A line a backend of a serving stack, what is known of its fault and the remedy, then the one to choose."""
        marks = {"right": "[green]✓[/]", "wrong": "[red]✗[/]", "failed": "[yellow]·[/]", "missing": "[dim]·[/]"}
        for row in found["backends"]:
            said = row["verdict"]
            if said in ("right", "wrong"):
                said += f", at most {row['worst']:.3g} of what rounding allows"
            elif said == "failed":
                said += ": " + next((c["error"] for c in row["cases"] if c.get("error")), row["cause"])
            else:
                said += f": {row['cause']}"
            self.out.print(f"{marks[row['verdict']]} ", end="")
            self.out.print(f"{row['backend']}: {said}", markup=False, soft_wrap=True)
            if row["remedy"]:
                self.out.print(f"    {row['cause']}", markup=False, soft_wrap=True)
                self.out.print(f"    → {row['remedy']}", markup=False, soft_wrap=True)
        switch = f"   {found['switch']}" if found.get("switch") else ""
        choice = f"choose {found['choose']}{switch}" if found["choose"] else "no FP4 backend is right here"
        self.out.print(choice, markup=False, soft_wrap=True)
        if found.get("note"):
            self.out.print(found["note"], markup=False, soft_wrap=True)

    def print_mapping(self, title: str, values: dict[str, Any]) -> None:
        from rich.table import Table

        table = Table(title=title, title_justify="left", show_header=False)
        for key, value in values.items():
            table.add_row(str(key), ", ".join(map(str, value)) if isinstance(value, list) else str(value))
        self.out.print(table)

    def print_doctor(self, findings: list[dict[str, str]]) -> None:
        for f in findings:
            mark = {"ok": "[green]✓[/]", "note": "[yellow]·[/]", "fault": "[red]✗[/]"}[f["level"]]
            self.out.print(f"{mark} {f['check']}: ", end="")
            self.out.print(f["seen"], markup=False, soft_wrap=True)
            if f.get("why"):
                self.out.print(f"    {f['why']}", markup=False, soft_wrap=True)
            if f.get("mend"):
                self.out.print(f"    → {f['mend']}", markup=False, soft_wrap=True)

    def print_verdict(self, verdict: dict[str, Any]) -> None:
        if verdict.get("gates"):
            self.print_gates(verdict["gates"])
        self.out.print(verdict["sentence"], markup=False, soft_wrap=True)
        for reason in verdict.get("reasons", ()):
            self.out.print(f"  · {reason}", markup=False, soft_wrap=True)
        for stage in verdict.get("stages", ()):
            self.err.print(f"[dim]{stage['name']:>12}  {stage['seconds']:7.1f} s  {stage.get('summary', '')}[/]")
        if verdict.get("report"):
            self.err.print(f"report: {verdict['report']}", markup=False, soft_wrap=True)


def _cell(value: Any) -> str:
    """A table's cell: shapes as 512x256, numbers short, nothing for None."""
    if isinstance(value, list):
        return "x".join(map(str, value))
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)

"""Several runs over time: what changed in gates, speed, divergence and size, and what cannot be compared.

build([DIR, DIR, …], output)   write trends.html (one offline file) and trends.md; runs are sorted by their time

A change between two runs is significant only where their 95 % intervals do not overlap; figures
without intervals are shown and not compared. Differences in machine, prompts or settings come
before any figure.
"""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from annie_quant import __version__
from annie_quant.core.errors import UsageError
from annie_quant.core.templates import render_html, render_markdown
from annie_quant.core.text import visible
from annie_quant.documents import Environment
from annie_quant.judge.metrics import METRICS
from annie_quant.report import comparison, format, write_files
from annie_quant.report.format import CSS, DASH, SIGNS, count, interval, significant
from annie_quant.report.run import LoadedRun, OfflineModel, ServedModel, load
from annie_quant.report.svg import MARKS
from annie_quant.report.tables import Cell, Table, grid

GROUPS = {
    "gate": "Gates",
    "speed": "Speed behind the servers, p50",
    "kl": "KL divergence from bf16, mean",
    "size": "Size on disk",
}
SPEEDS = {
    "ttft": (METRICS["ttft_content_ms"].label, -1),
    "decode": (METRICS["decode_tok_s"].label, 1),
}
Direction = Literal["better", "worse", ""]


@dataclass(frozen=True)
class RunFigure:
    """One figure of one run.

    context: the machine of a speed, the prompts of a served gate; only equal contexts are compared.
    """

    value: float
    low: float | None = None
    high: float | None = None
    n: float | None = None
    verdict: str = ""
    context: str = ""


@dataclass
class FigureLine:
    """One figure over the runs.

    key: group|side|metric.
    better: 1 where higher is better, -1 where lower is, 0 where neither is.
    points: one per run; None where the run lacks the figure.
    """

    key: str
    title: str
    where: str
    better: int
    points: list[RunFigure | None]

    @property
    def group(self) -> str:
        return self.key.split("|")[0]

    def text(self, point: RunFigure) -> str:
        if self.group == "gate":
            return f"{format.share(point.value)} {SIGNS.get(point.verdict, '')}".strip()
        return format.size(point.value) if self.group == "size" else significant(point.value)

    def before(self, index: int) -> RunFigure | None:
        """Return the figure of the latest earlier run that has it."""
        return next((p for p in reversed(self.points[:index]) if p), None)

    def change(self, index: int) -> Direction:
        """Return whether a run is significantly better or worse than the latest earlier run that has the figure."""
        now = self.points[index]
        before = self.before(index)
        if now is None or before is None or now.context != before.context:
            return ""
        if now.low is None or now.high is None or before.low is None or before.high is None:
            return ""
        gain = self.better * ((now.low > before.high) - (now.high < before.low))
        if not gain:
            return ""
        return "better" if gain > 0 else "worse"


@dataclass(frozen=True)
class FigureChange:
    direction: Direction
    sentence: str


def build(run_dirs: Sequence[str | os.PathLike], output: str | os.PathLike) -> list[Path]:
    """Write trends.html and trends.md into `output`; return their paths. Raises UsageError for fewer than two runs."""
    return write_files(Path(output), compose(run_dirs))


def compose(run_dirs: Sequence[str | os.PathLike]) -> dict[str, str]:
    """Return {file name: text}."""
    runs = in_order([load(d) for d in run_dirs])
    if len(runs) < 2:
        raise UsageError("trends need two runs or more", "annie-quant report DIR DIR")
    names = labels(runs)
    lines = collect(runs)
    tables = [
        overview(runs, names),
        *(group_table(g, title, lines, names) for g, title in GROUPS.items()),
    ]
    tables = [t for t in tables if t.rows]
    differing = differences(runs, names)
    changed = changes(lines, names)
    worse = sum(c.direction == "worse" for c in changed)
    headline = f"{len(names)} runs: no significant change"
    if changed:
        headline = f"{len(names)} runs: {worse} figures significantly worse, {len(changed) - worse} better than in the run before"
    values = {"tables": tables, "differences": differing, "changes": changed, "headline": headline}
    files = {
        "trends.html": render_html("trends.html", MARKS, version=__version__, **values),
        "trends.md": render_markdown("trends.md", grid=grid, **values),
    }
    return {name: text.encode("utf-8", "replace").decode() for name, text in files.items()}


def in_order(runs: list[LoadedRun]) -> list[LoadedRun]:
    """Return the runs by their recorded time; runs without one come last, in their order."""
    return sorted(
        runs, key=lambda r: (not r.document.environment.time, r.document.environment.time)
    )


def labels(runs: list[LoadedRun]) -> list[str]:
    """Return folder names, with as much of the path as makes them differ."""
    paths = [r.folder.resolve().parts for r in runs]
    names: list[str] = []
    for depth in range(1, max(map(len, paths)) + 1):
        names = [visible("/".join(p[-depth:])) for p in paths]
        if len(set(names)) == len(names):
            break
    return [n if names.count(n) == 1 else f"{n} ({i + 1})" for i, n in enumerate(names)]


def collect(runs: list[LoadedRun]) -> list[FigureLine]:
    """Return every figure that any run has, in the order of the newest run."""
    lines: dict[str, FigureLine] = {}
    for index in reversed(range(len(runs))):
        for key, title, where, better, point in _figures(runs[index]):
            line = lines.setdefault(key, FigureLine(key, title, where, better, [None] * len(runs)))
            line.points[index] = point
    order = list(GROUPS)
    return sorted(lines.values(), key=lambda line: order.index(line.group))


def _figures(run: LoadedRun) -> Iterator[tuple[str, str, str, int, RunFigure]]:
    """Yield (key, title, where, better, point) of every figure of a run."""
    machine = _machine(run)
    prompts = _prompts(run)
    for side in run.sides:
        where = f"{run.label(side.model)}, {side.title}"
        for gate in run.gate_names:
            r = side.gates.get(gate)
            if r and r.n:
                context = prompts if isinstance(side, ServedModel) else ""
                point = RunFigure(r.rate, r.low, r.high, r.n, r.verdict, context)
                better = 0 if r.advisory else 1
                yield f"gate|{side.key}|{gate}", run.gate_title(gate), where, better, point
        if isinstance(side, OfflineModel):
            kl = side.data.kl
            if kl:
                point = RunFigure(kl.mean, n=kl.n_tokens)
                yield f"kl|{side.key}|mean", "mean KL, nats", where, -1, point
            continue
        for gate, (title, better) in SPEEDS.items():
            row = side.data.speed_gates.get(gate)
            if row:
                point = RunFigure(row.value, row.low, row.high, row.n, row.verdict, machine)
                yield f"speed|{side.key}|{gate}", title, where, better, point
    for model in run.models:
        if model.size_bytes is not None:
            point = RunFigure(model.size_bytes)
            yield f"size|{model.name}|", "size on disk", run.label(model.name), -1, point


def differences(runs: list[LoadedRun], names: list[str]) -> list[str]:
    """Return how the runs differ apart from their models: machine, prompts, settings."""
    sentences = []
    for subject, key, note in (
        ("machines", _machine, ", so their speeds cannot be compared"),
        ("prompts", _prompts, ", so their gates judge different answers"),
        ("settings", lambda r: _digest(r.document.config), ""),
    ):
        groups = defaultdict(list)
        for run, label in zip(runs, names, strict=True):
            value = key(run)
            if value:
                groups[value].append(label)
        if len(groups) > 1:
            sentences.append(
                f"the {subject} differ{note}: {' / '.join(', '.join(g) for g in groups.values())}"
            )
    return sentences


def _digest(value: object) -> str:
    return hashlib.sha256(msgspec.json.encode(value, order="deterministic")).hexdigest()


def _machine(run: LoadedRun) -> str:
    environment = run.document.environment
    return (
        _digest([environment.cpu, environment.cores, environment.gpus])
        if environment != Environment()
        else ""
    )


def _prompts(run: LoadedRun) -> str:
    return _digest([[w.name, w.cases] for w in run.inputs]) if run.inputs else ""


def overview(runs: list[LoadedRun], names: list[str]) -> Table:
    table = Table("The runs, oldest first", "run", sortable=True)
    for run, label in zip(runs, names, strict=True):
        outcome = comparison.outcome(run)
        environment = run.document.environment
        cells = {
            "time": Cell(environment.time or DASH, css="word"),
            "machine": Cell(environment.cpu or DASH, css="word"),
            "requests": Cell(count(len(run.measured))),
            "outcome": Cell(f"{SIGNS[outcome]} {outcome}", css=f"word {CSS[outcome]}"),
            "verdict": Cell(run.sentence or "no verdict", css="word long"),
        }
        table.add(label, cells)
    return table


def group_table(group: str, title: str, lines: list[FigureLine], names: list[str]) -> Table:
    caption = f"{title}; ▲ significantly better and ▼ significantly worse than the run before"
    table = Table(caption, "figure", ["where", *names], sortable=True)
    for line in lines:
        if line.group == group:
            cells = [_cell(line, index, point) for index, point in enumerate(line.points)]
            table.rows.append((line.title, [Cell(line.where, css="word"), *cells]))
    return table


def _cell(line: FigureLine, index: int, point: RunFigure | None) -> Cell:
    if point is None:
        return Cell(DASH, css="none")
    sign, css = {"better": (" ▲", "pass"), "worse": (" ▼", "fail"), "": ("", "")}[
        line.change(index)
    ]
    bounds = "" if line.group == "gate" else interval(point.low, point.high)
    sub = ", ".join(filter(None, [bounds, f"n = {count(point.n)}" if point.n else ""]))
    return Cell(line.text(point) + sign, sub, f"{line.key}|{index}", css, sort=point.value)


def changes(lines: list[FigureLine], names: list[str]) -> list[FigureChange]:
    """Return every significant change, worse ones first."""
    rows = []
    for line in lines:
        for index, now in enumerate(line.points):
            before = line.before(index)
            direction = line.change(index)
            if now and before and direction:
                figures = f"{line.text(before)} → {line.text(now)} in {names[index]}"
                rows.append(FigureChange(direction, f"{line.title}, {line.where}: {figures}"))
    return sorted(rows, key=lambda c: c.direction != "worse")

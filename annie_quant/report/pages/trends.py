"""Several runs over time: what changed in gates, speed, divergence and size, and what cannot be compared.

build([DIR, DIR, …], output)   writes trends.html (one offline file) and trends.md; runs are put in the order of their time

A change between two runs is called sure only where their 95 % intervals do not overlap; figures without intervals only
show their values. Other machines, prompts or settings are named before any figure.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from annie_quant.errors import UsageError
from annie_quant.files import write_text
from annie_quant.judge.metrics import METRICS
from annie_quant.report import format
from annie_quant.report.charts import svg
from annie_quant.report.charts.gates import SIGNS, WIDTH, rate
from annie_quant.report.charts.svg import Canvas
from annie_quant.report.format import DASH, clean, count, number, significant
from annie_quant.report.pages import html, markdown
from annie_quant.report.pages.tables import Cell, Table
from annie_quant.report.run import Run, load


@dataclass(frozen=True)
class Point:
    """One figure of one run: its value, its interval where there is one, and n."""

    value: float
    low: float | None
    high: float | None
    n: float | None
    verdict: str = ""
    place: str = ""  # the machine of a speed, the prompts of a served gate: points of different places are not compared


@dataclass
class Line:
    """One figure over the runs, None where a run lacks it. `better`: which way is up, 1, -1 or 0."""

    key: str  # group|side|metric
    title: str
    where: str
    series: int
    better: int
    share: bool
    points: list[Point | None] = field(default_factory=list)

    def written(self, point: Point) -> str:
        if self.share:
            return f"{format.share(point.value)} {SIGNS.get(point.verdict, '')}".strip()
        return format.size(point.value) if self.key.startswith("size") else significant(point.value)

    def change(self, index: int) -> str:
        """ "better" or "worse" where this run differs surely from the one before that has the figure, else ""."""
        now, before = self.points[index], next((p for p in reversed(self.points[:index]) if p), None)
        if now is None or before is None or not self.better or now.place != before.place:
            return ""
        if None in (now.low, now.high, before.low, before.high):
            return ""
        if now.low > before.high:  # type: ignore[operator]
            return "better" if self.better > 0 else "worse"
        if now.high < before.low:  # type: ignore[operator]
            return "worse" if self.better > 0 else "better"
        return ""


def build(run_dirs: Sequence[str | os.PathLike], output: str | os.PathLike) -> list[Path]:
    """Write trends.html and trends.md into `output`; returns their paths. Raises UsageError for fewer than two runs."""
    files = compose(run_dirs)
    folder = Path(output)
    for title, content in files.items():
        write_text(folder / title, content)
    return [folder / title for title in files]


def compose(run_dirs: Sequence[str | os.PathLike]) -> dict[str, str]:
    runs = in_order([load(Path(d)) for d in run_dirs])
    if len(runs) < 2:
        raise UsageError("a trend needs two runs or more", "annie-quant report DIR DIR")
    names = labels(runs)
    lines = collect(runs)
    said = differences(runs, names)
    tables = [overview(runs, names), *(group_table(g, title, lines, names) for g, title in GROUPS.items())]
    tables = [t for t in tables if t.rows]
    changed = changes(lines, names)
    panels = [(line, panel(line, names)) for line in lines if sum(p is not None for p in line.points) > 1]
    files = {
        "trends.html": _html(names, tables, said, changed, panels),
        "trends.md": _markdown(names, tables, said, changed),
    }
    return {title: content.encode("utf-8", "replace").decode() for title, content in files.items()}


GROUPS = {
    "gate": "Gates",
    "speed": "Speed behind the servers, p50",
    "kl": "KL divergence from bf16, mean",
    "size": "Size on disk",
}
SPEEDS = {"ttft": (METRICS["ttft_content_ms"].label, -1), "decode": (METRICS["decode_tok_s"].label, 1)}


def in_order(runs: list[Run]) -> list[Run]:
    """By the time on record; runs without one keep their place after the others."""
    return sorted(
        runs, key=lambda r: (not r.doc["environment"].get("time"), str(r.doc["environment"].get("time") or ""))
    )


def labels(runs: list[Run]) -> list[str]:
    """Folder names, with as much of the path as tells them apart."""
    paths = [r.folder.resolve().parts for r in runs]
    for depth in range(1, max(map(len, paths)) + 1):
        found = ["/".join(p[-depth:]) for p in paths]
        if len(set(found)) == len(found):
            break
    return [clean(f) if found.count(f) == 1 else f"{clean(f)} ({i + 1})" for i, f in enumerate(found)]


def collect(runs: list[Run]) -> list[Line]:
    """Every figure that any run has, in the order of the newest run."""
    lines: dict[str, Line] = {}

    def add(index: int, line: Line, point: Point) -> None:
        kept = lines.setdefault(line.key, line)
        kept.points += [None] * (len(runs) - len(kept.points))
        kept.points[index] = point

    for index in reversed(range(len(runs))):
        run = runs[index]
        machine, prompts = _machine(run), _prompts(run)
        for side in run.sides:
            where, series = f"{run.label(side.model)}, {side.title}", run.series(side.model)
            for gate in run.gate_names:
                if (row := side.gates.get(gate)) and row["n"]:
                    place = prompts if side.kind == "served" else ""
                    point = Point(rate(row), row["low"], row["high"], row["n"], row["verdict"], place)
                    better = 0 if row["advisory"] else 1
                    add(
                        index, Line(f"gate|{side.key}|{gate}", run.gate_title(gate), where, series, better, True), point
                    )
            for gate, (title, better) in SPEEDS.items():
                row = side.data["speed_gates"].get(gate, {})
                if number(row.get("value")) is not None:
                    add(
                        index,
                        Line(f"speed|{side.key}|{gate}", title, where, series, better, False),
                        _speed(row, machine),
                    )
            if number(side.data["kl"].get("mean")) is not None:
                kl = side.data["kl"]
                line = Line(f"kl|{side.key}|mean", "mean KL, nats", where, series, -1, False)
                add(index, line, Point(kl["mean"], None, None, kl.get("n_tokens")))
        for model in run.models:
            if number(model.get("size_bytes")) is not None:
                line = Line(
                    f"size|{model['name']}|", "size on disk", model["label"], run.series(model["name"]), -1, False
                )
                add(index, line, Point(model["size_bytes"], None, None, None))
    order = list(GROUPS)
    return sorted(lines.values(), key=lambda line: order.index(line.key.split("|")[0]))


def _speed(row: dict[str, Any], machine: str) -> Point:
    ends = number(row.get("low")), number(row.get("high"))
    return Point(row["value"], *ends, number(row.get("n")), row.get("verdict", ""), machine)


def differences(runs: list[Run], names: list[str]) -> list[str]:
    """What makes the runs differ besides the model: machine, prompts, settings, version."""
    found = []
    for title, key, note in (
        ("machines", _machine, "their speeds cannot be compared"),
        ("prompts", _prompts, "their gates ask different things"),
        ("settings", lambda r: json.dumps(r.doc["config"], sort_keys=True, default=str), "see each run's report"),
    ):
        groups: dict[str, list[str]] = {}
        for run, label in zip(runs, names, strict=True):
            if value := key(run):
                groups.setdefault(value, []).append(label)
        if len(groups) > 1:
            parts = " / ".join(", ".join(g) for g in groups.values())
            found.append(
                f"the {title} differ, so {note}: {parts}" if title != "settings" else f"the settings differ: {parts}"
            )
    return found


def _machine(run: Run) -> str:
    environment = run.doc["environment"]
    return json.dumps([environment.get(k) for k in ("cpu", "cores", "gpus")], default=str) if environment else ""


def _prompts(run: Run) -> str:
    return (
        hashlib.sha256(json.dumps([[w["name"], w["cases"]] for w in run.inputs]).encode()).hexdigest()
        if run.inputs
        else ""
    )


def overview(runs: list[Run], names: list[str]) -> Table:
    table = Table("The runs, oldest first", ["time", "machine", "requests", "outcome", "verdict"])
    for run, label in zip(runs, names, strict=True):
        environment, outcome = run.doc["environment"], html.outcome(run)
        machine = ", ".join(str(environment[k]) for k in ("cpu",) if environment.get(k)) or DASH
        cells = [
            Cell(clean(environment.get("time") or DASH), css="word"),
            Cell(clean(machine), css="word"),
            Cell(count(len(run.measured))),
            Cell(f"{SIGNS[outcome]} {outcome}", css=f"word {outcome}"),
            Cell(clean(run.doc["verdict"].get("sentence") or "none reached"), css="word long"),
        ]
        table.rows.append((label, cells))
    return table


def group_table(group: str, title: str, lines: list[Line], names: list[str]) -> Table:
    table = Table(f"{title}; ▲ surely better and ▼ surely worse than the run before", ["where", *names])
    for line in lines:
        if not line.key.startswith(f"{group}|"):
            continue
        cells = [Cell(line.where, css="word")]
        for index, point in enumerate(line.points):
            if point is None:
                cells.append(Cell(DASH, css="none"))
                continue
            change = line.change(index)
            sign = {"better": " ▲", "worse": " ▼"}.get(change, "")
            bounds = "" if line.share else format.bounds(point.low, point.high)
            sub = ", ".join(filter(None, [bounds, f"n = {count(point.n)}" if point.n else ""]))
            css = {"better": "pass", "worse": "fail"}.get(change, "")
            cells.append(Cell(line.written(point) + sign, sub, f"{line.key}|{index}", css, sort=point.value))
        table.rows.append((line.title, cells))
    return table


def changes(lines: list[Line], names: list[str]) -> list[tuple[str, str]]:
    """(better or worse, sentence) of every sure change, worse ones first."""
    found = []
    for line in lines:
        for index, now in enumerate(line.points):
            if now is not None and (change := line.change(index)):
                before = next(p for p in reversed(line.points[:index]) if p)
                told = f"{line.title}, {line.where}: {line.written(before)} → {line.written(now)} in {names[index]}"
                found.append((change, told))
    return sorted(found, key=lambda c: c[0] != "worse")


def panel(line: Line, names: list[str]) -> Canvas:
    """One figure over the runs: marks with intervals, joined."""
    left, right, top, bottom = 46, WIDTH - 14, 46, 136
    known = [(i, p) for i, p in enumerate(line.points) if p]
    told = "; ".join(f"{names[i]}: {line.written(p)}" for i, p in known)
    c = Canvas(WIDTH, bottom + 22, f"{line.title}: {line.where}", told)
    c.text(0, 13, line.title, "t")
    c.text(0, 30, line.where)
    ends = [v for _, p in known for v in (p.low, p.high, p.value) if v is not None]
    low, high = min(ends), max(ends)
    room = (high - low) * 0.08 or abs(high) * 0.1 or 1.0
    low, high = (max(0.0, low - room), min(1.0, high + room)) if line.share else (max(0.0, low - room), high + room)
    x, y = svg.scale(0, len(names) - 1, left + 14, right - 14), svg.scale(low, high, bottom, top)
    write = svg.percent if line.share else (lambda v: format.size(v)) if line.key.startswith("size") else svg.plain
    svg.y_axis(c, y, svg.ticks(low, high, 3), left, right, write)
    for index in range(len(names)):
        c.text(x(index), bottom + 16, index + 1, "m")
    c.path([(x(i), y(p.value)) for i, p in known], f"l s{line.series}")
    for i, p in known:
        tip = f"{names[i]}: {line.written(p)}"
        if p.low is not None and p.high is not None:
            c.line(x(i), y(p.low), x(i), y(p.high), f"w s{line.series}", tip)
        c.mark(line.series, x(i), y(p.value), "f", tip)
    return c


def _html(
    names: list[str], tables: list[Table], said: list[str], changed: list, panels: list[tuple[Line, Canvas]]
) -> str:
    worse = sum(kind == "worse" for kind, _ in changed)
    moving = [(line, canvas) for line, canvas in panels if len({p.value for p in line.points if p}) > 1]
    return str(
        html.template("trends.html").render(
            **html.shell(), names=names, tables=tables, differences=said, changes=changed, panels=moving,
            headline=headline(len(names), worse, len(changed) - worse), still=len(panels) - len(moving),
        )
    )  # fmt: skip


def headline(runs: int, worse: int, better: int) -> str:
    if not worse and not better:
        return f"{runs} runs: nothing changed for sure"
    return f"{runs} runs: {worse} figures surely worse, {better} surely better than in the run before"


def _markdown(names: list[str], tables: list[Table], said: list[str], changed: list) -> str:
    worse = sum(kind == "worse" for kind, _ in changed)
    parts = [f"# {headline(len(names), worse, len(changed) - worse)}"]
    for title, items in (
        ("What cannot be compared", said),
        ("Surely worse", [words for kind, words in changed if kind == "worse"]),
        ("Surely better", [words for kind, words in changed if kind == "better"]),
    ):
        if items:
            parts += [f"## {title}", "\n".join(f"- {markdown.inert(item)}" for item in items)]
    for table in tables:
        parts += [f"## {markdown.inert(table.caption)}", markdown.grid(table, "", 2)]
    return "\n\n".join(parts) + "\n"

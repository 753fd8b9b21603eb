"""Size on disk against the pass rate of the worst deciding gate."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from annie_quant.report.charts import svg
from annie_quant.report.charts.figure import WIDE, Figure
from annie_quant.report.charts.svg import Canvas
from annie_quant.report.format import share, size
from annie_quant.report.run import LoadedRun, Side
from annie_quant.schema import GateResult

HEIGHT, LEFT, TOP, BOTTOM = 330, 52, 20, 250


@dataclass(frozen=True)
class _Point:
    side: Side
    size_bytes: int
    gate: str
    result: GateResult


def draw(run: LoadedRun) -> Figure:
    figure = Figure(
        "pareto",
        "A model is as good as its worst gate: the lowest pass rate of any deciding gate, with its 95 % interval, "
        "against size on disk. Up and left is better. Circles: offline (filled W4A4 or reference, hollow W4A16); "
        "diamonds: served. The line joins the models whose worst side no smaller one reaches. n: the table of gates.",
        wide=True,
    )
    points = [
        _Point(side, model.size_bytes, *min(gates, key=lambda item: (item[1].rate, item[1].low)))
        for model in run.models
        if model.size_bytes and model.size_bytes > 0
        for side in run.sides_of(model.name)
        if (gates := [(gate, result) for gate, result in side.deciding.items() if result.n])
    ]
    if len({p.side.model for p in points}) > 1:
        figure.panels.append(("pareto", _panel(run, points)))
    return figure


def _panel(run: LoadedRun, points: list[_Point]) -> Canvas:
    description = "; ".join(
        f"{run.label(p.side.model)} {p.side.title}: {size(p.size_bytes)}, worst gate {run.gate_title(p.gate)} "
        f"{share(p.result.rate)}"
        for p in points
    )
    c = Canvas(WIDE, HEIGHT, "Size and worst gate", description)
    largest = max(p.size_bytes for p in points)
    unit, scale = next((u for u in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)) if largest >= u[1]), ("B", 1.0))
    start = math.floor(min(p.result.low for p in points) * 5) / 5
    x, y = svg.scale(0, largest * 1.12, LEFT, WIDE - 14), svg.scale(start, 1.0, BOTTOM, TOP)
    marks = [t * scale for t in svg.ticks(0, largest * 1.12 / scale, 7)]
    svg.x_axis(c, x, marks, TOP, BOTTOM, lambda v: svg.plain(v / scale), f"size on disk, {unit}")
    svg.y_axis(c, y, svg.ticks(start, 1, 5), LEFT, WIDE - 14, svg.percent)
    c.path([(x(size_bytes), y(rate)) for size_bytes, rate in _front(points)], "h")
    placed: dict[str, int] = {}
    for p in points:
        model, result = p.side.model, p.result
        placed[model] = placed.get(model, -1) + 1
        at, series = x(p.size_bytes) + 10 * placed[model], run.series(model)
        tip = f"{run.label(model)}, {p.side.title}: {size(p.size_bytes)}, {run.gate_title(p.gate)} "
        tip += f"{result.passes} of {result.n}"
        c.line(at, y(result.low), at, y(result.high), f"w s{series}", tip)
        css = f"{'o' if p.side.how == 'W4A16' else 'f'} x{series}"
        c.mark(2 if p.side.kind == "served" else 0, at, y(result.rate), css, tip, 5)
    _model_names(c, run, {p.side.model: p.size_bytes for p in points}, x)
    return c


def _front(points: list[_Point]) -> list[tuple[int, float]]:
    """(size, rate) of the models whose worst side no smaller model reaches; empty for a single one."""
    worst: dict[str, tuple[int, float]] = {}
    for p in points:
        worst[p.side.model] = (p.size_bytes, min(p.result.rate, worst.get(p.side.model, (0, 1.0))[1]))
    front: list[tuple[int, float]] = []
    for size_bytes, rate in sorted(worst.values(), key=lambda w: (w[0], -w[1])):
        if not front or rate > front[-1][1]:
            front.append((size_bytes, rate))
    return front if len(front) > 1 else []


def _model_names(c: Canvas, run: LoadedRun, sizes: dict[str, int], x: Callable[[float], float]) -> None:
    """Write each model's name below its size, on up to three lines so that names do not overlap."""
    ends = [-99.0, -99.0, -99.0]
    for model, size_bytes in sorted(sizes.items(), key=lambda item: item[1]):
        at, text = x(size_bytes), f"{run.label(model)} · {size(size_bytes)}"
        width = 7.0 * len(text) + 16
        right = at + width > c.width
        start = at - width if right else at
        row = next((i for i, end in enumerate(ends) if start > end), 2)
        ends[row] = start + width
        y, series = BOTTOM + 50 + 16 * row, run.series(model)
        c.mark(series, at, y - 4, f"f x{series}")
        c.text(at + (-9 if right else 9), y, text, "v e" if right else "v")

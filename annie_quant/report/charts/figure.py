"""A figure of the report: panels with one caption, and what several charts share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from annie_quant.report.charts import svg
from annie_quant.report.charts.svg import Canvas
from annie_quant.report.run import Backend, LoadedRun, Side

WIDTH, WIDE = 340, 720  # pixels of a panel, and of a figure with one panel
ROWS_LEFT, ROWS_TOP = 118, 30  # of a panel with one row per side


@dataclass
class Figure:
    """panels: (name, drawing). The caption states n. groups: panels "GROUP.NAME" are shown one group at a time."""

    key: str
    caption: str = ""
    panels: list[tuple[str, Canvas]] = field(default_factory=list)
    wide: bool = False
    groups: dict[str, str] = field(default_factory=dict)

    def group_of(self, panel: str) -> str:
        return panel.split(".")[0] if self.groups else ""


def label_rows(c: Canvas, run: LoadedRun, sides: list[Side], ys: list[float]) -> None:
    """Write the sides' names left of their rows: the model's name once, then only how it runs."""
    previous = None
    for side, y in zip(sides, ys, strict=True):
        if side.model == previous:
            c.text(ROWS_LEFT - 8, y + 4, "bf16" if side.how == "reference" else side.how, "e")
        else:
            own = run.label(side.model).replace("NVFP4 ", "")[:11]
            c.text(ROWS_LEFT - 8, y + 4, own + ("" if side.how == "reference" else f" · {side.how}"), "e v")
        previous = side.model


LEFT, RIGHT, TOP, BOTTOM = 66, 570, 26, 226


@dataclass(frozen=True)
class Point:
    """low, high: an interval of y. tip: shown at the mark; a point without one has no mark."""

    x: float
    y: float
    tip: str = ""
    low: float | None = None
    high: float | None = None
    hollow: bool = False


@dataclass(frozen=True)
class Axis:
    title: str
    low: float
    high: float
    ticks: Sequence[float]
    write: Callable[[float], str] = svg.plain
    log: bool = False


def line_chart(
    run: LoadedRun, title: str, description: str, x_axis: Axis, y_axis: Axis, lines: list[tuple[Backend, list[Point]]]
) -> Canvas:
    c = Canvas(WIDE, BOTTOM + 40, title, description)
    c.text(0, 12, y_axis.title)
    x = svg.scale(x_axis.low, x_axis.high, LEFT, RIGHT, x_axis.log)
    y = svg.scale(y_axis.low, y_axis.high, BOTTOM, TOP)
    svg.y_axis(c, y, y_axis.ticks, LEFT - 14, RIGHT + 14, y_axis.write)
    for tick in x_axis.ticks:
        c.text(x(tick), BOTTOM + 16, x_axis.write(tick), "m")
    c.text((x(x_axis.low) + x(x_axis.high)) / 2, BOTTOM + 33, x_axis.title, "m")
    for index, (side, points) in enumerate(lines):
        series, shift = run.series(side.model), 5 * (index - (len(lines) - 1) / 2)
        places = [(x(p.x) + (shift if p.tip else 0), y(p.y)) for p in points]
        c.path(places, f"l s{series}")
        for p, (px, py) in zip(points, places, strict=True):
            if p.low is not None and p.high is not None:
                c.line(px, y(p.low), px, y(p.high), f"w s{series}", p.tip)
            if p.tip:
                c.mark(series, px, py, "o" if p.hollow else "f", p.tip)
    previous = -99.0
    for at, side in sorted([(y(points[-1].y), side) for side, points in lines], key=lambda end: end[0]):
        previous = max(at, previous + 15)  # names do not overlap
        c.mark(run.series(side.model), RIGHT + 22, previous, "f")
        c.text(RIGHT + 31, previous + 4, run.label(side.model), "v")
    return c

"""An SVG canvas with axes.

Colours are CSS classes (s0 … s7 for series), so that one drawing serves the light and the dark theme. `inline()` is for a page
with STYLE or its own colours; `document()` is a complete file. Sizes are pixels of the viewBox.

Figure is a figure of the report (panels with one caption); line_chart and label_rows are what several figures share.
"""

from __future__ import annotations

import html
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from annie_quant.core.files import ASSETS
from annie_quant.core.text import visible
from annie_quant.report.run import LoadedRun, MeasuredSide, ServedModel

# Colours of a file of its own, and what the shapes' classes mean.
STYLE, MARKS = (ASSETS / "templates" / "charts.css").read_text(encoding="utf-8").splitlines()
_ids = itertools.count(1)


def esc(text: object) -> str:
    return html.escape(visible(text), quote=True)


class Canvas:
    """Shapes in drawing order. Coordinates are pixels, x to the right and y down."""

    def __init__(self, width: float, height: float, title: str, description: str) -> None:
        self.width, self.height, self.title, self.description = width, height, title, description
        self.parts: list[str] = []

    def text(self, x: float, y: float, text: object, css: str = "") -> None:
        mark = f' class="{css}"' if css else ""
        self.parts.append(f'<text x="{x:.1f}" y="{y:.1f}"{mark}>{esc(text)}</text>')

    def line(self, x1: float, y1: float, x2: float, y2: float, css: str, tip: str = "") -> None:
        self._shape(f'line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{css}"', tip)

    def path(self, points: Sequence[tuple[float, float]], css: str) -> None:
        if points:
            body = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
            self.parts.append(f'<path d="M{body}" class="{css}"/>')

    def ticks(self, xs: Sequence[float], y: float, half: float, css: str) -> None:
        """Vertical strokes of 2 * half pixels around y."""
        body = "".join(f"M{x:.1f} {y - half:.1f}v{2 * half:g}" for x in xs)
        self.parts.append(f'<path d="{body}" class="{css}" style="stroke-width:1"/>')

    def dot(self, x: float, y: float, css: str, radius: float = 4, tip: str = "") -> None:
        self._shape(f'circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" class="{css}"', tip)

    def mark(self, series: int, x: float, y: float, css: str = "f", tip: str = "", size: float = 4.2) -> None:
        """Draw the series' shape, so that colour is not the only difference: dot, square, diamond, triangle.

        With "x3" in `css` the colour is that of series 3.
        """
        css = css.replace(" x", " s") if " x" in css else f"{css} s{series}"
        if series % 4 == 0:
            self.dot(x, y, css, size, tip)
            return
        r = size * (0.9, 0.9, 1.25, 1.2)[series % 4]
        square, diamond = [(-r, -r), (r, -r), (r, r), (-r, r)], [(0, -r), (r, 0), (0, r), (-r, 0)]
        corners = (square, diamond, [(0, -r), (r, r * 0.8), (-r, r * 0.8)])[series % 4 - 1]
        points = " ".join(f"{x + dx:.1f},{y + dy:.1f}" for dx, dy in corners)
        self._shape(f'polygon points="{points}" class="{css}"', tip)

    def _shape(self, opened: str, tip: str) -> None:
        self.parts.append(f"<{opened}><title>{esc(tip)}</title></{opened.split()[0]}>" if tip else f"<{opened}/>")

    def inline(self) -> str:
        """Return the drawing for a page that defines the colours."""
        return self._open("") + "".join(self.parts) + "</svg>"

    def document(self) -> str:
        """Return a complete SVG file in the theme that its viewer prefers."""
        opened = self._open(' xmlns="http://www.w3.org/2000/svg"')
        body = f"<style>{STYLE}{MARKS}</style>" + "".join(self.parts)
        return f'<?xml version="1.0" encoding="UTF-8"?>\n{opened}{body}</svg>\n'

    def _open(self, more: str) -> str:
        n = next(_ids)
        return (
            f'<svg{more} viewBox="0 0 {self.width:.0f} {self.height:.0f}" width="{self.width:.0f}" '
            f'height="{self.height:.0f}" role="img" aria-labelledby="t{n} d{n}">'
            f'<title id="t{n}">{esc(self.title)}</title><desc id="d{n}">{esc(self.description)}</desc>'
        )


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Return up to `most` + 1 round numbers from low to high."""
    if not high > low:
        return [low]
    raw = (high - low) / max(1, most)
    base = 10.0 ** math.floor(math.log10(raw))
    step = next(base * m for m in (1, 2, 5, 10) if base * m >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Return at most 5 of: 1, 2, 5 of each decade, or powers of ten where the range is wide."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1, 2, 5) if math.log10(high / low) <= 2.2 else (1,)
    marks = [m * 10.0**p for p in powers for m in steps if low * 0.999 <= m * 10.0**p <= high * 1.001]
    if len(marks) > 5 and low <= 1e-2:  # 2 and 5 would be long decimals
        marks = [10.0**p for p in powers if low * 0.999 <= 10.0**p <= high * 1.001]
    return marks[:: max(1, math.ceil(len(marks) / 5))]


def plain(value: float) -> str:
    """Return a number without trailing zeros; below 0.001 with a power of ten."""
    if 0 < abs(value) < 1e-3:
        power = math.floor(math.log10(abs(value)) + 1e-9)
        mantissa = value / 10.0**power
        lead = "10" if abs(mantissa - 1) < 1e-6 else f"{mantissa:g}·10"
        return lead + str(power).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return f"{value:,.10g}".replace(",", "\u202f")


def percent(value: float) -> str:
    return f"{100 * value:g}" + (" %" if value >= 1 else "")


def scale(low: float, high: float, start: float, end: float, log: bool = False) -> Callable[[float], float]:
    """Return the function from data to pixels, clamped to the axis."""
    transform = math.log10 if log else float
    a = transform(low)
    span = (transform(high) - a) or 1.0

    def pixel(value: float) -> float:
        value = max(value, low) if log else value
        return start + (end - start) * min(1.0, max(0.0, (transform(value) - a) / span))

    return pixel


def x_axis(
    c: Canvas,
    pixel: Callable[[float], float],
    marks: Sequence[float],
    top: float,
    bottom: float,
    write: Callable[[float], str] = plain,
    title: str = "",
) -> None:
    for value in marks:
        x = pixel(value)
        c.line(x, top, x, bottom, "g")
        c.text(x, bottom + 15, write(value), "m")
    if title:
        c.text((pixel(marks[0]) + pixel(marks[-1])) / 2 if marks else c.width / 2, bottom + 30, title, "m")


def y_axis(
    c: Canvas,
    pixel: Callable[[float], float],
    marks: Sequence[float],
    left: float,
    right: float,
    write: Callable[[float], str] = plain,
) -> None:
    for value in marks:
        y = pixel(value)
        c.line(left, y, right, y, "g")
        c.text(left - 6, y + 4, write(value), "e")


WIDTH, WIDE = 340, 720  # pixels of a panel, and of a figure with one panel
ROWS_LEFT, ROWS_TOP = 118, 30  # of a panel with one row per side


@dataclass
class Figure:
    """A figure of the report.

    caption: states n.
    panels: (name, drawing).
    wide: whether it takes the whole width of the page.
    groups: group → title; panels "GROUP.NAME" are shown one group at a time.
    """

    key: str
    caption: str = ""
    panels: list[tuple[str, Canvas]] = field(default_factory=list)
    wide: bool = False
    groups: dict[str, str] = field(default_factory=dict)

    def group_of(self, panel: str) -> str:
        return panel.split(".")[0] if self.groups else ""


def label_rows(c: Canvas, run: LoadedRun, sides: list[MeasuredSide], ys: list[float]) -> None:
    """Write the sides' names left of their rows: the model's name once, then only how it runs."""
    previous = None
    for side, y in zip(sides, ys, strict=True):
        if side.model == previous:
            c.text(ROWS_LEFT - 8, y + 4, "bf16" if side.how == "reference" else side.how, "e")
        else:
            label = run.label(side.model).replace("NVFP4 ", "")[:11]
            c.text(ROWS_LEFT - 8, y + 4, label + ("" if side.how == "reference" else f" · {side.how}"), "e v")
        previous = side.model


LEFT, RIGHT, TOP, BOTTOM = 66, 570, 26, 226


@dataclass(frozen=True)
class Point:
    """A point of a line.

    low, high: an interval of y.
    tip: shown at the mark; a point without one has no mark.
    """

    x: float
    y: float
    tip: str = ""
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Axis:
    title: str
    low: float
    high: float
    ticks: Sequence[float]


def line_chart(
    run: LoadedRun, title: str, description: str, across: Axis, up: Axis, lines: list[tuple[ServedModel, list[Point]]]
) -> Canvas:
    c = Canvas(WIDE, BOTTOM + 40, title, description)
    c.text(0, 12, up.title)
    x = scale(across.low, across.high, LEFT, RIGHT)
    y = scale(up.low, up.high, BOTTOM, TOP)
    y_axis(c, y, up.ticks, LEFT - 14, RIGHT + 14)
    for tick in across.ticks:
        c.text(x(tick), BOTTOM + 16, plain(tick), "m")
    c.text((x(across.low) + x(across.high)) / 2, BOTTOM + 33, across.title, "m")
    for index, (side, points) in enumerate(lines):
        series, shift = run.series(side.model), 5 * (index - (len(lines) - 1) / 2)
        places = [(x(p.x) + (shift if p.tip else 0), y(p.y)) for p in points]
        c.path(places, f"l s{series}")
        for p, (px, py) in zip(points, places, strict=True):
            if p.low is not None and p.high is not None:
                c.line(px, y(p.low), px, y(p.high), f"w s{series}", p.tip)
            if p.tip:
                c.mark(series, px, py, "f", p.tip)
    previous = -99.0
    for at, side in sorted([(y(points[-1].y), side) for side, points in lines], key=lambda end: end[0]):
        previous = max(at, previous + 15)  # names do not overlap
        c.mark(run.series(side.model), RIGHT + 22, previous, "f")
        c.text(RIGHT + 31, previous + 4, run.label(side.model), "v")
    return c

"""Drawings of the report: scales, ticks, and the shapes of assets/templates/charts.

Colours are CSS classes (s0 … s7 for series), so that one drawing serves the light and the dark
theme. `inline()` is for a page with STYLE or its own colours; `document()` is a complete file.
Sizes are pixels of the viewBox.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from annie_quant.core.files import ASSETS
from annie_quant.core.templates import render_svg
from annie_quant.report import format

# Colours of a file of its own, and what the shapes' classes mean.
STYLE, MARKS = (ASSETS / "templates" / "charts.css").read_text(encoding="utf-8").splitlines()
_ids = itertools.count(1)


@dataclass(frozen=True)
class Drawing:
    """A chart of a template.

    chart: assets/templates/charts/CHART.svg.
    values: what it draws.
    """

    chart: str
    width: float
    height: float
    title: str
    values: Mapping[str, object]

    def inline(self) -> str:
        """Return the drawing for a page that defines the colours."""
        return self._render("")

    def document(self) -> str:
        """Return a complete SVG file in the theme that its viewer prefers."""
        return f'<?xml version="1.0" encoding="UTF-8"?>\n{self._render(STYLE + MARKS)}\n'

    def _render(self, style: str) -> str:
        values = {
            "show": format,
            "plain": plain,
            "percent": _percent,
            "joined": _joined,
            "corners": corners,
            "top": ROWS_TOP,
            **self.values,
        }
        return render_svg(
            "charts/drawing.svg",
            drawing=self,
            n=next(_ids),
            style=style,
            **values,
        )


def _joined(points: Sequence[tuple[float, float]]) -> str:
    """Return the points of a path."""
    return "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


# By series: circle (drawn apart), square, diamond, triangle, in units of their size.
_CORNERS = (
    (),
    ((-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)),
    ((0, -1.25), (1.25, 0), (0, 1.25), (-1.25, 0)),
    ((0, -1.2), (1.2, 0.96), (-1.2, 0.96)),
)


def corners(shape: int, x: float, y: float, size: float) -> str:
    """Return the corners of a square, diamond or triangle around a point."""
    return " ".join(f"{x + dx * size:.1f},{y + dy * size:.1f}" for dx, dy in _CORNERS[shape % 4])


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
    powers = [10.0**p for p in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)]
    is_wide = math.log10(high / low) > 2.2
    marks = powers if is_wide else [m * power for power, m in itertools.product(powers, (1, 2, 5))]
    marks = _between(low, high, marks)
    if len(marks) > 5 and low <= 1e-2:  # 2 and 5 would be long decimals
        marks = _between(low, high, powers)
    return marks[:: max(1, math.ceil(len(marks) / 5))]


def _between(low: float, high: float, marks: list[float]) -> list[float]:
    return [mark for mark in marks if low * 0.999 <= mark <= high * 1.001]


def plain(value: float) -> str:
    """Return a number without trailing zeros; below 0.001 with a power of ten."""
    if 0 < abs(value) < 1e-3:
        power = math.floor(math.log10(abs(value)) + 1e-9)
        mantissa = value / 10.0**power
        lead = "10" if abs(mantissa - 1) < 1e-6 else f"{mantissa:g}·10"
        return lead + str(power).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return f"{value:,.10g}".replace(",", "\u202f")


def _percent(value: float) -> str:
    return f"{100 * value:g}" + (" %" if value >= 1 else "")


def scale(
    low: float, high: float, start: float, end: float, log: bool = False
) -> Callable[[float], float]:
    """Return the function from data to pixels, clamped to the axis."""
    transform = math.log10 if log else float
    a = transform(low)
    span = (transform(high) - a) or 1.0

    def pixel(value: float) -> float:
        value = max(value, low) if log else value
        return start + (end - start) * min(1.0, max(0.0, (transform(value) - a) / span))

    return pixel


# pixels of a panel, and of a figure with one panel
PANEL_WIDTH = 340
WIDE = 720
# of a panel with one row per side
ROWS_LEFT = 118
ROWS_TOP = 30


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
    panels: list[tuple[str, Drawing]] = field(default_factory=list)
    wide: bool = False
    groups: dict[str, str] = field(default_factory=dict)

    def group_of(self, panel: str) -> str:
        return panel.split(".")[0] if self.groups else ""

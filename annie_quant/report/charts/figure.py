"""A figure of the report: panels with one caption, and what several charts share."""

from __future__ import annotations

from dataclasses import dataclass, field

from annie_quant.report.charts.svg import Canvas
from annie_quant.report.run import LoadedRun, Side

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

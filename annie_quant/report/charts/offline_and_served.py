"""Gates of a model without a server and behind one: one panel per model that has both."""

from __future__ import annotations

import math
from collections.abc import Sequence

from annie_quant.report.charts import svg
from annie_quant.report.charts.figure import WIDTH, Figure
from annie_quant.report.charts.svg import Canvas
from annie_quant.report.format import share
from annie_quant.report.run import LoadedRun, Side

LEFT, TOP, ROW = 146, 50, 20
# Shape and fill by how a side runs; the colour is the model's.
_MARKS = {"reference": (0, "f"), "W4A4": (0, "f"), "W4A16": (0, "o"), "served": (2, "f")}


def draw(run: LoadedRun) -> Figure:
    figure = Figure(
        "offline-served",
        "Pass rates of the same model without a server and behind one (n and intervals: the table of gates). Where a "
        "tool call is right in the raw text and lost behind the server, its parser is at fault and not the model.",
    )
    for model in run.models:
        sides = [s for s in run.sides_of(model.name) if s.gates]
        if {s.kind for s in sides} == {"offline", "served"}:
            figure.panels.append((model.name, _panel(run, model.name, sides)))
    return figure


def _panel(run: LoadedRun, model: str, sides: Sequence[Side]) -> Canvas:
    gates = [g for g in run.gate_names if all(g in s.gates for s in sides)]
    bottom, series = TOP + ROW * len(gates), run.series(model)
    description = "; ".join(
        f"{s.title}: " + ", ".join(f"{run.gate_title(g)} {share(s.gates[g].rate)}" for g in gates) for s in sides
    )
    c = Canvas(WIDTH, bottom + 24, f"{run.label(model)}: offline and served", description)
    c.text(0, 14, run.label(model), "t")
    marks = [_MARKS.get(s.how, (1, "o")) for s in sides]
    for index, (side, (shape, css)) in enumerate(zip(sides, marks, strict=True)):
        c.mark(shape, LEFT - 34 + index * 76, 31, f"{css} x{series}")
        c.text(LEFT - 25 + index * 76, 35, side.how)
    start = math.floor(min([s.gates[g].rate for s in sides for g in gates] + [0.9]) * 10) / 10
    x = svg.scale(start, 1.0, LEFT, WIDTH - 20)
    svg.x_axis(c, x, svg.ticks(start, 1.0, 5), TOP - 4, bottom, svg.percent)
    for row, gate in enumerate(gates):
        y = TOP + ROW * (row + 0.5)
        c.text(LEFT - 10, y + 4, run.gate_title(gate), "e")
        xs = [x(s.gates[gate].rate) for s in sides]
        c.line(min(xs), y, max(xs), y, "a")
        for index, (side, (shape, css)) in enumerate(zip(sides, marks, strict=True)):
            result = side.gates[gate]
            shift = 5 * (index - (len(sides) - 1) / 2)  # equal rates would hide each other
            tip = f"{side.title}: {result.passes} of {result.n}"
            c.mark(shape, xs[index], y + shift, f"{css} x{series}", tip, 3.6)
    return c

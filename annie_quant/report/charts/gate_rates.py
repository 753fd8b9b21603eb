"""Gates against their thresholds: one panel per gate, one row per side with its pass rate and interval."""

from __future__ import annotations

import math

from annie_quant.report.charts import svg
from annie_quant.report.charts.figure import ROWS_LEFT, ROWS_TOP, WIDTH, Figure, label_rows
from annie_quant.report.charts.svg import Canvas
from annie_quant.report.format import SIGNS, share
from annie_quant.report.run import LoadedRun

ROW = 19  # pixels


def draw(run: LoadedRun) -> Figure:
    return Figure(
        "gates",
        "Share of answers that pass, with 95 % Wilson intervals; the dashed line is the threshold, "
        "the figures on the right are passes of n. A hollow mark is a gate that n cannot decide.",
        [(gate, _panel(run, gate)) for gate in run.gate_names],
    )


def _panel(run: LoadedRun, gate: str) -> Canvas:
    sides = [s for s in run.sides if gate in s.gates]
    results = [s.gates[gate] for s in sides]
    thresholds = {r.threshold for r in results}
    start = max(0.0, math.floor((min([r.low for r in results] + [*thresholds]) - 0.02) * 10) / 10)
    bottom = ROWS_TOP + ROW * len(sides)
    description = "; ".join(
        f"{run.label(s.model)} {s.title} {r.passes} of {r.n}, {s.word(gate)}"
        for s, r in zip(sides, results, strict=True)
    )
    c = Canvas(WIDTH, bottom + 22, f"Gate: {run.gate_title(gate)}", description)
    c.text(0, 14, run.gate_title(gate), "t")
    if all(r.advisory for r in results):
        c.text(WIDTH, 14, "informs only", "e")
    right = 30 + 6.6 * max(len(f"{r.passes}/{r.n}") for r in results)
    x = svg.scale(start, 1.0, ROWS_LEFT, WIDTH - right)
    svg.x_axis(c, x, svg.ticks(start, 1.0, 4), ROWS_TOP - 4, bottom, svg.percent)
    for threshold in thresholds:
        c.line(x(threshold), ROWS_TOP - 8, x(threshold), bottom, "h", f"threshold {share(threshold)}")
    ys = [ROWS_TOP + ROW * (index + 0.5) for index in range(len(sides))]
    label_rows(c, run, list(sides), ys)
    for side, r, y in zip(sides, results, ys, strict=True):
        tip = f"{run.label(side.model)}, {side.title}: {r.passes} of {r.n} = {share(r.rate)} "
        tip += f"({share(r.low)} to {share(r.high)}), {side.word(gate)}"
        series = run.series(side.model)
        c.line(x(r.low), y, x(r.high), y, f"w s{series}", tip)
        c.mark(series, x(r.rate), y, "o" if r.verdict == "undecided" else "f", tip)
        c.text(WIDTH - 14, y + 4, f"{r.passes}/{r.n}", "v e")
        c.text(WIDTH - 4, y + 4, SIGNS[r.verdict], "v m")
    return c

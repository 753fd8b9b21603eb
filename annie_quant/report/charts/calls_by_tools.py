"""Right tool calls against the number of tools on offer, with the same prompts at each number."""

from __future__ import annotations

import math

from annie_quant.report.charts import svg
from annie_quant.report.charts.figure import Figure
from annie_quant.report.charts.lines import Axis, Point, line_chart
from annie_quant.report.format import ends, share
from annie_quant.report.run import LoadedRun


def draw(run: LoadedRun) -> Figure:
    figure = Figure("tool-surface", wide=True)
    measured = [(s, [p for p in run.aggregates.tool_surface.get(s.name, []) if p.n and p.n_tools]) for s in run.served]
    measured = [(side, sorted(points, key=lambda p: p.n_tools)) for side, points in measured if len(points) > 1]
    if not measured:
        return figure
    lines = []
    for side, points in measured:
        marks = []
        for p in points:
            tip = f"{run.label(side.model)}, {p.n_tools} tools: {p.passes} of {p.n} = {share(p.passes / p.n)}"
            marks.append(Point(p.n_tools, p.passes / p.n, tip, p.low, p.high, p.worse))
        lines.append((side, marks))
    figure.caption = (
        "Right tool calls against the number of tools on offer, with 95 % Wilson intervals; the same prompts at each "
        f"number (n = {ends([p.n for _, points in measured for p in points])} per mark). A hollow mark is significantly "
        "worse than the fewest tools (exact McNemar test, Holm over the numbers)."
    )
    levels = sorted({p.n_tools for _, points in measured for p in points})
    start = max(0.0, math.floor((min(p.low for _, points in measured for p in points) - 0.02) * 10) / 10)
    description = "; ".join(
        f"{run.label(s.model)}: " + ", ".join(f"{p.n_tools} tools {p.passes} of {p.n}" for p in points)
        for s, points in measured
    )
    tools = Axis("tools on offer", levels[0], levels[-1], levels, log=True)
    rates = Axis("right tool calls", start, 1.0, svg.ticks(start, 1.0), svg.percent)
    title = "Right calls against the number of tools"
    figure.panels.append(("tool-surface", line_chart(run, title, description, tools, rates, lines)))
    return figure

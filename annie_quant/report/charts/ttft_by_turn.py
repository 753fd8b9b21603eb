"""Content TTFT against the turn of a growing conversation."""

from __future__ import annotations

from annie_quant.report.charts import svg
from annie_quant.report.charts.figure import Figure
from annie_quant.report.charts.lines import Axis, Point, line_chart
from annie_quant.report.format import ends, significant
from annie_quant.report.run import LoadedRun


def draw(run: LoadedRun) -> Figure:
    figure = Figure("turns", wide=True)
    lines, counts = [], []
    for side in run.served:
        points = []
        for turn in run.aggregates.turns.get(side.name, []):
            if turn.ttft_content_ms is not None:
                tip = f"{run.label(side.model)}, turn {turn.turn}: {significant(turn.ttft_content_ms)} ms, n = {turn.n}"
                points.append(Point(turn.turn, turn.ttft_content_ms, tip, turn.low, turn.high))
                counts.append(turn.n)
        if len(points) > 1:
            lines.append((side, points))
    if not lines:
        return figure
    figure.caption = (
        "Time to the first token of content against the turn of a growing conversation: p50 with its 95 % interval "
        f"(n = {ends(counts)} requests per mark)."
    )
    high = max(p.high or p.y for _, points in lines for p in points) * 1.05
    last = int(max(p.x for _, points in lines for p in points))
    description = "; ".join(
        f"{run.label(s.model)}: " + ", ".join(f"turn {p.x:g} {significant(p.y)} ms" for p in points)
        for s, points in lines
    )
    turns, times = Axis("turn", 1, last, range(1, last + 1)), Axis("TTFT content, ms", 0, high, svg.ticks(0, high))
    figure.panels.append(("turns", line_chart(run, "TTFT over turns", description, turns, times, lines)))
    return figure

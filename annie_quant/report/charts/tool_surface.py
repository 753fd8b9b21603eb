"""Figure of the tool surface: the share of right calls against the number of tools on offer, same prompts at each number."""

from __future__ import annotations

import math

from annie_quant.report.charts import svg
from annie_quant.report.charts.gates import Figure, rate
from annie_quant.report.charts.timing import backend_of, end_labels
from annie_quant.report.format import count, share
from annie_quant.report.run import Run


def tool_surface(run: Run) -> Figure:
    """A line a backend, with Wilson's interval at each number of tools; hollow: surely worse than with the fewest."""
    lines = [
        (s, rows) for s in run.of("served") if len(rows := run.aggregates["tool_surface"].get(backend_of(s), [])) > 1
    ]
    figure = Figure("tool-surface", "", wide=True)
    if not lines:
        return figure
    levels = sorted({int(r["n_tools"]) for _, rows in lines for r in rows})
    prompts = sorted({int(r["n"]) for _, rows in lines for r in rows})
    figure.caption = (
        "Right tool calls against the number of tools on offer, with 95 % Wilson intervals; the same prompts at each "
        f"number (n = {' to '.join(dict.fromkeys(map(count, (prompts[0], prompts[-1]))))} a mark). A hollow mark is surely "
        "worse than the fewest tools (exact McNemar test, Holm over the numbers)."
    )
    width, left, top, bottom, right = 720, 52, 26, 216, 150
    said = "; ".join(
        f"{run.label(s.model)}: " + ", ".join(f"{r['n_tools']:g} tools {r['passes']:g} of {r['n']:g}" for r in rows)
        for s, rows in lines
    )
    c = svg.Canvas(width, bottom + 40, "Right calls against the number of tools", said)
    c.text(0, 12, "right tool calls")
    lowest = min(rate(r) if r.get("low") is None else r["low"] for _, rows in lines for r in rows)
    start = max(0.0, math.floor((lowest - 0.02) * 10) / 10)
    x = svg.scale(levels[0], levels[-1], left + 14, width - right, log=True)
    y = svg.scale(start, 1.0, bottom, top)
    svg.y_axis(c, y, svg.ticks(start, 1.0), left, width - right + 14, svg.percent)
    for level in levels:
        c.text(x(level), bottom + 16, level, "m")
    c.text((x(levels[0]) + x(levels[-1])) / 2, bottom + 33, "tools on offer", "m")
    ends = []
    for index, (side, rows) in enumerate(lines):
        s, shift = run.series(side.model), 5 * (index - (len(lines) - 1) / 2)
        points = [(x(r["n_tools"]) + shift, y(rate(r))) for r in rows]
        c.path(points, f"l s{s}")
        for r, (px, py) in zip(rows, points, strict=True):
            tip = f"{run.label(side.model)}, {r['n_tools']:g} tools: {r['passes']:g} of {r['n']:g} = {share(rate(r))}"
            if r.get("low") is not None and r.get("high") is not None:
                c.line(px, y(r["low"]), px, y(r["high"]), f"w s{s}", tip)
            c.mark(s, px, py, "o" if r["worse"] else "f", tip)
        ends.append((points[-1][1], side, s))
    end_labels(c, run, ends, width - right + 22)
    figure.panels.append(("tool-surface", c))
    return figure

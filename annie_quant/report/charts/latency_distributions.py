"""Cumulative distributions of times: one panel per metric and workload, one curve per backend."""

from __future__ import annotations

from annie_quant.judge.metrics import COMPARED, METRICS
from annie_quant.report.charts import svg
from annie_quant.report.charts.figure import WIDTH, Figure
from annie_quant.report.charts.svg import Canvas
from annie_quant.report.format import ends, name, significant
from annie_quant.report.recount import group, label, quantile, values
from annie_quant.report.run import Backend, LoadedRun
from annie_quant.schema import RequestRecord

POINTS = 64  # of a curve
FEWEST = 5  # values that make a distribution
TIMES = {metric: METRICS[metric].title for metric in COMPARED if METRICS[metric].unit == "ms"}
LEFT, TOP, BOTTOM, RIGHT = 30, 42, 160, WIDTH - 8
Curve = tuple[Backend, list[float]]


def draw(run: LoadedRun, timed: list[RequestRecord]) -> Figure:
    figure = Figure(
        "distributions",
        "Share of values at or below the time on the axis (cumulative, measured requests only; "
        "for inter-token latency every gap of every stream counts). Curves of 100 "
        "values and more end at their 99th percentile; fewer than five values are no distribution and are left out.",
    )
    groups = group(timed, lambda r: (r.backend, label(r)))
    labels = sorted({label(r) for r in timed})
    for metric, title in TIMES.items():
        for workload in labels:
            curves = [(s, sorted(values(groups.get((s.name, workload), []), metric))) for s in run.served]
            curves = [(side, ordered) for side, ordered in curves if len(ordered) >= FEWEST]
            if curves:
                figure.panels.append((f"{metric}.{workload}", _panel(run, workload, title, curves)))
                figure.groups[metric] = title
    return figure


def _panel(run: LoadedRun, workload: str, title: str, curves: list[Curve]) -> Canvas:
    low = min(ordered[0] for _, ordered in curves)
    high = max(ordered[-1] if len(ordered) < 100 else quantile(ordered, 0.99) or 0.0 for _, ordered in curves)
    high = high if high > low else low + max(abs(low) * 0.1, 0.1)
    log = low > 0 and high / low > 20
    medians = [quantile(ordered, 0.5) for _, ordered in curves]
    description = "; ".join(
        f"{run.label(side.model)}: p50 {significant(p50)} ms, p99 {significant(quantile(ordered, 0.99))} ms, "
        f"n {len(ordered)}"
        for (side, ordered), p50 in zip(curves, medians, strict=True)
    )
    c = Canvas(WIDTH, BOTTOM + 22, f"{name(workload)}: {title}", description)
    c.text(0, 13, name(workload), "t")
    c.text(RIGHT, 13, f"ms · n = {ends([len(ordered) for _, ordered in curves])}", "e")
    c.text(0, 32, "p50")
    for index, ((side, _), p50) in enumerate(zip(curves[:4], medians, strict=False)):
        c.mark(run.series(side.model), LEFT + 8 + index * 76, 28, "f")
        c.text(LEFT + 16 + index * 76, 32, significant(p50), "v")
    x, y = svg.scale(low, high, LEFT, RIGHT, log), svg.scale(0, 1, BOTTOM, TOP)
    svg.x_axis(c, x, svg.log_ticks(low, high) if log else svg.ticks(low, high, 5), TOP, BOTTOM)
    svg.y_axis(c, y, [0, 0.5, 1], LEFT, RIGHT)
    for side, ordered in curves:
        c.path([(x(v), y(share)) for v, share in _steps(ordered) if v <= high], f"l s{run.series(side.model)}")
    return c


def _steps(ordered: list[float]) -> list[tuple[float, float]]:
    """(value, share at or below) of a sorted sample: exact steps of few values, POINTS of many."""
    n = len(ordered)
    if n <= POINTS:
        return [(v, share) for i, v in enumerate(ordered) for share in (i / n, (i + 1) / n)]
    places = (k * (n - 1) // (POINTS - 1) for k in range(POINTS))
    return [(ordered[0], 0.0), *((ordered[i], (i + 1) / n) for i in places)]

"""Total latency against answer length from medians, TTFT + tokens × TPOT, and where two backends are equal."""

from __future__ import annotations

import statistics

from annie_quant.report.charts import svg
from annie_quant.report.charts.figure import Figure
from annie_quant.report.charts.lines import Axis, Point, line_chart
from annie_quant.report.format import name, significant
from annie_quant.report.run import LoadedRun

LONGEST = 400  # tokens of an answer, the end of the axis


def draw(run: LoadedRun) -> Figure:
    figure = Figure("crossover", wide=True)
    lines, models, counts = [], [], []
    for side in run.served:
        alone = [w for label, w in side.data.workloads.items() if "@" not in label]
        medians = [(w.ttft_content_ms.p50, w.tpot_ms.p50) for w in alone if w.ttft_content_ms and w.tpot_ms]
        if medians:
            ttft, tpot = (statistics.fmean(column) for column in zip(*medians, strict=True))
            lines.append((side, [Point(0, ttft), Point(LONGEST, ttft + LONGEST * tpot)]))
            models.append(f"{run.label(side.model)}: {significant(ttft)} ms + {significant(tpot)} ms per token")
            counts.append(len(medians))
    if len(lines) < 2:
        return figure
    figure.caption = (
        "Total latency against the length of the answer: TTFT + tokens × TPOT from the medians, averaged over "
        f"{min(counts)} workloads." + _crossings(run)
    )
    high = max(points[-1].y for _, points in lines)
    tokens = Axis("tokens of the answer", 0, LONGEST, svg.ticks(0, LONGEST, 5))
    times = Axis("total latency, ms", 0, high, svg.ticks(0, high))
    title = "Total latency against answer length"
    figure.panels.append(("crossover", line_chart(run, title, "; ".join(models), tokens, times, lines)))
    return figure


def _crossings(run: LoadedRun) -> str:
    labels = {s.name: run.label(s.model) for s in run.served}
    sentences = []
    for row in run.aggregates.crossover:
        if row.tokens and row.tokens <= 10 * LONGEST and row.faster_when_short != row.faster_when_long:
            short, long = (labels.get(b, name(b)) for b in (row.faster_when_short, row.faster_when_long))
            sentences.append(f" {short} is faster below {significant(row.tokens)} tokens, {long} above.")
    return "".join(sentences)

"""KL divergence from bf16: over all tokens, then by token class, category and layer where they were measured."""

from __future__ import annotations

import math
from collections.abc import Iterable

from annie_quant.report.charts import svg
from annie_quant.report.charts.figure import ROWS_LEFT, ROWS_TOP, WIDTH, Figure, label_rows
from annie_quant.report.charts.svg import Canvas
from annie_quant.report.format import count, significant
from annie_quant.report.run import LoadedRun, OfflineModel
from annie_quant.schema import KLSummary

LEAST = 1e-6  # the smallest divergence on a logarithmic axis
Measured = list[tuple[OfflineModel, KLSummary]]


def draw(run: LoadedRun) -> Figure:
    measured = [(s, s.data.kl) for s in run.offline if s.data.kl]
    tokens = " or ".join(count(n) for n in sorted({kl.n_tokens for _, kl in measured}))
    figure = Figure(
        "kl",
        f"KL divergence from bf16 per assistant token, in nats (n = {tokens or 'unknown'} tokens per side), on a "
        "logarithmic axis. All tokens: the mark is the mean, the line runs from the median to the 99th percentile. The "
        "other panels: means, filled W4A4, hollow W4A16; by layer: with only this part in four bits.",
    )
    if not measured:
        return figure
    figure.panels.append(("overall", _overall(run, measured)))
    for part, title in (("by_class", "by token class"), ("by_category", "by category"), ("by_layer", "by layer")):
        rows = [(side, _means(kl, part)) for side, kl in measured]
        if any(means for _, means in rows):
            figure.panels.append((part, _breakdown(run, title, rows)))
    return figure


def _means(kl: KLSummary, part: str) -> dict[str, float]:
    if part == "by_layer":
        return {row.layer: row.kl for row in kl.by_layer}
    means = {key: figures.mean for key, figures in getattr(kl, part).items()}
    if part == "by_class" and kl.decisions:
        means["decisions"] = kl.decisions.mean
    return means


def _range(values: Iterable[float]) -> tuple[float, float]:
    """Powers of ten around the values."""
    values = [max(v, LEAST) for v in values]
    return 10 ** math.floor(math.log10(min(values))), 10 ** math.ceil(math.log10(max(values) * 1.0001))


def _overall(run: LoadedRun, measured: Measured) -> Canvas:
    step, bottom = 21, ROWS_TOP + 21 * len(measured)
    low, high = _range(v for _, kl in measured for v in (kl.median, kl.mean, kl.p99))
    description = "; ".join(f"{run.label(s.model)} {s.title}: mean {significant(kl.mean)}" for s, kl in measured)
    c = Canvas(WIDTH, bottom + 24, "KL divergence, All tokens", description)
    c.text(0, 14, "All tokens", "t")
    x = svg.scale(low, high, ROWS_LEFT, WIDTH - 52, log=True)
    svg.x_axis(c, x, svg.log_ticks(low, high), ROWS_TOP - 4, bottom, svg.plain)
    ys = [ROWS_TOP + step * (index + 0.5) for index in range(len(measured))]
    label_rows(c, run, [side for side, _ in measured], ys)
    for (side, kl), y in zip(measured, ys, strict=True):
        series, tip = run.series(side.model), f"median {significant(kl.median)}, p99 {significant(kl.p99)}"
        c.line(x(kl.median), y, x(kl.p99), y, f"w s{series}", tip)
        c.mark(series, x(kl.mean), y, "f", f"mean {significant(kl.mean)}")
        c.text(WIDTH, y + 4, significant(kl.mean), "v e")
    return c


def _breakdown(run: LoadedRun, title: str, rows: list[tuple[OfflineModel, dict[str, float]]]) -> Canvas:
    keys = list(dict.fromkeys(key for _, means in rows for key in means))
    step, bottom = 19, ROWS_TOP + 19 * len(keys)
    low, high = _range(v for _, means in rows for v in means.values())
    description = "; ".join(
        f"{key}: " + ", ".join(f"{run.label(s.model)} {s.title} {significant(means.get(key))}" for s, means in rows)
        for key in keys
    )
    c = Canvas(WIDTH, bottom + 24, f"Mean KL divergence {title}", description)
    c.text(0, 14, f"Mean, {title}", "t")
    x = svg.scale(low, high, ROWS_LEFT, WIDTH - 14, log=True)
    svg.x_axis(c, x, svg.log_ticks(low, high), ROWS_TOP - 4, bottom, svg.plain)
    for index, key in enumerate(keys):
        y = ROWS_TOP + step * (index + 0.5)
        c.text(ROWS_LEFT - 8, y + 4, key.removeprefix("layers.").replace("_", " ").replace(".", " ")[:18], "e")
        for side, means in rows:
            if key in means:
                tip = f"{run.label(side.model)} {side.title}: {significant(means[key])}"
                css = "o" if side.how == "W4A16" else "f"
                c.mark(run.series(side.model), x(means[key]), y, css, tip)
    return c

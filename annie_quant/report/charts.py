"""The figures of the report. assets/templates/charts draws them, and report.html has the captions that name no number.

Gates against their thresholds; KL divergence from bf16; TTFT by turn,
distributions, latency by answer length.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from annie_quant.bench.aggregates import labelled, mean_times, timed
from annie_quant.documents import KLSummary, RequestRecord
from annie_quant.judge.metrics import COMPARED, METRICS
from annie_quant.report.format import count, ends, name, significant
from annie_quant.report.recheck import quantile, values
from annie_quant.report.run import LoadedRun, OfflineModel, ServedModel
from annie_quant.report.svg import (
    PANEL_WIDTH,
    ROWS_LEFT,
    ROWS_TOP,
    WIDE,
    Drawing,
    Figure,
    log_ticks,
    scale,
    ticks,
)


def draw(run: LoadedRun) -> list[Figure]:
    """Return the figures, in the order of the report."""
    gates = Figure("gates", panels=[(gate, _gate_panel(run, gate)) for gate in run.gate_names])
    return [
        gates,
        kl_divergence(run),
        by_turn(run),
        distributions(run),
        by_length(run),
    ]


def _gate_panel(run: LoadedRun, gate: str) -> Drawing:
    sides = [side for side in run.sides if gate in side.gates]
    results = [side.gates[gate] for side in sides]
    thresholds = {r.threshold for r in results}
    lowest = min([r.low for r in results] + [*thresholds])
    start = max(0.0, math.floor((lowest - 0.02) * 10) / 10)
    ys, bottom = _rows(19, len(sides))
    right = 30 + 6.6 * max(len(f"{r.passes}/{r.n}") for r in results)
    values = {
        "run": run,
        "gate": gate,
        "informs": all(r.advisory for r in results),
        "thresholds": thresholds,
        "x": scale(start, 1.0, ROWS_LEFT, PANEL_WIDTH - right),
        "marks": ticks(start, 1.0, 4),
        "rows": list(zip(sides, results, ys, strict=True)),
        "left": ROWS_LEFT,
        "bottom": bottom,
    }
    return Drawing(
        "gate",
        PANEL_WIDTH,
        bottom + 22,
        f"Gate: {run.gate_title(gate)}",
        values,
    )


def _rows(height: int, count: int) -> tuple[list[float], int]:
    """Return the y of each row of a panel, and of the end of the last one."""
    return [ROWS_TOP + height * (index + 0.5) for index in range(count)], ROWS_TOP + height * count


MIN_KL = 1e-6  # the smallest divergence on a logarithmic axis
KL_PARTS = {
    "by_class": "by token class",
    "by_category": "by category",
    "by_layer": "by layer",
}


def kl_divergence(run: LoadedRun) -> Figure:
    measured = [(side, side.data.kl) for side in run.offline if side.data.kl]
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
    for part, title in KL_PARTS.items():
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


def _kl_axis(divergences: list[float], right: int) -> dict[str, object]:
    """Return the logarithmic axis of a panel, from power of ten to power of ten."""
    low = 10 ** math.floor(math.log10(max(min(divergences), MIN_KL)))
    high = 10 ** math.ceil(math.log10(max(max(divergences), MIN_KL) * 1.0001))
    x = scale(
        low,
        high,
        ROWS_LEFT,
        PANEL_WIDTH - right,
        log=True,
    )
    return {"x": x, "marks": log_ticks(low, high), "left": ROWS_LEFT}


def _overall(run: LoadedRun, measured: list[tuple[OfflineModel, KLSummary]]) -> Drawing:
    ys, bottom = _rows(21, len(measured))
    rows = [(side, kl, y) for (side, kl), y in zip(measured, ys, strict=True)]
    divergences = [v for _, kl in measured for v in (kl.median, kl.mean, kl.p99)]
    values = {
        "run": run,
        "rows": rows,
        "bottom": bottom,
        **_kl_axis(divergences, 52),
    }
    return Drawing(
        "divergence",
        PANEL_WIDTH,
        bottom + 24,
        "KL divergence, All tokens",
        values,
    )


def _breakdown(
    run: LoadedRun, title: str, rows: list[tuple[OfflineModel, dict[str, float]]]
) -> Drawing:
    keys = list(dict.fromkeys(key for _, means in rows for key in means))
    ys, bottom = _rows(19, len(keys))
    divergences = list(itertools.chain.from_iterable(means.values() for _, means in rows))
    values = {
        "run": run,
        "title": f"Mean, {title}",
        "rows": rows,
        "keys": list(zip(keys, ys, strict=True)),
        "bottom": bottom,
        **_kl_axis(divergences, 14),
    }
    return Drawing(
        "breakdown",
        PANEL_WIDTH,
        bottom + 24,
        f"Mean KL divergence {title}",
        values,
    )


# ---- served requests

LEFT = 66
RIGHT = 570
TOP = 26
BOTTOM = 226


@dataclass(frozen=True)
class Point:
    """A point of a line.

    low, high: an interval of y.
    tip: shown at the mark; a point without one has no mark.
    """

    x: float
    y: float
    tip: str = ""
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Axis:
    title: str
    low: float
    high: float
    ticks: Sequence[float]


def line_chart(
    run: LoadedRun,
    title: str,
    description: str,
    across: Axis,
    up: Axis,
    lines: list[tuple[ServedModel, list[Point]]],
) -> Drawing:
    x = scale(across.low, across.high, LEFT, RIGHT)
    y = scale(up.low, up.high, BOTTOM, TOP)
    paths = []
    for index, (side, points) in enumerate(lines):
        # Marks of several lines at one place stand next to each other.
        shift = 5 * (index - (len(lines) - 1) / 2)
        places = [((x(p.x) + (shift if p.tip else 0), y(p.y)), p) for p in points]
        paths.append((run.series(side.model), places))
    names = []
    previous = -99.0
    for side, points in sorted(lines, key=lambda line: y(line[1][-1].y)):
        previous = max(y(points[-1].y), previous + 15)  # names do not overlap
        names.append((run.label(side.model), run.series(side.model), previous))
    values = {
        "across": across,
        "up": up,
        "x": x,
        "y": y,
        "lines": paths,
        "ends": names,
        "description_text": description,
        "left": LEFT,
        "right": RIGHT,
        "bottom": BOTTOM,
    }
    return Drawing(
        "lines",
        WIDE,
        BOTTOM + 40,
        title,
        values,
    )


@dataclass
class _Lines:
    """The lines of a chart, one per backend, with a description for readers who do not see it."""

    lines: list[tuple[ServedModel, list[Point]]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)

    def add(self, run: LoadedRun, side: ServedModel, points: list[Point], text: str) -> None:
        self.lines.append((side, points))
        self.texts.append(f"{run.label(side.model)}: {text}")

    def figure(
        self, run: LoadedRun, key: str, caption: str, title: str, across: Axis, up: Axis
    ) -> Figure:
        chart = line_chart(
            run,
            title,
            "; ".join(self.texts),
            across,
            up,
            self.lines,
        )
        return Figure(key, caption, panels=[(key, chart)], wide=True)


def by_turn(run: LoadedRun) -> Figure:
    chart = _Lines()
    high = 0.0
    last = 1
    for side in run.served:
        points: list[Point] = []
        texts: list[str] = []
        for turn in run.aggregates.turns.get(side.name, []):
            if turn.ttft_content_ms is None:
                continue
            ttft = f"{significant(turn.ttft_content_ms)} ms"
            tip = f"{run.label(side.model)}, turn {turn.turn}: {ttft}, n = {turn.n}"
            points.append(
                Point(
                    turn.turn,
                    turn.ttft_content_ms,
                    tip,
                    turn.low,
                    turn.high,
                )
            )
            texts.append(f"turn {turn.turn} {ttft}")
            chart.counts.append(turn.n)
        if len(points) > 1:
            chart.add(run, side, points, ", ".join(texts))
            high = max(high, *(point.high or point.y for point in points))
            last = max(last, int(points[-1].x))
    if not chart.lines:
        return Figure("turns", wide=True)
    caption = (
        "Time to the first token of content against the turn of a growing conversation: p50 with its 95 % interval "
        f"(n = {ends(chart.counts)} requests per mark)."
    )
    turns = Axis("turn", 1, last, range(1, last + 1))
    times = Axis("TTFT content, ms", 0, high * 1.05, ticks(0, high * 1.05))
    return chart.figure(
        run,
        "turns",
        caption,
        "TTFT over turns",
        turns,
        times,
    )


CURVE_POINTS = 64
MIN_VALUES = 5  # that make a distribution
_TIMES = {metric: METRICS[metric].title for metric in COMPARED if METRICS[metric].unit == "ms"}
Curve = tuple[ServedModel, list[float]]


def distributions(run: LoadedRun) -> Figure:
    figure = Figure("distributions")
    fit = timed(run.measured)
    by_side: dict[str, dict[str, list[RequestRecord]]] = {}
    for side in run.served:
        by_side[side.name] = labelled(r for r in fit if r.backend == side.name)
    workloads = sorted(set().union(*by_side.values()))
    for metric, title in _TIMES.items():
        for workload in workloads:
            curves: list[Curve] = []
            for side in run.served:
                ordered = values(by_side[side.name].get(workload, ()), metric)
                if len(ordered) >= MIN_VALUES:
                    curves.append((side, ordered))
            if curves:
                figure.panels.append((f"{metric}.{workload}", _panel(run, workload, title, curves)))
                figure.groups[metric] = title
    return figure


def _panel(run: LoadedRun, workload: str, title: str, curves: list[Curve]) -> Drawing:
    left = 30
    top = 42
    bottom = 160
    right = PANEL_WIDTH - 8
    samples = [ordered for _, ordered in curves]
    low = min(sample[0] for sample in samples)
    # Of 100 values or more, the highest hundredth is left out.
    high = max(s[-1] if len(s) < 100 else quantile(s, 0.99) or 0.0 for s in samples)
    high = high if high > low else low + max(abs(low) * 0.1, 0.1)
    log = low > 0 and high / low > 20
    x = scale(
        low,
        high,
        left,
        right,
        log,
    )
    y = scale(0, 1, bottom, top)
    paths = []
    for side, ordered in curves:
        path = [(x(value), y(share)) for value, share in _steps(ordered) if value <= high]
        paths.append((side, quantile(ordered, 0.5), quantile(ordered, 0.99), len(ordered), path))
    figures = {
        "run": run,
        "title": name(workload),
        "counts": ends([len(sample) for sample in samples]),
        "marks": log_ticks(low, high) if log else ticks(low, high, 5),
        "curves": paths,
        "x": x,
        "y": y,
        "left": left,
        "top": top,
        "bottom": bottom,
        "right": right,
    }
    return Drawing(
        "distribution",
        PANEL_WIDTH,
        bottom + 22,
        f"{name(workload)}: {title}",
        figures,
    )


def _steps(ordered: list[float]) -> list[tuple[float, float]]:
    """Return (value, share at or below) of a sorted sample: all steps, or CURVE_POINTS of more values."""
    n = len(ordered)
    if n <= CURVE_POINTS:
        steps = []
        for index, value in enumerate(ordered):
            steps += [(value, index / n), (value, (index + 1) / n)]
        return steps
    places = (k * (n - 1) // (CURVE_POINTS - 1) for k in range(CURVE_POINTS))
    return [(ordered[0], 0.0), *((ordered[i], (i + 1) / n) for i in places)]


MAX_SHOWN_TOKENS = 400  # of an answer, the end of the axis


def by_length(run: LoadedRun) -> Figure:
    chart = _Lines()
    high = 0.0
    for side in run.served:
        times = mean_times(side.data)
        if times is None:
            continue
        ttft, tpot, n_workloads = times
        end = ttft + MAX_SHOWN_TOKENS * tpot
        speed = f"{significant(ttft)} ms + {significant(tpot)} ms per token"
        chart.add(run, side, [Point(0, ttft), Point(MAX_SHOWN_TOKENS, end)], speed)
        chart.counts.append(n_workloads)
        high = max(high, end)
    if len(chart.lines) < 2:
        return Figure("crossover", wide=True)
    caption = (
        "Total latency against the length of the answer: TTFT + tokens × TPOT from the medians, averaged over "
        f"{min(chart.counts)} workloads." + _crossings(run)
    )
    tokens = Axis("tokens of the answer", 0, MAX_SHOWN_TOKENS, ticks(0, MAX_SHOWN_TOKENS, 5))
    up = Axis("total latency, ms", 0, high, ticks(0, high))
    title = "Total latency against answer length"
    return chart.figure(
        run,
        "crossover",
        caption,
        title,
        tokens,
        up,
    )


def _crossings(run: LoadedRun) -> str:
    labels = {s.name: run.label(s.model) for s in run.served}
    text = ""
    for row in run.aggregates.crossover:
        short = row.faster_when_short
        long = row.faster_when_long
        if row.tokens and row.tokens <= 10 * MAX_SHOWN_TOKENS and short != long:
            faster = f"{labels.get(short, name(short))} is faster below"
            text += (
                f" {faster} {significant(row.tokens)} tokens, {labels.get(long, name(long))} above."
            )
    return text

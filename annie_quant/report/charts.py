"""The figures of the report. assets/templates/charts draws them, and report.html has the captions that name no number.

Gates against their thresholds and against the size on disk; KL divergence from bf16; TTFT by turn,
distributions, latency by answer length.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from annie_quant.bench.aggregates import labelled, mean_times, timed
from annie_quant.documents import GateResult, KLSummary, RequestRecord
from annie_quant.judge.metrics import COMPARED, METRICS
from annie_quant.report.format import count, ends, name, significant, size
from annie_quant.report.recheck import quantile, values
from annie_quant.report.run import LoadedRun, MeasuredSide, OfflineModel, ServedModel
from annie_quant.report.svg import (
    ROWS_LEFT,
    ROWS_TOP,
    WIDE,
    WIDTH,
    Drawing,
    Figure,
    log_ticks,
    plain,
    scale,
    ticks,
)


def draw(run: LoadedRun) -> list[Figure]:
    """Return the figures, in the order of the report."""
    gates = Figure("gates", panels=[(gate, _gate_panel(run, gate)) for gate in run.gate_names])
    return [
        gates,
        kl_divergence(run),
        size_and_gates(run),
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
        "x": scale(start, 1.0, ROWS_LEFT, WIDTH - right),
        "marks": ticks(start, 1.0, 4),
        "rows": list(zip(sides, results, ys, strict=True)),
        "left": ROWS_LEFT,
        "bottom": bottom,
    }
    return Drawing("gate", WIDTH, bottom + 22, f"Gate: {run.gate_title(gate)}", values)


def _rows(height: int, count: int) -> tuple[list[float], int]:
    """Return the y of each row of a panel, and of the end of the last one."""
    return [ROWS_TOP + height * (index + 0.5) for index in range(count)], ROWS_TOP + height * count


SIZE_BOTTOM = 250  # y of the axis of sizes, in pixels


@dataclass(frozen=True)
class _Point:
    side: MeasuredSide
    size_bytes: int
    gate: str
    result: GateResult


def size_and_gates(run: LoadedRun) -> Figure:
    figure = Figure("pareto", wide=True)
    points: list[_Point] = []
    for model in run.models:
        for side in run.sides_of(model.name) if model.size_bytes else ():
            gates = [(gate, result) for gate, result in side.deciding.items() if result.n]
            if gates:
                gate, worst = min(gates, key=lambda item: (item[1].rate, item[1].low))
                points.append(_Point(side, model.size_bytes or 0, gate, worst))
    if len({p.side.model for p in points}) > 1:
        figure.panels.append(("pareto", _size_panel(run, points)))
    return figure


def _size_panel(run: LoadedRun, points: list[_Point]) -> Drawing:
    left = 52
    top = 20
    largest = max(p.size_bytes for p in points)
    units = {"GB": 1e9, "MB": 1e6, "kB": 1e3, "B": 1.0}
    unit = next(u for u, unit_bytes in units.items() if largest >= unit_bytes)
    start = math.floor(min(p.result.low for p in points) * 5) / 5
    end = largest * 1.12
    x = scale(0, end, left, WIDE - 14)
    y = scale(start, 1.0, SIZE_BOTTOM, top)
    n_sides: Counter[str] = Counter()
    marks = []
    for p in points:
        marks.append((p, x(p.size_bytes) + 10 * n_sides[p.side.model]))
        n_sides[p.side.model] += 1
    values = {
        "run": run,
        "unit": unit,
        "write": lambda value: plain(value / units[unit]),
        "y_marks": ticks(start, 1, 5),
        "marks": [t * units[unit] for t in ticks(0, end / units[unit], 7)],
        "front": [(x(size_bytes), y(rate)) for size_bytes, rate in _front(points)],
        "names": _model_names(run, {p.side.model: p.size_bytes for p in points}, x),
        "points": marks,
        "x": x,
        "y": y,
        "left": left,
        "top": top,
        "bottom": SIZE_BOTTOM,
    }
    return Drawing("sizes", WIDE, 330, "Size and worst gate", values)


def _front(points: list[_Point]) -> list[tuple[int, float]]:
    """Return (size, rate) of the models whose worst side no smaller model reaches; [] for a single one."""
    rates: dict[tuple[int, str], float] = {}
    for p in points:
        model = (p.size_bytes, p.side.model)
        rates[model] = min(p.result.rate, rates.get(model, 1.0))
    front: list[tuple[int, float]] = []
    for (size_bytes, _), rate in sorted(rates.items(), key=lambda item: (item[0][0], -item[1])):
        if not front or rate > front[-1][1]:
            front.append((size_bytes, rate))
    return front if len(front) > 1 else []


def _model_names(
    run: LoadedRun, sizes: dict[str, int], x: Callable[[float], float]
) -> list[tuple[str, int, float, int, bool]]:
    """Return (name, series, x, y, whether it ends at x) of the models, on up to three lines so that names do not overlap."""
    line_ends = [-99.0, -99.0, -99.0]
    names = []
    for model, size_bytes in sorted(sizes.items(), key=lambda item: item[1]):
        at = x(size_bytes)
        text = f"{run.label(model)} · {size(size_bytes)}"
        width = 7.0 * len(text) + 16
        ends_here = at + width > WIDE
        start = at - width if ends_here else at
        line = next((i for i, end in enumerate(line_ends) if start > end), 2)
        line_ends[line] = start + width
        names.append((text, run.series(model), at, SIZE_BOTTOM + 50 + 16 * line, ends_here))
    return names


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
    x = scale(low, high, ROWS_LEFT, WIDTH - right, log=True)
    return {"x": x, "marks": log_ticks(low, high), "left": ROWS_LEFT}


def _overall(run: LoadedRun, measured: list[tuple[OfflineModel, KLSummary]]) -> Drawing:
    ys, bottom = _rows(21, len(measured))
    rows = [(side, kl, y) for (side, kl), y in zip(measured, ys, strict=True)]
    divergences = [v for _, kl in measured for v in (kl.median, kl.mean, kl.p99)]
    values = {"run": run, "rows": rows, "bottom": bottom, **_kl_axis(divergences, 52)}
    return Drawing("divergence", WIDTH, bottom + 24, "KL divergence, All tokens", values)


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
    return Drawing("breakdown", WIDTH, bottom + 24, f"Mean KL divergence {title}", values)


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
    return Drawing("lines", WIDE, BOTTOM + 40, title, values)


def by_turn(run: LoadedRun) -> Figure:
    figure = Figure("turns", wide=True)
    lines: list[tuple[ServedModel, list[Point]]] = []
    counts: list[int] = []
    models: list[str] = []
    for side in run.served:
        label = run.label(side.model)
        timed_turns = [
            turn
            for turn in run.aggregates.turns.get(side.name, [])
            if turn.ttft_content_ms is not None
        ]
        points: list[Point] = []
        texts: list[str] = []
        for turn in timed_turns:
            ttft = f"{significant(turn.ttft_content_ms)} ms"
            tip = f"{label}, turn {turn.turn}: {ttft}, n = {turn.n}"
            points.append(Point(turn.turn, turn.ttft_content_ms or 0.0, tip, turn.low, turn.high))
            texts.append(f"turn {turn.turn} {ttft}")
        if len(points) > 1:
            lines.append((side, points))
            models.append(f"{label}: {', '.join(texts)}")
            counts += [turn.n for turn in timed_turns]
    if not lines:
        return figure
    figure.caption = (
        "Time to the first token of content against the turn of a growing conversation: p50 with its 95 % interval "
        f"(n = {ends(counts)} requests per mark)."
    )
    shown = [point for _, points in lines for point in points]
    high = max(p.high or p.y for p in shown) * 1.05
    last = int(max(p.x for p in shown))
    turns = Axis("turn", 1, last, range(1, last + 1))
    times = Axis("TTFT content, ms", 0, high, ticks(0, high))
    chart = line_chart(run, "TTFT over turns", "; ".join(models), turns, times, lines)
    figure.panels.append(("turns", chart))
    return figure


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
    right = WIDTH - 8
    samples = [ordered for _, ordered in curves]
    low = min(sample[0] for sample in samples)
    # Of 100 values or more, the highest hundredth is left out.
    high = max(s[-1] if len(s) < 100 else quantile(s, 0.99) or 0.0 for s in samples)
    high = high if high > low else low + max(abs(low) * 0.1, 0.1)
    log = low > 0 and high / low > 20
    x = scale(low, high, left, right, log)
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
    return Drawing("distribution", WIDTH, bottom + 22, f"{name(workload)}: {title}", figures)


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


MAX_ANSWER_TOKENS = 400  # of an answer, the end of the axis


def by_length(run: LoadedRun) -> Figure:
    figure = Figure("crossover", wide=True)
    lines: list[tuple[ServedModel, list[Point]]] = []
    models: list[str] = []
    counts: list[int] = []
    for side in run.served:
        times = mean_times(side.data)
        if times is None:
            continue
        ttft, tpot, n_workloads = times
        lines.append(
            (side, [Point(0, ttft), Point(MAX_ANSWER_TOKENS, ttft + MAX_ANSWER_TOKENS * tpot)])
        )
        speed = f"{significant(ttft)} ms + {significant(tpot)} ms per token"
        models.append(f"{run.label(side.model)}: {speed}")
        counts.append(n_workloads)
    if len(lines) < 2:
        return figure
    figure.caption = (
        "Total latency against the length of the answer: TTFT + tokens × TPOT from the medians, averaged over "
        f"{min(counts)} workloads." + _crossings(run)
    )
    high = max(points[-1].y for _, points in lines)
    tokens = Axis("tokens of the answer", 0, MAX_ANSWER_TOKENS, ticks(0, MAX_ANSWER_TOKENS, 5))
    up = Axis("total latency, ms", 0, high, ticks(0, high))
    title = "Total latency against answer length"
    chart = line_chart(run, title, "; ".join(models), tokens, up, lines)
    figure.panels.append(("crossover", chart))
    return figure


def _crossings(run: LoadedRun) -> str:
    labels = {s.name: run.label(s.model) for s in run.served}
    text = ""
    for row in run.aggregates.crossover:
        short = row.faster_when_short
        long = row.faster_when_long
        if row.tokens and row.tokens <= 10 * MAX_ANSWER_TOKENS and short != long:
            faster = f"{labels.get(short, name(short))} is faster below"
            text += (
                f" {faster} {significant(row.tokens)} tokens, {labels.get(long, name(long))} above."
            )
    return text

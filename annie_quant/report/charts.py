"""The figures of the report. assets/templates/charts draws them, and report.html has the captions that name no number.

Gates against their thresholds, offline and served, and against the size on disk; KL divergence from bf16; TTFT by turn,
distributions, single streams, latency by answer length.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
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
    fit = timed(run.measured)
    return [
        *(gates, offline_and_served(run), kl_divergence(run), size_and_gates(run)),
        *(by_turn(run), distributions(run, fit), token_streams(run, fit), by_length(run)),
    ]


def _gate_panel(run: LoadedRun, gate: str) -> Drawing:
    sides = [s for s in run.sides if gate in s.gates]
    results = [s.gates[gate] for s in sides]
    thresholds = {r.threshold for r in results}
    start = max(0.0, math.floor((min([r.low for r in results] + [*thresholds]) - 0.02) * 10) / 10)
    ys, bottom = _rows(19, len(sides))
    right = 30 + 6.6 * max(len(f"{r.passes}/{r.n}") for r in results)
    values = {
        **{
            "run": run,
            "gate": gate,
            "informs": all(r.advisory for r in results),
            "thresholds": thresholds,
        },
        **{"x": scale(start, 1.0, ROWS_LEFT, WIDTH - right), "marks": ticks(start, 1.0, 4)},
        **{"rows": list(zip(sides, results, ys, strict=True)), "left": ROWS_LEFT, "bottom": bottom},
    }
    return Drawing("gate", WIDTH, bottom + 22, f"Gate: {run.gate_title(gate)}", values)


def _rows(height: int, count: int, top: int = ROWS_TOP) -> tuple[list[float], int]:
    """Return the y of each row of a panel, and of the end of the last one."""
    return [top + height * (index + 0.5) for index in range(count)], top + height * count


# Shape and fill by how a side runs; the colour is the model's.
_MARKS = {"reference": (0, "f"), "W4A4": (0, "f"), "W4A16": (0, "o"), "served": (2, "f")}


def offline_and_served(run: LoadedRun) -> Figure:
    figure = Figure("offline-served")
    for model in run.models:
        sides = [s for s in run.sides_of(model.name) if s.gates]
        if {s.kind for s in sides} == {"offline", "served"}:
            figure.panels.append((model.name, _model_panel(run, model.name, sides)))
    return figure


def _model_panel(run: LoadedRun, model: str, sides: Sequence[MeasuredSide]) -> Drawing:
    left, top = 146, 50
    gates = [g for g in run.gate_names if all(g in s.gates for s in sides)]
    ys, bottom = _rows(20, len(gates), top)
    start = math.floor(min([s.gates[g].rate for s in sides for g in gates] + [0.9]) * 10) / 10
    x = scale(start, 1.0, left, WIDTH - 20)
    rows = []
    for gate, y in zip(gates, ys, strict=True):
        results = [s.gates[gate] for s in sides]
        rows.append((run.gate_title(gate), y, [x(r.rate) for r in results], results))
    values = {
        **{"title": run.label(model), "series": run.series(model), "rows": rows},
        **{"sides": [(side, *_MARKS.get(side.how, (1, "o"))) for side in sides]},
        **{"x": x, "marks": ticks(start, 1.0, 5), "left": left, "top": top, "bottom": bottom},
    }
    return Drawing("model", WIDTH, bottom + 24, f"{run.label(model)}: offline and served", values)


SIZE_BOTTOM = 250  # y of the axis of sizes, in pixels


@dataclass(frozen=True)
class _Point:
    side: MeasuredSide
    size_bytes: int
    gate: str
    result: GateResult


def size_and_gates(run: LoadedRun) -> Figure:
    figure = Figure("pareto", wide=True)
    points = [
        _Point(side, model.size_bytes, *min(gates, key=lambda item: (item[1].rate, item[1].low)))
        for model in run.models
        if model.size_bytes and model.size_bytes > 0
        for side in run.sides_of(model.name)
        if (gates := [(gate, result) for gate, result in side.deciding.items() if result.n])
    ]
    if len({p.side.model for p in points}) > 1:
        figure.panels.append(("pareto", _size_panel(run, points)))
    return figure


def _size_panel(run: LoadedRun, points: list[_Point]) -> Drawing:
    left, top = 52, 20
    largest = max(p.size_bytes for p in points)
    unit, unit_bytes = next(
        (u for u in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)) if largest >= u[1]), ("B", 1.0)
    )
    start = math.floor(min(p.result.low for p in points) * 5) / 5
    x, y = scale(0, largest * 1.12, left, WIDE - 14), scale(start, 1.0, SIZE_BOTTOM, top)
    placed: dict[str, int] = {}
    marks = []
    for p in points:
        placed[p.side.model] = placed.get(p.side.model, -1) + 1
        marks.append((p, x(p.size_bytes) + 10 * placed[p.side.model]))
    values = {
        **{
            "run": run,
            "unit": unit,
            "write": lambda value: plain(value / unit_bytes),
            "y_marks": ticks(start, 1, 5),
        },
        "marks": [t * unit_bytes for t in ticks(0, largest * 1.12 / unit_bytes, 7)],
        "front": [(x(size_bytes), y(rate)) for size_bytes, rate in _front(points)],
        "names": _model_names(run, {p.side.model: p.size_bytes for p in points}, x),
        **{"points": marks, "x": x, "y": y, "left": left, "top": top, "bottom": SIZE_BOTTOM},
    }
    return Drawing("sizes", WIDE, 330, "Size and worst gate", values)


def _front(points: list[_Point]) -> list[tuple[int, float]]:
    """Return (size, rate) of the models whose worst side no smaller model reaches; [] for a single one."""
    worst: dict[str, tuple[int, float]] = {}
    for p in points:
        worst[p.side.model] = (
            p.size_bytes,
            min(p.result.rate, worst.get(p.side.model, (0, 1.0))[1]),
        )
    front: list[tuple[int, float]] = []
    for size_bytes, rate in sorted(worst.values(), key=lambda w: (w[0], -w[1])):
        if not front or rate > front[-1][1]:
            front.append((size_bytes, rate))
    return front if len(front) > 1 else []


def _model_names(
    run: LoadedRun, sizes: dict[str, int], x: Callable[[float], float]
) -> list[tuple[str, int, float, int, bool]]:
    """Return (name, series, x, y, whether it ends at x) of the models, on up to three lines so that names do not overlap."""
    ends, names = [-99.0, -99.0, -99.0], []
    for model, size_bytes in sorted(sizes.items(), key=lambda item: item[1]):
        at, text = x(size_bytes), f"{run.label(model)} · {size(size_bytes)}"
        width = 7.0 * len(text) + 16
        right = at + width > WIDE
        start = at - width if right else at
        row = next((i for i, end in enumerate(ends) if start > end), 2)
        ends[row] = start + width
        names.append((text, run.series(model), at, SIZE_BOTTOM + 50 + 16 * row, right))
    return names


LEAST = 1e-6  # the smallest divergence on a logarithmic axis
Measured = list[tuple[OfflineModel, KLSummary]]


def kl_divergence(run: LoadedRun) -> Figure:
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
    for part, title in (
        ("by_class", "by token class"),
        ("by_category", "by category"),
        ("by_layer", "by layer"),
    ):
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
    """Return the powers of ten around the values."""
    values = [max(v, LEAST) for v in values]
    return 10 ** math.floor(math.log10(min(values))), 10 ** math.ceil(
        math.log10(max(values) * 1.0001)
    )


def _overall(run: LoadedRun, measured: Measured) -> Drawing:
    ys, bottom = _rows(21, len(measured))
    low, high = _range(v for _, kl in measured for v in (kl.median, kl.mean, kl.p99))
    values = {
        **{
            "run": run,
            "x": scale(low, high, ROWS_LEFT, WIDTH - 52, log=True),
            "marks": log_ticks(low, high),
        },
        "rows": [(side, kl, y) for (side, kl), y in zip(measured, ys, strict=True)],
        **{"left": ROWS_LEFT, "bottom": bottom},
    }
    return Drawing("divergence", WIDTH, bottom + 24, "KL divergence, All tokens", values)


def _breakdown(
    run: LoadedRun, title: str, rows: list[tuple[OfflineModel, dict[str, float]]]
) -> Drawing:
    keys = list(dict.fromkeys(key for _, means in rows for key in means))
    ys, bottom = _rows(19, len(keys))
    low, high = _range(v for _, means in rows for v in means.values())
    values = {
        **{
            "run": run,
            "title": f"Mean, {title}",
            "rows": rows,
            "keys": list(zip(keys, ys, strict=True)),
        },
        **{"x": scale(low, high, ROWS_LEFT, WIDTH - 14, log=True), "marks": log_ticks(low, high)},
        **{"left": ROWS_LEFT, "bottom": bottom},
    }
    return Drawing("breakdown", WIDTH, bottom + 24, f"Mean KL divergence {title}", values)


# ---- served requests

LEFT, RIGHT, TOP, BOTTOM = 66, 570, 26, 226


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
    x, y = scale(across.low, across.high, LEFT, RIGHT), scale(up.low, up.high, BOTTOM, TOP)
    drawn = []
    for index, (side, points) in enumerate(lines):
        shift = 5 * (index - (len(lines) - 1) / 2)
        drawn.append(
            (
                run.series(side.model),
                [((x(p.x) + (shift if p.tip else 0), y(p.y)), p) for p in points],
            )
        )
    names, previous = [], -99.0
    for at, side in sorted(
        [(y(points[-1].y), side) for side, points in lines], key=lambda end: end[0]
    ):
        previous = max(at, previous + 15)  # names do not overlap
        names.append((run.label(side.model), run.series(side.model), previous))
    values = {
        "across": across,
        "up": up,
        "x": x,
        "y": y,
        "lines": drawn,
        "ends": names,
        "description_text": description,
    }
    values |= {"left": LEFT, "right": RIGHT, "bottom": BOTTOM}
    return Drawing("lines", WIDE, BOTTOM + 40, title, values)


def by_turn(run: LoadedRun) -> Figure:
    figure = Figure("turns", wide=True)
    lines, counts = [], []
    for side in run.served:
        points = []
        for turn in run.aggregates.turns.get(side.name, []):
            if (ttft := turn.ttft_content_ms) is not None:
                tip = f"{run.label(side.model)}, turn {turn.turn}: {significant(ttft)} ms, n = {turn.n}"
                points.append(Point(turn.turn, ttft, tip, turn.low, turn.high))
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
    models = [
        f"{run.label(s.model)}: " + ", ".join(f"turn {p.x:g} {significant(p.y)} ms" for p in points)
        for s, points in lines
    ]
    turns, times = (
        Axis("turn", 1, last, range(1, last + 1)),
        Axis("TTFT content, ms", 0, high, ticks(0, high)),
    )
    figure.panels.append(
        ("turns", line_chart(run, "TTFT over turns", "; ".join(models), turns, times, lines))
    )
    return figure


POINTS = 64  # of a curve
FEWEST = 5  # values that make a distribution
TIMES = {metric: METRICS[metric].title for metric in COMPARED if METRICS[metric].unit == "ms"}
Curve = tuple[ServedModel, list[float]]


def distributions(run: LoadedRun, fit: list[RequestRecord]) -> Figure:
    figure = Figure("distributions")
    groups = {s.name: labelled(r for r in fit if r.backend == s.name) for s in run.served}
    labels = sorted({label for group in groups.values() for label in group})
    for metric, title in TIMES.items():
        for workload in labels:
            curves = [(s, values(groups[s.name].get(workload, ()), metric)) for s in run.served]
            curves = [(side, ordered) for side, ordered in curves if len(ordered) >= FEWEST]
            if curves:
                figure.panels.append((f"{metric}.{workload}", _panel(run, workload, title, curves)))
                figure.groups[metric] = title
    return figure


def _panel(run: LoadedRun, workload: str, title: str, curves: list[Curve]) -> Drawing:
    left, top, bottom, right = 30, 42, 160, WIDTH - 8
    low = min(ordered[0] for _, ordered in curves)
    high = max(
        ordered[-1] if len(ordered) < 100 else quantile(ordered, 0.99) or 0.0
        for _, ordered in curves
    )
    high = high if high > low else low + max(abs(low) * 0.1, 0.1)
    log = low > 0 and high / low > 20
    x, y = scale(low, high, left, right, log), scale(0, 1, bottom, top)
    values = {
        **{
            "run": run,
            "title": name(workload),
            "counts": ends([len(ordered) for _, ordered in curves]),
        },
        "marks": log_ticks(low, high) if log else ticks(low, high, 5),
        "curves": [
            (
                *(side, quantile(ordered, 0.5), quantile(ordered, 0.99), len(ordered)),
                [(x(v), y(share)) for v, share in _steps(ordered) if v <= high],
            )
            for side, ordered in curves
        ],
        **{"x": x, "y": y, "left": left, "top": top, "bottom": bottom, "right": right},
    }
    return Drawing("distribution", WIDTH, bottom + 22, f"{name(workload)}: {title}", values)


def _steps(ordered: list[float]) -> list[tuple[float, float]]:
    """Return (value, share at or below) of a sorted sample: all steps of up to POINTS values, POINTS of more."""
    n = len(ordered)
    if n <= POINTS:
        return [(v, share) for i, v in enumerate(ordered) for share in (i / n, (i + 1) / n)]
    places = (k * (n - 1) // (POINTS - 1) for k in range(POINTS))
    return [(ordered[0], 0.0), *((ordered[i], (i + 1) / n) for i in places)]


def token_streams(run: LoadedRun, fit: list[RequestRecord]) -> Figure:
    figure = Figure("streams", wide=True)
    answers = _answers([s.name for s in run.served], fit)
    if not answers:
        return figure
    one = next(iter(answers.values()))
    figure.caption = (
        f"One stream per backend, the same prompt ({name(one.workload)}, case {one.case}): each tick is a piece of the "
        "answer as it arrived, the line from zero is the wait for the first. n = 1 request each: an "
        "illustration, not a measurement."
    )
    timings = [(s.model, answers[s.name].timings) for s in run.served if s.name in answers]
    streams = [
        (model, list(itertools.accumulate(times.itl_ms, initial=times.first_token_ms or 0.0)))
        for model, times in timings
    ]
    left, top, right = 132, 14, WIDE - 86
    bottom = top + 34 * len(streams)
    end = max(times[-1] for _, times in streams) or 1.0
    values = {
        "run": run,
        "streams": streams,
        "x": scale(0, end, left, right),
        "marks": ticks(0, end, 7),
    }
    values |= {"left": left, "top": top, "bottom": bottom, "right": right}
    drawing = Drawing("streams", WIDE, bottom + 34, "Single streams over time", values)
    figure.panels.append(("streams", drawing))
    return figure


def _answers(backends: list[str], fit: list[RequestRecord]) -> dict[str, RequestRecord]:
    """Return, by backend, the answers to the prompt that most backends streamed and whose shortest answer is longest."""
    prompts: dict[tuple[str, str, int], dict[str, RequestRecord]] = {}
    for record in fit:
        if record.backend in backends and record.timings.itl_ms:
            prompts.setdefault(record.prompt, {}).setdefault(record.backend, record)

    def rank(answers: dict[str, RequestRecord]) -> tuple[int, int]:
        return len(answers), min(len(r.timings.itl_ms) for r in answers.values())

    return max(prompts.values(), key=rank, default={})


LONGEST = 400  # tokens of an answer, the end of the axis


def by_length(run: LoadedRun) -> Figure:
    figure = Figure("crossover", wide=True)
    lines, models, counts = [], [], []
    for side in run.served:
        if (times := mean_times(side.data)) is not None:
            ttft, tpot, n_workloads = times
            lines.append((side, [Point(0, ttft), Point(LONGEST, ttft + LONGEST * tpot)]))
            models.append(
                f"{run.label(side.model)}: {significant(ttft)} ms + {significant(tpot)} ms per token"
            )
            counts.append(n_workloads)
    if len(lines) < 2:
        return figure
    figure.caption = (
        "Total latency against the length of the answer: TTFT + tokens × TPOT from the medians, averaged over "
        f"{min(counts)} workloads." + _crossings(run)
    )
    high = max(points[-1].y for _, points in lines)
    tokens = Axis("tokens of the answer", 0, LONGEST, ticks(0, LONGEST, 5))
    up = Axis("total latency, ms", 0, high, ticks(0, high))
    title = "Total latency against answer length"
    figure.panels.append(
        ("crossover", line_chart(run, title, "; ".join(models), tokens, up, lines))
    )
    return figure


def _crossings(run: LoadedRun) -> str:
    labels = {s.name: run.label(s.model) for s in run.served}
    sentences = []
    for row in run.aggregates.crossover:
        if (
            row.tokens
            and row.tokens <= 10 * LONGEST
            and row.faster_when_short != row.faster_when_long
        ):
            short, long = (
                labels.get(b, name(b)) for b in (row.faster_when_short, row.faster_when_long)
            )
            sentences.append(
                f" {short} is faster below {significant(row.tokens)} tokens, {long} above."
            )
    return "".join(sentences)

"""Charts of served requests: TTFT by turn, distributions, single streams, latency by answer length."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from annie_quant.bench.aggregates import labelled, timed
from annie_quant.documents import RequestRecord
from annie_quant.judge.metrics import COMPARED, METRICS
from annie_quant.report.format import ends, name, significant
from annie_quant.report.recheck import quantile, values
from annie_quant.report.run import LoadedRun, ServedModel
from annie_quant.report.svg import WIDE, WIDTH, Drawing, Figure, log_ticks, scale, ticks


def draw(run: LoadedRun) -> list[Figure]:
    """Return the charts of served requests, in the order of the report."""
    fit = timed(run.measured)
    return [by_turn(run), distributions(run, fit), token_streams(run, fit), by_length(run)]


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
    run: LoadedRun, title: str, description: str, across: Axis, up: Axis, lines: list[tuple[ServedModel, list[Point]]]
) -> Drawing:
    x, y = scale(across.low, across.high, LEFT, RIGHT), scale(up.low, up.high, BOTTOM, TOP)
    drawn = []
    for index, (side, points) in enumerate(lines):
        shift = 5 * (index - (len(lines) - 1) / 2)
        drawn.append((run.series(side.model), [((x(p.x) + (shift if p.tip else 0), y(p.y)), p) for p in points]))
    names, previous = [], -99.0
    for at, side in sorted([(y(points[-1].y), side) for side, points in lines], key=lambda end: end[0]):
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
    turns, times = Axis("turn", 1, last, range(1, last + 1)), Axis("TTFT content, ms", 0, high, ticks(0, high))
    figure.panels.append(("turns", line_chart(run, "TTFT over turns", description, turns, times, lines)))
    return figure


POINTS = 64  # of a curve
FEWEST = 5  # values that make a distribution
TIMES = {metric: METRICS[metric].title for metric in COMPARED if METRICS[metric].unit == "ms"}
Curve = tuple[ServedModel, list[float]]


def distributions(run: LoadedRun, fit: list[RequestRecord]) -> Figure:
    figure = Figure(
        "distributions",
        "Share of values at or below the time on the axis (cumulative, measured requests only; "
        "for inter-token latency every gap of every stream counts). Curves of 100 "
        "values and more end at their 99th percentile; fewer than five values are no distribution and are left out.",
    )
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
    high = max(ordered[-1] if len(ordered) < 100 else quantile(ordered, 0.99) or 0.0 for _, ordered in curves)
    high = high if high > low else low + max(abs(low) * 0.1, 0.1)
    log = low > 0 and high / low > 20
    x, y = scale(low, high, left, right, log), scale(0, 1, bottom, top)
    values = {
        **{"run": run, "title": name(workload), "counts": ends([len(ordered) for _, ordered in curves])},
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
    streams = [
        (s.model, list(itertools.accumulate(answers[s.name].itl_ms, initial=answers[s.name].first_token_ms or 0.0)))
        for s in run.served
        if s.name in answers
    ]
    left, top, right = 132, 14, WIDE - 86
    bottom = top + 34 * len(streams)
    end = max(times[-1] for _, times in streams) or 1.0
    values = {"run": run, "streams": streams, "x": scale(0, end, left, right), "marks": ticks(0, end, 7)}
    values |= {"left": left, "top": top, "bottom": bottom, "right": right}
    drawing = Drawing("streams", WIDE, bottom + 34, "Single streams over time", values)
    figure.panels.append(("streams", drawing))
    return figure


def _answers(backends: list[str], fit: list[RequestRecord]) -> dict[str, RequestRecord]:
    """Return, by backend, the answers to the prompt that most backends streamed and whose shortest answer is longest."""
    prompts: dict[tuple[str, str, int], dict[str, RequestRecord]] = {}
    for record in fit:
        if record.backend in backends and record.itl_ms:
            prompts.setdefault(record.prompt, {}).setdefault(record.backend, record)
    return max(
        prompts.values(), key=lambda answers: (len(answers), min(len(r.itl_ms) for r in answers.values())), default={}
    )


LONGEST = 400  # tokens of an answer, the end of the axis


def by_length(run: LoadedRun) -> Figure:
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
    tokens = Axis("tokens of the answer", 0, LONGEST, ticks(0, LONGEST, 5))
    times = Axis("total latency, ms", 0, high, ticks(0, high))
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

"""Charts of gates: against their thresholds, offline and served, and against the size on disk.

KL divergence from bf16: over all tokens, then by token class, category and layer where they were measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from annie_quant.documents import GateResult, KLSummary
from annie_quant.report import svg
from annie_quant.report.format import SIGNS, count, share, significant, size
from annie_quant.report.run import LoadedRun, MeasuredSide, OfflineModel


def draw(run: LoadedRun) -> list[svg.Figure]:
    """Return the charts of gates and KL divergence, in the order of the report."""
    return [gate_rates(run), offline_and_served(run), kl_divergence(run), size_and_gates(run)]


def gate_rates(run: LoadedRun) -> svg.Figure:
    return svg.Figure(
        "gates",
        "Share of answers that pass, with 95 % Wilson intervals; the dashed line is the threshold, "
        "the figures on the right are passes of n. A hollow mark is a gate that n cannot decide.",
        [(gate, _gate_panel(run, gate)) for gate in run.gate_names],
    )


def _gate_panel(run: LoadedRun, gate: str) -> svg.Canvas:
    row_height = 19
    sides = [s for s in run.sides if gate in s.gates]
    results = [s.gates[gate] for s in sides]
    thresholds = {r.threshold for r in results}
    start = max(0.0, math.floor((min([r.low for r in results] + [*thresholds]) - 0.02) * 10) / 10)
    bottom = svg.ROWS_TOP + row_height * len(sides)
    description = "; ".join(
        f"{run.label(s.model)} {s.title} {r.passes} of {r.n}, {s.word(gate)}"
        for s, r in zip(sides, results, strict=True)
    )
    c = svg.Canvas(svg.WIDTH, bottom + 22, f"Gate: {run.gate_title(gate)}", description)
    c.text(0, 14, run.gate_title(gate), "t")
    if all(r.advisory for r in results):
        c.text(svg.WIDTH, 14, "informs only", "e")
    right = 30 + 6.6 * max(len(f"{r.passes}/{r.n}") for r in results)
    x = svg.scale(start, 1.0, svg.ROWS_LEFT, svg.WIDTH - right)
    svg.x_axis(c, x, svg.ticks(start, 1.0, 4), svg.ROWS_TOP - 4, bottom, svg.percent)
    for threshold in thresholds:
        c.line(x(threshold), svg.ROWS_TOP - 8, x(threshold), bottom, "h", f"threshold {share(threshold)}")
    ys = [svg.ROWS_TOP + row_height * (index + 0.5) for index in range(len(sides))]
    svg.label_rows(c, run, list(sides), ys)
    for side, r, y in zip(sides, results, ys, strict=True):
        tip = f"{run.label(side.model)}, {side.title}: {r.passes} of {r.n} = {share(r.rate)} "
        tip += f"({share(r.low)} to {share(r.high)}), {side.word(gate)}"
        series = run.series(side.model)
        c.line(x(r.low), y, x(r.high), y, f"w s{series}", tip)
        c.mark(series, x(r.rate), y, "o" if r.verdict == "undecided" else "f", tip)
        c.text(svg.WIDTH - 14, y + 4, f"{r.passes}/{r.n}", "v e")
        c.text(svg.WIDTH - 4, y + 4, SIGNS[r.verdict], "v m")
    return c


# Shape and fill by how a side runs; the colour is the model's.
_MARKS = {"reference": (0, "f"), "W4A4": (0, "f"), "W4A16": (0, "o"), "served": (2, "f")}


def offline_and_served(run: LoadedRun) -> svg.Figure:
    figure = svg.Figure(
        "offline-served",
        "Pass rates of the same model without a server and behind one (n and intervals: the table of gates). Where a "
        "tool call is right in the raw text and lost behind the server, its parser is at fault and not the model.",
    )
    for model in run.models:
        sides = [s for s in run.sides_of(model.name) if s.gates]
        if {s.kind for s in sides} == {"offline", "served"}:
            figure.panels.append((model.name, _model_panel(run, model.name, sides)))
    return figure


def _model_panel(run: LoadedRun, model: str, sides: Sequence[MeasuredSide]) -> svg.Canvas:
    left, top, row_height = 146, 50, 20
    gates = [g for g in run.gate_names if all(g in s.gates for s in sides)]
    bottom, series = top + row_height * len(gates), run.series(model)
    description = "; ".join(
        f"{s.title}: " + ", ".join(f"{run.gate_title(g)} {share(s.gates[g].rate)}" for g in gates) for s in sides
    )
    c = svg.Canvas(svg.WIDTH, bottom + 24, f"{run.label(model)}: offline and served", description)
    c.text(0, 14, run.label(model), "t")
    marks = [_MARKS.get(s.how, (1, "o")) for s in sides]
    for index, (side, (shape, css)) in enumerate(zip(sides, marks, strict=True)):
        c.mark(shape, left - 34 + index * 76, 31, f"{css} x{series}")
        c.text(left - 25 + index * 76, 35, side.how)
    start = math.floor(min([s.gates[g].rate for s in sides for g in gates] + [0.9]) * 10) / 10
    x = svg.scale(start, 1.0, left, svg.WIDTH - 20)
    svg.x_axis(c, x, svg.ticks(start, 1.0, 5), top - 4, bottom, svg.percent)
    for row, gate in enumerate(gates):
        y = top + row_height * (row + 0.5)
        c.text(left - 10, y + 4, run.gate_title(gate), "e")
        xs = [x(s.gates[gate].rate) for s in sides]
        c.line(min(xs), y, max(xs), y, "a")
        for index, (side, (shape, css)) in enumerate(zip(sides, marks, strict=True)):
            result = side.gates[gate]
            shift = 5 * (index - (len(sides) - 1) / 2)  # equal rates would hide each other
            tip = f"{side.title}: {result.passes} of {result.n}"
            c.mark(shape, xs[index], y + shift, f"{css} x{series}", tip, 3.6)
    return c


SIZE_BOTTOM = 250  # y of the axis of sizes, in pixels


@dataclass(frozen=True)
class _Point:
    side: MeasuredSide
    size_bytes: int
    gate: str
    result: GateResult


def size_and_gates(run: LoadedRun) -> svg.Figure:
    figure = svg.Figure(
        "pareto",
        "A model is as good as its worst gate: the lowest pass rate of any deciding gate, with its 95 % interval, "
        "against size on disk. Up and left is better. Circles: offline (filled W4A4 or reference, hollow W4A16); "
        "diamonds: served. The line joins the models whose worst side no smaller one reaches. n: the table of gates.",
        wide=True,
    )
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


def _size_panel(run: LoadedRun, points: list[_Point]) -> svg.Canvas:
    left, top = 52, 20
    description = "; ".join(
        f"{run.label(p.side.model)} {p.side.title}: {size(p.size_bytes)}, worst gate {run.gate_title(p.gate)} "
        f"{share(p.result.rate)}"
        for p in points
    )
    c = svg.Canvas(svg.WIDE, 330, "Size and worst gate", description)
    largest = max(p.size_bytes for p in points)
    unit, scale = next((u for u in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)) if largest >= u[1]), ("B", 1.0))
    start = math.floor(min(p.result.low for p in points) * 5) / 5
    x, y = svg.scale(0, largest * 1.12, left, svg.WIDE - 14), svg.scale(start, 1.0, SIZE_BOTTOM, top)
    marks = [t * scale for t in svg.ticks(0, largest * 1.12 / scale, 7)]
    svg.x_axis(c, x, marks, top, SIZE_BOTTOM, lambda v: svg.plain(v / scale), f"size on disk, {unit}")
    svg.y_axis(c, y, svg.ticks(start, 1, 5), left, svg.WIDE - 14, svg.percent)
    c.path([(x(size_bytes), y(rate)) for size_bytes, rate in _front(points)], "h")
    placed: dict[str, int] = {}
    for p in points:
        model, result = p.side.model, p.result
        placed[model] = placed.get(model, -1) + 1
        at, series = x(p.size_bytes) + 10 * placed[model], run.series(model)
        tip = f"{run.label(model)}, {p.side.title}: {size(p.size_bytes)}, {run.gate_title(p.gate)} "
        tip += f"{result.passes} of {result.n}"
        c.line(at, y(result.low), at, y(result.high), f"w s{series}", tip)
        css = f"{'o' if p.side.how == 'W4A16' else 'f'} x{series}"
        c.mark(2 if p.side.kind == "served" else 0, at, y(result.rate), css, tip, 5)
    _model_names(c, run, {p.side.model: p.size_bytes for p in points}, x)
    return c


def _front(points: list[_Point]) -> list[tuple[int, float]]:
    """Return (size, rate) of the models whose worst side no smaller model reaches; [] for a single one."""
    worst: dict[str, tuple[int, float]] = {}
    for p in points:
        worst[p.side.model] = (p.size_bytes, min(p.result.rate, worst.get(p.side.model, (0, 1.0))[1]))
    front: list[tuple[int, float]] = []
    for size_bytes, rate in sorted(worst.values(), key=lambda w: (w[0], -w[1])):
        if not front or rate > front[-1][1]:
            front.append((size_bytes, rate))
    return front if len(front) > 1 else []


def _model_names(c: svg.Canvas, run: LoadedRun, sizes: dict[str, int], x: Callable[[float], float]) -> None:
    """Write each model's name below its size, on up to three lines so that names do not overlap."""
    ends = [-99.0, -99.0, -99.0]
    for model, size_bytes in sorted(sizes.items(), key=lambda item: item[1]):
        at, text = x(size_bytes), f"{run.label(model)} · {size(size_bytes)}"
        width = 7.0 * len(text) + 16
        right = at + width > c.width
        start = at - width if right else at
        row = next((i for i, end in enumerate(ends) if start > end), 2)
        ends[row] = start + width
        y, series = SIZE_BOTTOM + 50 + 16 * row, run.series(model)
        c.mark(series, at, y - 4, f"f x{series}")
        c.text(at + (-9 if right else 9), y, text, "v e" if right else "v")


LEAST = 1e-6  # the smallest divergence on a logarithmic axis
Measured = list[tuple[OfflineModel, KLSummary]]


def kl_divergence(run: LoadedRun) -> svg.Figure:
    measured = [(s, s.data.kl) for s in run.offline if s.data.kl]
    tokens = " or ".join(count(n) for n in sorted({kl.n_tokens for _, kl in measured}))
    figure = svg.Figure(
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
    """Return the powers of ten around the values."""
    values = [max(v, LEAST) for v in values]
    return 10 ** math.floor(math.log10(min(values))), 10 ** math.ceil(math.log10(max(values) * 1.0001))


def _overall(run: LoadedRun, measured: Measured) -> svg.Canvas:
    step, bottom = 21, svg.ROWS_TOP + 21 * len(measured)
    low, high = _range(v for _, kl in measured for v in (kl.median, kl.mean, kl.p99))
    description = "; ".join(f"{run.label(s.model)} {s.title}: mean {significant(kl.mean)}" for s, kl in measured)
    c = svg.Canvas(svg.WIDTH, bottom + 24, "KL divergence, All tokens", description)
    c.text(0, 14, "All tokens", "t")
    x = svg.scale(low, high, svg.ROWS_LEFT, svg.WIDTH - 52, log=True)
    svg.x_axis(c, x, svg.log_ticks(low, high), svg.ROWS_TOP - 4, bottom, svg.plain)
    ys = [svg.ROWS_TOP + step * (index + 0.5) for index in range(len(measured))]
    svg.label_rows(c, run, [side for side, _ in measured], ys)
    for (side, kl), y in zip(measured, ys, strict=True):
        series, tip = run.series(side.model), f"median {significant(kl.median)}, p99 {significant(kl.p99)}"
        c.line(x(kl.median), y, x(kl.p99), y, f"w s{series}", tip)
        c.mark(series, x(kl.mean), y, "f", f"mean {significant(kl.mean)}")
        c.text(svg.WIDTH, y + 4, significant(kl.mean), "v e")
    return c


def _breakdown(run: LoadedRun, title: str, rows: list[tuple[OfflineModel, dict[str, float]]]) -> svg.Canvas:
    keys = list(dict.fromkeys(key for _, means in rows for key in means))
    step, bottom = 19, svg.ROWS_TOP + 19 * len(keys)
    low, high = _range(v for _, means in rows for v in means.values())
    description = "; ".join(
        f"{key}: " + ", ".join(f"{run.label(s.model)} {s.title} {significant(means.get(key))}" for s, means in rows)
        for key in keys
    )
    c = svg.Canvas(svg.WIDTH, bottom + 24, f"Mean KL divergence {title}", description)
    c.text(0, 14, f"Mean, {title}", "t")
    x = svg.scale(low, high, svg.ROWS_LEFT, svg.WIDTH - 14, log=True)
    svg.x_axis(c, x, svg.log_ticks(low, high), svg.ROWS_TOP - 4, bottom, svg.plain)
    for index, key in enumerate(keys):
        y = svg.ROWS_TOP + step * (index + 0.5)
        c.text(svg.ROWS_LEFT - 8, y + 4, key.removeprefix("layers.").replace("_", " ").replace(".", " ")[:18], "e")
        for side, means in rows:
            if key in means:
                tip = f"{run.label(side.model)} {side.title}: {significant(means[key])}"
                css = "o" if side.how == "W4A16" else "f"
                c.mark(run.series(side.model), x(means[key]), y, css, tip)
    return c

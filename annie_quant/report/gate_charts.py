"""The charts of gates and KL divergence: against thresholds, offline and served, and against the size on disk.

KL divergence from bf16: over all tokens, then by token class, category and layer where they were measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from annie_quant.documents import GateResult, KLSummary
from annie_quant.report.format import count, size
from annie_quant.report.run import LoadedRun, MeasuredSide, OfflineModel
from annie_quant.report.svg import ROWS_LEFT, ROWS_TOP, WIDE, WIDTH, Drawing, Figure, log_ticks, plain, scale, ticks


def draw(run: LoadedRun) -> list[Figure]:
    """Return the charts of gates and KL divergence, in the order of the report."""
    return [gate_rates(run), offline_and_served(run), kl_divergence(run), size_and_gates(run)]


def gate_rates(run: LoadedRun) -> Figure:
    return Figure(
        "gates",
        "Share of answers that pass, with 95 % Wilson intervals; the dashed line is the threshold, "
        "the figures on the right are passes of n. A hollow mark is a gate that n cannot decide.",
        [(gate, _gate_panel(run, gate)) for gate in run.gate_names],
    )


def _gate_panel(run: LoadedRun, gate: str) -> Drawing:
    sides = [s for s in run.sides if gate in s.gates]
    results = [s.gates[gate] for s in sides]
    thresholds = {r.threshold for r in results}
    start = max(0.0, math.floor((min([r.low for r in results] + [*thresholds]) - 0.02) * 10) / 10)
    ys, bottom = _rows(19, len(sides))
    right = 30 + 6.6 * max(len(f"{r.passes}/{r.n}") for r in results)
    values = {
        **{"run": run, "gate": gate, "informs": all(r.advisory for r in results), "thresholds": thresholds},
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
    figure = Figure(
        "offline-served",
        "Pass rates of the same model without a server and behind one (n and intervals: the table of gates). Where a "
        "tool call is right in the raw text and lost behind the server, its parser is at fault and not the model.",
    )
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
    figure = Figure(
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


def _size_panel(run: LoadedRun, points: list[_Point]) -> Drawing:
    left, top = 52, 20
    largest = max(p.size_bytes for p in points)
    unit, unit_bytes = next((u for u in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)) if largest >= u[1]), ("B", 1.0))
    start = math.floor(min(p.result.low for p in points) * 5) / 5
    x, y = scale(0, largest * 1.12, left, WIDE - 14), scale(start, 1.0, SIZE_BOTTOM, top)
    placed: dict[str, int] = {}
    marks = []
    for p in points:
        placed[p.side.model] = placed.get(p.side.model, -1) + 1
        marks.append((p, x(p.size_bytes) + 10 * placed[p.side.model]))
    values = {
        **{"run": run, "unit": unit, "write": lambda value: plain(value / unit_bytes), "y_marks": ticks(start, 1, 5)},
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
        worst[p.side.model] = (p.size_bytes, min(p.result.rate, worst.get(p.side.model, (0, 1.0))[1]))
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


def _overall(run: LoadedRun, measured: Measured) -> Drawing:
    ys, bottom = _rows(21, len(measured))
    low, high = _range(v for _, kl in measured for v in (kl.median, kl.mean, kl.p99))
    values = {
        **{"run": run, "x": scale(low, high, ROWS_LEFT, WIDTH - 52, log=True), "marks": log_ticks(low, high)},
        "rows": [(side, kl, y) for (side, kl), y in zip(measured, ys, strict=True)],
        **{"left": ROWS_LEFT, "bottom": bottom},
    }
    return Drawing("divergence", WIDTH, bottom + 24, "KL divergence, All tokens", values)


def _breakdown(run: LoadedRun, title: str, rows: list[tuple[OfflineModel, dict[str, float]]]) -> Drawing:
    keys = list(dict.fromkeys(key for _, means in rows for key in means))
    ys, bottom = _rows(19, len(keys))
    low, high = _range(v for _, means in rows for v in means.values())
    values = {
        **{"run": run, "title": f"Mean, {title}", "rows": rows, "keys": list(zip(keys, ys, strict=True))},
        **{"x": scale(low, high, ROWS_LEFT, WIDTH - 14, log=True), "marks": log_ticks(low, high)},
        **{"left": ROWS_LEFT, "bottom": bottom},
    }
    return Drawing("breakdown", WIDTH, bottom + 24, f"Mean KL divergence {title}", values)

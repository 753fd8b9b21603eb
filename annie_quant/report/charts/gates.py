"""Figures of what the models say: gates against thresholds, offline against served, KL divergence."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from annie_quant.report.charts import svg
from annie_quant.report.charts.svg import Canvas
from annie_quant.report.format import clean, number, share, significant
from annie_quant.report.run import Run, Side

WIDTH = 340
WORDS = {"pass": "pass", "fail": "fail", "undecided": "undecided"}
SIGNS = {"pass": "✓", "fail": "✗", "undecided": "?"}


@dataclass
class Figure:
    """A titled set of panels. `caption` says what n is; `groups` sets panels apart (shown one group at a time)."""

    key: str
    caption: str
    panels: list[tuple[str, Canvas]] = field(default_factory=list)
    wide: bool = False
    groups: dict[str, str] = field(default_factory=dict)

    def group_of(self, panel: str) -> str:
        return panel.split(".")[0] if self.groups else ""


def rate(row: dict) -> float:
    share_: float = row["passes"] / row["n"] if row["n"] else 0.0
    return share_


def gate_panels(run: Run) -> Figure:
    """A panel a gate: every side's pass rate with its interval, against the threshold."""
    figure = Figure(
        "gates",
        "Share of answers that pass, with 95 % Wilson intervals; the dashed line is the threshold, "
        "the figures on the right are passes of n. A hollow mark is a gate that n cannot decide.",
    )
    for gate in run.gate_names:
        sides = [s for s in run.sides if gate in s.gates]
        figure.panels.append((gate, _gate_panel(run, gate, sides)))
    return figure


def _gate_panel(run: Run, gate: str, sides: list[Side]) -> Canvas:
    left, top, step = 118, 30, 19
    rows = [s.gates[gate] for s in sides]
    right = 30 + 6.6 * max(len(f"{r['passes']:g}/{r['n']:g}") for r in rows)
    thresholds: set[float] = {r["threshold"] for r in rows if r["threshold"] is not None}
    lowest: float = min([rate(r) if r["low"] is None else r["low"] for r in rows] + [*thresholds])
    start = max(0.0, math.floor((lowest - 0.02) * 10) / 10)
    bottom = top + step * len(sides)
    said = "; ".join(
        f"{run.label(s.model)} {s.title} {r['passes']:g} of {r['n']:g}, {r.get('verdict', '')}"
        for s, r in zip(sides, rows, strict=True)
    )
    c = Canvas(WIDTH, bottom + 22, f"Gate: {run.gate_title(gate)}", said)
    c.text(0, 14, run.gate_title(gate), "t")
    if all(r.get("advisory") for r in rows):
        c.text(WIDTH, 14, "informs only", "e")
    place = svg.scale(start, 1.0, left, WIDTH - right)
    svg.x_axis(c, place, svg.ticks(start, 1.0, 4), top - 4, bottom, svg.percent)
    for threshold in thresholds:
        c.line(place(threshold), top - 8, place(threshold), bottom, "h", f"threshold {share(threshold)}")
    previous = None
    for index, (side, row) in enumerate(zip(sides, rows, strict=True)):
        y, s = top + step * index + step / 2, run.series(side.model)
        verdict = row.get("verdict", "")
        tip = (
            f"{run.label(side.model)}, {side.title}: {row['passes']:g} of {row['n']:g} = {share(rate(row))} "
            f"({share(row.get('low'))} to {share(row.get('high'))}), {verdict}"
        )
        c.text(
            left - 8, y + 4, _short(run, side, side.model == previous), "e" + ("" if side.model == previous else " v")
        )
        previous = side.model
        if number(row.get("low")) is not None and number(row.get("high")) is not None:
            c.line(place(row["low"]), y, place(row["high"]), y, f"w s{s}", tip)
        c.mark(s, place(rate(row)), y, "o" if verdict == "undecided" else "f", tip)
        c.text(WIDTH - 14, y + 4, f"{row['passes']:g}/{row['n']:g}", "v e")
        c.text(WIDTH - 4, y + 4, SIGNS.get(verdict, ""), "v m")
    return c


def _short(run: Run, side: Side, repeated: bool) -> str:
    words = side.title.split()[0] if side.kind == "offline" else "served"
    words = "bf16" if words == "reference" and repeated else words
    own = run.label(side.model).replace("NVFP4 ", "")
    if repeated:
        return words
    return own[:11] + ("" if words == "reference" else f" · {words}")


def offline_and_served(run: Run) -> Figure:
    """A panel a model that has both: each gate's rate offline (per numerics) and behind its server."""
    figure = Figure(
        "offline-served",
        "Pass rates of the same model without a server and behind one (n and intervals: the table of gates). Where a "
        "tool call is right in the raw text and lost behind the server, its parser is at fault and not the model.",
    )
    for model in run.models:
        sides = [s for s in run.sides if s.model == model["name"] and s.gates]
        if {s.kind for s in sides} == {"offline", "served"}:
            gates = [g for g in run.gate_names if all(g in s.gates for s in sides)]
            figure.panels.append((model["name"], _both_panel(run, model, sides, gates)))
    return figure


# Each way of running has its own shape; the colour is the model's.
_WAYS = {"reference": (0, "f"), "W4A4": (0, "f"), "W4A16": (0, "o"), "served": (2, "f")}


def _both_panel(run: Run, model: dict, sides: list[Side], gates: list[str]) -> Canvas:
    left, top, step, series = 146, 50, 20, run.series(model["name"])
    bottom = top + step * len(gates)
    said = "; ".join(
        f"{s.title}: " + ", ".join(f"{run.gate_title(g)} {share(rate(s.gates[g]))}" for g in gates) for s in sides
    )
    c = Canvas(WIDTH, bottom + 24, f"{model['label']}: offline and served", said)
    c.text(0, 14, model["label"], "t")
    ways = [(*_WAYS.get(way(s), (1, "o")), way(s)) for s in sides]
    for index, (shape, css, words) in enumerate(ways):
        at = left - 34 + index * 76
        c.mark(shape, at, 31, f"{css} x{series}")
        c.text(at + 9, 35, words)
    start = math.floor(min([rate(s.gates[g]) for s in sides for g in gates] + [0.9]) * 10) / 10
    place = svg.scale(start, 1.0, left, WIDTH - 20)
    svg.x_axis(c, place, svg.ticks(start, 1.0, 5), top - 4, bottom, svg.percent)
    for line, gate in enumerate(gates):
        y = top + step * line + step / 2
        c.text(left - 10, y + 4, run.gate_title(gate), "e")
        xs = [place(rate(s.gates[gate])) for s in sides]
        c.line(min(xs), y, max(xs), y, "a")
        for index, (side, x) in enumerate(zip(sides, xs, strict=True)):
            found, (shape, css, _) = side.gates[gate], ways[index]
            # Marks of one rate would hide each other: they fan out by a few pixels.
            shift = 5 * (index - (len(sides) - 1) / 2)
            c.mark(shape, x, y + shift, f"{css} x{series}", f"{side.title}: {found['passes']:g} of {found['n']:g}", 3.6)
    return c


def way(side: Side) -> str:
    """reference, W4A4, W4A16 or served."""
    return side.title.split()[0] if side.kind == "offline" else "served"


def kl_sides(run: Run) -> list[Side]:
    return [s for s in run.of("offline") if "mean" in s.data["kl"]]


def kl_panels(run: Run) -> Figure:
    """KL divergence from bf16: overall, then by token class and by category where they were measured."""
    sides = kl_sides(run)
    counts = sorted({int(n) for s in sides if (n := number(s.data["kl"].get("n_tokens")))})
    tokens = " or ".join(f"{n:,}".replace(",", "\u202f") for n in counts)
    figure = Figure(
        "kl",
        f"KL divergence from bf16 per assistant token, in nats (n = {tokens or 'unknown'} tokens a side), on a "
        "logarithmic axis. All tokens: the mark is the mean, the line runs from the median to the 99th percentile. The "
        "other panels: means, filled W4A4, hollow W4A16; by layer: with this part alone in four bits.",
    )
    if not sides:
        return figure
    figure.panels.append(("overall", _kl_panel(run, "All tokens", [(s, s.data["kl"]) for s in sides])))
    for part, title in (("by_class", "by token class"), ("by_category", "by category"), ("by_layer", "by layer")):
        names = dict.fromkeys(k for s in sides for k in s.data["kl"].get(part, {}))
        if names:
            figure.panels.append((part, _kl_breakdown(run, title, part, list(names), sides)))
    return figure


def _log_range(found: list[float | None], least: float = 1e-6) -> tuple[float, float]:
    some = [max(v, least) for v in found if v is not None]
    low, high = min(some, default=least), max(some, default=1.0)
    return 10 ** math.floor(math.log10(low)), 10 ** math.ceil(math.log10(high * 1.0001))


def _kl_panel(run: Run, title: str, rows: list[tuple[Side, dict]]) -> Canvas:
    left, top, step = 118, 30, 21
    low, high = _log_range([number(kl.get(k)) for _, kl in rows for k in ("median", "mean", "p99")])
    bottom = top + step * len(rows)
    c = Canvas(
        WIDTH,
        bottom + 24,
        f"KL divergence, {title}",
        "; ".join(f"{run.label(s.model)} {s.title}: mean {significant(kl.get('mean'))}" for s, kl in rows),
    )
    c.text(0, 14, title, "t")
    place = svg.scale(low, high, left, WIDTH - 52, log=True)
    svg.x_axis(c, place, svg.log_ticks(low, high), top - 4, bottom, svg.plain)
    previous = None
    for index, (side, kl) in enumerate(rows):
        y, s = top + step * index + step / 2, run.series(side.model)
        c.text(
            left - 8, y + 4, _short(run, side, side.model == previous), "e" + ("" if side.model == previous else " v")
        )
        previous = side.model
        a, b = number(kl.get("median")), number(kl.get("p99"))
        if a is not None and b is not None:
            c.line(place(a), y, place(b), y, f"w s{s}", f"median {significant(a)}, p99 {significant(b)}")
        c.mark(s, place(kl["mean"]), y, "f", f"mean {significant(kl['mean'])}")
        c.text(WIDTH, y + 4, significant(kl["mean"]), "v e")
    return c


def _kl_breakdown(run: Run, title: str, part: str, names: list[str], sides: list[Side]) -> Canvas:
    left, top, step = 118, 30, 19
    cells = {(n, s.key): s.data["kl"].get(part, {}).get(n) for n in names for s in sides}
    low, high = _log_range(list(cells.values()))
    bottom = top + step * len(names)
    c = Canvas(
        WIDTH,
        bottom + 24,
        f"Mean KL divergence {title}",
        "; ".join(
            f"{n}: " + ", ".join(f"{run.label(s.model)} {s.title} {significant(cells[n, s.key])}" for s in sides)
            for n in names
        ),
    )
    c.text(0, 14, f"Mean, {title}", "t")
    place = svg.scale(low, high, left, WIDTH - 14, log=True)
    svg.x_axis(c, place, svg.log_ticks(low, high), top - 4, bottom, svg.plain)
    for index, key in enumerate(names):
        y = top + step * index + step / 2
        c.text(left - 8, y + 4, clean(key).removeprefix("layers.").replace("_", " ").replace(".", " ")[:18], "e")
        for side in sides:
            value = cells[key, side.key]
            if value is not None:
                hollow = side.title.startswith("W4A16")
                c.mark(
                    run.series(side.model),
                    place(value),
                    y,
                    "o" if hollow else "f",
                    f"{run.label(side.model)} {side.title}: {significant(value)}",
                )
    return c

"""Figures of bytes: size on disk against manners, memory of the servers."""

from __future__ import annotations

import math
from collections.abc import Callable

from annie_quant.report.charts import svg
from annie_quant.report.charts.gates import WIDTH, Figure, rate, way
from annie_quant.report.charts.svg import Canvas
from annie_quant.report.format import clean, number, share, size
from annie_quant.report.run import Run, Side

SOURCES = {
    "process_rss_bytes": "resident memory of the server's processes",
    "gpu_process_bytes": "GPU memory of the server's processes as NVML gives it",
    "system_used_bytes": "MemTotal − MemAvailable of the whole machine",
}


def weakest(side: Side) -> tuple[str, dict] | None:
    """The deciding gate with the lowest pass rate: a model has the manners of its worst gate."""
    rows = [(g, r) for g, r in side.gates.items() if not r.get("advisory") and number(r.get("n"))]
    return min(rows, key=lambda item: (rate(item[1]), number(item[1].get("low")) or 0), default=None)


def pareto(run: Run) -> Figure:
    """Size on disk against the worst gate's pass rate, a mark a side."""
    points = [
        (m, s, *w)
        for m in run.models
        if number(m.get("size_bytes"))
        for s in run.sides
        if s.model == m["name"] and (w := weakest(s))
    ]
    figure = Figure(
        "pareto",
        "A model has the manners of its worst gate: the lowest pass rate of any deciding gate, with its 95 % interval, "
        "against size on disk. Up and left is better. Circles: offline (filled W4A4 or reference, hollow W4A16); "
        "diamonds: served. The line joins the models whose worst side no smaller one reaches. n: the table of gates.",
        wide=True,
    )
    if len({p[0]["name"] for p in points}) > 1:
        figure.panels.append(("pareto", _pareto_panel(run, points)))
    return figure


def _pareto_panel(run: Run, points: list[tuple[dict, Side, str, dict]]) -> Canvas:
    width, height, left, top, bottom = 720, 330, 52, 20, 250
    said = "; ".join(
        f"{m['label']} {s.title}: {size(m['size_bytes'])}, worst gate {run.gate_title(g)} {share(rate(r))}"
        for m, s, g, r in points
    )
    c = Canvas(width, height, "Size against manners", said)
    largest = max(m["size_bytes"] for m, *_ in points)
    unit, scale = next((u for u in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)) if largest >= u[1]), ("B", 1.0))
    start = math.floor(min(number(r.get("low")) or 0.0 for *_, r in points) * 5) / 5
    x, y = svg.scale(0, largest * 1.12, left, width - 14), svg.scale(start, 1.0, bottom, top)
    marks = [t * scale for t in svg.ticks(0, largest * 1.12 / scale, 7)]
    svg.x_axis(c, x, marks, top, bottom, lambda v: svg.plain(v / scale), f"size on disk, {unit}")
    svg.y_axis(c, y, svg.ticks(start, 1, 5), left, width - 14, svg.percent)
    worst: dict[str, tuple[float, float]] = {}
    for m, _, _, row in points:
        worst[m["name"]] = (m["size_bytes"], min(rate(row), worst.get(m["name"], (0, 1.0))[1]))
    front: list[tuple[float, float]] = []
    for bytes_, share_ in sorted(worst.values(), key=lambda p: (p[0], -p[1])):
        if not front or share_ > front[-1][1]:
            front.append((bytes_, share_))
    if len(front) > 1:
        c.path([(x(a), y(b)) for a, b in front], "h")
    placed: dict[str, int] = {}
    for m, side, gate, row in points:
        at = placed[m["name"]] = placed.get(m["name"], -1) + 1
        px, s = x(m["size_bytes"]) + 10 * at, run.series(m["name"])
        seen = f"{run.gate_title(gate)} {row['passes']:g} of {row['n']:g}"
        tip = f"{m['label']}, {side.title}: {size(m['size_bytes'])}, {seen}"
        if number(row.get("low")) is not None and number(row.get("high")) is not None:
            c.line(px, y(row["low"]), px, y(row["high"]), f"w s{s}", tip)
        kind = way(side)
        c.mark(2 if kind == "served" else 0, px, y(rate(row)), f"{'o' if kind == 'W4A16' else 'f'} x{s}", tip, 5)
    _names(c, run, points, x, bottom + 50)
    return c


def _names(c: Canvas, run: Run, points: list, x: Callable[[float], float], y: float) -> None:
    """Each model's name under its place, in a second and third line where they would meet."""
    ends = [-99.0, -99.0, -99.0]
    for m in sorted({p[0]["name"]: p[0] for p in points}.values(), key=lambda m: m["size_bytes"]):
        px, label = x(m["size_bytes"]), f"{m['label']} · {size(m['size_bytes'])}"
        long = 7.0 * len(label) + 16
        right = px + long > c.width
        start = px - long if right else px
        lane = next((i for i, end in enumerate(ends) if start > end), 2)
        ends[lane] = start + long
        c.mark(run.series(m["name"]), px, y + 16 * lane - 4, f"f x{run.series(m['name'])}")
        c.text(px + (-9 if right else 9), y + 16 * lane, label, "v e" if right else "v")


def memory_bars(run: Run) -> Figure:
    """Memory of each server: idle, with one request, with five at once."""
    sides = [s for s in run.of("served") if s.data["memory_bytes"]]
    levels = [("idle", "idle"), ("one", "1 request"), ("five", "5 at once")]
    found = sorted({str(s.data["memory_bytes"].get("source") or "") for s in sides} - {""})
    words = ", ".join(SOURCES.get(f, clean(f)) for f in found) or "source not recorded"
    figure = Figure("memory", f"Memory of each server: {words}; the highest seen, one measurement each (n = 1).")
    largest = max([number(s.data["memory_bytes"].get(k)) or 0 for s in sides for k, _ in levels], default=0)
    if not largest:
        return figure
    step, top, left = 17, 26, 76
    for side in sides:
        series, memory = run.series(side.model), side.data["memory_bytes"]
        said = "; ".join(f"{words}: {size(memory.get(k))}" for k, words in levels)
        c = Canvas(WIDTH, top + step * 3 + 4, f"Memory: {run.label(side.model)}, {side.title}", said)
        c.text(0, 14, run.label(side.model), "t")
        place = svg.scale(0, largest, 0, WIDTH - left - 66)
        for index, (key, words) in enumerate(levels):
            value, y = number(memory.get(key)), top + step * index
            c.text(left - 8, y + 10, words, "e")
            if value is not None:
                c.bar(left, y, place(value), step - 5, f"f s{series}")
            c.text(left + (place(value) if value else 0) + 6, y + 10, size(value), "v")
        figure.panels.append((side.key, c))
    return figure

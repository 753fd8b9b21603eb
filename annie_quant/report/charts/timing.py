"""Figures of time: TTFT over turns, distributions, single streams token by token, total latency against length."""

from __future__ import annotations

from annie_quant.judge.metrics import COMPARED, METRICS
from annie_quant.report import recount
from annie_quant.report.charts import svg
from annie_quant.report.charts.gates import WIDTH, Figure
from annie_quant.report.charts.svg import Canvas
from annie_quant.report.format import clean, count, name, number, significant
from annie_quant.report.run import Run, Side

POINTS = 64  # of a distribution's curve
FEWEST = 5  # values that make a distribution
LONGEST = 400  # tokens of an answer, the end of the axis
DISTRIBUTIONS = {name: METRICS[name].title for name in COMPARED if METRICS[name].unit == "ms"}


def backend_of(side: Side) -> str:
    return side.key.split("/", 1)[1]


def turns(run: Run) -> Figure:
    """Content TTFT (p50 with its interval) against the turn of a conversation."""
    lines = {}
    for side in run.of("served"):
        rows = [
            r
            for r in run.aggregates["turns"].get(backend_of(side), [])
            if r["p50"] is not None and number(r.get("turn")) is not None
        ]
        if len(rows) > 1:
            lines[side.key] = (side, rows)
    counts = sorted({int(r["n"]) for _, rows in lines.values() for r in rows if number(r.get("n"))})
    figure = Figure(
        "turns",
        "Time to the first token of content against the turn of a growing conversation: p50 with its "
        f"95 % interval (n = {' to '.join(dict.fromkeys(map(str, (counts[:1] + counts[-1:]))))} "
        "requests a mark)."
        if counts
        else "",
        wide=True,
    )
    if not lines:
        return figure
    width, left, top, bottom, right = 720, 52, 26, 236, 150
    high = max(number(r.get("high")) or r["p50"] for _, rows in lines.values() for r in rows) * 1.05
    last = max(int(r["turn"]) for _, rows in lines.values() for r in rows)
    c = Canvas(
        width,
        bottom + 40,
        "TTFT over turns",
        "; ".join(
            f"{run.label(s.model)}: " + ", ".join(f"turn {r['turn']} {significant(r['p50'])} ms" for r in rows)
            for s, rows in lines.values()
        ),
    )
    c.text(0, 12, "TTFT content, ms")
    x, y = svg.scale(1, last, left + 14, width - right), svg.scale(0, high, bottom, top)
    svg.y_axis(c, y, svg.ticks(0, high), left, width - right + 14)
    for turn in range(1, last + 1):
        c.text(x(turn), bottom + 16, turn, "m")
    c.text((x(1) + x(last)) / 2, bottom + 33, "turn", "m")
    ends = []
    for index, (side, rows) in enumerate(lines.values()):
        s, shift = run.series(side.model), 5 * (index - (len(lines) - 1) / 2)
        points = [(x(r["turn"]) + shift, y(r["p50"])) for r in rows]
        c.path(points, f"l s{s}")
        for r, (px, py) in zip(rows, points, strict=True):
            tip = f"{run.label(side.model)}, turn {r['turn']}: {significant(r['p50'])} ms, n = {r.get('n')}"
            if number(r.get("low")) is not None and number(r.get("high")) is not None:
                c.line(px, y(r["low"]), px, y(r["high"]), f"w s{s}", tip)
            c.mark(s, px, py, "f", tip)
        ends.append((points[-1][1], side, s))
    end_labels(c, run, ends, width - right + 22)
    figure.panels.append(("turns", c))
    return figure


def end_labels(c: Canvas, run: Run, ends: list[tuple[float, Side, int]], x: float) -> None:
    """Names beside the lines' ends, pushed apart where they would lie on each other."""
    previous = -99.0
    for y, side, s in sorted(ends, key=lambda e: e[0]):
        y = max(y, previous + 15)
        previous = y
        c.mark(s, x, y, "f")
        c.text(x + 9, y + 4, run.label(side.model), "v")


def distributions(run: Run, clocked: list[dict]) -> Figure:
    """A panel a workload and metric: the share of values at or below x, a curve a backend."""
    figure = Figure(
        "distributions",
        "Share of values at or below the time on the axis (cumulative, measured requests only; "
        "for inter-token latency every gap of every stream counts). Curves of 100 "
        "values and more end at their 99th percentile; fewer than five values are no distribution and are left out.",
        groups=dict(DISTRIBUTIONS),
    )
    by_backend = {
        s.key: recount.grouped([r for r in clocked if r.get("backend") == backend_of(s)], recount.label)
        for s in run.of("served")
    }
    labels = sorted({w for groups in by_backend.values() for w in groups})
    for metric, title in DISTRIBUTIONS.items():
        for workload in labels:
            curves = [
                (s, sorted(found))
                for s in run.of("served")
                if len(found := recount.values(by_backend[s.key].get(workload, []), metric)) >= FEWEST
            ]
            if curves:
                figure.panels.append((f"{metric}.{workload}", _ecdf(run, workload, title, curves)))
    present = {p.split(".")[0] for p, _ in figure.panels}
    figure.groups = {k: v for k, v in figure.groups.items() if k in present}
    return figure


def _ecdf(run: Run, workload: str, title: str, curves: list[tuple[Side, list[float]]]) -> Canvas:
    left, top, bottom, right = 30, 42, 160, 8
    low = min(found[0] for _, found in curves)
    high = max(_end(found) for _, found in curves)
    high = high if high > low else low + max(abs(low) * 0.1, 0.1)
    log = low > 0 and high / low > 20
    middles = [recount.quantile(found, 0.5) for _, found in curves]
    said = "; ".join(
        f"{run.label(side.model)}: p50 {significant(p50)} ms, p99 {significant(recount.quantile(found, 0.99))} ms, "
        f"n {len(found)}"
        for (side, found), p50 in zip(curves, middles, strict=True)
    )
    c = Canvas(WIDTH, bottom + 22, f"{name(workload)}: {title}", said)
    c.text(0, 13, name(workload), "t")
    counts = sorted({len(found) for _, found in curves})
    c.text(WIDTH - right, 13, f"ms · n = {'–'.join(map(count, dict.fromkeys(counts[:1] + counts[-1:])))}", "e")
    c.text(0, 32, "p50")
    for index, ((side, _), p50) in enumerate(zip(curves[:4], middles, strict=False)):
        c.mark(run.series(side.model), left + 8 + index * 76, 28, "f")
        c.text(left + 16 + index * 76, 32, significant(p50), "v")
    place, height = svg.scale(low, high, left, WIDTH - right, log), svg.scale(0, 1, bottom, top)
    svg.x_axis(c, place, svg.log_ticks(low, high) if log else svg.ticks(low, high, 5), top, bottom)
    svg.y_axis(c, height, [0, 0.5, 1], left, WIDTH - right)
    for side, found in curves:
        c.path([(place(v), height(f)) for v, f in _steps(found, high)], f"l s{run.series(side.model)}")
    return c


def _end(found: list[float]) -> float:
    """Where a sorted sample's curve may end: the 99th percentile, the greatest value while that is no percentile."""
    return found[-1] if len(found) < 100 else recount.quantile(found, 0.99) or found[-1]


def _steps(found: list[float], high: float) -> list[tuple[float, float]]:
    """(value, share at or below) of a sorted sample: true steps for few values, a thinned curve for many."""
    n = len(found)
    if n <= POINTS:
        corners = [(v, f) for i, v in enumerate(found) for f in (i / n, (i + 1) / n)]
    else:
        corners = [(found[0], 0.0)] + [
            (found[i], (i + 1) / n) for i in (k * (n - 1) // (POINTS - 1) for k in range(POINTS))
        ]
    return [(v, f) for v, f in corners if v <= high]


def streams(run: Run, clocked: list[dict]) -> Figure:
    """One answer to the same prompt by each backend, a tick for each token as it arrived."""
    figure = Figure("streams", "", wide=True)
    chosen = _common_prompt(run, clocked)
    if not chosen:
        return figure
    shown = []
    for side, record in chosen:
        gaps = recount.values([record], "itl_ms")
        firsts = [number(record.get(f"first_{kind}_ms")) for kind in ("reasoning", "content", "tool")]
        start = min((v for v in firsts if v is not None), default=0.0)
        times = [start]
        for gap in gaps:
            times.append(times[-1] + gap)
        shown.append((side, record, times))
    workload, case = chosen[0][1]["workload"], chosen[0][1].get("case")
    figure.caption = (
        f"One stream a backend, the same prompt ({name(workload)}, case {clean(case)}): each tick is a piece of the "
        "answer as it arrived, the line from zero is the wait for the first. n = 1 request each: an "
        "illustration, not a measurement."
    )
    left, step, top, right = 132, 34, 14, 86
    end = max(times[-1] for *_, times in shown) or 1.0
    bottom = top + step * len(shown)
    c = Canvas(
        720,
        bottom + 34,
        "Single streams over time",
        "; ".join(
            f"{run.label(s.model)}: first after {significant(t[0])} ms, {len(t)} pieces, last {significant(t[-1])} ms"
            for s, _, t in shown
        ),
    )
    place = svg.scale(0, end, left, 720 - right)
    svg.x_axis(c, place, svg.ticks(0, end, 7), top - 4, bottom, svg.plain, "milliseconds since the request")
    for index, (side, _, times) in enumerate(shown):
        y, s = top + step * index + step / 2, run.series(side.model)
        c.text(left - 8, y + 4, run.label(side.model)[:19], "v e")
        c.line(place(0), y, place(times[0]), y, f"l s{s}", f"first after {significant(times[0])} ms")
        ticks = "".join(f"M{place(t):.1f} {y - 9:.1f}v18" for t in times)
        c.parts.append(f'<path d="{ticks}" class="l s{s}" style="stroke-width:1"/>')
        c.text(724 - right, y + 4, f"{len(times)} pieces", "")
    figure.panels.append(("streams", c))
    return figure


def _common_prompt(run: Run, clocked: list[dict]) -> list[tuple[Side, dict]]:
    """The prompt with the longest shortest answer that every backend (or as many as can be) streamed."""
    sides = {backend_of(s): s for s in run.of("served")}
    prompts: dict[tuple, dict[str, dict]] = {}
    for record in clocked:
        if record.get("backend") in sides and recount.values([record], "itl_ms"):
            key = (record["workload"], record.get("case"), record.get("turn"))
            prompts.setdefault(key, {}).setdefault(record["backend"], record)
    if not prompts:
        return []
    most = max(len(found) for found in prompts.values())
    best = max(
        (found for found in prompts.values() if len(found) == most),
        key=lambda found: min(len(r["itl_ms"]) for r in found.values()),
    )
    return [(sides[b], best[b]) for b in sides if b in best]


def latency_lines(run: Run) -> Figure:
    """Total latency against answer length from the medians: TTFT + tokens × TPOT, and where two backends cross."""
    figure = Figure("crossover", "", wide=True)
    lines = []
    for side in run.of("served"):
        rows = [w for label, w in side.data["workloads"].items() if "@" not in label]
        pairs = [(w.get("ttft_content_ms", {}).get("p50"), w.get("tpot_ms", {}).get("p50")) for w in rows]
        pairs = [(a, b) for a, b in pairs if a is not None and b is not None]
        if pairs:
            lines.append((side, *(sum(v) / len(pairs) for v in zip(*pairs, strict=True)), len(pairs)))
    if len(lines) < 2:
        return figure
    longest = LONGEST
    figure.caption = (
        f"Total latency against the length of the answer: TTFT + tokens × TPOT from the medians, averaged over "
        f"{min(n for *_, n in lines)} workloads." + _crossings(run)
    )
    width, left, top, bottom, right = 720, 52, 26, 216, 150
    high = max(t + longest * p for _, t, p, _ in lines)
    c = Canvas(
        width,
        bottom + 40,
        "Total latency against answer length",
        "; ".join(f"{run.label(s.model)}: {significant(t)} ms + {significant(p)} ms a token" for s, t, p, _ in lines),
    )
    c.text(0, 12, "total latency, ms")
    x, y = svg.scale(0, longest, left, width - right), svg.scale(0, high, bottom, top)
    svg.x_axis(c, x, svg.ticks(0, longest, 5), top, bottom, svg.plain, "tokens of the answer")
    svg.y_axis(c, y, svg.ticks(0, high), left, width - right)
    for side, ttft, tpot, _ in lines:
        c.path([(x(0), y(ttft)), (x(longest), y(ttft + longest * tpot))], f"l s{run.series(side.model)}")
    end_labels(c, run, [(y(t + longest * p), s, run.series(s.model)) for s, t, p, _ in lines], width - right + 14)
    figure.panels.append(("crossover", c))
    return figure


def _crossings(run: Run) -> str:
    words, labels = [], {backend_of(s): run.label(s.model) for s in run.of("served")}
    for row in run.aggregates["crossover"]:
        tokens = number(row.get("tokens"))
        if tokens and tokens <= 10 * LONGEST and row.get("faster_when_short") != row.get("faster_when_long"):
            short, long = (labels.get(row[k], name(row[k])) for k in ("faster_when_short", "faster_when_long"))
            words.append(f" {short} is faster below {significant(tokens)} tokens, {long} above.")
    return "".join(words)

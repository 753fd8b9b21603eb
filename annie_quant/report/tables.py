"""The report's tables, written once for HTML, Markdown and CSV.

A cell has the key of the figure that it shows ("gate|served/naive|tool_call"). HTML keeps it as
data-k, so that a test can compare every number with the records.
"""

from __future__ import annotations

import csv
import io
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import to_builtins
from msgspec.structs import asdict

from annie_quant import documents
from annie_quant.core.text import inert
from annie_quant.core.untrusted import JsonObject
from annie_quant.judge.decision.wording import is_change
from annie_quant.judge.metrics import COMPARED, METRICS
from annie_quant.judge.pairing import is_tested
from annie_quant.report import format
from annie_quant.report.run import LoadedRun, MeasuredSide, OfflineModel, ServedModel

if TYPE_CHECKING:
    from markupsafe import Markup

LABELS = {metric: METRICS[metric].label for metric in COMPARED}
LEVELS = ("idle", "one", "five")


@dataclass
class Cell:
    """A cell.

    sub: a second, smaller line.
    key: which figure it shows.
    css: classes of the page's style sheet.
    sort: the value to sort by.
    """

    text: str
    sub: str = ""
    key: str = ""
    css: str = ""
    span: int = 1
    sort: float | None = None


@dataclass
class Table:
    """A table.

    first: header of the first column.
    header: headers of the other columns.
    rows: (name, cells).
    groups: a header row above `header`, of (text, span, model).
    """

    caption: str
    first: str
    header: list[str] = field(default_factory=list)
    rows: list[tuple[str, list[Cell]]] = field(default_factory=list)
    groups: list[tuple[str, int, str]] = field(default_factory=list)
    sortable: bool = False

    def add(self, name: str, cells: Mapping[str, Cell]) -> None:
        """Add a row. cells: by the header of their column."""
        self.header = list(cells)
        self.rows.append((name, list(cells.values())))


def figure(text: str, key: str, value: float | None) -> Cell:
    return Cell(text, key=key, sort=value)


def number_cell(
    row: object,
    field: str,
    key: str,
    write: Callable[[float | None], str] = format.significant,
) -> Cell:
    """Return a field of a row as a cell, with its key."""
    value = getattr(row, field)
    return Cell(write(value), key=f"{key}{field}", sort=value)


def gate_cell(run: LoadedRun, side: MeasuredSide, gate: str) -> Cell:
    """Return a gate's passes with its verdict, and below the counts that decide it and the interval of the rate.

    The reference loses nothing, so it has neither sign nor colour. Nor has what neither side passes once.
    """
    result = side.gates.get(gate)
    if result is None:
        return Cell("", css="none")
    text = passes(result)
    notes = [f"{format.interval(result.low, result.high, format.percent)}\u00a0%"]
    css = "none"
    if not run.is_reference(side):
        pair = side.pair(gate)
        if pair is not None:
            notes.insert(0, _counts(gate, result, pair))
        if not side.shows_nothing(gate):
            text = f"{text} {format.SIGNS[result.verdict]}"
            css = "advisory" if result.advisory else result.verdict
    return Cell(
        text,
        "; ".join(notes),
        f"gate|{side.key}|{gate}",
        css,
        sort=result.rate,
    )


def _counts(gate: str, result: documents.GateResult, pair: documents.PairedGate) -> str:
    """Return what decides a gate that was compared: answers lost and won on the reference's prompts."""
    if not is_tested(gate, pair):
        return f"not tested, the reference passes {pair.passed} of {pair.n}"
    text = f"{pair.lost} lost, {pair.won} won"
    missing = pair.n - result.n
    if missing > 0:
        text = f"{text} of {pair.n}, {missing} without an answer to judge"
    return text


def passes(result: documents.GateResult) -> str:
    return f"{format.count(result.passes)}/{format.count(result.n)}"


def metric_summary(side: ServedModel, workload: str, metric: str) -> documents.MetricSummary | None:
    of_workload = side.data.workloads.get(workload)
    return getattr(of_workload, metric) if of_workload else None


def metric_cell(side: ServedModel, workload: str, metric: str, stat: str = "p50") -> Cell:
    row = metric_summary(side, workload, metric)
    if row is None:
        return Cell(format.DASH, css="none")
    value = getattr(row, stat)
    sub = format.interval(row.low, row.high) if stat == "p50" else ""
    return Cell(
        format.significant(value), sub, f"metric|{side.key}|{workload}|{metric}|{stat}", sort=value
    )


def speed_cell(side: ServedModel, gate: str, metric: str) -> Cell:
    """Return the figure that a speed limit judges, over all workloads; where there is none, the greeting's."""
    row = side.data.speed_gates.get(gate)
    if row is None:
        return metric_cell(side, "greeting", metric)
    text = f"{format.significant(row.value)} {format.SIGNS[row.verdict]}"
    return Cell(
        text,
        format.interval(row.low, row.high),
        f"speed|{side.key}|{gate}",
        row.verdict,
        sort=row.value,
    )


TIMES = "Times: over all requests of a side; the verdict compares two sides over the prompts that both answered."


CELL_CAPTION = (
    "Passes of n with ✓ keeps, ✗ loses, ? undecided. Below: the answers lost and won against the reference on the same prompts, "
    "which decide, and the 95 % interval of the rate."
)
CHANGED_CAPTION = f"Changed against bf16's own answers; a change is not an error. {CELL_CAPTION}"


def side_by_side(run: LoadedRun) -> Table:
    """Return sizes, gates with a right and wrong, and speed of all models."""
    table, models, columns = _sides_table(
        run, f"Right or wrong, by labels and rules. {CELL_CAPTION} {TIMES}"
    )

    def add_model_row(title: str, cell: Callable[[documents.ModelRow], Cell]) -> None:
        cells = [cell(m) for m in models]
        for c, (_, span, _) in zip(cells, table.groups, strict=True):
            c.span = span
        if any(c.text != format.DASH for c in cells):
            table.rows.append((title, cells))

    def add_served_row(title: str, cell: Callable[[ServedModel], Cell]) -> None:
        cells = [cell(s) if isinstance(s, ServedModel) else Cell("", css="none") for s in columns]
        if any(c.key for c in cells):
            table.rows.append((title, cells))

    add_model_row("size on disk", lambda m: Cell(format.size(m.size_bytes), key=f"size|{m.name}"))
    add_model_row("bits per weight", _bits_cell)
    add_model_row("decode, tok/s (predicted)", predicted_cell)
    add_model_row("first token, ms (predicted)", lambda m: Cell(format.first_token(m.first_token)))
    _add_gates(table, run, columns, [gate for gate in run.gate_names if not is_change(gate)])
    longest = next(iter(run.workloads), "")
    if "long_response" in run.workloads:
        longest = "long_response"
    itl = f"ITL p50, ms ({format.name(longest)})"
    ttft = "content TTFT p50, ms (≤ 120)"
    decode = "decode speed p50, tok/s (≥ 25)"
    add_served_row(ttft, lambda s: speed_cell(s, "ttft", "ttft_content_ms"))
    add_served_row(itl, lambda s: metric_cell(s, longest, "itl_ms"))
    add_served_row(decode, lambda s: speed_cell(s, "decode", "decode_tok_s"))
    return table


def changes(run: LoadedRun) -> Table:
    """Return the gates that compare with bf16's own answers, of all models."""
    table, _, columns = _sides_table(run, CHANGED_CAPTION)
    _add_gates(table, run, columns, [gate for gate in run.gate_names if is_change(gate)])
    return table


def _sides_table(
    run: LoadedRun, caption: str
) -> tuple[Table, list[documents.ModelRow], list[MeasuredSide | None]]:
    """Return a table without rows, its models and its columns; unlisted models only where there is no other."""
    table = Table(caption, "", [])
    models = [m for m in run.models if m.name not in run.unlisted] or run.models
    columns: list[MeasuredSide | None] = []
    for model in models:
        sides = run.sides_of(model.name)
        columns += sides or [None]
        table.groups.append((run.label(model.name), max(1, len(sides)), model.name))
        for side in sides:
            # Two lines: the arithmetic or "served", then "offline" or the server.
            served = side.kind == "served"
            place = side.title.removesuffix(" served") if served else "offline"
            table.header.append(f"{side.how}\n{place}")
        if not sides:
            table.header.append("not measured")
    return table, models, columns


def _add_gates(
    table: Table, run: LoadedRun, columns: Sequence[MeasuredSide | None], gates: Sequence[str]
) -> None:
    for gate in gates:
        advisory = all(s.gates[gate].advisory for s in columns if s and gate in s.gates)
        title = run.gate_title(gate) + (" (informs only)" if advisory else "")
        cells = [gate_cell(run, s, gate) if s else Cell("", css="none") for s in columns]
        table.rows.append((title, cells))


def _bits_cell(model: documents.ModelRow) -> Cell:
    return Cell(format.significant(model.bits_per_weight), key=f"bits|{model.name}")


def predicted_cell(model: documents.ModelRow) -> Cell:
    """Return the predicted speed of one stream and the device."""
    speed = model.predicted
    return Cell(
        f"{format.significant(speed.tok_s)} ({speed.device})" if speed else format.DASH,
        key=f"predicted|{model.name}",
    )


MEETS = {"pass": "meets {}", "fail": "misses {}", "undecided": "{} undecided"}


def gates_table(run: LoadedRun) -> Table:
    """One row per side and gate, with the rule."""
    caption = "Every gate of every model under every numerics and behind every server"
    table = Table(caption, "model", sortable=True)
    for side, gate in itertools.product(run.sides, run.gate_names):
        r = side.gates.get(gate)
        if r is None:
            continue
        key = f"{side.key}|{gate}"
        share = format.share
        required = MEETS[r.meets].format(r.requirement) if r.meets and r.requirement else ""
        cells = {
            "where": Cell(side.title, css="word"),
            "gate": Cell(run.gate_title(gate), css="word"),
            "passes / n": figure(passes(r), f"gate|{key}", r.rate),
            "rate": figure(share(r.rate), f"rate|{key}", r.rate),
            "95 % interval": figure(
                format.interval(r.low, r.high, share), f"interval|{key}", r.low
            ),
            "rule": Cell(share(r.threshold), r.rule, css="rule", sort=r.threshold),
            "verdict": _verdict_cell(run, side, gate),
            "n to decide": Cell(format.count(r.n_to_decide) if r.n_to_decide else ""),
            "requirement": Cell(required, css="word"),
        }
        table.add(run.label(side.model), cells)
    return table


def _verdict_cell(run: LoadedRun, side: MeasuredSide, gate: str) -> Cell:
    verdict = side.gates[gate].verdict
    if run.is_reference(side):
        return Cell("reference", css="word none")
    if side.shows_nothing(gate):
        return Cell(f"{side.word(gate)}, without a pass", css="word none")
    return Cell(f"{format.SIGNS[verdict]} {side.word(gate)}", css=f"word {verdict}")


STATISTICS = ("p50", "p90", "p99")


def latency_table(run: LoadedRun, metric: str) -> Table:
    """One row per workload, three columns per backend: p50 with its interval, p90, p99."""
    sides = run.served
    caption = f"{LABELS[metric]}: p50 with its 95 % interval below, p90 and p99"
    table = Table(caption, "workload", ["n", *STATISTICS * len(sides)])
    table.groups = [("", 1, ""), *((run.label(s.model), 3, s.model) for s in sides)]
    for workload in run.workloads:
        summaries = [metric_summary(side, workload, metric) for side in sides]
        counts = [row.n for row in summaries if row]
        if counts:
            cells = [Cell(format.ends(counts))]
            for side, statistic in itertools.product(sides, STATISTICS):
                cells.append(metric_cell(side, workload, metric, statistic))
            table.rows.append((format.name(workload), cells))
    return table


def kl_table(run: LoadedRun, sides: Sequence[MeasuredSide] | None = None) -> Table:
    table = Table("KL divergence from bf16 per assistant token, in nats", "model", sortable=True)
    for side in run.offline:
        kl = side.data.kl
        if kl is None or (sides is not None and side not in sides):
            continue
        key = f"kl|{side.key}|"
        cells = {
            "numerics": Cell(side.how, css="word"),
            **{field: number_cell(kl, field, key) for field in ("mean", "median", "p99", "max")},
            "same top token": number_cell(kl, "same_top", key, format.share),
            "tokens": number_cell(kl, "n_tokens", key, format.count),
            "perplexity": Cell(
                format.significant(side.data.perplexity), key=f"perplexity|{side.key}"
            ),
        }
        table.add(run.label(side.model), cells)
    return table


def comparisons_table(run: LoadedRun, only_all: bool = False) -> Table:
    """One row per pair, workload and metric.

    only_all: only those over all workloads.
    """
    table = Table(
        ("Over all workloads, paired" if only_all else "Paired")
        + " by prompt: b − a with its 95 % bootstrap interval, the noise that two equal servers would stay below in 95 % of such "
        "comparisons (A/A of both sides), and p after Holm over all comparisons of the run",
        "a",
        sortable=True,
    )
    labels = {s.name: run.label(s.model) for s in run.served}
    for index, row in enumerate(run.aggregates.comparisons):
        if only_all and row.workload != "all":
            continue
        key = f"cmp|{index}|"
        differs = "too few" if row.too_few else "not shown"
        cells = {
            "b": Cell(labels.get(row.b, format.name(row.b)), css="word"),
            "workload": Cell(format.name(row.workload), css="word"),
            "metric": Cell(LABELS.get(row.metric, format.name(row.metric)), css="word"),
            "prompts": number_cell(row, "n_prompts", key, format.count),
            "median a": number_cell(row, "median_a", key),
            "median b": number_cell(row, "median_b", key),
            "b − a": number_cell(row, "median_difference", key, format.signed),
            "interval": Cell(format.bounds(row.low, row.high), sort=row.low),
            "noise": number_cell(row, "noise", key, format.tolerance),
            "p (Holm)": number_cell(row, "p_holm", key, format.p_value),
            "differs": Cell("yes", css="word sure")
            if row.significant
            else Cell(differs, css="word"),
        }
        table.add(labels.get(row.a, format.name(row.a)), cells)
    return table


_SOURCES = {
    "process_rss_bytes": "resident memory of the server's processes",
    "gpu_process_bytes": "GPU memory of the server's processes, reported by NVML",
    "system_used_bytes": "MemTotal − MemAvailable of the whole machine",
}


def memory_table(run: LoadedRun) -> Table:
    """One row per server: its memory idle, with one request and with five at once, and where the figures come from."""
    caption = "Memory of each server, the highest seen, one measurement each (n = 1)"
    table = Table(caption, "server", ["idle", "1 request", "5 at once", "source"])
    for side in run.served:
        memory = side.data.memory_bytes
        if memory is None:
            continue
        cells = [number_cell(memory, level, f"memory|{side.key}|", format.size) for level in LEVELS]
        for cell in cells:
            cell.key = cell.key if cell.sort is not None else ""
        source = _SOURCES.get(memory.source, memory.source) or "not recorded"
        cells.append(Cell(source, css="word"))
        table.rows.append((f"{run.label(side.model)}, {side.title}", cells))
    return table


def ladder_tables(run: LoadedRun) -> list[Table]:
    """One table per axis of a ladder: one row per backend, one column per level."""
    rows: dict[str, list[tuple[ServedModel, documents.Ladder]]] = {}
    for side in run.served:
        for ladder in run.aggregates.ladders.get(side.name, []):
            rows.setdefault(ladder.axis, []).append((side, ladder))
    return [_ladder_table(run, axis, of_axis) for axis, of_axis in rows.items()]


def _ladder_table(
    run: LoadedRun, axis: str, rows: Sequence[tuple[ServedModel, documents.Ladder]]
) -> Table:
    points = itertools.chain.from_iterable(ladder.points for _, ladder in rows)
    levels = sorted({point.level for point in points})
    table = Table(
        f"Prompts that are right in every repeat at each level of {format.name(axis)}, with 95 % Wilson intervals; "
        f"{format.SIGNS['fail']}: from the cliff on",
        "model",
        [format.count(level) for level in levels],
    )
    for side, ladder in rows:
        by_level = {point.level: point for point in ladder.points}
        breaks = ladder.cliff.breaks if ladder.cliff else None
        cells = [
            _level_cell(by_level.get(n), worse=breaks is not None and n >= breaks) for n in levels
        ]
        table.rows.append((f"{run.label(side.model)}, {side.title}", cells))
    return table


def _level_cell(point: documents.LadderPoint | None, worse: bool) -> Cell:
    if point is None:
        return Cell(format.DASH, css="none")
    text = f"{format.count(point.passes)}/{format.count(point.n)}"
    interval = format.interval(point.low, point.high, format.share)
    if worse:
        return Cell(f"{text} {format.SIGNS['fail']}", interval, css="fail")
    return Cell(text, interval)


def noise_table(run: LoadedRun) -> Table:
    """One row per backend and main metric: its A/A comparison, and the noise that follows."""
    table = Table(
        "Each backend against itself: prompts measured more than once, their repeats assigned to two sides (A/A)",
        "backend",
    )
    labels = {s.name: run.label(s.model) for s in run.served}
    for backend, rows in run.aggregates.noise.items():
        single = len({row.workload for row in rows}) == 1
        floors = {row.metric: row for row in rows if single or row.workload == "all"}
        for metric in ("ttft_content_ms", "tpot_ms"):
            floor = floors.get(metric)
            if floor is None:
                continue
            cells = {
                "metric": Cell(LABELS[metric], css="word"),
                "prompts": Cell(format.count(floor.n_repeated)),
                "A/A": Cell(format.signed(floor.difference)),
                "interval": Cell(format.bounds(floor.low, floor.high)),
                "noise": Cell(format.tolerance(floor.floor)),
            }
            table.add(labels.get(backend, format.name(backend)), cells)
    return table


def stages_table(run: LoadedRun) -> Table:
    stages = run.document.stages
    total = sum(stage.seconds or 0.0 for stage in stages)
    table = Table(
        f"Time of each stage, {format.seconds(total)} together", "stage", ["time", "outcome"]
    )
    for stage in stages:
        cells = [
            Cell(format.seconds(stage.seconds), key=f"stage|{stage.name}"),
            Cell(stage.summary, css="word"),
        ]
        table.rows.append((stage.name, cells))
    return table


def facts(run: LoadedRun) -> list[tuple[str, list[tuple[str, str]]]]:
    """Command, environment, settings and backends as (title, [(name, value)]); nested values are flattened."""
    argv = run.document.argv
    command = {"argv": " ".join([Path(argv[0]).name, *argv[1:]])} if argv else {}
    environment = run.document.environment
    parts: tuple[tuple[str, Any], ...] = (
        ("Command", command),
        ("Environment", environment if environment != documents.Environment() else {}),
        ("Settings", run.document.config),
        ("Backends", run.backends),
    )
    rows = ((title, _flat(to_builtins(part))) for title, part in parts)
    return [(title, pairs) for title, pairs in rows if pairs]


def _flat(value: JsonObject, prefix: str = "") -> list[tuple[str, str]]:
    rows = []
    for key, item in value.items():
        label = f"{prefix}{key}"
        if isinstance(item, dict):
            rows += _flat(item, f"{label} · ")
        elif isinstance(item, list) and any(isinstance(i, dict) for i in item):
            rows += _flat({f"{label} {index}": part for index, part in enumerate(item, 1)})
        elif item not in (None, "", [], {}):
            text = ", ".join(map(str, item)) if isinstance(item, list) else str(item)
            rows.append((label, text[:400]))
    return rows


CSV_COLUMNS = "model part where workload metric n n_prompts p50 p90 p99 mean low high passes threshold verdict"


def csv_rows(run: LoadedRun) -> list[JsonObject]:
    """results.csv, one row per figure; gates are metric "gate:NAME" with their rate in `mean`, as in bench exports."""
    rows: list[JsonObject] = []
    for model, metric in itertools.product(run.models, ("size_bytes", "bits_per_weight")):
        size = {"model": model.name, "part": "size", "metric": metric}
        rows.append({**size, "mean": getattr(model, metric)})
    for side in run.sides:
        identity = {"model": side.model, "part": side.kind, "where": side.name.split("/")[-1]}
        for gate, r in side.gates.items():
            rows.append({"metric": f"gate:{gate}", "workload": "all", "mean": r.rate})
            for column in ("n", "low", "high", "passes", "threshold", "verdict"):
                rows[-1][column] = getattr(r, column)
            rows[-1] |= identity
        figures = _served_rows(side) if isinstance(side, ServedModel) else _offline_rows(side)
        rows += [identity | row for row in figures]
    return [row for row in rows if row["mean"] is not None]


def _offline_rows(side: OfflineModel) -> Iterator[JsonObject]:
    kl = side.data.kl
    if kl is None:
        return
    yield {"metric": "kl_nats", **_divergence(kl)}
    yield {"metric": "same_top", "n": kl.n_tokens, "mean": kl.same_top}
    if kl.decisions:
        yield {"metric": "kl_nats:decisions", **_divergence(kl.decisions)}


def _served_rows(side: ServedModel) -> Iterator[JsonObject]:
    for workload, metric in itertools.product(side.data.workloads, COMPARED):
        row = metric_summary(side, workload, metric)
        if row:
            yield {**asdict(row), "workload": workload, "metric": metric}
    for level in LEVELS:
        value = getattr(side.data.memory_bytes, level, None)
        yield {"metric": f"memory_bytes:{level}", "n": 1, "mean": value}


def _divergence(figures: documents.KLFigures) -> dict[str, float]:
    return {
        "n": figures.n_tokens,
        "p50": figures.median,
        "p99": figures.p99,
        "mean": figures.mean,
    }


def csv_text(run: LoadedRun) -> str:
    out = io.StringIO()
    table = csv.DictWriter(out, CSV_COLUMNS.split(), lineterminator="\n", restval="")
    table.writeheader()
    table.writerows(csv_rows(run))
    return out.getvalue()


def grid(table: Table, left: int = 1) -> Markup:
    """Return a pipe table with aligned columns: the first `left` to the left, others to the right. Spans become empty cells."""
    from markupsafe import Markup

    header = table.header
    if table.groups:
        groups: list[str] = []
        for label, span, _ in table.groups:
            groups += [label] * span
        first_lines = [title.splitlines()[0] for title in header]
        header = [" ".join(pair).strip() for pair in zip(groups, first_lines, strict=True)]
    rows = [[table.first, *header], *([name, *_cell_texts(cells)] for name, cells in table.rows)]
    columns = list(itertools.zip_longest(*rows, fillvalue=""))
    for index, texts in enumerate(columns):
        shown = [inert(text) for text in texts]
        width = max(map(len, shown))
        is_left = index < left
        padded = [text.ljust(width) if is_left else text.rjust(width) for text in shown]
        rule = "-" * (width + 2) if is_left else "-" * (width + 1) + ":"
        columns[index] = (f" {padded[0]} ", rule, *(f" {text} " for text in padded[1:]))
    lines = [f"|{'|'.join(row)}|" for row in zip(*columns, strict=True)]
    return Markup("\n".join(lines))  # noqa: S704, each cell is inert


def _cell_texts(cells: list[Cell]) -> list[str]:
    texts = []
    for cell in cells:
        text = f"{cell.text} ({cell.sub})" if cell.sub and cell.css != "rule" else cell.text
        texts += [text] + [""] * (cell.span - 1)
    return texts

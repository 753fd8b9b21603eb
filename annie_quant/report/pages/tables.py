"""The report's tables as plain rows, written once for HTML, Markdown and CSV.

A cell carries the key of the figure it shows ("gate|served/naive|tool_call"), which the HTML keeps as data-k: that is
how tests find every number and compare it with the records.
"""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass, field
from typing import Any

from annie_quant.judge.metrics import COMPARED, METRICS
from annie_quant.report.charts.gates import SIGNS, rate
from annie_quant.report.format import DASH, bounds, clean, count, name, number, p_value, share, significant, size
from annie_quant.report.run import Run, Side

LABELS = {name: METRICS[name].label for name in COMPARED}


@dataclass
class Cell:
    text: str
    sub: str = ""  # a second line, smaller: an interval
    key: str = ""
    css: str = ""
    span: int = 1
    sort: float | None = None


@dataclass
class Table:
    """`groups`: a first header row of (text, span, model); `header`: the second. A row: its name, then its cells."""

    caption: str
    header: list[str]
    rows: list[tuple[str, list[Cell]]] = field(default_factory=list)
    groups: list[tuple[str, int, str]] = field(default_factory=list)
    sortable: bool = False


def gate_cell(side: Side, gate: str, interval: bool = True) -> Cell:
    row = side.gates.get(gate)
    if row is None:
        return Cell("", css="none")
    verdict = str(row.get("verdict", ""))
    sign = SIGNS.get(verdict, "")
    sub = bounds(row.get("low"), row.get("high"), lambda v: share(v).replace("\u00a0%", "")) if interval else ""
    words = f"{count(row['passes'])}/{count(row['n'])}"
    css = "advisory" if row["advisory"] else verdict
    return Cell(f"{words} {sign}".strip(), sub and f"{sub}\u00a0%", f"gate|{side.key}|{gate}", css, sort=rate(row))


def metric_cell(side: Side, workload: str, metric: str, stat: str = "p50", interval: bool = True) -> Cell:
    found = side.data["workloads"].get(workload, {}).get(metric, {})
    value = number(found.get(stat))
    if value is None:
        return Cell(DASH, css="none")
    sub = bounds(found.get("low"), found.get("high")) if interval and stat == "p50" else ""
    return Cell(significant(value), sub, f"metric|{side.key}|{workload}|{metric}|{stat}", sort=value)


def speed_cell(side: Side, gate: str, metric: str) -> Cell:
    """The pooled figure that the founding limits judge; without it, the greeting's."""
    row = side.data["speed_gates"].get(gate, {})
    if number(row.get("value")) is None:
        return metric_cell(side, "greeting", metric)
    verdict = str(row.get("verdict", ""))
    text = f"{significant(row['value'])} {SIGNS.get(verdict, '')}".strip()
    return Cell(text, bounds(row.get("low"), row.get("high")), f"speed|{side.key}|{gate}", verdict, sort=row["value"])


def columns(run: Run, every: bool = False) -> list[tuple[dict[str, Any], list[Side]]]:
    """Models and their sides, in order; models outside the list of models (side products) only when asked."""
    shown = [m for m in run.models if every or not m.get("unlisted")] or run.models
    return [(m, [s for s in run.sides if s.model == m["name"]]) for m in shown]


def side_by_side(run: Run) -> Table:
    """The one table: sizes, gates and speed of all models."""
    groups = columns(run)
    table = Table("Passes of n with ✓ pass, ✗ fail, ? undecided, and the 95 % interval beneath", [], [])
    for model, sides in groups:
        table.groups.append((model["label"], max(1, len(sides)), model["name"]))
        table.header += [column_title(s) for s in sides] or ["not measured"]

    def whole(title: str, write: Any) -> None:
        cells = [write(m) for m, _ in groups]
        for cell, (_, sides) in zip(cells, groups, strict=True):
            cell.span = max(1, len(sides))
        if any(c.text != DASH for c in cells):
            table.rows.append((title, cells))

    whole("size on disk", lambda m: Cell(size(m.get("size_bytes")), key=f"size|{m['name']}"))
    whole("bits per weight", lambda m: Cell(significant(m.get("bits_per_weight")), key=f"bits|{m['name']}"))
    flat: list[Side | None] = [s for _, sides in groups for s in (sides or [None])]  # type: ignore[list-item]
    for gate in run.gate_names:
        title = run.gate_title(gate)
        if all(s.gates[gate].get("advisory") for s in flat if s and gate in s.gates):
            title += " (informs only)"
        table.rows.append((title, [gate_cell(s, gate) if s else Cell("", css="none") for s in flat]))

    def served(title: str, write: Any) -> None:
        cells = [write(s) if s and s.kind == "served" else Cell("", css="none") for s in flat]
        if any(c.key for c in cells):
            table.rows.append((title, cells))

    served(f"{METRICS['ttft_content_ms'].title} p50, ms (≤ 120)", lambda s: speed_cell(s, "ttft", "ttft_content_ms"))
    longest = itl_workload(run)
    served(f"ITL p50, ms ({name(longest)})", lambda s: metric_cell(s, longest, "itl_ms"))
    served(f"{METRICS['decode_tok_s'].title} p50, tok/s (≥ 25)", lambda s: speed_cell(s, "decode", "decode_tok_s"))
    return table


def column_title(side: Side) -> str:
    """Two lines: what, and how."""
    return (
        f"{side.title.removesuffix(' offline')}\noffline"
        if side.kind == "offline"
        else f"served\n{side.title.removesuffix(' served')}"
    )


def itl_workload(run: Run) -> str:
    return "long_response" if "long_response" in run.workloads else next(iter(run.workloads), "")


def gates_table(run: Run) -> Table:
    """Every side with every gate, a line each: for screen readers and for those who want the rule."""
    table = Table(
        "Every gate of every model under every numerics and behind every server",
        ["where", "gate", "passes / n", "rate", "95 % interval", "threshold", "verdict", "n to decide"],
        sortable=True,
    )
    for side in run.sides:
        for gate in run.gate_names:
            row = side.gates.get(gate)
            if row is None:
                continue
            key = f"{side.key}|{gate}"
            verdict = str(row.get("verdict", ""))
            table.rows.append(
                (
                    run.label(side.model),
                    [
                        Cell(side.title, css="word"),
                        Cell(run.gate_title(gate), css="word"),
                        Cell(f"{count(row['passes'])}/{count(row['n'])}", key=f"gate|{key}", sort=rate(row)),
                        Cell(share(rate(row)), key=f"rate|{key}", sort=rate(row)),
                        Cell(
                            bounds(row.get("low"), row.get("high"), share),
                            key=f"interval|{key}",
                            sort=number(row.get("low")),
                        ),
                        Cell(
                            share(row.get("threshold")),
                            clean(row.get("rule") or ""),
                            css="rule",
                            sort=number(row.get("threshold")),
                        ),
                        Cell(f"{SIGNS.get(verdict, '')} {verdict}".strip(), css=f"word {verdict}"),
                        Cell(count(row.get("n_to_decide")) if row.get("n_to_decide") else ""),
                    ],
                )
            )
    return table


def latency_table(run: Run, metric: str) -> Table:
    """A row a workload, three columns a backend: p50 with its interval beneath, p90, p99."""
    sides = run.of("served")
    table = Table(f"{LABELS[metric]}: p50 with its 95 % interval beneath, p90 and p99", ["n"])
    table.groups = [("", 1, "")] + [(run.label(s.model), 3, s.model) for s in sides]
    table.header += ["p50", "p90", "p99"] * len(sides)
    for workload in run.workloads:
        cells: list[Cell] = []
        counts = []
        for side in sides:
            cells += [metric_cell(side, workload, metric, stat) for stat in ("p50", "p90", "p99")]
            of_workload = side.data["workloads"].get(workload, {})
            n = of_workload.get(metric, {}).get("n") or of_workload.get("n")
            counts += [n] if n and cells[-3].key else []
        if counts:
            words = "–".join(dict.fromkeys(count(v) for v in (min(counts), max(counts))))
            table.rows.append((name(workload), [Cell(words), *cells]))
    return table


def kl_table(run: Run) -> Table:
    table = Table(
        "KL divergence from bf16 per assistant token, in nats",
        ["numerics", "mean", "median", "p99", "max", "same top token", "tokens", "perplexity"],
        sortable=True,
    )
    for side in run.of("offline"):
        kl = side.data["kl"]
        if not kl:
            continue
        cells = [Cell(side.title.split()[0], css="word")]
        cells += [
            Cell(significant(kl.get(k)), key=f"kl|{side.key}|{k}", sort=number(kl.get(k)))
            for k in ("mean", "median", "p99", "max")
        ]
        cells += [
            Cell(share(kl.get("same_top")), key=f"kl|{side.key}|same_top", sort=number(kl.get("same_top"))),
            Cell(count(kl.get("n_tokens")), key=f"kl|{side.key}|n_tokens", sort=number(kl.get("n_tokens"))),
            Cell(significant(side.data.get("perplexity")), key=f"perplexity|{side.key}"),
        ]
        table.rows.append((run.label(side.model), cells))
    return table


def comparisons_table(run: Run, only_all: bool = False) -> Table:
    """A row a pair, workload and metric; `only_all`: just the rows over all workloads."""
    table = Table(
        ("Over all workloads, paired" if only_all else "Paired")
        + " by prompt: b − a with its 95 % bootstrap interval, and p after Holm over all comparisons of the run",
        ["b", "workload", "metric", "prompts", "median a", "median b", "b − a", "interval", "p (Holm)", "differs"],
        sortable=True,
    )
    names = {s.key.split("/", 1)[1]: run.label(s.model) for s in run.of("served")}
    for index, row in enumerate(run.aggregates["comparisons"]):
        if only_all and row.get("workload") != "all":
            continue
        sure, key = bool(row.get("significant")), f"cmp|{index}|"
        ends = [row.get("low"), row.get("high")]
        cells = [
            Cell(names.get(row.get("b"), name(row.get("b"))), css="word"),
            Cell(name(row.get("workload")), css="word"),
            Cell(LABELS.get(row.get("metric"), name(row.get("metric"))), css="word"),
            Cell(count(row.get("n_prompts")), key=key + "n_prompts", sort=number(row.get("n_prompts"))),
            Cell(significant(row.get("median_a")), key=key + "median_a", sort=number(row.get("median_a"))),
            Cell(significant(row.get("median_b")), key=key + "median_b", sort=number(row.get("median_b"))),
            Cell(
                signed(row.get("median_difference")),
                key=key + "median_difference",
                sort=number(row.get("median_difference")),
            ),
            Cell(DASH if None in map(number, ends) else " to ".join(map(signed, ends)), sort=number(ends[0])),
            Cell(p_value(row.get("p_holm")), key=key + "p_holm", sort=number(row.get("p_holm"))),
            Cell(
                "yes" if sure else "too few" if row.get("too_few") else "not shown", css="word sure" if sure else "word"
            ),
        ]
        table.rows.append((names.get(row.get("a"), name(row.get("a"))), cells))
    return table


def signed(value: Any) -> str:
    text = significant(value)
    return text.replace("-", "−") if (number(value) or 0) <= 0 or text == DASH else f"+{text}"


CSV_COLUMNS = (
    "model", "part", "where", "workload", "metric", "n", "n_prompts", "p50", "p90", "p99", "mean", "low", "high",
    "passes", "threshold", "verdict",
)  # fmt: skip


def csv_rows(run: Run) -> list[dict[str, Any]]:
    """results.csv, a figure a line; gates are metric "gate:NAME" with their share in `mean`, as in bench exports."""
    rows: list[dict[str, Any]] = []
    for model in run.models:
        for key in ("size_bytes", "bits_per_weight"):
            if number(model.get(key)) is not None:
                rows.append({"model": model["name"], "part": "size", "metric": key, "mean": model[key]})
    for side in run.sides:
        own = {"model": side.model, "part": side.kind, "where": side.key.split("/", 1)[1]}
        if side.kind == "offline":
            own["where"] = own["where"].split("/", 1)[1]
        for gate, row in side.gates.items():
            kept = {k: row.get(k) for k in ("n", "low", "high", "passes", "threshold", "verdict")}
            rows.append(own | {"metric": f"gate:{gate}", "workload": "all", "mean": rate(row)} | kept)
        kl = side.data["kl"]
        if number(kl.get("mean")) is not None:
            seen = {"n": kl.get("n_tokens"), "p50": kl.get("median"), "p99": kl.get("p99"), "mean": kl["mean"]}
            rows.append(own | {"metric": "kl_nats"} | seen)
        if number(kl.get("same_top")) is not None:
            rows.append(own | {"metric": "same_top", "n": kl.get("n_tokens"), "mean": kl["same_top"]})
        for workload, metrics in side.data["workloads"].items():
            for metric in COMPARED:
                found = metrics.get(metric, {})
                if number(found.get("p50")) is not None:
                    kept = {k: found.get(k) for k in ("n", "n_prompts", "p50", "p90", "p99", "mean", "low", "high")}
                    rows.append(own | {"workload": workload, "metric": metric} | kept)
        for level in ("idle", "one", "five"):
            value = side.data["memory_bytes"].get(level)
            if value is not None:
                rows.append(own | {"metric": f"memory_bytes:{level}", "n": 1, "mean": int(value)})
    return rows


def csv_text(run: Run) -> str:
    out = io.StringIO()
    table = csv.DictWriter(out, CSV_COLUMNS, lineterminator="\n", restval="")
    table.writeheader()
    table.writerows(csv_rows(run))
    return out.getvalue()

"""report.md: verdict, paste-ready tables in the style of llama-bench, method. comparison.md: the founding document.

Every cell is escaped for Markdown.
"""

from __future__ import annotations

import re
from typing import Any

from annie_quant.report.charts.gates import SIGNS
from annie_quant.report.format import clean, seconds
from annie_quant.report.pages import advice, tables
from annie_quant.report.pages import comparison as founding
from annie_quant.report.pages.html import facts, findings, outcome
from annie_quant.report.pages.tables import Cell, Table
from annie_quant.report.run import Run

_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~])")


def inert(value: Any) -> str:
    """One line of text that Markdown shows as it is."""
    return _SPECIAL.sub(r"\\\1", " ".join(clean(value).split()))


def grid(table: Table, first: str, left: int = 1) -> str:
    """A pipe table with aligned columns: the first `left` to the left, numbers to the right. Spans are repeated."""
    rows = [[first, *_headers(table)], *([name, *_cells(cells)] for name, cells in table.rows)]
    body = [[inert(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) if i < len(row) else 0 for row in body) for i in range(max(map(len, body)))]
    lines = []
    for index, row in enumerate(body):
        row = row + [""] * (len(widths) - len(row))
        padded = [c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        lines.append("| " + " | ".join(padded) + " |")
        if index == 0:
            rule = ["-" * (w + 2) if i < left else "-" * (w + 1) + ":" for i, w in enumerate(widths)]
            lines.append("|" + "|".join(rule) + "|")
    return "\n".join(lines)


def _headers(table: Table) -> list[str]:
    if not table.groups:
        return table.header
    own = [label for label, span, _ in table.groups for _ in range(span)]
    return [f"{label} {title.split(chr(10))[0]}".strip() for label, title in zip(own, table.header, strict=True)]


def _cells(cells: list[Cell]) -> list[str]:
    found = []
    for cell in cells:
        text = f"{cell.text} ({cell.sub})" if cell.sub and cell.css != "rule" else cell.text
        found += [text] + [""] * (cell.span - 1)
    return found


def render(run: Run, check: dict[str, Any] | None) -> str:
    verdict = run.doc["verdict"]
    sentence = clean(verdict.get("sentence") or "").strip()
    parts = [f"# {inert(sentence) or 'No verdict has been reached for this run'}"]
    if sentence:
        parts.append(f"**{outcome(run)}**")
    parts += _list("Reasons", verdict["reasons"])
    if run.sides:
        parts += [
            "## Side by side",
            "Passes of n; ✓ pass, ✗ fail, ? undecided; 95 % intervals in brackets.",
            grid(tables.side_by_side(run), ""),
        ]
    for metric, title in tables.LABELS.items():
        table = tables.latency_table(run, metric)
        if table.rows and metric != "completion_tokens":
            parts += [f"## {title}", grid(table, "workload")]
    if (kl := tables.kl_table(run)).rows:
        parts += ["## KL divergence from bf16", grid(kl, "model", 2)]
    comparisons = tables.comparisons_table(run, only_all=True)
    comparisons = comparisons if comparisons.rows else tables.comparisons_table(run)
    if comparisons.rows:
        parts += ["## Paired comparisons", inert(comparisons.caption) + ".", grid(comparisons, "a", 4)]
    parts += _checklist(run)
    parts += _list("Not in this run", [f"{m['what']}. To make it: {m['command']}" for m in run.missing])
    parts += _list("Caveats", findings(run))
    parts += ["## Method", *method(run, check)]
    if stages := run.doc["stages"]:
        rows = [
            (str(s.get("name")), [Cell(seconds(s.get("seconds"))), Cell(str(s.get("summary", "")))]) for s in stages
        ]
        parts += ["## Stages", grid(Table("", ["time", "outcome"], rows), "stage")]
    for title, pairs in facts(run):
        parts += [f"## {title}", "\n".join(f"- {inert(key)}: {inert(value)}" for key, value in pairs)]
    return "\n\n".join(parts) + "\n"


def _checklist(run: Run) -> list[str]:
    title, lines = advice.checklist(run)
    marks = {"pass": "[x]", "fail": "[ ] **no:**", "undecided": "[ ] open:"}
    rows = [f"- {marks[x.verdict]} {inert(x.item)} ({inert(x.evidence)})" for x in lines]
    return [f"## Drop-in checklist: {inert(title)}", "\n".join(rows)] if rows else []


def comparison(run: Run, check: dict[str, Any] | None) -> str:
    """comparison.md: recommendation, founding table, quality, checklist, memory budget, decision tree, caveats, method."""
    who, table = founding.pair(run), founding.founding_table(run)
    title = f"{who.names[0]} against {who.names[1] or 'nothing else'}" if who else "Comparison"
    parts = [f"# {inert(title)}"]
    if (said := advice.recommendation(run)) is None:
        parts.append("No candidate was measured behind a server, so there is nothing to compare yet.")
    else:
        parts += ["## Recommendation", f"**{inert(said.sentence)}**"]
        parts += _list("Why", said.reasons) + _list("What changes in operation", said.operation)
    if table:
        parts += ["## Side by side", grid(table, "dimension", 3)]
    if run.sides:
        parts += ["## Quality", "Passes of n; ✓ pass, ✗ fail, ? undecided; 95 % intervals in brackets."]
        parts.append(grid(tables.side_by_side(run), ""))
    parts += _checklist(run)
    if budget := founding.registry(run):
        parts += ["## Memory budget", inert(budget.caption) + ".", grid(budget, "model")]
    if steps := advice.decision_tree(run):
        parts += ["## Decision tree, as it was walked", tree(steps)]
    parts += _list("Not in this run", [f"{m['what']}. To make it: {m['command']}" for m in run.missing])
    parts += _list("Caveats", findings(run))
    parts += ["## Method", *method(run, check)]
    return "\n\n".join(parts) + "\n"


def tree(steps: list[advice.Step], depth: int = 0) -> str:
    """Steps as nested lists, each with its outcome's sign."""
    lines = []
    for step in steps:
        lines.append("  " * depth + f"- {SIGNS.get(step.verdict, '·')} {inert(step.text)}")
        if step.children:
            lines.append(tree(step.children, depth + 1))
    return "\n".join(lines)


def method(run: Run, check: dict[str, Any] | None) -> list[str]:
    failed = sum(bool(r.get("error")) for r in run.measured)
    found = [
        f"{len(run.records)} requests on record, {len(run.measured)} measured (the rest warm-ups), {failed} failed. "
        "Failed requests count as failures in gates; they, cold starts, stalls and impossible stamps are left out of times. "
        "Rates have Wilson intervals; medians have bootstrap intervals with the prompt as the unit."
    ]
    if run.torn_lines:
        found.append(f"{run.torn_lines} lines of records.jsonl could not be read and are left out.")
    if check:
        found.append(
            f"{check['compared'] - len(check['differ'])} of {check['compared']} served figures were counted again from "
            "records.jsonl with the same result."
        )
        found += [
            f"DIFFERS: {inert(d['what'])}: run.json says {d['reported']}, the records {d['counted']}."
            for d in check["differ"][:20]
        ]
    return found


def _list(title: str, items: list[str]) -> list[str]:
    return [f"## {title}", "\n".join(f"- {inert(item)}" for item in items)] if items else []

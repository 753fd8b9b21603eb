"""report.md: verdict, tables in the style of llama-bench, method. comparison.md: the document of the original plan (R48).

Every cell is cleaned and escaped for Markdown.
"""

from __future__ import annotations

from collections.abc import Iterable

from annie_quant.core.text import inert
from annie_quant.report import comparison, tables
from annie_quant.report.recheck import Recount, caveats
from annie_quant.report.run import LoadedRun
from annie_quant.report.tables import Cell, Table

LEGEND = (
    "Passes of n; ✓ keeps, ✗ loses, ? undecided against the reference on the same prompts (by the absolute requirement where there "
    f"is none); 95 % intervals of the rate in brackets. {tables.TIMES}"
)
SHOWN = 20  # differences and unreadable lines


def bullets(items: Iterable[object]) -> str:
    return "\n".join(f"- {inert(item)}" for item in items)


def grid(table: Table, left: int = 1) -> str:
    """Return a pipe table with aligned columns: the first `left` to the left, others to the right. Spans become empty cells."""
    header = table.header
    if table.groups:
        groups = [label for label, span, _ in table.groups for _ in range(span)]
        header = [f"{label} {title.splitlines()[0]}".strip() for label, title in zip(groups, header, strict=True)]
    rows = [[table.first, *header], *([name, *_cells(cells)] for name, cells in table.rows)]
    body = [[inert(cell) for cell in row] for row in rows]
    columns = max(map(len, body))
    body = [row + [""] * (columns - len(row)) for row in body]
    widths = [max(map(len, column)) for column in zip(*body, strict=True)]
    lines = []
    for row in body:
        padded = [c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        lines.append("| " + " | ".join(padded) + " |")
    rule = ["-" * (w + 2) if i < left else "-" * (w + 1) + ":" for i, w in enumerate(widths)]
    return "\n".join([lines[0], "|" + "|".join(rule) + "|", *lines[1:]])


def _cells(cells: list[Cell]) -> list[str]:
    texts = []
    for cell in cells:
        text = f"{cell.text} ({cell.sub})" if cell.sub and cell.css != "rule" else cell.text
        texts += [text] + [""] * (cell.span - 1)
    return texts


def _section(title: str, items: Iterable[object]) -> list[str]:
    text = bullets(items)
    return [f"## {title}", text] if text else []


def render(run: LoadedRun, check: Recount | None) -> str:
    parts = [f"# {inert(run.sentence) or 'No verdict has been reached for this run'}"]
    if run.sentence:
        parts.append(f"**{inert(comparison.badge(run))}**")
    parts += _section("Reasons", run.verdict.reasons)
    if run.sides:
        parts += ["## Side by side", LEGEND, grid(tables.side_by_side(run))]
    for metric, title in tables.LABELS.items():
        table = tables.latency_table(run, metric)
        if table.rows and metric != "completion_tokens":
            parts += [f"## {title}", grid(table)]
    if (kl := tables.kl_table(run)).rows:
        parts += ["## KL divergence from bf16", grid(kl, 2)]
    for only_all in (True, False):
        comparisons = tables.comparisons_table(run, only_all)
        if comparisons.rows:
            parts += ["## Paired comparisons", inert(comparisons.caption) + ".", grid(comparisons, 4)]
            break
    if (stability := tables.stability_table(run)).rows:
        parts += ["## Noise and drift", inert(stability.caption) + ".", grid(stability, 2)]
    parts += [*_checklist(run), *_limits(run), *_method(run, check)]
    if (stages := tables.stages_table(run)).rows:
        parts += ["## Stages", grid(stages)]
    for title, pairs in tables.facts(run):
        parts += _section(title, (f"{key}: {value}" for key, value in pairs))
    return "\n\n".join(parts) + "\n"


def render_comparison(run: LoadedRun, check: Recount | None) -> str:
    """comparison.md: recommendation, dimensions, quality, checklist, memory budget, decision tree, caveats, method."""
    labels = [run.label(s.model) for s in (run.candidate, run.incumbent) if s]
    title = " against ".join(labels if len(labels) > 1 else [*labels, "nothing else"]) if labels else "Comparison"
    parts = [f"# {inert(title)}"]
    if advised := comparison.recommendation(run):
        parts += ["## Recommendation", f"**{inert(advised.sentence)}**", *_section("Why", advised.reasons)]
        parts += _section("What changes in operation", comparison.operation_changes(run))
    else:
        parts.append("No candidate was measured behind a server, so there is nothing to compare yet.")
    if dimensions := comparison.dimensions(run):
        parts += ["## Side by side", grid(dimensions, 3)]
    if run.sides:
        parts += ["## Quality", LEGEND, grid(tables.side_by_side(run))]
    parts += _checklist(run)
    if budget := comparison.memory_budget(run):
        parts += ["## Memory budget", inert(budget.caption) + ".", grid(budget)]
    if steps := comparison.decision_tree(run):
        parts += ["## Decision tree of this run", "\n".join(_tree(steps))]
    parts += [*_limits(run), *_method(run, check)]
    return "\n\n".join(parts) + "\n"


def _checklist(run: LoadedRun) -> list[str]:
    marks = {"pass": "[x]", "fail": "[ ] **no:**", "undecided": "[ ] open:"}
    rows = [f"- {marks[x.verdict]} {inert(x.item)} ({inert(x.evidence)})" for x in comparison.checklist(run)]
    return [f"## Drop-in checklist: {inert(comparison.checklist_title(run))}", "\n".join(rows)] if rows else []


def _tree(steps: list[comparison.DecisionStep], depth: int = 0) -> list[str]:
    """Return steps as nested lists, each with the sign of its verdict."""
    lines = []
    for step in steps:
        lines += [f"{'  ' * depth}- {step.sign} {inert(step.text)}", *_tree(step.children, depth + 1)]
    return lines


def _limits(run: LoadedRun) -> list[str]:
    missing = _section("Not in this run", (f"{m.message}. To make it: {m.command}" for m in run.missing))
    return missing + _section("Caveats", caveats(run))


def _method(run: LoadedRun, check: Recount | None) -> list[str]:
    parts = [
        "## Method",
        f"{len(run.records)} requests on record, {len(run.measured)} measured (the rest warm-ups), {run.failed} failed. "
        "Failed requests count as failures in gates; they, cold starts, stalls and impossible stamps are left out of times. "
        "Rates have Wilson intervals; medians have bootstrap intervals with the prompt as the unit.",
    ]
    if run.bad_lines:
        parts.append(f"{len(run.bad_lines)} lines of records.jsonl could not be read and are left out.")
        parts.append(bullets(run.bad_lines[:SHOWN]))
    if check:
        parts.append(inert(check.summary) + ".")
        parts += [f"DIFFERS: {inert(difference.message)}." for difference in check.differences[:SHOWN]]
    return parts

"""The texts of a search: its outcome in one sentence, its path as a tree, and search.md."""

from __future__ import annotations

from collections.abc import Sequence

from annie_quant import documents
from annie_quant.core.templates import render_markdown
from annie_quant.judge.decision.wording import points, title
from annie_quant.report import format

QUICK_S = 90.0  # up to here a time is in seconds
_MARKS = {"pass": "✓", "fail": "✗", "undecided": "?"}


def page(result: documents.SearchResult) -> str:
    """Return search.json as Markdown."""
    models = []
    if result.reference:
        models.append(("bf16", result.reference, dict[str, documents.PairedGate]()))
    for row in result.strategies:
        for kind, side in row.numerics.items():
            models.append((f"{row.strategy} {kind.upper()}", side.gates, side.paired))
    return render_markdown(
        "search.md",
        result=result,
        outcome=outcome(result),
        path=tree(result),
        models=models,
        title=title,
        points=points,
        first_token=format.first_token,
        marks=_MARKS,
        gates=list(dict.fromkeys(gate for _, table, _ in models for gate in table)),
        failed=[row for row in result.strategies if not row.passed],
    )


def outcome(result: documents.SearchResult) -> str:
    """Return the search's outcome as one sentence."""
    required = " and ".join(n.upper() for n in result.required) or "every numerics that it allows"
    if result.chosen:
        time = duration(result.seconds)
        return f"{result.chosen} is the first to keep every gate under {required}, after {time}."
    if result.stopped:
        return result.stopped
    n = len(result.strategies)
    errors = [row.error for row in result.strategies if row.error is not None]
    if not errors:
        return f"None of {n} strategies keeps every gate under {required}."
    if len(errors) == n:
        return f"None of {n} strategies could be made: {errors[0]}"
    return (
        f"None of {n - len(errors)} checkpoints keeps every gate under {required}; "
        f"{len(errors)} more could not be made: {errors[0]}"
    )


def duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < QUICK_S else f"{seconds / 60:.1f} minutes"


def reference_line(gates: documents.GateTable) -> str:
    """Return whether the bf16 model passes its own gates; a gate that it misses was not lost by quantizing."""
    missed = []
    for gate, result in gates.items():
        if result.absolute_verdict == "fail" and not result.advisory:
            missed.append(f"{title(gate)} {result.passes} of {result.n}")
    if not missed:
        return "YES → from the fewest bytes per token up:"
    return (
        f"NO, not all: {', '.join(missed)} → its own answers are the measure, "
        "from the fewest bytes per token up:"
    )


def tree(result: documents.SearchResult) -> list[str]:
    """Return the steps of a search as a tree, one line per step."""
    lines = ["Does the bf16 model have the manners itself?"]
    if result.stopped:
        return [*lines, f"└── NO → {result.stopped}"]
    lines.append(f"└── {reference_line(result.reference)}")
    for row, is_last in _with_last(result.strategies):
        lines.append(f"    {'└──' if is_last else '├──'} {row.strategy}")
        indent = "   " if is_last else "│  "
        for step, is_last_step in _with_last(row.path):
            lines.append(f"    {indent} {'└──' if is_last_step else '├──'} {step}")
    return lines


def _with_last(rows: Sequence) -> list[tuple]:
    """Return each row with whether it is the last one."""
    return [(row, i == len(rows)) for i, row in enumerate(rows, 1)]

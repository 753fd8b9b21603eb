"""The page of a search: tables of everything that was tried, and the path through the decision tree."""

from __future__ import annotations

import datetime
import platform

import psutil
import torch

from annie_quant.core.templates import render_markdown
from annie_quant.documents import GateResult, GateTable, PairedGate, SearchResult, StrategyRow
from annie_quant.judge.decision.rule import points, title

MARKS = {"pass": "✓", "fail": "✗", "undecided": "?"}
NONE = "–"


def cell(gate: GateResult | None, pair: PairedGate | None = None) -> str:
    if gate is None:
        return NONE
    if pair is None or gate.advisory:
        return f"{gate.passes}/{gate.n}"
    interval = f"{points(pair.difference)}: {points(pair.low)} to {points(pair.high)}"
    return f"{gate.passes}/{gate.n} {MARKS[gate.verdict]} ({interval})"


def render(result: SearchResult) -> str:
    """Return search.json as Markdown."""
    models: list[tuple[str, GateTable, dict[str, PairedGate]]] = []
    if result.reference:
        models.append(("bf16", result.reference, {}))
    for row in result.strategies:
        models += [(f"{row.strategy} {kind.upper()}", side.gates, side.paired) for kind, side in row.numerics.items()]
    return render_markdown(
        "search.md",
        result=result,
        outcome=outcome(result),
        summary=summary,
        title=title,
        cell=cell,
        models=models,
        gates=list(dict.fromkeys(gate for _, table, _ in models for gate in table)),
        path=tree(result),
        failed=[row for row in result.strategies if not row.passed],
    )


def outcome(result: SearchResult) -> str:
    """Return the search's outcome as one sentence."""
    required = " and ".join(n.upper() for n in result.required)
    if result.chosen:
        return f"{result.chosen} is the first to keep every gate under {required}, after {duration(result.seconds)}."
    if result.stopped:
        return result.stopped
    return f"None of {len(result.strategies)} strategies keeps every gate under {required}."


def duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.1f} minutes"


def summary(row: StrategyRow) -> list[str]:
    """Return the cells of a strategy in the table of all strategies."""
    if row.error is not None or row.size_bytes is None:
        return [f"could not be made: {row.error}", *[NONE] * 8]
    kl = {kind: side.kl for kind, side in row.numerics.items() if side.kl is not None}
    sides = [kl.get(kind) for kind in ("w4a4", "w4a16")]
    return [
        row.outcome,
        f"{row.size_bytes / 1e6:,.2f}",
        f"{row.bits_per_weight:.2f}",
        f"{row.predicted_tok_s:,.0f}",
        *(NONE if side is None else f"{side.mean:.4f}" for side in sides),
        " / ".join(NONE if side is None else f"{side.flips}/{side.n_tokens}" for side in sides),
        " / ".join(f"{side.same_answers.same}/{side.same_answers.n}" for side in row.numerics.values()),
        f"{row.seconds:.0f} s",
    ]


def tree(result: SearchResult) -> list[str]:
    """Return the path through the decision tree, one line per step."""
    lines = ["Does the bf16 model have the manners itself?"]
    if result.stopped:
        return [*lines, f"└── NO → {result.stopped}"]
    lines += ["└── YES → strategies, cheapest first:"]
    for i, row in enumerate(result.strategies):
        branch, indent = ("└──", "   ") if i == len(result.strategies) - 1 else ("├──", "│  ")
        lines.append(f"    {branch} {row.strategy}")
        for j, step in enumerate(row.path):
            lines.append(f"    {indent} {'└──' if j == len(row.path) - 1 else '├──'} {step}")
    return lines


def where(n: int) -> str:
    """Return a line with the number of prompts, the date and the machine."""
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    cores = psutil.cpu_count(logical=False) or psutil.cpu_count() or 0
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return f"n = {n} prompts per gate, {today}, {platform.machine()}, {cores} cores, {gpu}."

"""The page of a search: tables of everything that was tried, and the path through the decision tree."""

from __future__ import annotations

import datetime
import platform
from collections.abc import Sequence

import psutil
import torch

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
    rows = result.strategies
    lines = ["# Search: the first strategy that keeps the manners", ""]
    lines += [f"`{result.command}`", "", result.where, ""]
    lines += [f"**{outcome(result)}**", ""]
    lines += [f"- {note}" for note in result.notes]
    lines += ["", "## Strategies", "", *summary_table(rows), "", "## Gates", ""]
    lines += [
        "Passes/n, verdict (points more or fewer than bf16 on the same prompts: 90 % score interval). A strategy that was dropped "
        "early had fewer prompts. Columns without a verdict are for information.",
        "",
    ]
    lines += gates_table(result)
    lines += ["", "## The path taken", "", "```", *tree(result), "```", ""]
    lines += ["## Why strategies failed", "", *explanations(rows), ""]
    lines += ["How it is decided: docs/method.md.", ""]
    return "\n".join(lines)


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


def summary_table(rows: Sequence[StrategyRow]) -> list[str]:
    lines = [
        "| strategy | outcome | MB | bits per weight | GB10, tok/s (predicted) | KL W4A4 | KL W4A16 | "
        "top-token flips W4A4 / W4A16 | answers as bf16's | quantize + evaluate |",
        "|" + "---|" * 10,
    ]
    for row in rows:
        if row.error is not None or row.size_bytes is None:
            lines.append(f"| {row.strategy} | could not be made: {row.error} |" + f" {NONE} |" * 8)
            continue
        kl = {kind: side.kl for kind, side in row.numerics.items() if side.kl is not None}
        means = [f"{kl[k].mean:.4f}" if k in kl else NONE for k in ("w4a4", "w4a16")]
        flips = [f"{kl[k].flips}/{kl[k].n_tokens}" if k in kl else NONE for k in ("w4a4", "w4a16")]
        same = [f"{side.same_answers.same}/{side.same_answers.n}" for side in row.numerics.values()]
        lines.append(
            f"| {row.strategy} | {row.outcome} | {row.size_bytes / 1e6:,.2f} | {row.bits_per_weight:.2f} | "
            f"{row.predicted_tok_s:,.0f} | {means[0]} | {means[1]} | {flips[0]} / {flips[1]} | "
            f"{' / '.join(same)} | {row.seconds:.0f} s |"
        )
    return lines


def gates_table(result: SearchResult) -> list[str]:
    tables: dict[str, tuple[GateTable, dict[str, PairedGate]]] = {}
    if result.reference:
        tables["bf16"] = (result.reference, {})
    for row in result.strategies:
        tables |= {f"{row.strategy} {kind.upper()}": (side.gates, side.paired) for kind, side in row.numerics.items()}
    gates = list(dict.fromkeys(gate for table, _ in tables.values() for gate in table))
    lines = ["| model | " + " | ".join(map(title, gates)) + " |", "|---" * (len(gates) + 1) + "|"]
    for name, (table, pairs) in tables.items():
        lines.append(f"| {name} | " + " | ".join(cell(table.get(g), pairs.get(g)) for g in gates) + " |")
    return lines


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


def explanations(rows: Sequence[StrategyRow]) -> list[str]:
    lines = []
    for row in rows:
        if not row.passed:
            lines.append(f"- **{row.strategy}**: {row.error or '; '.join(row.why)}.")
            lines += [f"  - {line}" for line in row.explained or ()]
    return lines or ["Nothing failed."]


def where(n: int) -> str:
    """Return a line with the number of prompts, the date and the machine."""
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    cores = psutil.cpu_count(logical=False) or psutil.cpu_count() or 0
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return f"n = {n} prompts per gate, {today}, {platform.machine()}, {cores} cores, {gpu}."

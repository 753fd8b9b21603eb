"""What a search leaves to read: the table of all that was tried, the tree, and the path that was taken through it."""

from __future__ import annotations

import datetime
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from annie_quant.pipeline.stages import weight_sizes
from annie_quant.quantize.estimate import GB10_READ

MARKS = {"pass": "✓", "fail": "✗", "undecided": "?"}


def weight_traffic(folder: Path) -> dict[str, float]:
    """{"read_bytes" a decoded token, "ceiling_tok_s" on a GB10}: every weight once, of an untied embedding one row."""
    from annie_quant.files import read_json

    config = read_json(folder / "config.json")
    tied = config.get("tie_word_embeddings", (config.get("text_config") or {}).get("tie_word_embeddings", False))
    sizes = weight_sizes(folder)
    skip = () if tied else ("embed_tokens.weight",)
    read = sum(size for name, (_, size) in sizes.items() if not name.endswith(skip) and not name.startswith("mtp."))
    return {"read_bytes": read, "ceiling_tok_s": GB10_READ / read}


def cell(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return "–"
    return f"{row['passes']}/{row['n']} {MARKS[row['verdict']]} ({row['low']:.3f}–{row['high']:.3f})"


def render(found: Mapping[str, Any]) -> str:
    """search.json as Markdown."""
    rows = found["strategies"]
    lines = ["# Search: the first strategy that keeps the manners", ""]
    lines += [f"`{found['command']}`", "", found["where"], ""]
    lines += [f"**{outcome(found)}**", ""]
    lines += [f"- {note}" for note in found["notes"]]
    lines += ["", "## Strategies", "", *summary_table(rows), "", "## Gates", ""]
    lines += [
        "Passes/n, verdict (95 % Wilson interval). A strategy that was dropped early was asked fewer prompts.",
        "",
    ]
    lines += gates_table(found)
    lines += ["", "## The path taken", "", "```", *tree(found), "```", ""]
    lines += ["## Why those that failed did", "", *explanations(rows), ""]
    lines += ["## How it is decided", "", *RULES, ""]
    return "\n".join(lines)


def outcome(found: Mapping[str, Any]) -> str:
    required = " and ".join(n.upper() for n in found["required"])
    if found["chosen"]:
        return f"{found['chosen']} is the first to pass every gate under {required}, after {minutes(found['seconds'])}."
    if found["stopped"]:
        return found["stopped"]
    return f"None of {len(found['strategies'])} strategies passes every gate under {required}."


def minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.1f} minutes"


def summary_table(rows: list[Mapping[str, Any]]) -> list[str]:
    lines = [
        "| strategy | outcome | MB | bits a weight | GB10 ceiling, tok/s | of a 9B: GB, tok/s | KL W4A4 | KL W4A16 | "
        "top-token flips W4A4 / W4A16 | answers as bf16's | quantize + judge |",
        "|" + "---|" * 11,
    ]
    for r in rows:
        if r.get("error"):
            lines.append(f"| {r['strategy']} | could not be made: {r['error']} |" + " – |" * 9)
            continue
        kl = {k: s["kl"] for k, s in r["numerics"].items()}
        means = [f"{kl[k]['mean']:.4f}" if k in kl else "–" for k in ("w4a4", "w4a16")]
        flips = [f"{kl[k]['flips']}/{kl[k]['n_tokens']}" if k in kl else "–" for k in ("w4a4", "w4a16")]
        same = [s["same_answers"] for s in r["numerics"].values()]
        lines.append(
            f"| {r['strategy']} | {r['outcome']} | {r['size_bytes'] / 1e6:,.2f} | {r['bits_per_weight']:.2f} | "
            f"{r['ceiling_tok_s']:,.0f} | {nine(r)} | {means[0]} | {means[1]} | {flips[0]} / {flips[1]} | "
            f"{' / '.join(f'''{s['same']}/{s['n']}''' for s in same)} | {r['seconds']:.0f} s |"
        )
    return lines


def nine(row: Mapping[str, Any]) -> str:
    of = row.get("of_9b")
    return f"{of['size_bytes'] / 1e9:.2f}, {of['ceiling_tok_s']:.0f}" if of else "–"


def gates_table(found: Mapping[str, Any]) -> list[str]:
    sides = {"bf16": found["reference"]} if found["reference"] else {}
    for r in found["strategies"]:
        sides |= {f"{r['strategy']} {k.upper()}": s["gates"] for k, s in (r.get("numerics") or {}).items()}
    gates = list(dict.fromkeys(g for table in sides.values() for g in table))
    lines = ["| model | " + " | ".join(gates) + " |", "|---" * (len(gates) + 1) + "|"]
    lines += [f"| {name} | " + " | ".join(cell(table.get(g)) for g in gates) + " |" for name, table in sides.items()]
    return lines


def tree(found: Mapping[str, Any]) -> list[str]:
    lines = ["Does the bf16 model hold the gates itself?"]
    if found["stopped"]:
        return [*lines, f"└── NO → {found['stopped']}"]
    lines += ["└── YES → strategies, cheapest first:"]
    for i, r in enumerate(found["strategies"]):
        last = i == len(found["strategies"]) - 1
        bar, pad = ("└──", "   ") if last else ("├──", "│  ")
        lines.append(f"    {bar} {r['strategy']}")
        steps = r["path"]
        for j, step in enumerate(steps):
            lines.append(f"    {pad} {'└──' if j == len(steps) - 1 else '├──'} {step}")
    return lines


def explanations(rows: list[Mapping[str, Any]]) -> list[str]:
    lines = []
    for r in rows:
        if r["passed"]:
            continue
        lines.append(f"- **{r['strategy']}**: {r.get('error') or '; '.join(r['why'])}.")
        for extra in r.get("explained", ()):
            lines.append(f"  - {extra}")
    return lines or ["Nothing failed."]


RULES = [
    "- Smoke: the founding question (the capital of Japan) answered with the fact, no markdown, no thinking.",
    "- Early look at 30 prompts a gate: dropped when no outcome of the rest could pass it, or when the interval lies below the "
    "threshold at 1 − 0.05/looks (Bonferroni over the looks of a gate).",
    "- With --all there is no early look: the whole table rests on the same prompts.",
    "- Last look at all prompts: the gates' own rules (rates: lower 95 % Wilson bound at the founding rate; leaks and empty "
    "answers: none; facts and sums: lower bound at 0.95). Only this look can pass.",
    "- KL: mean over the assistant tokens of bf16's own answers, nats. Flips: tokens whose most likely token is another.",
    "- GB10 ceiling: 232 GB/s of measured reads over the bytes of weights that one token needs; the same for Qwen3.5-9B by count "
    "of its parameters (annie-quant quantize --strategy S --model 9b --dry-run).",
]


def where(n: int) -> str:
    """The machine and the date, for the page."""
    import platform

    import psutil

    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    cores = psutil.cpu_count(logical=False) or psutil.cpu_count() or 0
    return f"n = {n} prompts a gate, {today}, {platform.machine()}, {cores} cores{gpu()}."


def gpu() -> str:
    import torch

    return f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ", no GPU"


def bits(size_bytes: int, weights: int) -> float:
    return 8 * size_bytes / weights if weights else math.nan

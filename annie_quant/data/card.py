"""The dataset card: README.md beside the JSON lines, with what a reader and a dataset host need to know."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from annie_quant.files import write_text
from annie_quant.persona import Persona

MARK = "<!-- annie-quant data -->"


def write_card(output: Path, persona: Persona, rows: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> Path:
    """Write the card and return its path. A README.md that is not ours is left alone; the card has another name then."""
    path = output.parent / "README.md"
    if path.exists() and MARK not in path.read_text(encoding="utf-8"):
        path = output.with_name(f"{output.stem}.card.md")
    write_text(path, render(output.name, persona, rows, summary))
    return path


def render(file: str, persona: Persona, rows: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> str:
    teachers = Counter((r["provenance"]["teacher"], r["provenance"]["model"]) for r in rows)
    splits = Counter(r["split"] for r in rows)
    times = sorted(r["provenance"]["time"] for r in rows)
    split = next(iter(splits), "calibration")
    head = {
        "language": ["en"],
        "task_categories": ["text-generation"],
        "size_categories": ["n<1K" if len(rows) < 1000 else "1K<n<10K"],
        "configs": [{"config_name": "default", "data_files": [{"split": split, "path": file}]}],
    }
    lines = [
        "---",
        *(f"{k}: {json.dumps(v)}" for k, v in head.items()),
        "---",
        MARK,
        f"# Conversations with {persona.name}",
        "",
        f"{len(rows)} conversations for calibrating and training a model that speaks as {persona.name}, made by "
        "`annie-quant data`. Fields: id, category, messages, tools, thinking, provenance, split; a tool call's arguments "
        "are a JSON string.",
        "",
        "| category | conversations | tool that must be called | user turns |",
        "|---|---|---|---|",
        *(
            f"| {c.name} | {summary['by_category'].get(c.name, 0)} | {c.tool or 'none'} | {c.turns} |"
            for c in persona.categories
        ),
        "",
        "| made by | model | conversations |",
        "|---|---|---|",
        *(f"| {teacher} | {model} | {n} |" for (teacher, model), n in teachers.items()),
        "",
        f"- split: {', '.join(f'{name} ({n})' for name, n in splits.items())}; no prompt of it is a gate's prompt (checked)",
        f"- with tool calls: {summary['with_tools']}; valid by every rule: {summary['valid']} of {summary['total']}",
        f"- made from {times[0]} to {times[-1]}" if times else "- empty",
        f"- system prompt, SHA-256: {persona.prompt_sha256}",
        f"- persona file, SHA-256: {persona.sha256}",
        "",
        "The text is synthetic: the offline teacher's comes from templates, a language model's may be wrong in its facts. "
        "Quantize and judge with the system prompt above; annie-quant refuses another one unless told.",
        "",
    ]
    return "\n".join(lines)

"""The dataset card: a README.md next to the JSON lines, for readers and for dataset hosts."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from annie_quant.data.validate import Validation
from annie_quant.files import write_text
from annie_quant.persona import Persona
from annie_quant.printable import inert

MARK = "<!-- annie-quant data -->"


def write_card(output: Path, persona: Persona, rows: Sequence[Mapping[str, Any]], validation: Validation) -> Path:
    """Write the card and return its path. A README.md that annie-quant did not write is kept; the card is then STEM.card.md."""
    path = output.parent / "README.md"
    if path.exists() and MARK not in path.read_text(encoding="utf-8"):
        path = output.with_name(f"{output.stem}.card.md")
    write_text(path, render(output.name, persona, rows, validation))
    return path


def render(file: str, persona: Persona, rows: Sequence[Mapping[str, Any]], validation: Validation) -> str:
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
        f"# Conversations with {inert(persona.name)}",
        "",
        f"{len(rows)} conversations for calibrating and training a model that speaks as {inert(persona.name)}, made by "
        "`annie-quant data`. Fields: id, category, messages, tools, thinking, provenance, split; a tool call's arguments "
        "are a JSON string.",
        "",
        "| category | conversations | tool that must be called | user turns |",
        "|---|---|---|---|",
        *(
            f"| {inert(c.name)} | {validation.by_category.get(c.name, 0)} | {inert(c.tool or 'none')} | {c.turns} |"
            for c in persona.categories
        ),
        "",
        "| made by | model | conversations |",
        "|---|---|---|",
        *(f"| {inert(teacher)} | {inert(model)} | {n} |" for (teacher, model), n in teachers.items()),
        "",
        f"- split: {', '.join(f'{name} ({n})' for name, n in splits.items())}; no prompt of it is a gate's prompt (checked)",
        f"- with tool calls: {validation.with_tools}; valid by every rule: {validation.valid} of {validation.total}",
        f"- made from {times[0]} to {times[-1]}" if times else "- empty",
        f"- system prompt, SHA-256: {persona.prompt_sha256}",
        f"- persona file, SHA-256: {persona.sha256}",
        "",
        "The text is synthetic: the offline teacher's comes from templates, a language model's may have wrong facts. Quantize "
        "and evaluate with the system prompt above; annie-quant refuses another one without --allow-prompt-mismatch.",
        "",
    ]
    return "\n".join(lines)

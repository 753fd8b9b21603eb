"""`annie-quant data`: conversations by a teacher, in the founding five categories, a row a line.

A row: id, category, messages, tools (where offered), thinking, provenance, split. Tool arguments are a JSON string on
disk, as OpenAI's format has them; chat templates want them decoded.
"""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from annie_quant import registry
from annie_quant.data import teachers
from annie_quant.data.persona import Persona, load_persona
from annie_quant.data.validate import faults, validate
from annie_quant.errors import UsageError
from annie_quant.files import replacing

CATEGORIES = ("greeting", "factual", "memory", "web", "multi_turn")
Progress = Callable[..., Any]


def generate(
    persona: str | Path | Persona = "annie",
    teacher: str = "offline",
    n: int = 500,
    output: str | Path | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Make n conversations, evenly over the categories, and write those that are valid to `output` (JSON lines).

    Returns a summary: total, valid, with_tools, by_category, dropped (reasons), ok. The offline teacher gives the same
    rows for the same seed, times in provenance apart (SOURCE_DATE_EPOCH fixes those). progress(done, total, text).
    """
    if n < len(CATEGORIES):
        raise UsageError(f"n is {n}; each of the {len(CATEGORIES)} categories needs at least one conversation")
    who = persona if isinstance(persona, Persona) else load_persona(persona)
    part = registry.find(teachers, teacher, "teacher")
    provenance = {
        "teacher": teacher,
        "model": part.MODEL,
        "prompt_sha256": who.prompt_sha256,
        "persona_sha256": who.sha256,
        "time": _now(),
    }
    rows: list[dict[str, Any]] = []
    dropped: dict[str, int] = {}
    for index, category in enumerate(CATEGORIES):
        count = n // len(CATEGORIES) + (index < n % len(CATEGORIES))
        for made in part.conversations(who, category, count, seed):
            row = {"id": f"{category}-{len(rows):04d}", "category": category, **made}
            row |= {"provenance": provenance, "split": "calibration"}
            wrong = faults(row)
            if wrong:
                dropped[wrong[0]] = dropped.get(wrong[0], 0) + 1
                continue
            rows.append(row)
            if progress is not None:
                progress(len(rows), n, category)
    if output is not None:
        with replacing(output, "w") as file:
            for row in rows:
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
    return validate(rows) | {"dropped": dropped, "output": str(output) if output is not None else None}


def _now() -> str:
    epoch = os.environ.get("SOURCE_DATE_EPOCH")
    utc = datetime.timezone.utc
    moment = datetime.datetime.fromtimestamp(int(epoch), utc) if epoch else datetime.datetime.now(utc)
    return moment.isoformat(timespec="seconds")

"""Answers written and labelled by hand for the gates (tests/data/labelled_answers.json).

Each row starts with whether the answer passes, then its text. MEMORY_CALLS add tool calls as [name, arguments], for the tool
search_memory(query: string, limit?: integer); RAW_CALLS have raw text as the model wrote it with thinking off; ABSTAIN add
whether a tool was called. Edge cases: minus signs in prose, products, "15" in "150", Tokyo in a question, half-open think
tags, XML tool calls as text, bold inside code.
"""

from __future__ import annotations

import json

from paths import DATA

ANSWERS: dict[str, list[list]] = json.loads(
    (DATA / "labelled_answers.json").read_text(encoding="utf-8")
)

"""What calibration conversations must hold: the founding documents' rules, checked row by row.

Of 500 rows at least 400 are valid and at least 80 call a tool; no answer holds markdown; memory rows call
search_memory, web rows web_search; multi-turn rows have five user turns.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

MIN_VALID, MIN_TOOLS = 400 / 500, 80 / 500
MUST_CALL = {"memory": "search_memory", "web": "web_search"}
TURNS = 5
_ROLES = {"system", "user", "assistant", "tool"}


def faults(row: Mapping[str, Any]) -> list[str]:
    """What is wrong with one conversation, in plain words; empty when nothing is."""
    messages = row.get("messages")
    if not isinstance(messages, list) or not messages:
        return ["no messages"]
    found = []
    for index, message in enumerate(messages):
        role = message.get("role") if isinstance(message, Mapping) else None
        if role not in _ROLES:
            return [f"message {index}: unknown role {role!r}"]
        if role == "assistant":
            found += _assistant(message)
        elif not str(message.get("content") or "").strip():
            found.append(f"a {role} message is empty")
    if messages[-1]["role"] != "assistant":
        found.append("the last message is not the assistant's")
    users = sum(m["role"] == "user" for m in messages)
    category = row.get("category")
    if category == "multi_turn" and users != TURNS:
        found.append(f"{users} user turns, expected {TURNS}")
    wanted = MUST_CALL.get(str(category))
    called = [c["function"].get("name") for m in messages for c in m.get("tool_calls") or () if "function" in c]
    if wanted and wanted not in called:
        found.append(f"{wanted} is not called")
    if not wanted and called:
        found.append(f"{called[0]!r} is called where no tool is wanted")
    return found


def _assistant(message: Mapping[str, Any]) -> list[str]:
    from annie_quant.judge.gates.thinking_leak import leaked
    from annie_quant.judge.markdown import markdown_in

    text = str(message.get("content") or "")
    found = []
    if not text.strip() and not message.get("tool_calls"):
        found.append("an answer is empty")
    if markdown_in(text):
        found.append(f"markdown in an answer: {markdown_in(text)}")
    if leaked(text):
        found.append("thinking in an answer")
    for call in message.get("tool_calls") or ():
        arguments = call.get("function", {}).get("arguments")
        try:
            decoded = json.loads(arguments) if isinstance(arguments, str) else None
        except ValueError:
            decoded = None
        if not isinstance(decoded, dict):
            found.append("tool arguments are no JSON object in a string")
    return found


def validate(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Counts over all rows, and whether the whole is enough: total, valid, with_tools, by_category, faults, ok."""
    total = valid = tools = 0
    by_category: dict[str, int] = {}
    seen: dict[str, int] = {}
    for row in rows:
        total += 1
        wrong = faults(row)
        for fault in wrong:
            seen[fault] = seen.get(fault, 0) + 1
        if wrong:
            continue
        valid += 1
        tools += any(m.get("tool_calls") for m in row["messages"])
        by_category[row["category"]] = by_category.get(row["category"], 0) + 1
    enough = total > 0 and valid >= MIN_VALID * total and tools >= MIN_TOOLS * total
    return {
        "total": total,
        "valid": valid,
        "with_tools": tools,
        "by_category": by_category,
        "faults": seen,
        "ok": bool(enough),
    }

"""What calibration conversations must hold: the founding documents' rules, checked row by row.

Of 500 rows at least 400 are valid and at least 80 call a tool; no answer holds markdown; a category's own tool is called
and no other, with arguments that parse and fit its JSON schema; turns and lengths are right; no two rows say the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from annie_quant.data.near import Near, user_text
from annie_quant.persona import Persona, load_persona

MIN_VALID = 400 / 500
MIN_TOOLS = 80 / 200  # of the conversations that should call one
# A voice's answer is short; a user's text is not a document. The whole stays below 2,048 tokens at 4 characters each.
MAX_USER, MAX_ANSWER, MAX_TOTAL = 1000, 800, 8000
_ROLES = {"system", "user", "assistant", "tool"}


def faults(row: Mapping[str, Any], persona: Persona | None = None) -> list[str]:
    """What is wrong with one conversation, in plain words; empty when nothing is."""
    persona = persona or load_persona("annie")
    messages = row.get("messages")
    if not isinstance(messages, list) or not messages:
        return ["no messages"]
    found = []
    for index, message in enumerate(messages):
        role = message.get("role") if isinstance(message, Mapping) else None
        if role not in _ROLES:
            return [f"message {index}: unknown role {role!r}"]
        if role == "assistant":
            found += _assistant(message, row.get("tools") or ())
        elif not str(message.get("content") or "").strip():
            found.append(f"a {role} message is empty")
        elif role == "user" and len(message["content"]) > MAX_USER:
            found.append(f"a user message is longer than {MAX_USER} characters")
    if messages[-1]["role"] != "assistant":
        found.append("the last message is not the assistant's")
    if messages[0]["role"] == "system" and messages[0].get("content") != persona.system_prompt:
        found.append("the system prompt is not the persona's")
    if sum(len(str(m.get("content") or "")) for m in messages) > MAX_TOTAL:
        found.append(f"longer than {MAX_TOTAL} characters")
    return found + _category(row, persona)


def _category(row: Mapping[str, Any], persona: Persona) -> list[str]:
    category = persona.category(str(row.get("category")))
    if category is None:
        return [f"{persona.name} has no category {row.get('category')!r}"]
    found = []
    users = sum(m["role"] == "user" for m in row["messages"])
    if users != category.turns:
        found.append(f"{users} user turns, expected {category.turns}")
    called = [c["function"].get("name") for m in row["messages"] for c in m.get("tool_calls") or () if "function" in c]
    if category.tool and category.tool not in called:
        found.append(f"{category.tool} is not called")
    wrong = next((name for name in called if name != category.tool), None)
    if wrong and category.tool is None:
        found.append(f"{wrong!r} is called where no tool is wanted")
    elif wrong and category.tool in called:
        found.append(f"{wrong!r} is called besides {category.tool}")
    return found


def _assistant(message: Mapping[str, Any], tools: Any) -> list[str]:
    from annie_quant.judge.checks.markdown import markdown_in
    from annie_quant.judge.checks.thinking import leaked

    text = str(message.get("content") or "")
    found = []
    if not text.strip() and not message.get("tool_calls"):
        found.append("an answer is empty")
    if len(text) > MAX_ANSWER:
        found.append(f"an answer is longer than {MAX_ANSWER} characters")
    if markdown_in(text):
        found.append(f"markdown in an answer: {markdown_in(text)}")
    if leaked(text):
        found.append("thinking in an answer")
    for call in message.get("tool_calls") or ():
        found += _call(call.get("function") or {}, tools)
    return found


def _call(function: Mapping[str, Any], tools: Any) -> list[str]:
    import jsonschema

    arguments = function.get("arguments")
    try:
        decoded = json.loads(arguments) if isinstance(arguments, str) else None
    except ValueError:
        decoded = None
    if not isinstance(decoded, dict):
        return ["tool arguments are no JSON object in a string"]
    offered = {t["function"]["name"]: t["function"] for t in tools}
    if function.get("name") not in offered:
        return [f"{function.get('name')!r} is called and not offered"]
    schema = offered[function["name"]].get("parameters") or {}
    wrong = next(iter(jsonschema.Draft202012Validator(schema).iter_errors(decoded)), None)
    return [] if wrong is None else [f"arguments of {function['name']} do not fit its schema: {wrong.message}"]


def validate(
    rows: Iterable[Mapping[str, Any]], persona: Persona | None = None, wanted: int | None = None
) -> dict[str, Any]:
    """Counts over all rows, and whether the whole is enough: total, valid, with_tools, by_category, faults, ok.

    wanted: how many conversations were asked for, where that is more than there are.
    """
    persona = persona or load_persona("annie")
    total = valid = tools = 0
    by_category: dict[str, int] = {}
    seen: dict[str, int] = {}
    near: dict[str, Near] = {}
    for row in rows:
        total += 1
        wrong = faults(row, persona)
        if not wrong:
            others, text = near.setdefault(str(row["category"]), Near()), user_text(row)
            if others.find(text) is not None:
                wrong = ["the user says nearly the same as in another conversation"]
            others.add(str(row.get("id", total)), text)
        for fault in wrong:
            seen[fault] = seen.get(fault, 0) + 1
        if wrong:
            continue
        valid += 1
        tools += any(m.get("tool_calls") for m in row["messages"])
        by_category[row["category"]] = by_category.get(row["category"], 0) + 1
    whole = max(total, wanted or 0)
    expected_tools = whole * sum(c.tool is not None for c in persona.categories) / len(persona.categories)
    enough = total > 0 and valid >= MIN_VALID * whole and tools >= MIN_TOOLS * expected_tools
    return {
        "total": total,
        "valid": valid,
        "with_tools": tools,
        "by_category": by_category,
        "faults": seen,
        "ok": bool(enough),
    }

"""The rules for calibration conversations (requirements R1 and R2), checked row by row.

Of 500 rows at least 400 are valid and at least 80 call a tool; no answer has markdown; a category's own tool is called and no
other, with arguments that parse and match its JSON schema; turns and lengths are right; no two rows have nearly the same user
text.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from annie_quant.data.duplicates import DuplicateFinder, user_text
from annie_quant.judge.checks.markdown import markdown_in
from annie_quant.judge.checks.thinking import leaked
from annie_quant.persona import Persona, load_persona
from annie_quant.tool_schema import mismatch

MIN_VALID = 400 / 500
MIN_TOOLS = 80 / 200  # of the conversations that should call one
# In characters. A spoken answer is short; the whole stays below 2,048 tokens at 4 characters per token.
MAX_USER, MAX_ANSWER, MAX_TOTAL = 1000, 800, 8000
ROLES = {"system", "user", "assistant", "tool"}


class Validation(msgspec.Struct):
    """with_tools: valid rows that call a tool. faults: number of rows per fault. ok: whether the set is large enough."""

    total: int
    valid: int
    with_tools: int
    by_category: dict[str, int]
    faults: dict[str, int]
    ok: bool


def faults(row: Mapping[str, Any], persona: Persona | None = None) -> list[str]:
    """Return a description of each rule that a conversation breaks. persona: default: annie."""
    persona = persona or load_persona("annie")
    messages = row.get("messages")
    if not isinstance(messages, list) or not messages:
        return ["no messages"]
    result = []
    for index, message in enumerate(messages):
        role = message.get("role") if isinstance(message, Mapping) else None
        if role not in ROLES:
            return [f"message {index}: unknown role {role!r}"]
        if role == "assistant":
            result += _assistant_faults(message, row.get("tools") or ())
        elif not str(message.get("content") or "").strip():
            result.append(f"a {role} message is empty")
        elif role == "user" and len(message["content"]) > MAX_USER:
            result.append(f"a user message is longer than {MAX_USER} characters")
    if messages[-1]["role"] != "assistant":
        result.append("the last message is not the assistant's")
    if messages[0]["role"] == "system" and messages[0].get("content") != persona.system_prompt:
        result.append("the system prompt is not the persona's")
    if sum(len(str(m.get("content") or "")) for m in messages) > MAX_TOTAL:
        result.append(f"longer than {MAX_TOTAL} characters")
    return result + _category_faults(row, persona)


def _category_faults(row: Mapping[str, Any], persona: Persona) -> list[str]:
    category = persona.category(str(row.get("category")))
    if category is None:
        return [f"{persona.name} has no category {row.get('category')!r}"]
    result = []
    turns = sum(m["role"] == "user" for m in row["messages"])
    if turns != category.turns:
        result.append(f"{turns} user turns, expected {category.turns}")
    called = [
        c["function"].get("name") for m in row["messages"] for c in m.get("tool_calls") or () if c.get("function")
    ]
    if category.tool and category.tool not in called:
        result.append(f"{category.tool} is not called")
    other = next((name for name in called if name != category.tool), None)
    if other and category.tool is None:
        result.append(f"{other!r} is called, expected no tool call")
    elif other and category.tool in called:
        result.append(f"{other!r} is called in addition to {category.tool}")
    return result


def _assistant_faults(message: Mapping[str, Any], tools: Iterable[Mapping[str, Any]]) -> list[str]:
    text = str(message.get("content") or "")
    result = []
    if not text.strip() and not message.get("tool_calls"):
        result.append("an answer is empty")
    if len(text) > MAX_ANSWER:
        result.append(f"an answer is longer than {MAX_ANSWER} characters")
    if markdown_in(text):
        result.append(f"markdown in an answer: {markdown_in(text)}")
    if leaked(text):
        result.append("thinking in an answer")
    for call in message.get("tool_calls") or ():
        result += _call_faults(call.get("function") or {}, tools)
    return result


def _call_faults(function: Mapping[str, Any], tools: Iterable[Mapping[str, Any]]) -> list[str]:
    arguments = function.get("arguments")
    try:
        decoded = json.loads(arguments) if isinstance(arguments, str) else None
    except ValueError:
        decoded = None
    if not isinstance(decoded, dict):
        return ["tool arguments are not a JSON object in a string"]
    offered = {t["function"].get("name"): t["function"] for t in tools}
    name = function.get("name")
    if name not in offered:
        return [f"{name!r} is called and not offered"]
    schema = offered[name].get("parameters") or {}
    misfit = mismatch(decoded, schema)
    return [f"arguments of {name} do not match its schema: {misfit}"] if misfit else []


def validate(
    rows: Iterable[Mapping[str, Any]], persona: Persona | None = None, requested: int | None = None
) -> Validation:
    """Check all rows and the set as a whole.

    requested: number of conversations that were requested, if that is more than there are.
    """
    persona = persona or load_persona("annie")
    total = valid = tools = 0
    by_category: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    finders: dict[str, DuplicateFinder] = {}
    for row in rows:
        total += 1
        row_faults = faults(row, persona)
        if not row_faults:
            finder, text = finders.setdefault(str(row["category"]), DuplicateFinder()), user_text(row)
            if finder.find(text) is not None:
                row_faults = ["nearly the same user text as in another conversation"]
            finder.add(str(row.get("id", total)), text)
        counts.update(row_faults)
        if row_faults:
            continue
        valid += 1
        tools += any(m.get("tool_calls") for m in row["messages"])
        by_category[row["category"]] += 1
    expected = max(total, requested or 0)
    expected_tools = expected * sum(c.tool is not None for c in persona.categories) / len(persona.categories)
    enough = total > 0 and valid >= MIN_VALID * expected and tools >= MIN_TOOLS * expected_tools
    return Validation(total, valid, tools, dict(by_category), dict(counts), bool(enough))

"""The rules for a row of conversations, and for a set of them (requirements R1 and R2).

form_faults   the form that `data`, `init`, `quantize` and `search` need: a row without faults can be rendered and scored
faults        a persona's own rules too
validate      a set

A row is a JSON object. `annie-quant data`, `data --check`, `init`, `quantize` and `search` use the
same rules:

    messages    list of {"role": "system" | "user" | "assistant" | "tool", "content": text}; required; the last is the
                assistant's, except in prompts that the model answers itself (`quantize --answers own`).
                An assistant message may have tool_calls: [{"function": {"name", "arguments"}}] and
                then no content. Arguments are an object, or the same as a JSON string, and fit the
                tool's JSON schema.
    tools       the OpenAI function tools that are offered in this row; without it, the persona's.
    category    optional; one of the persona's categories, which fixes the number of user turns and the tool to be called.
    thinking    optional: whether the answer was written with thinking on. default: false
    id          optional. Other fields are ignored.

At least four fifths of a teacher's set are valid, and enough of them call a tool. No two rows of a
category have nearly the same user text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, TypeVar

import msgspec

from annie_quant.core.json_schema import mismatch
from annie_quant.core.untrusted import JsonObject, decode_json
from annie_quant.data.duplicates import DuplicateFinder
from annie_quant.data.prompt_rules import rules_of
from annie_quant.documents.persona import Persona, Tool, load_persona
from annie_quant.judge.checks.text import leaked, markdown_in

Row = Mapping[str, Any]  # a conversation as its file has it; `faults` checks it
_RowT = TypeVar("_RowT", bound=Row)


def spread(rows: Sequence[_RowT], limit: int) -> list[_RowT]:
    """Return at most `limit` rows, evenly spread."""
    n = min(limit, len(rows))
    return [rows[i * len(rows) // n] for i in range(n)]


def user_text(row: Row) -> str:
    """Return all user messages of a conversation as one text."""
    return "\n".join(text_of(m.get("content")) for m in row["messages"] if m["role"] == "user")


def text_of(content: object) -> str:
    """Return the text of a message's content: a string, or OpenAI's list of parts."""
    if isinstance(content, list):
        return "\n".join(str(p.get("text") or "") for p in content if isinstance(p, Mapping))
    return str(content or "")


class _RowFunction(msgspec.Struct):
    """The function of a tool or of a call; `arguments` is JSON text, or its value."""

    name: str | None = None
    arguments: str | JsonObject | None = None
    parameters: JsonObject | None = None


class _RowTool(msgspec.Struct):
    function: _RowFunction


class _RowCall(_RowFunction):
    """A call of a tool, with its fields in `function` or directly."""

    function: _RowFunction | None = None


class _RowMessage(msgspec.Struct):
    role: str
    content: str | list[JsonObject] | None = None
    tool_calls: list[_RowCall] | None = None


class _RowSource(msgspec.Struct):
    persona: str | None = None
    prompt_sha256: str | None = None


class _Row(msgspec.Struct):
    """What is required of a row so that it can be read; `validate` checks the rest."""

    messages: Annotated[list[_RowMessage], msgspec.Meta(min_length=1)]
    tools: list[_RowTool] | None = None
    provenance: _RowSource | None = None
    thinking: bool | None = None
    category: str | int | None = None


def check_readable(row: object) -> None:
    """Raise msgspec.ValidationError unless a row has messages of the types that every reader of rows relies on."""
    msgspec.convert(row, _Row)


MIN_VALID = 400 / 500
MIN_TOOLS = 80 / 200  # of the conversations that should call one
# In characters. A spoken answer is short; a whole conversation stays below 2,048 tokens at 4
# characters per token.
MAX_USER = 1000
MAX_ANSWER = 800
MAX_TOTAL = 8000
PROMPT_TEACHER = "prompts"  # of rows without an answer (data/behaviour_prompts.py)
NO_MESSAGES = "no messages"
ROW_ROLES = {"system", "user", "assistant", "tool"}


class ValidatedRows(msgspec.Struct):
    """The check of a set.

    with_tools: number of valid rows that call a tool.
    faults: number of rows per fault.
    ok: whether enough rows are valid and enough of them call a tool.
    """

    total: int
    valid: int
    with_tools: int
    by_category: dict[str, int]
    faults: dict[str, int]
    ok: bool


def faults(row: Row, persona: Persona | None = None) -> list[str]:
    """Return a description of each rule that a conversation breaks. persona: default: annie."""
    persona = persona or load_persona("annie")
    teacher = teacher_of(row)
    result = form_faults(row, persona.tools, needs_answer=teacher != PROMPT_TEACHER)
    if result and (result[0] == NO_MESSAGES or "unknown role" in result[0]):
        return result
    messages = row["messages"]
    # The limits of length are for what a teacher wrote
    limited = teacher not in (None, "log", "model", PROMPT_TEACHER)
    other_prompt = (
        messages[0]["role"] == "system" and messages[0].get("content") != persona.system_prompt
    )
    if teacher != "log" and other_prompt:
        result.append("the system prompt is not the persona's")
    for message in messages:
        if message["role"] == "assistant":
            result += _style_faults(text_of(message.get("content")), persona, limited)
    if limited:
        lengths = [(m["role"], len(text_of(m.get("content")))) for m in messages]
        if any(role == "user" and length > MAX_USER for role, length in lengths):
            result.append(f"a user message is longer than {MAX_USER} characters")
        if sum(length for _, length in lengths) > MAX_TOTAL:
            result.append(f"longer than {MAX_TOTAL} characters")
    if row.get("category") is not None and teacher != "log":
        result += _category_faults(row, persona)
    return result


def teacher_of(row: Row) -> str | None:
    """Return who wrote a row: a teacher's name, "log" for production (annie-quant init), None where it is not known."""
    provenance = row.get("provenance")
    teacher = provenance.get("teacher") if isinstance(provenance, Mapping) else None
    return str(teacher) if teacher else None


def form_faults(
    row: Row, tools: Sequence[Tool] | None = (), needs_answer: bool = True
) -> list[str]:
    """Return a description of each rule of the form that a row breaks; a row without faults can be rendered and scored.

    tools: on offer where the row names none. None: not known; calls of rows without tools are then
        not checked.
    needs_answer: its last message must be the assistant's.
    """
    messages = row.get("messages")
    if not isinstance(messages, list) or not messages:
        return [NO_MESSAGES]
    offered: Any = tools if row.get("tools") is None else row["tools"]
    result = [] if offered is None else _tools_faults(offered)
    schemas = None
    if offered is not None and not result:
        schemas = {t["function"]["name"]: t["function"] for t in offered}
    for index, message in enumerate(messages):
        role = message.get("role") if isinstance(message, Mapping) else None
        if role not in ROW_ROLES:
            return [f"message {index}: unknown role {role!r}"]
        if role == "assistant":
            if not text_of(message.get("content")).strip() and not message.get("tool_calls"):
                result.append("an answer is empty")
            for call in message.get("tool_calls") or ():
                result += _call_faults(call, schemas)
        elif role != "tool" and not text_of(message.get("content")).strip():
            result.append(f"a {role} message is empty")
    if needs_answer and messages[-1]["role"] != "assistant":
        result.append("the last message is not the assistant's")
    return result


def _tools_faults(tools: object) -> list[str]:
    try:
        valid = all(tool.function.name for tool in msgspec.convert(tools, list[_RowTool]))
    except msgspec.ValidationError:
        valid = False
    fault = 'tools are not a list of {"type": "function", "function": {"name": ...}}'
    return [] if valid else [fault]


def _category_faults(row: Row, persona: Persona) -> list[str]:
    category = persona.category(str(row.get("category")))
    if category is None:
        return [f"{persona.name} has no category {row.get('category')!r}"]
    result = []
    turns = sum(m["role"] == "user" for m in row["messages"])
    confirmed = category.tool in rules_of(persona).confirmed
    if turns not in (category.turns, category.turns + confirmed):
        result.append(f"{turns} user turns, expected {category.turns}")
    calls = [call for m in row["messages"] for call in m.get("tool_calls") or ()]
    called = [call["function"].get("name") for call in calls if call.get("function")]
    if category.tool and category.tool not in called:
        result.append(f"{category.tool} is not called")
    other = next((name for name in called if name != category.tool), None)
    if other and category.tool is None:
        result.append(f"{other!r} is called, expected no tool call")
    elif other and category.tool in called:
        result.append(f"{other!r} is called in addition to {category.tool}")
    return result


def _style_faults(text: str, persona: Persona, limited: bool) -> list[str]:
    result = []
    if limited and len(text) > MAX_ANSWER:
        result.append(f"an answer is longer than {MAX_ANSWER} characters")
    kind = markdown_in(text) if persona.forbids_markdown else None
    if kind:
        result.append(f"markdown in an answer: {kind}")
    if leaked(text):
        result.append("thinking in an answer")
    return result


def _call_faults(call: object, schemas: Mapping[str, Tool] | None) -> list[str]:
    function = call.get("function") if isinstance(call, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(name, str) or not name:
        return ['a tool call is not {"function": {"name": ..., "arguments": ...}}']
    arguments = function.get("arguments")
    try:
        decoded = decode_json(arguments or "{}") if isinstance(arguments, str) else arguments
    except ValueError:
        decoded = None
    if not isinstance(decoded, Mapping):
        return ["tool arguments are not a JSON object, or one in a string"]
    if schemas is None:
        return []
    if name not in schemas:
        return [f"{name!r} is called and not offered"]
    misfit = mismatch(dict(decoded), schemas[name].get("parameters") or {})
    return [f"arguments of {name} do not match its schema: {misfit}"] if misfit else []


def validate(
    rows: Iterable[Row], persona: Persona | None = None, requested: int | None = None
) -> ValidatedRows:
    """Check all rows and the set as a whole. Rows without a category are counted under "none".

    requested: number of conversations that were requested, if that is more than there are.
    """
    persona = persona or load_persona("annie")
    total = tools = 0
    by_category = Counter[str]()
    counts = Counter[str]()
    finders: dict[str, DuplicateFinder] = {}
    categorized = False
    for row in rows:
        total += 1
        category = str(row.get("category") or "none")
        categorized |= row.get("category") is not None and teacher_of(row) != "log"
        row_faults = faults(row, persona)
        if not row_faults:
            finder = finders.setdefault(category, DuplicateFinder())
            text = user_text(row)
            if finder.find(text) is not None:
                row_faults = ["nearly the same user text as in another conversation"]
            finder.add(str(row.get("id", total)), text)
        counts.update(row_faults)
        if not row_faults:
            tools += any(m.get("tool_calls") for m in row["messages"])
            by_category[category] += 1
    expected = max(total, requested or 0)
    valid = by_category.total()
    share = 0.0  # of the rows that should call a tool
    if categorized:
        share = sum(c.tool is not None for c in persona.categories) / len(persona.categories)
    enough = total > 0 and valid >= MIN_VALID * expected and tools >= MIN_TOOLS * expected * share
    return ValidatedRows(total, valid, tools, dict(by_category), dict(counts), bool(enough))


def form_report(
    rows: Iterable[Row], persona: Persona | None = None, needs_answer: bool = True
) -> str | None:
    """Return one line about the rows whose form is invalid; None where all are valid."""
    tools = persona.tools if persona else None
    found = [form_faults(row, tools, needs_answer) for row in rows]
    counts = Counter(row_faults[0] for row_faults in found if row_faults)
    if not counts:
        return None
    most, n = counts.most_common(1)[0]
    return f"{counts.total()} of {len(found)} conversations break a rule of the row form, {n} of them: {most}"

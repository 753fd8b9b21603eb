"""What a tool returns to a drawn call: fields of its result schema, or that its description names, or what its name asks for.

"Returns the order's status and delivery date." gives {"order": "AK-40017", "status": "open", "delivery_date": "2026-12-09"}.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping

from annie_quant.core.untrusted import JsonObject
from annie_quant.data.exchanges import WORDS
from annie_quant.data.prompt_rules import REQUESTS, PromptRules, words_of
from annie_quant.data.schema_values import Schema, ValueDrawer

RESULT_SCHEMAS = ("returns", "response", "output_schema", "outputSchema", "output", "result")
MAX_FIELDS = 6
MAX_FIELD_WORDS = 3
LIST_LENGTH = 2
_RETURNS = re.compile(
    r"\b(?:returns?|responds with|yields|(?:result|response|output) (?:has|contains|is)|gives(?: back)?|(?:result|output|fields):"
    r"|liefert|gibt|ergebnis:|rückgabe:|antwort:)\s+([^.\n]+)",
    re.IGNORECASE,
)
# "Return the status of an order": what follows these words is not a field
_TAIL = re.compile(
    r"\s(?:in|of|for|with|from|as|at|on|by|im|in der|des|der|für|von|mit|zurück|aus)\s.*$"
)
_NO_FIELD = {
    *("the", "a", "an", "its", "their", "object", "json", "list", "all", "current", "each", "one", "new", "this", "only"),
    *("der", "die", "das", "den", "dem", "ein", "eine", "einen", "alle", "liste", "zurück", "aktuelle", "aktuellen", "neue"),
}  # fmt: skip


def draw_result(
    tool: Schema, arguments: JsonObject, rng: random.Random, split: str, rules: PromptRules
) -> JsonObject:
    """Return a result of a call. A field with an argument's name has that argument's value."""
    description = str(tool.get("description") or "")
    schema = next((tool[key] for key in RESULT_SCHEMAS if isinstance(tool.get(key), Mapping)), None)
    drawer = ValueDrawer(schema or {}, rng, split, rules, f"{tool['name']} {description}")
    if schema is not None:
        drawn = drawer.value({"type": "object", **schema})
        if isinstance(drawn, dict) and drawn:
            return {name: arguments.get(name, value) for name, value in drawn.items()}
    fields = named_fields(description)
    words = words_of(str(tool["name"]))
    reads = bool(words) and words[0] in REQUESTS.read_verbs
    if not fields and reads:
        fields = _asked_for(words[1:], arguments)
    result: JsonObject = {}
    for name, value in arguments.items():
        if not isinstance(value, (list, dict)):
            result[name] = value
    texts = [value for value in result.values() if isinstance(value, str)]
    drawer.note_fields([*result, *fields, *texts])
    for name in fields:
        if name not in result:
            value = _field_value(drawer, name, result)
            result[name] = drawer.not_before(value, arguments.values())
    noun = "_".join(words[1:]) or "_".join(words)
    if not fields and f"{noun}_id" not in result:
        number = WORDS.first_order[split] + rng.randint(0, 9999)
        result[f"{noun}_id"] = f"{noun[:1].upper()}-{number}"
    elif not fields:
        result["completed"] = True
    drawer.put_in_order(result)
    return result


def _asked_for(noun: list[str], arguments: JsonObject) -> list[str]:
    """Return what a tool without a description of its result returns: what its name asks for, of a known thing its state."""
    known = any({*noun} <= {*words_of(name)} for name in arguments)
    return ["state", "last_change_date"] if known or not noun else ["_".join(noun)]


def _field_value(drawer: ValueDrawer, name: str, known: JsonObject) -> object:
    """Return a value, or a list for a name in the plural. The value of an argument whose name has all words of this one is kept."""
    words = words_of(name)
    for argument, value in known.items():
        if {*words} <= {*words_of(argument)}:
            return value
    for ending in ("s", "en", "e"):
        singular = name.removesuffix(ending)
        if singular == name or drawer.knows(name):
            continue
        if ending == "s" or drawer.knows(singular):
            values = {drawer.result_value(singular) for _ in range(LIST_LENGTH)}
            return sorted(values, key=str)
    return drawer.result_value(name)


def named_fields(description: str) -> list[str]:
    """Return the fields that a description says a tool returns."""
    match = _RETURNS.search(description)
    if match is None:
        return []
    text = match[1]
    quoted = re.findall(r"[`'\"](\w+)[`'\"]", text)
    if quoted:
        return quoted[:MAX_FIELDS]
    fields = []
    for part in re.split(r"[,;/(){}]|\s(?:and|or|und|oder|sowie|plus)\s", text):
        part = _TAIL.sub("", re.sub(r"^.*(?:'s|object with|list with|objekt mit)\s", "", part))
        words = [word for word in re.findall(r"\w+", part) if word.lower() not in _NO_FIELD]
        if len(words) > 1 and words[-1].lower() in ("value", "values", "wert"):
            words.pop()  # "the lowest and highest value"
        if 0 < len(words) <= MAX_FIELD_WORDS and words[0].isidentifier():
            fields.append("_".join(words).lower() if len(words) > 1 else words[0])
    return list(dict.fromkeys(fields))[:MAX_FIELDS]

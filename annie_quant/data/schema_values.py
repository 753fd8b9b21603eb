"""Values that fit a JSON schema, drawn with a seed: the arguments of a tool call.

Enums, constants, examples, numbers with limits, text by pattern, format and the property's name,
arrays, nested objects, optional properties, unions and local references ($defs) are drawn.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

import rstr

from annie_quant.core.json_schema import mismatch
from annie_quant.core.untrusted import JsonObject
from annie_quant.data.exchanges import MY_TOPICS, WORDS

OPTIONAL_SHARE = 0.5  # of the optional properties, which get a value
MAX_ITEMS = 3
MAX_SCHEMA_DEPTH = 6
MAX_ATTEMPTS = 30
LOWEST = 1  # of numbers without limits
HIGHEST = 90

Schema = Mapping[str, Any]  # a JSON schema, or an OpenAI tool with one
_NULL = {"type": "null"}


class NoValue(Exception):
    """No drawn value fits the schema."""


def draw_arguments(schema: Schema, rng: random.Random, split: str) -> JsonObject:
    """Return arguments that fit a tool's parameters.

    Raises NoValue where none of MAX_ATTEMPTS fits, for example because the schema refers to another
    document, which is never fetched.
    """
    drawer = _Drawer(schema, rng, split)
    reason = None
    for _ in range(MAX_ATTEMPTS):
        try:
            value = drawer.value(schema)
        except (RecursionError, AttributeError, TypeError, ValueError, re.error):
            raise NoValue("the schema is not valid, or refers to itself without end") from None
        if isinstance(value, dict):
            reason = mismatch(value, schema)
            if reason is None:
                return value
    because = f": {reason}" if reason else ""
    raise NoValue(f"no arguments that fit {json.dumps(schema)[:120]}{because}")


class _Drawer:
    """Draws values for the parts of one schema.

    root: the schema, to which local references refer.
    split: whose words are used.
    """

    def __init__(self, root: Schema, rng: random.Random, split: str) -> None:
        self.root = root
        self.rng = rng
        self.split = split

    def value(self, node: object, name: str = "", depth: int = 0) -> object:
        """Return a value for a part of the schema, which is that of the property `name` at this depth."""
        if not isinstance(node, Mapping):
            return self._text({}, name)
        if "$ref" in node:
            node = self._resolved(node)
        if "const" in node:
            return node["const"]
        if node.get("enum"):
            return self.rng.choice(node["enum"])
        for key in ("anyOf", "oneOf"):
            if node.get(key):
                return self.value(self._option(node, key, depth), name, depth)
        if node.get("allOf"):
            parts = [_without(node, "allOf"), *node["allOf"]]
            return self.value(self._merged(parts), name, depth)
        kind = self._kind(node)
        if kind == "object":
            return self._object(node, depth)
        if kind == "array":
            return self._array(node, name, depth)
        if kind in ("integer", "number"):
            return self._number(node, kind)
        if kind == "boolean":
            return self.rng.random() < 0.5
        return None if kind == "null" else self._text(node, name)

    def _option(self, node: Schema, key: str, depth: int) -> Schema:
        """Return the schema with one of its alternatives: null only where it refers to itself deeply, or has no other."""
        if depth >= MAX_SCHEMA_DEPTH and _NULL in node[key]:
            options = [_NULL]
        else:
            options = [option for option in node[key] if option != _NULL] or node[key]
        return {**_without(node, key), **self._resolved(self.rng.choice(options))}

    def _kind(self, node: Schema) -> object:
        kind = node.get("type")
        if isinstance(kind, list):
            kind = self.rng.choice([k for k in kind if k != "null"] or kind)
        if kind is not None:
            return kind
        if "properties" in node:
            return "object"
        return "array" if "items" in node else "string"

    def _object(self, node: Schema, depth: int) -> JsonObject:
        required = set(node.get("required") or ())
        properties = node.get("properties") or {}
        result = {}
        chosen = []
        for key in properties:
            if key in required or (depth < MAX_SCHEMA_DEPTH and self.rng.random() < OPTIONAL_SHARE):
                chosen.append(key)
        chosen += [key for key in required if key not in properties]
        for key in chosen:
            result[key] = self.value(properties.get(key, {}), key, depth + 1)
        return result

    def _array(self, node: Schema, name: str, depth: int) -> list[object]:
        n = int(node.get("minItems", depth < MAX_SCHEMA_DEPTH))
        if depth < MAX_SCHEMA_DEPTH:
            most = min(int(node.get("maxItems", MAX_ITEMS)), n + MAX_ITEMS - 1)
            n = self.rng.randint(n, max(n, most))
        items = [self.value(node.get("items", {}), name, depth + 1) for _ in range(n)]
        if node.get("uniqueItems"):
            return list({json.dumps(item, sort_keys=True): item for item in items}.values())
        return items

    def _number(self, node: Schema, kind: object) -> int | float:
        low = node.get("minimum", node.get("exclusiveMinimum"))
        high = node.get("maximum", node.get("exclusiveMaximum"))
        if low is None:
            low = LOWEST if high is None else min(LOWEST, high - (HIGHEST - LOWEST))
        if high is None:
            high = max(HIGHEST, low + (HIGHEST - LOWEST))
        number = int if kind == "integer" else float
        step = node.get("multipleOf") or (1 if kind == "integer" else 0.5)
        first = -(-low // step)
        last = high // step
        if last < first:
            return low if kind == "number" else int(low)
        return number(self.rng.randint(int(first), int(last)) * step)

    def _text(self, node: Schema, name: str) -> str:
        """Return an example of the schema, or a text by its format and name; one by its pattern where that does not match."""
        examples = [text for text in node.get("examples") or () if isinstance(text, str)]
        text = self.rng.choice(examples) if examples else self._word(node, name)
        pattern = node.get("pattern")
        if pattern is None or re.search(pattern, text):
            return text
        generator = rstr.Rstr(self.rng)
        # * and + repeat up to 100 times
        return min((generator.xeger(pattern) for _ in range(3)), key=len)

    def _word(self, node: Schema, name: str) -> str:
        rng = self.rng
        kind = node.get("format")
        key = name.lower()
        day = f"{rng.randint(1, 28):02d}"
        date = f"2026-{rng.randint(1, 12):02d}-{day}"
        time = f"{rng.randint(6, 22):02d}:{rng.choice((0, 15, 30, 45)):02d}"
        who = rng.choice(WORDS.names[self.split])
        if kind == "date" or key in ("date", "day", "birthday") or key.endswith("_date"):
            return date
        if kind == "date-time":
            return f"{date}T{time}:00Z"
        if kind == "time" or key == "time" or key.endswith("_time"):
            return time
        if kind == "email" or "email" in key:
            return f"{who.lower()}{rng.randint(1, 99)}@example.org"
        if kind in ("uri", "url") or key in ("url", "uri", "link"):
            return f"https://example.org/{who.lower()}/{rng.randint(1, 999)}"
        if key in ("room", "place", "area", "zone"):  # language: data
            return rng.choice(WORDS.units)
        if key in ("city", "location", "town"):
            return rng.choice(WORDS.facts["capital"])[1]
        if key == "country":
            return rng.choice(WORDS.facts["capital"])[0]
        if key in ("name", "person", "contact", "user", "recipient", "to"):
            return who
        if key.endswith(("_id", "number", "code")) or key in ("id", "order"):
            number = WORDS.first_order[self.split] + rng.randint(0, 9999)
            return f"{key[:1].upper() or 'N'}-{number}"
        return self._topic(int(node.get("minLength", 0)), int(node.get("maxLength", 1000)))

    def _topic(self, shortest: int, longest: int) -> str:
        text = self.rng.choice(MY_TOPICS[self.split])
        if len(text) < shortest:
            text = (text + " ") * (shortest // (len(text) + 1) + 1)
        text = text[:longest]
        return text.strip() if len(text.strip()) >= shortest else text

    def _resolved(self, node: object) -> Schema:
        """Return a schema with its local reference (#/$defs/NAME) replaced by what it refers to."""
        for _ in range(MAX_SCHEMA_DEPTH):
            if not isinstance(node, Mapping) or "$ref" not in node:
                break
            target: Any = self.root
            for part in str(node["$ref"]).lstrip("#/").split("/"):
                target = target.get(part, {}) if isinstance(target, Mapping) else {}
            node = {**target, **_without(node, "$ref")}
        return node if isinstance(node, Mapping) else {}

    def _merged(self, nodes: Sequence[object]) -> JsonObject:
        """Return one schema for all of several."""
        result: JsonObject = {}
        properties: JsonObject = {}
        required: list[str] = []
        for schema in map(self._resolved, nodes):
            result |= schema
            properties |= schema.get("properties", {})
            required += schema.get("required", ())
        return result | {
            key: value
            for key, value in (("properties", properties), ("required", required))
            if value
        }


def _without(node: Schema, key: str) -> JsonObject:
    return {k: v for k, v in node.items() if k != key}

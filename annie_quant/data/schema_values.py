"""Values that fit a JSON schema, drawn with a seed: arguments for the calls of the offline teacher.

Enums, constants, defaults, numbers with limits, text by format and by the property's name, arrays, nested objects, optional
properties, unions and local references ($defs). Free text is drawn from a split's own words, so that an argument of a gate
is in no other split.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

from annie_quant.data.words import MY_TOPICS, WORDS
from annie_quant.tool_schema import mismatch

OPTIONAL_SHARE = 0.5  # of optional properties that are given
MAX_ITEMS, MAX_DEPTH, MAX_DRAWS = 3, 6, 30
LOW, HIGH = 1, 90  # numbers without limits
UNITS = ("kitchen", "garden", "office", "garage", "cellar", "attic", "hall", "bedroom", "bathroom", "balcony")
NAMES = {
    "train": ("Anna", "Ben", "Clara", "David", "Ella", "Felix"),
    "calibration": ("Greta", "Henry", "Ida", "Jonas"),
    "gate": ("Karin", "Leo", "Mara", "Nils", "Olga", "Paul"),
}
FIRST_ORDER = {"train": 10000, "calibration": 40000, "gate": 70000}


class NoValue(Exception):
    """No value was drawn that fits the schema."""


def draw_arguments(schema: Mapping[str, Any], rng: random.Random, split: str) -> dict[str, Any]:
    """Return arguments that fit a tool's parameters.

    Raises NoValue where none is drawn in MAX_DRAWS attempts, also because the schema refers to another document, which is
    not fetched.
    """
    reason = None
    for _ in range(MAX_DRAWS):
        value = _draw(schema, schema, rng, split, "", 0)
        if isinstance(value, dict):
            reason = mismatch(value, schema)
            if reason is None:
                return value
    raise NoValue(f"no arguments that fit {json.dumps(schema)[:120]}" + (f": {reason}" if reason else ""))


def _draw(node: Any, root: Mapping[str, Any], rng: random.Random, split: str, name: str, depth: int) -> Any:
    if not isinstance(node, Mapping):
        return _text({}, rng, split, name)
    if "$ref" in node:
        node = _resolved(node, root)
    if "const" in node:
        return node["const"]
    if node.get("enum"):
        return rng.choice(node["enum"])
    for key in ("anyOf", "oneOf"):
        if node.get(key):
            options = [option for option in node[key] if option != {"type": "null"}] or node[key]
            return _draw({**_without(node, key), **_resolved(rng.choice(options), root)}, root, rng, split, name, depth)
    if node.get("allOf"):
        return _draw(_merged([_without(node, "allOf"), *node["allOf"]], root), root, rng, split, name, depth)
    kind = node.get("type")
    if isinstance(kind, list):
        kind = rng.choice([k for k in kind if k != "null"] or kind)
    if kind is None:
        kind = "object" if "properties" in node else "array" if "items" in node else "string"
    if kind == "object":
        return _object(node, root, rng, split, depth)
    if kind == "array":
        low, high = int(node.get("minItems", 1)), int(node.get("maxItems", MAX_ITEMS))
        n = rng.randint(low, max(low, min(high, low + MAX_ITEMS - 1))) if depth < MAX_DEPTH else low
        items = [_draw(node.get("items", {}), root, rng, split, name, depth + 1) for _ in range(n)]
        return _distinct(items) if node.get("uniqueItems") else items
    if kind in ("integer", "number"):
        return _number(node, rng, kind)
    if kind == "boolean":
        return rng.random() < 0.5
    return None if kind == "null" else _text(node, rng, split, name)


def _object(node: Mapping[str, Any], root: Mapping[str, Any], rng: random.Random, split: str, depth: int) -> dict:
    required = set(node.get("required") or ())
    properties = node.get("properties") or {}
    chosen = [key for key in properties if key in required or (depth < MAX_DEPTH and rng.random() < OPTIONAL_SHARE)] + [
        key for key in required if key not in properties
    ]
    return {key: _draw(properties.get(key, {}), root, rng, split, key, depth + 1) for key in chosen}


def _number(node: Mapping[str, Any], rng: random.Random, kind: str) -> int | float:
    low = node.get("minimum", node.get("exclusiveMinimum"))
    high = node.get("maximum", node.get("exclusiveMaximum"))
    if low is None:
        low = min(LOW, high - (HIGH - LOW)) if high is not None else LOW
    if high is None:
        high = max(HIGH, low + (HIGH - LOW))
    step = node.get("multipleOf") or (1 if kind == "integer" else 0.5)
    first, last = -(-low // step), high // step
    if last < first:
        return low if kind == "number" else int(low)
    value = rng.randint(int(first), int(last)) * step
    return int(value) if kind == "integer" else float(value)


def _text(node: Mapping[str, Any], rng: random.Random, split: str, name: str) -> str:
    kind, key = node.get("format"), name.lower()
    day, month, hour, minute = rng.randint(1, 28), rng.randint(1, 12), rng.randint(6, 22), rng.choice((0, 15, 30, 45))
    who = rng.choice(NAMES[split])
    if kind == "date" or key in ("date", "day", "birthday") or key.endswith("_date"):
        return f"2026-{month:02d}-{day:02d}"
    if kind == "date-time":
        return f"2026-{month:02d}-{day:02d}T{hour:02d}:{minute:02d}:00Z"
    if kind == "time" or key == "time" or key.endswith("_time"):
        return f"{hour:02d}:{minute:02d}"
    if kind == "email" or "email" in key:
        return f"{who.lower()}{rng.randint(1, 99)}@example.org"
    if kind in ("uri", "url") or key in ("url", "uri", "link"):
        return f"https://example.org/{who.lower()}/{rng.randint(1, 999)}"
    if key in ("room", "place", "area", "zone"):  # language: data
        return rng.choice(UNITS)
    if key in ("city", "location", "town"):
        return rng.choice(WORDS.facts["capital"])[1]
    if key == "country":
        return rng.choice(WORDS.facts["capital"])[0]
    if key in ("name", "person", "contact", "user", "recipient", "to"):
        return who
    if key.endswith(("_id", "number", "code")) or key in ("id", "order"):
        return f"{key[:1].upper() or 'N'}-{FIRST_ORDER[split] + rng.randint(0, 9999)}"
    low, high = int(node.get("minLength", 0)), int(node.get("maxLength", 1000))
    text = rng.choice(MY_TOPICS[split])
    if len(text) < low:
        text = (text + " ") * (low // (len(text) + 1) + 1)
    return text[:high].strip() if low <= len(text[:high].strip()) else text[:high]


def _resolved(node: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a schema with its local reference (#/$defs/NAME) replaced by what it refers to."""
    for _ in range(MAX_DEPTH):
        if not isinstance(node, Mapping) or "$ref" not in node:
            break
        target: Any = root
        for part in str(node["$ref"]).lstrip("#/").split("/"):
            target = target.get(part, {}) if isinstance(target, Mapping) else {}
        node = {**target, **_without(node, "$ref")}
    return node if isinstance(node, Mapping) else {}


def _merged(nodes: Sequence[Any], root: Mapping[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for node in (_resolved(n, root) for n in nodes):
        properties = {**result.get("properties", {}), **node.get("properties", {})}
        required = [*result.get("required", ()), *node.get("required", ())]
        result |= node
        if properties:
            result["properties"] = properties
        if required:
            result["required"] = required
    return result


def _without(node: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {k: v for k, v in node.items() if k != key}


def _distinct(items: Sequence[Any]) -> list[Any]:
    return list({json.dumps(item, sort_keys=True): item for item in items}.values())

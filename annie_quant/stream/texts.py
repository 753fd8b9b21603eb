"""Fields of a server's JSON, which may have any type, and texts that were cut into pieces."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from annie_quant.core.text import printable
from annie_quant.core.untrusted import JsonObject, decode_json, without_surrogates

MAX_NAME = 200  # characters of an id, a name, a reason
# What is not a byte of a UTF-8 sequence that was cut (U+DC80 to U+DCFF, as in Python's surrogateescape).
_HALVES = re.compile("[\ud800-\udc7f\udd00-\udfff]")
_SURROGATES = re.compile("[\ud800-\udfff]")


def decode_event(data: bytes) -> Any:
    """Return an event's JSON. Texts of its choices may end in a half character, whose other half is in the next event.

    Raises ValueError for what is not JSON.
    """
    try:
        return decode_json(data)
    except ValueError:
        try:
            value = json.loads(data.decode("utf-8", "surrogateescape"))
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise
    return {
        str(name): item if name == "choices" else without_surrogates(item)
        for name, item in value.items()
    }


def joined(pieces: Iterable[str]) -> str:
    """Return the text of all pieces: halves of a character are joined, and what is left of one is U+FFFD."""
    text = "".join(pieces)
    if text.isascii() or not _SURROGATES.search(text):
        return text
    units = text.encode("utf-16-le", "surrogatepass")
    text = units.decode("utf-16-le", "surrogatepass")
    text = _HALVES.sub("\N{REPLACEMENT CHARACTER}", text)
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def text_of(value: object) -> str:
    """Return the text of a string, or of a part or list of parts, however deep it is; "" for any other value."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return "".join(map(text_of, value))
    if isinstance(value, dict):
        return "".join(text_of(value.get(name)) for name in _PART_TEXTS)
    return ""


_PART_TEXTS = ("text", "thinking", "reasoning", "summary", "refusal")
_TEXT_PARTS = ("text", "output_text", "refusal", None)
_THINKING = re.compile("think|thought|reason", re.IGNORECASE)


def split_parts(content: object) -> tuple[str, str, list[str]]:
    """Return (text, thinking, other) of a message's content: a string, a part, or a list of parts.

    other: the types of parts that are neither.
    """
    text = []
    thinking = []
    other = []
    for part in content if isinstance(content, list) else [content]:
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(part, dict) and (part.get("thought") is True or _THINKING.search(str(kind))):
            thinking.append(text_of(part))
        elif isinstance(part, (bool, int, float)):
            other.append(type(part).__name__)
        elif kind in _TEXT_PARTS:
            text.append(text_of(part))
        else:
            other.append(str(kind)[:MAX_NAME])
    return "".join(text), "".join(thinking), other


def object_field(parent: JsonObject, name: str) -> JsonObject:
    """Return a field that is an object; {} if it is missing or null. Raises ValueError for any other type."""
    value = parent.get(name)
    if value is None or isinstance(value, dict):
        return value or {}
    raise ValueError(f"{name} is not an object: {printable(str(value)[:200], 60)}")


def object_list(parent: JsonObject, name: str) -> list[JsonObject]:
    """Return a field that is a list of objects, as `object_field` does."""
    value = parent.get(name)
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise ValueError(f"{name} is not a list of objects: {printable(str(value)[:200], 60)}")
    return value


def name_field(parent: JsonObject, name: str) -> str | None:
    """Return a field that is a short text: an id, a name, a reason. Numbers are read as text."""
    value = parent.get(name)
    if value is None:
        return None
    if not isinstance(value, (str, int)) or isinstance(value, bool):
        raise ValueError(f"{name} is not text: {printable(str(value)[:200], 60)}")
    return joined([str(value)[:MAX_NAME]])

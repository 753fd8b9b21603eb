"""Data that another party wrote: a server's answers, a checkpoint's metadata, a log. Decode it, limit it, show it.

decode_json(data)   JSON of any content; the only exception is ValueError
limited(value)      a copy without what could not be stored again: depth, sizes and numbers are limited
printable(text)     text for a terminal: no escape sequence, no control character, one line
"""

from __future__ import annotations

import math
import re
import unicodedata
from typing import Any

import msgspec

MAX_DEPTH = 8
MAX_ENTRIES = 100
MAX_TEXT = 1000
MAX_INTEGER = 2**53  # beyond it JSON readers disagree
# ECMA-48: control sequences (CSI), strings that a terminal acts upon (OSC, DCS, SOS, PM, APC), and two-character escapes.
_ESCAPE = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]?|(?:\x1b[]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)?|\x1b[ -/]*.?",
    re.DOTALL,
)


def decode_json(data: bytes | str) -> Any:
    """Return the value of a JSON document. Raises ValueError, with one line, for everything that cannot be decoded."""
    try:
        return msgspec.json.decode(data)
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise ValueError(f"not JSON: {printable(str(error), 200)}") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None


def limited(value: Any, depth: int = MAX_DEPTH) -> Any:
    """Return a copy of a decoded JSON value that can be stored: MAX_ENTRIES per list or object, MAX_TEXT characters per
    text, finite numbers, integers up to MAX_INTEGER. What does not fit is cut, or None."""
    if isinstance(value, str):
        return value[:MAX_TEXT]
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int):
        return value if abs(value) <= MAX_INTEGER else None
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if depth <= 0:
        return None
    if isinstance(value, dict):
        entries = list(value.items())[:MAX_ENTRIES]
        return {str(key)[:MAX_TEXT]: limited(item, depth - 1) for key, item in entries}
    if isinstance(value, list):
        return [limited(item, depth - 1) for item in value[:MAX_ENTRIES]]
    return None


def integer(value: Any) -> int | None:
    """Return a count: an integer from 0 to MAX_INTEGER; None for anything else (True is not a count)."""
    return value if type(value) is int and 0 <= value <= MAX_INTEGER else None


def printable(text: str, most: int | None = None, lines: bool = False) -> str:
    """Return text without escape sequences and invisible characters, on one line (`lines`: keep line breaks and tabs).

    most: longest result. Characters that change the order of others (Trojan Source, CVE-2021-42574) are invisible too.
    """
    text = _ESCAPE.sub("", text)
    kept = "\n\t" if lines else ""
    text = "".join(c if c in kept or c.isprintable() else _replacement(c) for c in text)
    if not lines:
        text = " ".join(text.split())
    return text if most is None or len(text) <= most else text[: most - 1] + "…"


def _replacement(character: str) -> str:
    """A space for white space, nothing for format characters, "\ufffd" for a surrogate or an unassigned one."""
    category = unicodedata.category(character)
    if category.startswith("Z") or character in "\n\r\t\v\f\x85":
        return " "
    return "" if category in ("Cc", "Cf") else "\ufffd"

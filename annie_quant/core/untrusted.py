"""Data that another party wrote: a server's answers, a checkpoint's metadata, a log.

Decode it, limit it, show it.

decode_json(data)   JSON of any content; the only exception is ValueError; lenient: with NaN, and U+FFFD for lone surrogates
limited(value)      a copy without what could not be stored again: depth, sizes and numbers are limited
integer(value)      a count, or None; cost_usd(value): an amount, or None
printable(text)     text for a terminal: no escape sequence, no control character, one line
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from annie_quant.core.text import printable

# A decoded JSON object of another party: the type of a field is checked where it is read.
JsonObject = dict[str, Any]
MAX_STORED_DEPTH = 8
MAX_ENTRIES = 100
MAX_STORED_TEXT = 1000
MAX_INTEGER = 2**53  # beyond it JSON readers disagree
MAX_COUNT = 10**14  # sums of a few such counts can be stored (documents.reading.Count)
MAX_COST_USD = 1e9
_SURROGATE = re.compile("[\ud800-\udfff]")


def decode_json(data: bytes | str, lenient: bool = False) -> Any:
    """Return the value of a JSON document.

    Raises ValueError, with one line, for everything that cannot be decoded.

    lenient: also accept what Python's json module accepts and msgspec does not: NaN, infinities,
        and lone surrogates, which become U+FFFD, because no file can hold them.
    """
    try:
        return msgspec.json.decode(data)
    except (msgspec.MsgspecError, UnicodeError) as error:
        fault = f"not JSON: {printable(str(error), 200)}"
    except RecursionError:
        fault = "nested too deeply"
    if lenient:
        with contextlib.suppress(ValueError, RecursionError):
            return without_surrogates(json.loads(data))
    raise ValueError(fault)


def without_surrogates(value: object) -> Any:
    """Return a decoded JSON value with U+FFFD for each lone surrogate.

    RecursionError where it is nested too deeply.
    """
    return changed_texts(value, partial(_SURROGATE.sub, "\N{REPLACEMENT CHARACTER}"))


def changed_texts(value: object, change: Callable[[str], str]) -> object:
    """Return a JSON value with its names and texts changed, in the order in which they are written."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(key): changed_texts(item, change) for key, item in value.items()}
    return [changed_texts(item, change) for item in value] if isinstance(value, list) else value


def limited(value: object, depth: int = MAX_STORED_DEPTH) -> Any:
    """Return a copy of a decoded JSON value that can be stored.

    It has MAX_ENTRIES per list or object, MAX_STORED_TEXT characters per text, finite numbers, and
    integers up to MAX_INTEGER. What does not fit is cut, or None.
    """
    if isinstance(value, str):
        return value[:MAX_STORED_TEXT]
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
        return {str(key)[:MAX_STORED_TEXT]: limited(item, depth - 1) for key, item in entries}
    if isinstance(value, list):
        return [limited(item, depth - 1) for item in value[:MAX_ENTRIES]]
    return None


def integer(value: object) -> int | None:
    """Return a count: an integer from 0 to MAX_COUNT; None for anything else (True is not a count)."""
    return value if type(value) is int and 0 <= value <= MAX_COUNT else None


def cost_usd(value: object) -> float | None:
    """Return an amount of money: a number from 0 to MAX_COST_USD; None for anything else (NaN and True are no amounts)."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if 0 <= value < MAX_COST_USD else None

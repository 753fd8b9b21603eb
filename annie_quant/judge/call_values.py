"""Whole calls against a list of allowed values for each argument, as the Berkeley leaderboard's answers are written.

{"name": {"argument": [allowed, allowed, ...]}}: "" among the allowed values means that the argument may be left out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from annie_quant.judge.answers import Answer
from annie_quant.judge.tools import arguments_of

# Case, spaces and this punctuation say nothing about whether a text argument is right.
_NOISE = re.compile(r"[ ,./\-_*^]")


def selection_fault(answer: Answer, expected: Sequence[Mapping[str, Any]]) -> str:
    """Whether just the expected functions are called, each as often as expected, in any order."""
    seen = sorted(str(call.get("name")) for call in answer.tool_calls)
    wanted = sorted(name for call in expected for name in call)
    return "" if seen == wanted else f"it called {', '.join(seen) or 'nothing'}, wanted {', '.join(wanted)}"


def values_fault(answer: Answer, expected: Sequence[Mapping[str, Any]]) -> str:
    """Whether each expected call has a call of its own with allowed values, in any order."""
    if fault := selection_fault(answer, expected):
        return fault
    left = list(answer.tool_calls)
    for wanted in expected:
        name, allowed = next(iter(wanted.items()))
        faults = [(_call_fault(call, name, allowed), call) for call in left]
        match = next((call for fault, call in faults if not fault), None)
        if match is None:
            return next((fault for fault, call in faults if call.get("name") == name), f"{name} was not called")
        left.remove(match)
    return ""


def _call_fault(call: Mapping[str, Any], name: str, allowed: Mapping[str, Sequence[Any]]) -> str:
    if call.get("name") != name:
        return f"it called {call.get('name')!r}, wanted {name!r}"
    try:
        given = arguments_of(call)
    except ValueError:
        return f"the arguments of {name!r} are not JSON"
    return f"{name!r}: {fault}" if (fault := _mapping_fault(given, allowed)) else ""


def _mapping_fault(given: Any, allowed: Mapping[str, Sequence[Any]]) -> str:
    if not isinstance(given, dict):
        return f"{given!r} is no object"
    if strange := [key for key in given if key not in allowed]:
        return f"there is no argument {strange[0]!r}"
    for key, choices in allowed.items():
        if key not in given:
            if "" not in choices:
                return f"the argument {key!r} is missing"
        elif not any(_same(given[key], choice) for choice in choices):
            return f"the argument {key!r} is {given[key]!r}, allowed: {list(choices)!r}"
    return ""


def _same(seen: Any, choice: Any) -> bool:
    if isinstance(seen, bool) or isinstance(choice, bool):
        return seen is choice
    if isinstance(seen, str) and isinstance(choice, str):
        return _NOISE.sub("", seen).replace("'", '"').lower() == _NOISE.sub("", choice).replace("'", '"').lower()
    if isinstance(seen, (list, tuple)) and isinstance(choice, (list, tuple)):
        return len(seen) == len(choice) and all(_same(x, y) for x, y in zip(seen, choice, strict=True))
    if isinstance(seen, dict) and isinstance(choice, dict):
        return not _mapping_fault(seen, choice)
    return bool(seen == choice)

"""Whole calls against lists of allowed values, in the form of the Berkeley leaderboard's answers.

{"name": {"argument": [allowed, allowed, ...]}}: "" among the allowed values means that the argument may be omitted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from annie_quant.judge.answers import Answer
from annie_quant.judge.checks.statements import contains
from annie_quant.judge.checks.tools import abstention, arguments_of, tool_call
from annie_quant.judge.workloads import Case, Workload

# Case, spaces and this punctuation do not decide whether a text argument is right.
_IGNORED = re.compile(r"[ ,./\-_*^]")


def tool_selection(answer: Answer, case: Case, workload: Workload) -> str | None:
    """The expected functions are called and no others, each as often as expected, in any order."""
    expected = case.expect.get("calls")
    return selection_fault(answer, expected) if expected else None


def tool_values(answer: Answer, case: Case, workload: Workload) -> str | None:
    """The expected calls are made, with allowed values for every argument, in any order."""
    expected = case.expect.get("calls")
    return values_fault(answer, expected) if expected else None


def several_calls(answer: Answer, case: Case, workload: Workload) -> str | None:
    """tool_values where two calls or more are expected."""
    expected = case.expect.get("calls") or ()
    return values_fault(answer, expected) if len(expected) > 1 else None


def use_result(answer: Answer, case: Case, workload: Workload) -> str | None:
    """All that is expected of an answer to what a tool returned."""
    if not case.after_result:
        return None
    faults = [check(answer, case, workload) for check in (contains, tool_call, tool_values, abstention)]
    applicable = [fault for fault in faults if fault is not None]
    return next(filter(None, applicable), "") if applicable else None


def selection_fault(answer: Answer, expected: Sequence[Mapping[str, Any]]) -> str:
    called = sorted(str(call.get("name")) for call in answer.tool_calls)
    names = sorted(name for call in expected for name in call)
    return "" if called == names else f"it called {', '.join(called) or 'nothing'}, expected {', '.join(names)}"


def values_fault(answer: Answer, expected: Sequence[Mapping[str, Any]]) -> str:
    if fault := selection_fault(answer, expected):
        return fault
    left = list(answer.tool_calls)
    for expected_call in expected:
        name, allowed = next(iter(expected_call.items()))
        faults = [(_call_fault(call, name, allowed), call) for call in left]
        match = next((call for fault, call in faults if not fault), None)
        if match is None:
            return next((fault for fault, call in faults if call.get("name") == name), f"{name} was not called")
        left.remove(match)
    return ""


def _call_fault(call: Mapping[str, Any], name: str, allowed: Mapping[str, Sequence[Any]]) -> str:
    if call.get("name") != name:
        return f"it called {call.get('name')!r}, expected {name!r}"
    try:
        arguments = arguments_of(call)
    except ValueError:
        return f"the arguments of {name!r} are not JSON"
    return f"{name!r}: {fault}" if (fault := _mapping_fault(arguments, allowed)) else ""


def _mapping_fault(arguments: Any, allowed: Mapping[str, Sequence[Any]]) -> str:
    if not isinstance(arguments, dict):
        return f"{arguments!r} is not an object"
    if unknown := [key for key in arguments if key not in allowed]:
        return f"unknown argument {unknown[0]!r}"
    for key, choices in allowed.items():
        if key not in arguments:
            if "" not in choices:
                return f"the argument {key!r} is missing"
        elif not any(_same(arguments[key], choice) for choice in choices):
            return f"the argument {key!r} is {arguments[key]!r}, allowed: {list(choices)!r}"
    return ""


def _same(value: Any, choice: Any) -> bool:
    if isinstance(value, bool) or isinstance(choice, bool):
        return value is choice
    if isinstance(value, str) and isinstance(choice, str):
        return _normalized(value) == _normalized(choice)
    if isinstance(value, (list, tuple)) and isinstance(choice, (list, tuple)):
        return len(value) == len(choice) and all(_same(x, y) for x, y in zip(value, choice, strict=True))
    if isinstance(value, dict) and isinstance(choice, dict):
        return not _mapping_fault(value, choice)
    return bool(value == choice)


def _normalized(text: str) -> str:
    return _IGNORED.sub("", text).replace("'", '"').lower()

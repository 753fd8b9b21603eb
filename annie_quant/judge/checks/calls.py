"""Checks of tool calls: the right function, arguments that parse and match their schema, allowed values.

Calls with the allowed values of their arguments have the form of the Berkeley leaderboard's
answers, {"name": {"argument": [allowed, allowed, ...]}}: "" among the allowed values means that the
argument may be omitted.
"""

from __future__ import annotations

import json
import math
import re
import unicodedata
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from annie_quant.core.json_schema import mismatch
from annie_quant.core.untrusted import decode_json
from annie_quant.documents import Answer, ToolCall
from annie_quant.judge.answers import (
    CALL_VANISHED,
    Tools,
    has_call_markup,
    parser_fault,
    raw_view,
)
from annie_quant.judge.checks.statements import contains, fold

if TYPE_CHECKING:
    from annie_quant.judge.workloads import Case, Workload

Allowed = Mapping[str, Sequence[object]]  # argument → allowed values
ExpectedCall = Mapping[str, Allowed]  # one function → its arguments
# Case, spaces and this punctuation do not decide whether a text argument is right.
_IGNORED = re.compile(r"[ ,./\-_*^]")


# ---- reading calls


def arguments_of(call: ToolCall) -> object:
    """Return a call's arguments, decoded. Raises ValueError where they are not JSON (NaN is not)."""
    arguments = call.get("arguments")
    if arguments is None:
        raise ValueError("there are no arguments")
    return decode_json(arguments) if isinstance(arguments, str) else arguments


def normalized_call(call: ToolCall) -> tuple[str, str]:
    """Return name and arguments of a call so that equal calls are equal (`canonical`)."""
    try:
        arguments = arguments_of(call)
    except ValueError:
        arguments = str(call.get("arguments"))
    return str(call.get("name")), canonical(arguments)


def canonical(value: object) -> str:
    """Return the JSON text of a value: keys sorted, 1.0 as 1, true apart from 1, text stripped."""
    return json.dumps(_plain(value), sort_keys=True, ensure_ascii=False)


def _plain(value: object) -> object:
    if isinstance(value, str):
        return unicodedata.normalize("NFC", value).strip()
    if isinstance(value, float) and math.isfinite(value) and value == int(value):
        return int(value)
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value


# ---- the expected tool


def tool_call(
    answer: Answer, case: Case, workload: Workload, reference: Answer | None
) -> str | None:
    """The expected tool is called, no other one and nothing twice, with arguments that match its schema."""
    expected = case.expect.get("tool")
    return _expected_call_fault(answer, expected, workload.tools_for(case)) if expected else None


def tool_call_raw(
    answer: Answer, case: Case, workload: Workload, reference: Answer | None
) -> str | None:
    """tool_call on what the model wrote, also where the server left the call in the text.

    A higher rate than tool_call: the fault is the server's parser (is --tool-call-parser set?), not
    the model. It does not apply where the server lost the call, because nobody knows what the model wrote.
    """
    tools = workload.tools_for(case)
    if parser_fault(answer) == CALL_VANISHED:
        return None
    return tool_call(raw_view(answer, tools), case, workload, reference)


def _expected_call_fault(answer: Answer, expected: str, tools: Tools) -> str:
    if answer.error:
        return f"the request failed: {answer.error}"
    for call in answer.tool_calls:
        if call.get("name") != expected:
            return f"it called {call.get('name')!r}, expected {expected!r}"
    if len(set(map(normalized_call, answer.tool_calls))) < len(answer.tool_calls):
        return f"it called {expected!r} twice with the same arguments"
    return schemas_fault(answer, tools)


def tool_arguments(
    answer: Answer, case: Case, workload: Workload, reference: Answer | None
) -> str | None:
    """Each expected argument of the call has its words (one text, or a list of alternatives)."""
    name = case.expect.get("tool")
    expected = case.expect.get("arguments")
    if not name or not expected:
        return None
    call = next((c for c in answer.tool_calls if c.get("name") == name), None)
    if call is None:
        return f"{name!r} was not called"
    try:
        arguments = arguments_of(call)
    except ValueError:
        return "the arguments are not JSON"
    if not isinstance(arguments, dict):
        return "the arguments are not an object"
    for key, stated in expected.items():
        value = arguments.get(key)
        if value is None:
            return f"the argument {key!r} is missing"
        choices = stated if isinstance(stated, list) else [stated]
        if not any(_has_words(value, choice) for choice in choices):
            return f"the argument {key!r} is {value!r}, expected {stated!r}"
    return ""


def _has_words(value: object, choice: object) -> bool:
    if isinstance(choice, str) and isinstance(value, str):
        return fold(choice) in fold(value)
    return canonical(value) == canonical(choice)


# ---- any call


def tool_schema(
    answer: Answer, case: Case, workload: Workload, reference: Answer | None
) -> str | None:
    """Something is called where calls are expected, and all arguments parse and match their schemas."""
    return schemas_fault(answer, workload.tools_for(case)) if case.expect.get("calls") else None


def schemas_fault(answer: Answer, tools: Tools) -> str:
    """Return the fault of the first call whose name is not on offer or whose arguments do not match; no call fails too."""
    if not answer.tool_calls:
        if has_call_markup(answer):
            return "the tool call is in the text, unparsed"
        if '"name"' in answer.text and '"arguments"' in answer.text:
            return "a tool call is in the text as JSON"
        return "no tool was called"
    faults = (_schema_fault(call, tools) for call in answer.tool_calls)
    return next(filter(None, faults), "")


def _schema_fault(call: ToolCall, tools: Tools) -> str:
    name = call.get("name")
    try:
        arguments = arguments_of(call)
    except ValueError as error:
        return f"the arguments of {name!r} are not JSON: {error}"
    if not isinstance(arguments, dict):
        return f"the arguments of {name!r} are a {type(arguments).__name__}, expected an object"
    functions = [tool.get("function", tool) for tool in tools or ()]
    function = next((f for f in functions if f.get("name") == name), None)
    if function is None:
        return f"{name!r} is not among the tools on offer"
    misfit = mismatch(arguments, function.get("parameters") or {})
    return f"the arguments of {name!r} do not match its schema: {misfit}" if misfit else ""


def abstention(
    answer: Answer, case: Case, workload: Workload, reference: Answer | None
) -> str | None:
    """No tool is called where none fits; an answer in words is expected instead."""
    if not case.expect.get("no_tool"):
        return None
    if answer.tool_calls:
        return f"it called {answer.tool_calls[0].get('name')!r} where no tool fits"
    if has_call_markup(answer):
        return "a tool call is in the text where no tool fits"
    return "" if answer.text.strip() else "no text was received"


def call_rate(
    answer: Answer, case: Case, workload: Workload, reference: Answer | None
) -> str | None:
    """Something is called, where tools are on offer. Neither answer is right by itself: the rate is compared."""
    if not workload.tools_for(case):
        return None
    return "" if answer.tool_calls or has_call_markup(answer) else "no tool was called"


def scenario(
    answer: Answer, case: Case, workload: Workload, reference: Answer | None
) -> str | None:
    """The package tool-eval-bench gives the status "pass"; it plays and judges its scenarios itself (judge/tool_eval.py)."""
    return None


# ---- calls and the allowed values of their arguments


def allowed(value: object) -> object:
    """Return a value as the leaderboard's answers have it: each field of an object is a list of allowed values."""
    if isinstance(value, Mapping):
        return {key: [allowed(item)] for key, item in value.items()}
    return [allowed(item) for item in value] if isinstance(value, list) else value


def tool_selection(
    answer: Answer, case: Case, workload: Workload, reference: Answer | None
) -> str | None:
    """The expected functions are called and no others, each as often as expected, in any order."""
    expected = case.expect.get("calls")
    return selection_fault(answer, expected) if expected else None


def tool_values(
    answer: Answer, case: Case, workload: Workload, reference: Answer | None
) -> str | None:
    """The expected calls are made, with allowed values for every argument, in any order."""
    expected = case.expect.get("calls")
    return values_fault(answer, expected) if expected else None


def several_calls(
    answer: Answer, case: Case, workload: Workload, reference: Answer | None
) -> str | None:
    """tool_values where two calls or more are expected."""
    expected = case.expect.get("calls") or ()
    return values_fault(answer, expected) if len(expected) > 1 else None


def use_result(
    answer: Answer, case: Case, workload: Workload, reference: Answer | None
) -> str | None:
    """All that is expected of an answer to what a tool returned."""
    if not case.after_result:
        return None
    checks = (contains, tool_call, tool_values, abstention)
    faults = [check(answer, case, workload, reference) for check in checks]
    applicable = [fault for fault in faults if fault is not None]
    return next(filter(None, applicable), "") if applicable else None


def selection_fault(answer: Answer, expected: Sequence[ExpectedCall]) -> str:
    called = called_names(answer)
    names = sorted(name for call in expected for name in call)
    if called == names:
        return ""
    return f"it called {', '.join(called) or 'nothing'}, expected {', '.join(names)}"


def called_names(answer: Answer) -> list[str]:
    return sorted(str(call.get("name")) for call in answer.tool_calls)


def values_fault(answer: Answer, expected: Sequence[ExpectedCall]) -> str:
    fault = selection_fault(answer, expected)
    if fault:
        return fault
    unmatched = list(answer.tool_calls)
    for expected_call in expected:
        [(name, arguments)] = expected_call.items()
        named = [call for call in unmatched if call.get("name") == name]
        faults = [_call_fault(call, arguments) for call in named]
        if "" not in faults:
            return f"{name!r}: {faults[0]}"
        unmatched.remove(named[faults.index("")])
    return ""


def _call_fault(call: ToolCall, allowed: Allowed) -> str:
    try:
        return _mapping_fault(arguments_of(call), allowed)
    except ValueError:
        return "the arguments are not JSON"


def _mapping_fault(arguments: object, allowed: Allowed) -> str:
    if not isinstance(arguments, dict):
        return f"{arguments!r} is not an object"
    unknown = [key for key in arguments if key not in allowed]
    if unknown:
        return f"unknown argument {unknown[0]!r}"
    for key, values in allowed.items():
        # Objects in objects have single values.
        choices = values if isinstance(values, (list, tuple)) else [values]
        if key not in arguments:
            if "" not in choices:
                return f"the argument {key!r} is missing"
        elif not any(_same(arguments[key], choice) for choice in choices):
            return f"the argument {key!r} is {arguments[key]!r}, allowed: {choices!r}"
    return ""


def _same(value: object, choice: object) -> bool:
    if isinstance(value, bool) or isinstance(choice, bool):
        return value is choice
    if isinstance(value, str) and isinstance(choice, str):
        return _normalized(value) == _normalized(choice)
    if isinstance(value, (list, tuple)) and isinstance(choice, (list, tuple)):
        return len(value) == len(choice) and all(map(_same, value, choice))
    if isinstance(value, dict) and isinstance(choice, dict):
        return not _mapping_fault(value, choice)
    return bool(value == choice)


def _normalized(text: str) -> str:
    return _IGNORED.sub("", text).replace("'", '"').lower()

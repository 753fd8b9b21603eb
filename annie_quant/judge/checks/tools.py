"""Tool calls against their schemas: the right name, arguments that parse, types that fit, the expected words."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from annie_quant.judge.answers import Answer, raw_view
from annie_quant.judge.checks.statements import fold
from annie_quant.judge.workloads import Case, Workload
from annie_quant.tool_schema import mismatch

Tools = Sequence[Mapping[str, Any]] | None


def tool_call(answer: Answer, case: Case, workload: Workload) -> str | None:
    """The expected tool is called with arguments that parse and fit its schema."""
    expected = case.expect.get("tool")
    return _call_fault(answer, expected, workload.tools_for(case)) if expected else None


def tool_call_raw(answer: Answer, case: Case, workload: Workload) -> str | None:
    """tool_call on what the model wrote, also where the server left the call in the text.

    A higher rate than tool_call: the fault is the server's parser (is --tool-call-parser set?), not the model.
    """
    expected, tools = case.expect.get("tool"), workload.tools_for(case)
    return _call_fault(raw_view(answer, tools), expected, tools) if expected else None


def tool_arguments(answer: Answer, case: Case, workload: Workload) -> str | None:
    """Each expected argument of the call has its words (one text, or a list of alternatives)."""
    name, expected = case.expect.get("tool"), case.expect.get("arguments")
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
    for key, choices in expected.items():
        value = arguments.get(key)
        if value is None:
            return f"the argument {key!r} is missing"
        if not any(_matches(value, choice) for choice in (choices if isinstance(choices, list) else [choices])):
            return f"the argument {key!r} is {value!r}, expected {choices!r}"
    return ""


def tool_schema(answer: Answer, case: Case, workload: Workload) -> str | None:
    """Something is called where calls are expected, and all arguments parse and fit their schemas."""
    return schemas_fault(answer, workload.tools_for(case)) if case.expect.get("calls") else None


def abstention(answer: Answer, case: Case, workload: Workload) -> str | None:
    """No tool is called where none fits; an answer in words is expected instead."""
    if not case.expect.get("no_tool"):
        return None
    if answer.tool_calls:
        return f"it called {answer.tool_calls[0].get('name')!r} where no tool fits"
    if has_call_markup(answer):
        return "a tool call is in the text where no tool fits"
    return "" if answer.text.strip() else "no text was received"


def call_rate(answer: Answer, case: Case, workload: Workload) -> str | None:
    """Something is called, where tools are on offer. Neither answer is right by itself: the rate is compared."""
    if not workload.tools_for(case):
        return None
    return "" if answer.tool_calls or has_call_markup(answer) else "no tool was called"


def schemas_fault(answer: Answer, tools: Tools) -> str:
    """Return the fault of the first call whose name is not on offer or whose arguments do not fit; no call fails too."""
    if not answer.tool_calls:
        if has_call_markup(answer):
            return "the tool call is in the text, unparsed"
        if '"name"' in answer.text and '"arguments"' in answer.text:
            return "a tool call is in the text as JSON"
        return "no tool was called"
    return next((fault for call in answer.tool_calls if (fault := _schema_fault(call, tools))), "")


def arguments_of(call: Mapping[str, Any]) -> Any:
    """Return a call's arguments, decoded. Raises ValueError where they are not JSON."""
    arguments = call.get("arguments")
    if isinstance(arguments, str):
        return json.loads(arguments)
    if arguments is None:
        raise ValueError("there are no arguments")
    return arguments


def has_call_markup(answer: Answer) -> bool:
    """Return whether a tool call is left in the text."""
    return "<tool_call>" in answer.text or "<function=" in answer.text


def _call_fault(answer: Answer, expected: str, tools: Tools) -> str:
    if answer.error:
        return f"the request failed: {answer.error}"
    if answer.tool_calls and answer.tool_calls[0].get("name") != expected:
        return f"it called {answer.tool_calls[0].get('name')!r}, expected {expected!r}"
    return schemas_fault(answer, tools)


def _schema_fault(call: Mapping[str, Any], tools: Tools) -> str:
    name = call.get("name")
    try:
        arguments = arguments_of(call)
    except ValueError as error:
        return f"the arguments of {name!r} are not JSON: {error}"
    if not isinstance(arguments, dict):
        return f"the arguments of {name!r} are a {type(arguments).__name__}, expected an object"
    schemas = {t.get("function", t).get("name"): t.get("function", t).get("parameters") or {} for t in tools or ()}
    if name not in schemas:
        return f"{name!r} is not among the tools on offer"
    schema = schemas[name]
    unknown = [key for key in arguments if key not in schema.get("properties", {key: None})]
    if unknown and not schema.get("additionalProperties"):
        return f"{name!r} has no argument {unknown[0]!r}"
    misfit = mismatch(arguments, schema)
    return f"the arguments of {name!r} do not fit its schema: {misfit}" if misfit else ""


def _matches(value: Any, choice: Any) -> bool:
    if isinstance(choice, str) and isinstance(value, str):
        return fold(choice) in fold(value)
    return bool(value == choice)

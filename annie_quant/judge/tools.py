"""Tool calls against their schemas: the right name, arguments that parse, types that fit, the right words asked for."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from annie_quant.judge.answers import Answer
from annie_quant.judge.text import fold


def call_fault(answer: Answer, wanted: str, tools: Sequence[Mapping[str, Any]] | None) -> str:
    """What is wrong with the calls of an answer that should call `wanted`; "" when nothing is."""
    if answer.error:
        return f"the request failed: {answer.error}"
    if not answer.tool_calls:
        return _no_call(answer)
    first = answer.tool_calls[0].get("name")
    if first != wanted:
        return f"it called {first!r}, wanted {wanted!r}"
    return schemas_fault(answer, tools)


def schemas_fault(answer: Answer, tools: Sequence[Mapping[str, Any]] | None) -> str:
    """The first call whose name is not on offer or whose arguments do not fit its schema; no call is a fault too."""
    if not answer.tool_calls:
        return _no_call(answer)
    return next((fault for call in answer.tool_calls if (fault := _schema_fault(call, tools))), "")


def arguments_of(call: Mapping[str, Any]) -> Any:
    """A call's arguments, decoded. Raises ValueError where they are not JSON."""
    arguments = call.get("arguments")
    if isinstance(arguments, str):
        return json.loads(arguments)
    if arguments is None:
        raise ValueError("no arguments came")
    return arguments


def _no_call(answer: Answer) -> str:
    if "<tool_call>" in answer.text or "<function=" in answer.text:
        return "the tool call stands in the text, unparsed"
    if '"name"' in answer.text and '"arguments"' in answer.text:
        return "a tool call stands in the text as JSON"
    return "no tool was called"


def _schema_fault(call: Mapping[str, Any], tools: Sequence[Mapping[str, Any]] | None) -> str:
    name = call.get("name")
    try:
        arguments = arguments_of(call)
    except ValueError as error:
        return f"the arguments of {name!r} are not JSON: {error}"
    if not isinstance(arguments, dict):
        return f"the arguments of {name!r} are a {type(arguments).__name__}, wanted an object"
    schemas = {t.get("function", t).get("name"): t.get("function", t).get("parameters") or {} for t in tools or ()}
    if name not in schemas:
        return f"{name!r} is not among the tools offered"
    return _mismatch(arguments, schemas[name], str(name))


def _mismatch(arguments: dict[str, Any], schema: Mapping[str, Any], name: str) -> str:
    from jsonschema import Draft202012Validator

    unknown = [key for key in arguments if key not in schema.get("properties", {key: None})]
    if unknown:
        return f"{name!r} has no argument {unknown[0]!r}"
    error = next(Draft202012Validator(schema).iter_errors(arguments), None)
    if error is None:
        return ""
    where = ".".join(str(part) for part in error.path)
    return f"the arguments of {name!r} do not fit its schema{f' at {where}' if where else ''}: {error.message}"


def argument_fault(answer: Answer, wanted: str, expected: Mapping[str, Any]) -> str:
    """Each expected argument of a call of `wanted` holds its words (a text, or a list of which any will do)."""
    call = next((c for c in answer.tool_calls if c.get("name") == wanted), None)
    if call is None:
        return f"{wanted!r} was not called"
    try:
        arguments = arguments_of(call)
    except ValueError:
        return "the arguments are not JSON"
    if not isinstance(arguments, dict):
        return "the arguments are not an object"
    for key, choices in expected.items():
        seen = arguments.get(key)
        if seen is None:
            return f"the argument {key!r} is missing"
        if not any(_holds(seen, choice) for choice in (choices if isinstance(choices, list) else [choices])):
            return f"the argument {key!r} is {seen!r}, wanted {choices!r}"
    return ""


def _holds(seen: Any, choice: Any) -> bool:
    if isinstance(choice, str) and isinstance(seen, str):
        return fold(choice) in fold(seen)
    return bool(seen == choice)

"""Checks of what an answer states and of its tool calls: the right function, arguments that parse and fit, allowed values."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from annie_quant.core.text import printable
from annie_quant.documents import ToolCall
from annie_quant.judge.answers import Answer, Tools, raw_view

if TYPE_CHECKING:
    from annie_quant.judge.workloads import Case, Workload

# ---- what an answer states: a word or a number as a whole ("15" is not in "150"), not in a question, not denied

_UNITS = (
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
)
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
_SENTENCE_END = re.compile(r"(?<=[.!?…])(?:[\"'”’)*_]*)\s+|\n+")
_DENIED = re.compile(
    r"\b(?:not|isn't|isnt|never|wasn't|neither|aren't|can't be)\s+(?:in\s+|called\s+|the\s+)?$"
)


def fold(text: str) -> str:
    """Return the text without case and accents, in compatibility forms: "Tōkyō" as "tokyo", "１５" as "15"."""
    plain = unicodedata.normalize("NFKD", text.replace("’", "'"))
    return "".join(c for c in plain if not unicodedata.combining(c)).casefold()


def spelled(number: str) -> str | None:
    """Return a pattern for a whole number from 0 to 999 in English words ("fifteen", "one hundred twenty")."""
    if not number.isdigit() or len(number) > 3:
        return None
    value = int(number)
    if value < 20:
        return _UNITS[value]
    if value < 100:
        tens, ones = divmod(value, 10)
        return _TENS[tens - 2] + (f"[ -]{_UNITS[ones]}" if ones else "")
    hundreds, rest = divmod(value, 100)
    return f"{_UNITS[hundreds]} hundred" + (f" (?:and )?{spelled(str(rest))}" if rest else "")


def _pattern(statement: str) -> re.Pattern[str]:
    plain = fold(statement).strip()
    if re.fullmatch(r"\d+(?:\.\d+)?", plain):
        # Not inside a longer number, a decimal, a thousands group, nor after a minus sign.
        digits = rf"(?<![\w])(?<!\d[.,])(?<![\s(=][-−])(?<!^[-−]){re.escape(plain)}(?![\w%]|[.,]\d)(?!\s*/\s*\d)"
        words = spelled(plain)
        longer = r"[\w-]|\s+(?:hundred|thousand|million)\b"
        return re.compile(rf"{digits}|(?<![\w-]){words}(?!{longer})" if words else digits)
    body = r"\s+".join(re.escape(part) for part in plain.split())
    return re.compile(rf"(?<!\w){body}(?!\w)")


def states(statement: str, text: str) -> bool:
    """Return whether some sentence that is not a question has `statement` as whole words, and does not deny it."""
    pattern = _pattern(statement)
    for sentence in _SENTENCE_END.split(fold(text)):
        if sentence.rstrip(" \"'”’)*_").endswith("?"):
            continue
        if any(
            not _DENIED.search(sentence[: match.start()]) for match in pattern.finditer(sentence)
        ):
            return True
    return False


def missing(statements: Sequence[str | Sequence[str]] | str, text: str) -> str:
    """Return the first statement that the text lacks, "" where it has all. A list inside means any one of it."""
    for item in [statements] if isinstance(statements, str) else statements:
        choices = [item] if isinstance(item, str) else list(item)
        if not any(states(choice, text) for choice in choices):
            return " or ".join(choices)
    return ""


def contains(
    answer: Answer, case: Case, workload: Workload, reference: Answer | None
) -> str | None:
    """The answer states everything in `expect.contains`."""
    statements = case.expect.get("contains")
    if not statements:
        return None
    return (
        f"the answer does not state {lacking!r}"
        if (lacking := missing(statements, answer.text))
        else ""
    )


# ---- tool calls and their schemas


def tool_call(
    answer: Answer, case: Case, workload: Workload, reference: Answer | None
) -> str | None:
    """The expected tool is called, no other one and nothing twice, with arguments that parse and fit its schema."""
    expected = case.expect.get("tool")
    return _expected_call_fault(answer, expected, workload.tools_for(case)) if expected else None


def scenario(
    answer: Answer, case: Case, workload: Workload, reference: Answer | None
) -> str | None:
    """The package tool-eval-bench gives the status "pass"; it plays and judges its scenarios itself (judge/tool_eval.py)."""
    return None


def tool_call_raw(
    answer: Answer, case: Case, workload: Workload, reference: Answer | None
) -> str | None:
    """tool_call on what the model wrote, also where the server left the call in the text.

    A higher rate than tool_call: the fault is the server's parser (is --tool-call-parser set?), not the model.
    """
    expected, tools = case.expect.get("tool"), workload.tools_for(case)
    return _expected_call_fault(raw_view(answer, tools), expected, tools) if expected else None


def tool_arguments(
    answer: Answer, case: Case, workload: Workload, reference: Answer | None
) -> str | None:
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
        if not any(
            _matches(value, choice)
            for choice in (choices if isinstance(choices, list) else [choices])
        ):
            return f"the argument {key!r} is {value!r}, expected {choices!r}"
    return ""


def tool_schema(
    answer: Answer, case: Case, workload: Workload, reference: Answer | None
) -> str | None:
    """Something is called where calls are expected, and all arguments parse and fit their schemas."""
    return schemas_fault(answer, workload.tools_for(case)) if case.expect.get("calls") else None


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


def schemas_fault(answer: Answer, tools: Tools) -> str:
    """Return the fault of the first call whose name is not on offer or whose arguments do not fit; no call fails too."""
    if not answer.tool_calls:
        if has_call_markup(answer):
            return "the tool call is in the text, unparsed"
        if '"name"' in answer.text and '"arguments"' in answer.text:
            return "a tool call is in the text as JSON"
        return "no tool was called"
    return next((fault for call in answer.tool_calls if (fault := _schema_fault(call, tools))), "")


def arguments_of(call: ToolCall) -> object:
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


def _expected_call_fault(answer: Answer, expected: str, tools: Tools) -> str:
    if answer.error:
        return f"the request failed: {answer.error}"
    if other := next((call for call in answer.tool_calls if call.get("name") != expected), None):
        return f"it called {other.get('name')!r}, expected {expected!r}"
    arguments = [call.get("arguments") for call in answer.tool_calls]
    if any(own in arguments[:i] for i, own in enumerate(arguments)):
        return f"it called {expected!r} twice with the same arguments"
    return schemas_fault(answer, tools)


def _schema_fault(call: ToolCall, tools: Tools) -> str:
    name = call.get("name")
    try:
        arguments = arguments_of(call)
    except ValueError as error:
        return f"the arguments of {name!r} are not JSON: {error}"
    if not isinstance(arguments, dict):
        return f"the arguments of {name!r} are a {type(arguments).__name__}, expected an object"
    schemas = {
        t.get("function", t).get("name"): t.get("function", t).get("parameters") or {}
        for t in tools or ()
    }
    if name not in schemas:
        return f"{name!r} is not among the tools on offer"
    schema = schemas[name]
    unknown = [key for key in arguments if key not in schema.get("properties", {key: None})]
    if unknown and not schema.get("additionalProperties"):
        return f"{name!r} has no argument {unknown[0]!r}"
    misfit = mismatch(arguments, schema)
    return f"the arguments of {name!r} do not fit its schema: {misfit}" if misfit else ""


def mismatch(arguments: object, schema: Mapping[str, object]) -> str | None:
    """Return how arguments do not match a schema, in one line, or None.

    A schema may come from elsewhere: one that cannot be used is a mismatch, and a `$ref` to another document is never fetched
    (jsonschema would open any URL, and files).
    """
    import jsonschema
    import referencing

    try:
        # An empty registry retrieves nothing.
        validator = jsonschema.Draft202012Validator(schema, registry=referencing.Registry())
        first = next(iter(validator.iter_errors(arguments)), None)
    except RecursionError:
        return "the tool's schema refers to itself without end"
    except Exception as error:  # an invalid schema raises errors of many types: of types, of patterns, of references
        return f"the tool's schema cannot be used: {printable(f'{type(error).__name__}: {error}', 200)}"
    if first is None:
        return None
    where = ".".join(str(part) for part in first.path)
    return printable(f"{f'at {where}: ' if where else ''}{first.message}", 300)


def _matches(value: object, choice: object) -> bool:
    if isinstance(choice, str) and isinstance(value, str):
        return fold(choice) in fold(value)
    return bool(value == choice)


# ---- calls and the allowed values of their arguments, in the form of the Berkeley leaderboard's answers
#
# {"name": {"argument": [allowed, allowed, ...]}}: "" among the allowed values means that the argument may be omitted.

Allowed = Mapping[str, Sequence[object]]  # argument → allowed values
ExpectedCall = Mapping[str, Allowed]  # one function → its arguments


def allowed(value: object) -> object:
    """Return a value as the leaderboard's answers have it: each field of an object is a list of allowed values."""
    if isinstance(value, Mapping):
        return {key: [allowed(item)] for key, item in value.items()}
    return [allowed(item) for item in value] if isinstance(value, list) else value


# Case, spaces and this punctuation do not decide whether a text argument is right.
_IGNORED = re.compile(r"[ ,./\-_*^]")


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
    faults = [
        check(answer, case, workload, reference)
        for check in (contains, tool_call, tool_values, abstention)
    ]
    applicable = [fault for fault in faults if fault is not None]
    return next(filter(None, applicable), "") if applicable else None


def selection_fault(answer: Answer, expected: Sequence[ExpectedCall]) -> str:
    called = sorted(str(call.get("name")) for call in answer.tool_calls)
    names = sorted(name for call in expected for name in call)
    return (
        ""
        if called == names
        else f"it called {', '.join(called) or 'nothing'}, expected {', '.join(names)}"
    )


def values_fault(answer: Answer, expected: Sequence[ExpectedCall]) -> str:
    if fault := selection_fault(answer, expected):
        return fault
    left = list(answer.tool_calls)
    for expected_call in expected:
        name, allowed = next(iter(expected_call.items()))
        faults = [(_call_fault(call, name, allowed), call) for call in left]
        match = next((call for fault, call in faults if not fault), None)
        if match is None:
            return next(
                (fault for fault, call in faults if call.get("name") == name),
                f"{name} was not called",
            )
        left.remove(match)
    return ""


def _call_fault(call: ToolCall, name: str, allowed: Allowed) -> str:
    if call.get("name") != name:
        return f"it called {call.get('name')!r}, expected {name!r}"
    try:
        arguments = arguments_of(call)
    except ValueError:
        return f"the arguments of {name!r} are not JSON"
    return f"{name!r}: {fault}" if (fault := _mapping_fault(arguments, allowed)) else ""


def _mapping_fault(arguments: object, allowed: Allowed) -> str:
    if not isinstance(arguments, dict):
        return f"{arguments!r} is not an object"
    if unknown := [key for key in arguments if key not in allowed]:
        return f"unknown argument {unknown[0]!r}"
    for key, values in allowed.items():
        choices = (
            values if isinstance(values, (list, tuple)) else [values]
        )  # objects in objects have single values
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
        return len(value) == len(choice) and all(
            _same(x, y) for x, y in zip(value, choice, strict=True)
        )
    if isinstance(value, dict) and isinstance(choice, dict):
        return not _mapping_fault(value, choice)
    return bool(value == choice)


def _normalized(text: str) -> str:
    return _IGNORED.sub("", text).replace("'", '"').lower()

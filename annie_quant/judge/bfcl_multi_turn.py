"""The Berkeley leaderboard's multi-turn cases as prompts: each step of the recorded solution is one prompt.

The conversation up to a step is replayed with the recorded calls and their results, so bf16 and the quantized model get the same
prompts; expected is the step's call. The leaderboard lets a model go its own way and compares the final state, so these figures
are not the leaderboard's: they show whether quantizing changed the next call. A turn whose solution is empty (a function or an
argument is missing, and the model should say so) expects no call.

Results come from the package's own simulated systems (in memory), whose public functions are called with literal arguments.
"""

from __future__ import annotations

import ast
import copy
import importlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from annie_quant.errors import EnvironmentFault

CATEGORIES = ("multi_turn_base", "multi_turn_miss_func", "multi_turn_miss_param", "multi_turn_long_context")
MISSING_FUNCTION = "I have updated some more functions you can choose from. What about now?"
DOCUMENTS = {
    "GorillaFileSystem": "gorilla_file_system",
    "MathAPI": "math_api",
    "MessageAPI": "message_api",
    "TwitterAPI": "posting_api",
    "TicketAPI": "ticket_api",
    "TradingBot": "trading_bot",
    "TravelAPI": "travel_booking",
    "VehicleControlAPI": "vehicle_control",
}
_PACKAGE = "bfcl_eval.eval_checker.multi_turn_eval.func_source_code"
MAX_RESULT = 20_000  # characters


class Systems(Protocol):
    """The simulated systems of one case; they keep their state from call to call."""

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Return the result as the model sees it."""


Start = Callable[[Mapping[str, Any], bool], Systems]  # (row, long context)


class PackageSystems:
    """The systems of the package bfcl-eval. Raises EnvironmentFault where one of its imports is missing."""

    def __init__(self, row: Mapping[str, Any], long_context: bool) -> None:
        self._functions: dict[str, Callable[..., Any]] = {}
        for name in row["involved_classes"]:
            try:
                system = getattr(importlib.import_module(f"{_PACKAGE}.{DOCUMENTS[name]}"), name)()
            except ImportError as error:
                raise EnvironmentFault(
                    f"the multi-turn cases of bfcl need {error.name}, which is not installed",
                    f"pip install {error.name}",
                ) from error
            if hasattr(system, "_load_scenario"):
                state = copy.deepcopy((row.get("initial_config") or {}).get(name, {}))
                system._load_scenario(state, long_context=long_context)
            for function in dir(system):
                if not function.startswith("_") and callable(getattr(system, function)):
                    self._functions[function] = getattr(system, function)

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        try:
            result = self._functions[name](**arguments)
        except Exception as error:  # what a system rejects is a result, which the model sees
            return json.dumps({"error": str(error)})
        return result if isinstance(result, str) else json.dumps(result, default=str, ensure_ascii=False)


def prompts(
    root: Path, category: str, rows_of: Callable[[Path], Iterator[dict[str, Any]]], start: Start
) -> Iterator[Any]:
    """Yield (id, messages, tool documents, expected calls) of each step of each case of a category.

    rows_of: reads a file of JSON lines. Expected calls: in the form of judge/checks/calls.py; none where no call is right.
    """
    documents = {name: list(rows_of(root / "multi_turn_func_doc" / f"{file}.json")) for name, file in DOCUMENTS.items()}
    solutions = {r["id"]: r["ground_truth"] for r in rows_of(root / "possible_answer" / f"BFCL_v4_{category}.json")}
    for row in rows_of(root / f"BFCL_v4_{category}.json"):
        excluded = set(row.get("excluded_function") or ())
        tools = [d for name in row["involved_classes"] for d in documents[name] if d["name"] not in excluded]
        yield from _steps(row, tools, solutions[row["id"]], start(row, "long_context" in category))


def _steps(
    row: Mapping[str, Any], tools: Sequence[Mapping[str, Any]], solution: Sequence[Sequence[str]], systems: Systems
) -> Iterator[tuple[str, list[dict[str, Any]], list[Mapping[str, Any]], list[dict[str, Any]]]]:
    missed = {int(turn): set(names) for turn, names in (row.get("missed_function") or {}).items()}
    orders = {t["name"]: list(t["parameters"].get("properties", {})) for t in tools}
    history: list[dict[str, Any]] = []
    for turn, messages in enumerate(row["question"]):
        held_back = {name for later, names in missed.items() if later > turn for name in names}
        offered = [t for t in tools if t["name"] not in held_back]
        history += [dict(m) for m in messages] or [{"role": "user", "content": MISSING_FUNCTION}]
        calls = [parsed_call(text, orders) for text in solution[turn]]
        if not calls:
            yield f"{row['id']}-{turn}", list(history), offered, []
            history.append({"role": "assistant", "content": "I cannot do that with what I have."})
        for step, (name, arguments) in enumerate(calls):
            expected = {name: allowed(arguments)}
            yield f"{row['id']}-{turn}.{step}", list(history), offered, [expected]
            number = f"call_{len(history)}"
            function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
            history += [
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [{"id": number, "type": "function", "function": function}],
                },
                {
                    "role": "tool",
                    "tool_call_id": number,
                    "name": name,
                    "content": systems.call(name, arguments)[:MAX_RESULT],
                },
            ]
        if calls:
            history.append({"role": "assistant", "content": "Done."})


def allowed(value: Any) -> Any:
    """Return a value as the leaderboard's answers have it: each field of an object is a list of allowed values."""
    if isinstance(value, Mapping):
        return {key: [allowed(item)] for key, item in value.items()}
    return [allowed(item) for item in value] if isinstance(value, list) else value


def parsed_call(text: str, orders: Mapping[str, Sequence[str]]) -> tuple[str, dict[str, Any]]:
    """Return name and arguments of a recorded call such as "sort('a.txt', reverse=True)".

    orders: the parameters of each function, in order, for positional arguments. Raises EnvironmentFault for anything but a
    call of a name with literal arguments.
    """
    try:
        call = ast.parse(text.strip(), mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, (ast.Name, ast.Attribute)):
            raise ValueError("not a call")
        name = call.func.id if isinstance(call.func, ast.Name) else call.func.attr
        values = [ast.literal_eval(argument) for argument in call.args]
        arguments = dict(zip(orders.get(name, ()), values, strict=False))
        if len(arguments) < len(values):
            raise ValueError("more arguments than parameters")
        arguments |= {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}
    except (ValueError, SyntaxError, RecursionError, MemoryError) as error:
        raise EnvironmentFault(
            f"bfcl: the recorded call {text[:80]!r} cannot be read: {error}", "use bfcl-eval 2026.3"
        ) from None
    return name, arguments

"""The Berkeley Function Calling Leaderboard's cases as a workload, from the package bfcl-eval (Apache 2.0).

    load()                         all cases of CATEGORIES, single-turn prompts
    load("multiple,irrelevance")   complete categories
    load("live_multiple")          prompts of real users
    load("multi_turn_base")        multi-turn: one prompt per step of the recorded solutions

Dots in function names are replaced, as the leaderboard does for models that call functions
natively: OpenAI's names have none.
"""

from __future__ import annotations

import ast
import copy
import importlib
import importlib.util
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from annie_quant.core.errors import EnvironmentFault, UsageError
from annie_quant.core.files import sha256_text
from annie_quant.core.untrusted import JsonObject
from annie_quant.judge.checks.calls import allowed
from annie_quant.judge.workloads import Case, Workload

# ---- multi-turn cases: each step of the recorded solution is one prompt
#
# The conversation up to a step is replayed with the recorded calls and their results, so bf16 and
# the quantized model get the same prompts; the step's call is expected. The leaderboard lets a
# model go its own way and compares the final state, so these figures are not the leaderboard's:
# they show whether quantizing changed the next call. A turn whose solution is empty (a function or
# an argument is missing, and the model should say so) expects no call. Results come from the
# package's own simulated systems (in memory), whose public functions are called with literal
# arguments.

MULTI_TURN = (
    "multi_turn_base",
    "multi_turn_miss_func",
    "multi_turn_miss_param",
    "multi_turn_long_context",
)
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

    def call(self, name: str, arguments: JsonObject) -> str:
        """Return the result as the model sees it."""


Start = Callable[[JsonObject, bool], Systems]  # (row, long context)


class PackageSystems:
    """The systems of the package bfcl-eval. Raises EnvironmentFault where one of its imports is missing."""

    def __init__(self, row: JsonObject, long_context: bool) -> None:
        self._functions: dict[str, Callable[..., Any]] = {}
        for name in row["involved_classes"]:
            try:
                system = getattr(importlib.import_module(f"{_PACKAGE}.{DOCUMENTS[name]}"), name)()
            except ImportError as error:
                message = f"the multi-turn cases of bfcl need {error.name}, which is not installed"
                raise EnvironmentFault(message, f"pip install {error.name}") from error
            if hasattr(system, "_load_scenario"):
                state = copy.deepcopy((row.get("initial_config") or {}).get(name, {}))
                system._load_scenario(state, long_context=long_context)
            for function in dir(system):
                if not function.startswith("_") and callable(getattr(system, function)):
                    self._functions[function] = getattr(system, function)

    def call(self, name: str, arguments: JsonObject) -> str:
        try:
            result = self._functions[name](**arguments)
        except Exception as error:  # what a system rejects is a result, which the model sees
            return json.dumps({"error": str(error)})
        return (
            result
            if isinstance(result, str)
            else json.dumps(result, default=str, ensure_ascii=False)
        )


def _steps(root: Path, category: str, start: Start) -> Iterator[Case]:
    """Yield one prompt per step of each case of a category."""
    documents = {
        name: list(_rows(root / "multi_turn_func_doc" / f"{file}.json"))
        for name, file in DOCUMENTS.items()
    }
    solutions = {
        r["id"]: r["ground_truth"]
        for r in _rows(root / "possible_answer" / f"BFCL_v4_{category}.json")
    }
    for row in _rows(root / f"BFCL_v4_{category}.json"):
        excluded = set(row.get("excluded_function") or ())
        tools = [
            d
            for name in row["involved_classes"]
            for d in documents[name]
            if d["name"] not in excluded
        ]
        systems = start(row, "long_context" in category)
        for name, messages, offered, calls in _turns_with_calls(
            row, tools, solutions[row["id"]], systems
        ):
            yield _case(name, messages, offered, calls, category)


def _turns_with_calls(
    row: JsonObject,
    tools: Sequence[JsonObject],
    solution: Sequence[Sequence[str]],
    systems: Systems,
) -> Iterator[tuple[str, list[JsonObject], list[JsonObject], list[JsonObject]]]:
    """Yield (id, messages, documents of the tools on offer, expected calls) of each step; no calls where no call is right."""
    missed = {int(turn): set(names) for turn, names in (row.get("missed_function") or {}).items()}
    orders = {t["name"]: list(t["parameters"].get("properties", {})) for t in tools}
    history: list[JsonObject] = []
    for turn, messages in enumerate(row["question"]):
        held_back = {name for later, names in missed.items() if later > turn for name in names}
        offered = [t for t in tools if t["name"] not in held_back]
        history += [dict(m) for m in messages] or [{"role": "user", "content": MISSING_FUNCTION}]
        calls = [parsed_call(text, orders) for text in solution[turn]]
        if not calls:
            yield f"{row['id']}-{turn}", list(history), offered, []
        for step, (name, arguments) in enumerate(calls):
            yield f"{row['id']}-{turn}.{step}", list(history), offered, [{name: allowed(arguments)}]
            number = f"call_{len(history)}"
            text = json.dumps(arguments, ensure_ascii=False)
            call = {"id": number, "type": "function", "function": {"name": name, "arguments": text}}
            result = systems.call(name, arguments)[:MAX_RESULT]
            history.append({"role": "assistant", "content": "", "tool_calls": [call]})
            history.append(
                {"role": "tool", "tool_call_id": number, "name": name, "content": result}
            )
        end = "Done." if calls else "I cannot do that with what I have."
        history.append({"role": "assistant", "content": end})


def parsed_call(text: str, orders: Mapping[str, Sequence[str]]) -> tuple[str, JsonObject]:
    """Return name and arguments of a recorded call such as "sort('a.txt', reverse=True)".

    orders: the parameters of each function, in order, for positional arguments. Raises
    EnvironmentFault for anything but a call of a name with literal arguments.
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
        message = f"bfcl: the recorded call {text[:80]!r} cannot be read: {error}"
        raise EnvironmentFault(message, "use bfcl-eval 2026.3") from None
    return name, arguments


CATEGORIES = ("simple_python", "multiple", "parallel", "parallel_multiple", "irrelevance")
# live_relevance is left out: it has no recorded answers, any call is right.
LIVE = (
    "live_simple",
    "live_multiple",
    "live_parallel",
    "live_parallel_multiple",
    "live_irrelevance",
)
MAX_TOKENS = 512
_GATES = ("tool_schema", "tool_selection", "tool_values", "abstention")
# What bf16 itself gets wrong in a long conversation is not lost by quantizing: its own calls are
# the reference.
MULTI_TURN_GATES = (*_GATES, "same_tool", "same_arguments", "same_validity")
_TYPES = {
    "dict": "object",
    "float": "number",
    "tuple": "array",
    "int": "integer",
    "str": "string",
    "bool": "boolean",
}
_COPIED = ("description", "enum", "default")


def load(
    categories: str = "", folder: str | Path | None = None, start: Start = PackageSystems
) -> Workload:
    """Load the cases of the named categories ("": all single-turn ones).

    folder: the package's data folder.
    start: makes the simulated systems of a multi-turn case.

    Raises EnvironmentFault where the package is not installed, UsageError for an unknown category.
    """
    names = [c for c in categories.split(",") if c] or list(CATEGORIES)
    for name in names:
        if name not in (*CATEGORIES, *LIVE, *MULTI_TURN):
            hint = f"choose from: {', '.join((*CATEGORIES, *LIVE, *MULTI_TURN))}"
            raise UsageError(f"bfcl has no category {name!r} here", hint)
    root = Path(folder) if folder is not None else _package_data()
    rows = (
        _steps(root, name, start) if name in MULTI_TURN else _cases(root, name) for name in names
    )
    cases = list(itertools.chain.from_iterable(rows))
    return Workload(
        name="bfcl",
        description=f"BFCL v4, {', '.join(names)}",
        persona=None,
        system=None,
        tools=None,
        thinking=False,
        max_tokens=MAX_TOKENS,
        temperature=0,
        gates=MULTI_TURN_GATES if set(names) & set(MULTI_TURN) else _GATES,
        cases=tuple(cases),
        sha256=sha256_text(json.dumps([[c.id, c.expect, c.tools] for c in cases], sort_keys=True)),
        default=False,
    )


def _package_data() -> Path:
    spec = importlib.util.find_spec("bfcl_eval")
    if spec is None or not spec.submodule_search_locations:
        message = "the workload bfcl needs the package bfcl-eval, which is not installed"
        raise EnvironmentFault(message, "pip install --no-deps bfcl-eval")
    return Path(next(iter(spec.submodule_search_locations))) / "data"


def _cases(root: Path, category: str) -> Iterator[Case]:
    file = f"BFCL_v4_{category}.json"
    answers = {}
    if not category.endswith("irrelevance"):
        answers = {row["id"]: row["ground_truth"] for row in _rows(root / "possible_answer" / file)}
    for row in _rows(root / file):
        calls = []
        for call in answers.get(row["id"], ()):
            calls.append({_name(name): values for name, values in call.items()})
        yield _case(row["id"], row["question"][0], row["function"], calls, category)


def _case(
    name: str,
    messages: Sequence[JsonObject],
    tools: Sequence[JsonObject],
    calls: list[JsonObject],
    category: str,
) -> Case:
    """Return a prompt that expects calls, or none."""
    expect: JsonObject = {"calls": calls} if calls else {"no_tool": True}
    return Case(
        name, tuple(messages), expect=expect, tools=tuple(map(_tool, tools)), category=category
    )


def _tool(function: JsonObject) -> JsonObject:
    name = _name(function["name"])
    description = function.get("description", "")
    schema = {
        "name": name,
        "description": description,
        "parameters": _schema(function["parameters"]),
    }
    return {"type": "function", "function": schema}


def _rows(path: Path) -> Iterator[JsonObject]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        message = f"{path.name} of bfcl-eval cannot be read: {error.strerror}"
        raise EnvironmentFault(message, "use bfcl-eval 2026.3") from error
    for line in lines:
        yield json.loads(line)


def _name(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]", "_", name)


def _schema(node: JsonObject) -> JsonObject:
    """Convert the leaderboard's types ("dict", "float", "any", ...) to JSON Schema."""
    schema: JsonObject = {key: node[key] for key in _COPIED if key in node}
    kind = str(node.get("type", "any")).lower()
    if kind != "any":
        schema["type"] = _TYPES.get(kind, kind)
    if "properties" in node:
        schema["properties"] = {key: _schema(value) for key, value in node["properties"].items()}
    if "items" in node:
        schema["items"] = _schema(node["items"])
    if "required" in node:
        schema["required"] = list(node["required"])
    return schema

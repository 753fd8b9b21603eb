"""The Berkeley Function Calling Leaderboard's cases as a workload, from the package bfcl-eval (Apache 2.0).

    load()                         all cases of the single-turn categories below
    load("multiple,irrelevance")   complete categories
    load("multi_turn_base")        multi-turn: one prompt per step of the recorded solutions (bfcl_multi_turn.py)

Dots in function names are replaced, as the leaderboard does for models that call functions natively: OpenAI's names have
none.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from annie_quant.errors import EnvironmentFault, UsageError
from annie_quant.judge import bfcl_multi_turn
from annie_quant.judge.bfcl_multi_turn import Start
from annie_quant.judge.workloads import Case, Workload

CATEGORIES = ("simple_python", "multiple", "parallel", "parallel_multiple", "irrelevance")
MAX_TOKENS = 512
MULTI_TURN = bfcl_multi_turn.CATEGORIES
GATES = ("tool_schema", "tool_selection", "tool_values", "abstention")
# What bf16 itself gets wrong in a long conversation is not lost by quantizing: its own calls are the reference.
MULTI_TURN_GATES = (*GATES, "same_tool", "same_arguments", "same_validity")
_TYPES = {"dict": "object", "float": "number", "tuple": "array", "int": "integer", "str": "string", "bool": "boolean"}
_COPIED = ("description", "enum", "default")


def load(
    categories: str = "", folder: str | Path | None = None, start: Start = bfcl_multi_turn.PackageSystems
) -> Workload:
    """Load the cases of the named categories ("": all single-turn ones).

    folder: the package's data folder. start: makes the simulated systems of a multi-turn case.

    Raises EnvironmentFault where the package is not installed, UsageError for an unknown category.
    """
    names = [c for c in categories.split(",") if c] or list(CATEGORIES)
    for name in names:
        if name not in (*CATEGORIES, *MULTI_TURN):
            raise UsageError(
                f"bfcl has no category {name!r} here", f"choose from: {', '.join((*CATEGORIES, *MULTI_TURN))}"
            )
    root = Path(folder) if folder is not None else _package_data()
    cases = [
        case for name in names for case in (_steps(root, name, start) if name in MULTI_TURN else _cases(root, name))
    ]
    digest = hashlib.sha256(json.dumps([[c.id, c.expect, c.tools] for c in cases], sort_keys=True).encode())
    return Workload(
        name="bfcl",
        description=f"BFCL v4, {', '.join(names)}",
        persona=None,
        system=None,
        tools=None,
        thinking=False,
        max_tokens=MAX_TOKENS,
        temperature=0,
        gates=MULTI_TURN_GATES if set(names) & set(MULTI_TURN) else GATES,
        cases=tuple(cases),
        sha256=digest.hexdigest(),
        default=False,
    )


def _package_data() -> Path:
    spec = importlib.util.find_spec("bfcl_eval")
    if spec is None or not spec.submodule_search_locations:
        raise EnvironmentFault(
            "the workload bfcl needs the package bfcl-eval, which is not installed",
            "pip install --no-deps bfcl-eval",
        )
    return Path(next(iter(spec.submodule_search_locations))) / "data"


def _cases(root: Path, category: str) -> Iterator[Case]:
    file = f"BFCL_v4_{category}.json"
    answers = {}
    if category != "irrelevance":
        answers = {row["id"]: row["ground_truth"] for row in _rows(root / "possible_answer" / file)}
    for row in _rows(root / file):
        tools = tuple(map(_tool, row["function"]))
        calls = [{_name(name): values for name, values in call.items()} for call in answers.get(row["id"], ())]
        expect: dict[str, Any] = {"calls": calls} if category != "irrelevance" else {"no_tool": True}
        yield Case(id=row["id"], messages=tuple(row["question"][0]), expect=expect, tools=tools, category=category)


def _steps(root: Path, category: str, start: Start) -> Iterator[Case]:
    for name, messages, documents, calls in bfcl_multi_turn.prompts(root, category, _rows, start):
        expect: dict[str, Any] = {"calls": calls} if calls else {"no_tool": True}
        yield Case(
            id=name, messages=tuple(messages), expect=expect, tools=tuple(map(_tool, documents)), category=category
        )


def _tool(function: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {
            "name": _name(function["name"]),
            "description": function.get("description", ""),
            "parameters": _schema(function["parameters"]),
        },
    }


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise EnvironmentFault(
            f"{path.name} of bfcl-eval cannot be read: {error.strerror}", "use bfcl-eval 2026.3"
        ) from error
    for line in lines:
        yield json.loads(line)


def _name(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]", "_", name)


def _schema(node: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the leaderboard's types ("dict", "float", "any", ...) to JSON Schema."""
    schema: dict[str, Any] = {key: node[key] for key in _COPIED if key in node}
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

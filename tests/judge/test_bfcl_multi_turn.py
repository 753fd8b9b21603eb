"""The leaderboard's multi-turn cases as prompts, with small data in its form, and with the package where it is installed."""

from __future__ import annotations

import importlib.util
import json

import pytest

from annie_quant.core.errors import EnvironmentFault
from annie_quant.documents import Answer
from annie_quant.judge import bfcl
from annie_quant.judge.bfcl import DOCUMENTS, MISSING_FUNCTION, parsed_call
from annie_quant.judge.gates import faults
from annie_quant.judge.library import build_workload


def document(name, *parameters):
    properties = {p: {"type": "string", "description": p} for p in parameters}
    return {
        "name": name,
        "description": name,
        "parameters": {"type": "dict", "properties": properties, "required": list(parameters[:1])},
        "response": {"type": "dict"},
    }


FILES = [document("cd", "folder"), document("sort", "file_name", "order"), document("ls")]
ROW = {
    "id": "multi_turn_0",
    "question": [
        [{"role": "user", "content": "Go to docs."}],
        [{"role": "user", "content": "Sort a.txt, then list."}],
    ],
    "initial_config": {"GorillaFileSystem": {"root": {"docs": {}}}},
    "path": ["GorillaFileSystem.cd"],
    "involved_classes": ["GorillaFileSystem"],
    "excluded_function": ["ls"],
}
SOLUTION = [["cd(folder='docs')"], ["sort('a.txt', order='up')", "cd('..')"]]


class Systems:
    """Counts its calls, so that a result shows the order of the replay."""

    def __init__(self, row, long_context):
        self.n, self.long = 0, long_context
        assert row["initial_config"]["GorillaFileSystem"]["root"]

    def call(self, name, arguments):
        self.n += 1
        return json.dumps({"call": self.n, "name": name, "long": self.long, **arguments})


@pytest.fixture
def folder(tmp_path):
    def write(path, *rows):
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    for name in DOCUMENTS.values():
        write(
            tmp_path / "multi_turn_func_doc" / f"{name}.json",
            *(FILES if name == "gorilla_file_system" else ()),
        )
    missed = dict(ROW, missed_function={"2": ["sort"]}, question=[*ROW["question"], []])
    for category in bfcl.MULTI_TURN:
        row, solution = ROW, SOLUTION
        if category.endswith("miss_func"):
            row, solution = missed, [SOLUTION[0], [], SOLUTION[1]]
        write(tmp_path / f"BFCL_v4_{category}.json", row)
        write(
            tmp_path / "possible_answer" / f"BFCL_v4_{category}.json",
            {"id": row["id"], "ground_truth": solution},
        )
    return tmp_path


def names(case):
    return [t["function"]["name"] for t in case.tools]


def test_each_step_is_a_prompt_with_the_recorded_calls_and_their_results_before_it(folder):
    workload = bfcl.load("multi_turn_base", folder, Systems)
    first, second, third = workload.cases
    assert [c.id for c in workload.cases] == [
        "multi_turn_0-0.0",
        "multi_turn_0-1.0",
        "multi_turn_0-1.1",
    ]
    assert [m["role"] for m in first.messages] == ["user"]
    assert [m["role"] for m in third.messages] == [
        "user",
        "assistant",
        "tool",
        "assistant",
        "user",
        "assistant",
        "tool",
    ]
    assert json.loads(third.messages[-1]["content"]) == {
        "call": 2, "name": "sort", "long": False, "file_name": "a.txt", "order": "up",
    }  # fmt: skip
    assert third.messages[-1]["tool_call_id"] == third.messages[-2]["tool_calls"][0]["id"]
    assert second.expect == {"calls": [{"sort": {"file_name": ["a.txt"], "order": ["up"]}}]}
    assert names(first) == ["cd", "sort"]  # ls is excluded
    assert (
        first.tools[0]["function"]["parameters"]["type"] == "object"
        and "response" not in first.tools[0]["function"]
    )
    called = Answer(
        tool_calls=[
            {"id": "", "name": "sort", "arguments": '{"file_name": "a.txt", "order": "up"}'}
        ]
    )
    assert (
        faults(called, second, workload)["tool_values"]
        == ""
        != faults(called, third, workload)["tool_values"]
    )
    assert {"same_tool", "same_arguments"} <= set(workload.gates)


def test_a_missing_function_is_held_back_until_its_turn_and_expects_no_call_before(folder):
    cases = bfcl.load("multi_turn_miss_func", folder, Systems).cases
    assert [(c.id, names(c)) for c in cases] == [
        ("multi_turn_0-0.0", ["cd"]), ("multi_turn_0-1", ["cd"]),
        ("multi_turn_0-2.0", ["cd", "sort"]), ("multi_turn_0-2.1", ["cd", "sort"]),
    ]  # fmt: skip
    assert cases[1].expect == {"no_tool": True}
    assert cases[2].messages[-1] == {"role": "user", "content": MISSING_FUNCTION}


def test_long_context_is_passed_on(folder):
    last = bfcl.load("multi_turn_long_context", folder, Systems).cases[-1]
    assert json.loads(last.messages[2]["content"])["long"] is True


def test_the_cases_can_be_written_as_a_workload_file(folder):
    workload = bfcl.load("multi_turn_base", folder, Systems)
    case = workload.cases[-1]
    cases = [
        {
            "id": case.id,
            "messages": list(case.messages),
            "tools": list(case.tools),
            "expect": dict(case.expect),
        }
    ]
    document = {"name": "bfcl", "max_tokens": 99, "gates": list(workload.gates), "cases": cases}
    assert build_workload(document).cases[0].messages == case.messages


@pytest.mark.parametrize(
    ("text", "call"),
    [
        ("cd('a', )", ("cd", {"folder": "a"})),
        (
            "sort('a', order=['x', -1.5, None])",
            ("sort", {"file_name": "a", "order": ["x", -1.5, None]}),
        ),
        ("TradingBot.buy(n=True)", ("buy", {"n": True})),
    ],
)
def test_recorded_calls(text, call):
    assert parsed_call(text, {"cd": ["folder"], "sort": ["file_name", "order"]}) == call


@pytest.mark.parametrize(
    "text",
    ["", "cd(", "cd(__import__('os').system('x'))", "cd('a', 'b')", "1 + 1", "f()(1)", "(" * 9999],
)
def test_what_is_not_a_call_with_literals_is_an_error(text):
    with pytest.raises(EnvironmentFault, match="cannot be read"):
        parsed_call(text, {"cd": ["folder"]})


def plain(value):
    """Return an allowed value without the lists that objects in it have."""
    if isinstance(value, dict):
        return {k: plain(v[0]) for k, v in value.items()}
    return [plain(v) for v in value] if isinstance(value, list) else value


@pytest.mark.skipif(
    importlib.util.find_spec("bfcl_eval") is None,
    reason="the package bfcl-eval, whose cases these are, is not installed",
)
@pytest.mark.parametrize("category", bfcl.MULTI_TURN)
def test_every_recorded_step_of_the_package_is_right_by_its_own_answer(category):
    workload = bfcl.load(category)
    failed_results = 0
    for case in workload.cases:
        failed_results += (
            '"error"' in str(case.messages[-1]["content"]) and case.messages[-1]["role"] == "tool"
        )
        if case.expect.get("calls"):
            (expected,) = case.expect["calls"]
            ((name, values),) = expected.items()
            arguments = json.dumps({k: plain(v[0]) for k, v in values.items()})
            answer = Answer(tool_calls=[{"id": "", "name": name, "arguments": arguments}])
            assert faults(answer, case, workload)["tool_values"] == "", case.id
    assert len({c.id for c in workload.cases}) == len(workload.cases) > 900
    assert failed_results < 0.03 * len(workload.cases), failed_results

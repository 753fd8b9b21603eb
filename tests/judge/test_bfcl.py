"""The Berkeley leaderboard's cases as a workload, and the comparison with its answers."""

from __future__ import annotations

import copy
import importlib.util
import json

import pytest

from annie_quant import judge
from annie_quant.core.errors import AnnieError
from annie_quant.documents import Answer
from annie_quant.judge import bfcl
from annie_quant.judge.checks.calls import selection_fault, values_fault
from annie_quant.judge.gates import faults

QUESTION = {
    "id": "parallel_0",
    "question": [[{"role": "user", "content": "Play Swift for 20 minutes and Maroon 5 for 15."}]],
    "function": [
        {
            "name": "spotify.play",
            "description": "Play an artist",
            "parameters": {
                "type": "dict",
                "properties": {
                    "artist": {"type": "string"},
                    "duration": {"type": "float"},
                    "options": {"type": "any"},
                    "tags": {
                        "type": "tuple",
                        "items": {"type": "dict", "properties": {"x": {"type": "integer"}}},
                    },
                },
                "required": ["artist", "duration"],
            },
        }
    ],
}
ANSWER = {
    "id": "parallel_0",
    "ground_truth": [
        {"spotify.play": {"artist": ["Taylor Swift"], "duration": [20], "options": ["", "loud"]}},
        {"spotify.play": {"artist": ["Maroon 5"], "duration": [15, 15.5], "options": [""]}},
    ],
}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "possible_answer").mkdir()
    for name in bfcl.CATEGORIES:
        parallel = name == "parallel"
        for path, row in ((tmp_path, QUESTION), (tmp_path / "possible_answer", ANSWER)):
            (path / f"BFCL_v4_{name}.json").write_text(json.dumps(row) + "\n" if parallel else "")
    none = dict(QUESTION, id="irrelevance_0")
    (tmp_path / "BFCL_v4_irrelevance.json").write_text(json.dumps(none) + "\n")
    return tmp_path


def calls(*pairs: tuple[str, object]) -> Answer:
    return Answer(
        tool_calls=[
            {"name": n, "arguments": a if isinstance(a, str) else json.dumps(a)} for n, a in pairs
        ]
    )


def test_leaderboard_schemas_are_converted_to_json_schema(folder):
    case = bfcl.load("parallel", folder).cases[0]
    function = case.tools[0]["function"]
    assert function["name"] == "spotify_play"
    assert function["parameters"]["type"] == "object"
    assert function["parameters"]["properties"]["duration"] == {"type": "number"}
    assert "type" not in function["parameters"]["properties"]["options"]
    assert function["parameters"]["properties"]["tags"]["items"]["type"] == "object"
    assert [next(iter(c)) for c in case.expect["calls"]] == ["spotify_play"] * 2


def test_irrelevant_questions_expect_no_call(folder):
    workload = bfcl.load("irrelevance", folder)
    case = workload.cases[0]
    assert faults(Answer(text="No tool of mine can do that."), case, workload)["abstention"] == ""
    assert faults(calls(("spotify_play", {})), case, workload)["abstention"]
    assert faults(calls(("spotify_play", {})), case, workload)["tool_selection"] is None


def play(artist="Taylor Swift", duration=20, **more):
    return "spotify_play", {"artist": artist, "duration": duration, **more}


@pytest.mark.parametrize(
    ("called", "right"),
    [
        ([play("maroon 5", 15.5), play()], True),
        ([play(options="LOUD"), play("Maroon 5", 15)], True),
        ([play()], False),
        ([play(), play()], False),
        ([play(), play("Maroon 5", 16)], False),
        ([("spotify_play", {"artist": "Taylor Swift"}), play("Maroon 5", 15)], False),
        ([play(duration=True), play("Maroon 5", 15)], False),
        ([play(volume=3), play("Maroon 5", 15)], False),
        ([("spotify_play", "{broken"), play("Maroon 5", 15)], False),
    ],
)
def test_values(folder, called, right):
    case = bfcl.load("parallel", folder).cases[0]
    assert (values_fault(calls(*called), case.expect["calls"]) == "") is right


def test_objects_in_objects_have_single_values():
    expected = [{"move": {"to": [{"place": {"x": 1.5, "y": 2}, "speed": [3, ""]}]}}]
    assert values_fault(calls(("move", {"to": {"place": {"x": 1.5, "y": 2}}})), expected) == ""
    assert "place" in values_fault(calls(("move", {"to": {"place": {"x": 1.5, "y": 3}}})), expected)


def test_live_questions_that_no_tool_fits_need_no_recorded_answer(folder):
    (folder / "BFCL_v4_live_irrelevance.json").write_text(
        json.dumps(QUESTION | {"id": "live_irrelevance_0"}) + "\n"
    )
    assert [c.expect for c in bfcl.load("live_irrelevance", folder).cases] == [{"no_tool": True}]


def test_selection_counts_calls(folder):
    expected = bfcl.load("parallel", folder).cases[0].expect["calls"]
    assert selection_fault(calls(("spotify_play", {}), ("spotify_play", {})), expected) == ""
    assert "nothing" in selection_fault(Answer(text="hm"), expected)
    assert selection_fault(calls(*[("spotify_play", {})] * 3), expected)


def test_unknown_categories_and_a_missing_package_are_one_line(monkeypatch):
    with pytest.raises(AnnieError, match="no category"):
        bfcl.load("nonsense")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(AnnieError, match="bfcl-eval"):
        judge.load_workloads(["bfcl"])


# Two have a required argument without an allowed value, one an object in an object. The leaderboard's checker refuses them, too.
REFUSE_THEMSELVES = {"live_simple_106-63-0", "live_simple_112-68-0", "live_multiple_121-46-0"}


@pytest.mark.skipif(
    importlib.util.find_spec("bfcl_eval") is None, reason="the package bfcl-eval is not installed"
)
def test_every_case_of_the_package_accepts_its_own_answer():
    """Each ground truth, as calls with its first allowed values, passes; with an unknown argument it fails."""
    for category in (*bfcl.CATEGORIES[:-1], *bfcl.LIVE[:-1]):
        for case in bfcl.load(category).cases:
            called = [
                (name, {k: v[0] for k, v in values.items() if v and v[0] != ""})
                for call in case.expect["calls"]
                for name, values in call.items()
            ]
            called = [
                (name, {k: _first(v) for k, v in arguments.items()}) for name, arguments in called
            ]
            if case.id in REFUSE_THEMSELVES:
                assert values_fault(calls(*called), case.expect["calls"])
                continue
            assert values_fault(calls(*called), case.expect["calls"]) == "", case.id
            spoilt = copy.deepcopy(called)
            spoilt[0][1]["no such argument"] = 1
            assert values_fault(calls(*spoilt), case.expect["calls"]), case.id


def _first(value):
    """Return the first allowed value; objects inside an answer have lists of allowed values themselves."""
    if isinstance(value, dict):
        return {
            k: _first(v[0]) for k, v in value.items() if isinstance(v, list) and v and v[0] != ""
        }
    return [_first(v) for v in value] if isinstance(value, list) else value

"""Workloads that are used only by name: the tool surface and random words."""

from __future__ import annotations

import json

import pytest

from annie_quant import judge
from annie_quant.core.errors import UsageError
from annie_quant.judge.library import build_workload

TOOL = {
    "type": "function",
    "function": {"name": "a", "parameters": {"type": "object", "properties": {}}},
}


def test_every_level_of_the_tool_surface_has_the_right_tool():
    (surface,) = judge.load_workloads(["tool_surface"])
    prompts_by_size = {}
    for case in surface.cases:
        tools = surface.tools_for(case)
        assert case.expect["tool"] in [t["function"]["name"] for t in tools]
        prompts_by_size.setdefault(len(tools), []).append(case.messages[0]["content"])
    assert sorted(prompts_by_size) == [1, 2, 4, 8, 16, 32, 64]
    assert len({json.dumps(prompts) for prompts in prompts_by_size.values()}) == 1, (
        "all levels must have the same prompts"
    )
    names = [t["function"]["name"] for t in surface.tools]
    assert len(set(names)) == 64


def test_random_words_are_answered_to_the_token_limit():
    (workload,) = judge.load_workloads(["random_128_256"])
    body = workload.request(workload.cases[0])
    assert body["ignore_eos"] is True and body["max_tokens"] == 256
    assert len({c.messages[0]["content"] for c in workload.cases}) == 100
    assert workload.system_prompt is None


def test_these_workloads_are_not_defaults():
    names = [w.name for w in judge.load_workloads()]
    assert "tool_surface" not in names and "random_128_256" not in names and "greeting" in names


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cases": [{"id": "1", "messages": [{}], "tools": 3}]}, "needs 3 tools"),
        ({"extra": {"messages": []}}, "must not contain 'messages'"),
    ],
)
def test_faults_are_named(change, message):
    data = {
        "name": "x",
        "max_tokens": 5,
        "gates": [],
        "tools": [TOOL],
        "cases": [{"id": "1", "messages": [{}]}],
    }
    with pytest.raises(UsageError, match=message):
        build_workload(data | change)

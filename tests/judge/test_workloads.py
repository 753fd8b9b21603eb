"""Workload files: the requests they make, and a one-line error for each mistake."""

from __future__ import annotations

import json

import pytest

from annie_quant import judge
from annie_quant.core.errors import AnnieError, UsageError
from annie_quant.judge.library import build_workload, read_workload

GOOD = {
    "name": "w",
    "max_tokens": 9,
    "gates": ["non_empty"],
    "cases": [{"id": "a", "messages": [{"role": "user", "content": "hi"}]}],
}
TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {}}},
}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"gates": ["no_such"]}, "unknown gate 'no_such'"),
        ({"cases": []}, "there are no cases"),
        ({"cases": [{"messages": []}]}, "cases[0]: object missing required field 'id'"),
        ({"cases": [{"id": "a"}]}, "needs one of 'messages', 'turns' and 'prompt_tokens'"),
        ({"cases": GOOD["cases"] * 2}, "two cases with the id 'a'"),
        ({"tools": "persona"}, "no persona is named"),
        ({"tools": "all"}, "tools: expected a list, null or 'persona', got 'all'"),
        ({"tools": 3}, "tools: expected str | array | null, got int"),
        ({"tools": [{"function": {"name": ["f"]}}]}, "tools[0].name: expected str, got array"),
        ({"tools": [{"function": 3}]}, "tools[0]: expected object, got int"),
        (
            {"tools": [{"function": {"name": "f", "parameters": {"properties": 3}}}]},
            "properties: expected object, got int",
        ),
        (
            {"cases": [GOOD["cases"][0] | {"tools": [{}]}]},
            "case 'a': tools[0]: object missing required field 'name'",
        ),
        ({"max_tokens": "many"}, "max_tokens: expected int, got str"),
        ({"thinkng": True}, "unknown field 'thinkng'"),
    ],
)
def test_an_invalid_workload_is_a_one_line_error(change, words):
    with pytest.raises(UsageError) as caught:
        build_workload(GOOD | change, path="folder/mine.json")
    assert (
        words in caught.value.message
        and "mine.json" in caught.value.message
        and "\n" not in caught.value.message
    )


@pytest.mark.parametrize("missing", ["name", "max_tokens", "gates", "cases"])
def test_a_missing_field_is_named(missing):
    with pytest.raises(UsageError, match=f"missing required field {missing!r}"):
        build_workload({k: v for k, v in GOOD.items() if k != missing})


def test_broken_files(tmp_path):
    with pytest.raises(UsageError, match="cannot be read"):
        read_workload(tmp_path / "none.json")
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(UsageError, match=r"broken\.json: not JSON"):
        read_workload(tmp_path / "broken.json")
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(UsageError, match=r"list\.json: expected object, got array"):
        read_workload(tmp_path / "list.json")


@pytest.mark.parametrize("turns", [3, [4], [None]])
def test_expectations_of_turns_that_are_not_a_list_of_objects(turns, tmp_path):
    """Seed 3902/2482 of the workloads' fuzzer: the search for labels iterated over a number."""
    (tmp_path / "turns.json").write_text(
        json.dumps(GOOD | {"cases": [{"id": "t", "turns": ["a"], "expect": {"turns": turns}}]})
    )
    with pytest.raises(UsageError, match=r"turns\.json: case 't': expect.*turns.* expected "):
        read_workload(tmp_path / "turns.json")


def test_loading_by_name_folder_and_path(tmp_path):
    for name in ("one", "two"):
        (tmp_path / f"{name}.json").write_text(json.dumps(GOOD | {"name": name}))
    assert [w.name for w in judge.load_workloads(folder=tmp_path)] == ["one", "two"]
    assert [w.name for w in judge.load_workloads(["two"], tmp_path)] == ["two"]
    assert [w.name for w in judge.load_workloads([str(tmp_path / "one.json")])] == ["one"]
    with pytest.raises(AnnieError) as caught:
        judge.load_workloads(["three"], tmp_path)
    assert "one, two" in caught.value.hint
    assert len({w.sha256 for w in judge.load_workloads(folder=tmp_path)}) == 2


def test_a_request_has_all_settings():
    workload = build_workload(
        GOOD | {"system": "Be Annie.", "thinking": True, "temperature": 0.7, "tools": [TOOL]}
    )
    body = workload.request(workload.cases[0], model="m")
    assert body["model"] == "m" and body["max_tokens"] == 9 and body["temperature"] == 0.7
    assert body["messages"] == [
        {"role": "system", "content": "Be Annie."},
        {"role": "user", "content": "hi"},
    ]
    assert body["chat_template_kwargs"] == {"enable_thinking": True}
    assert body["tools"] == [TOOL] and body["tool_choice"] == "auto"


def test_a_case_can_have_its_own_tools():
    cases = [
        {"id": "own", "messages": GOOD["cases"][0]["messages"], "tools": [TOOL, TOOL]},
        {"id": "none", "messages": GOOD["cases"][0]["messages"], "tools": []},
        *GOOD["cases"],
    ]
    workload = build_workload(GOOD | {"tools": [TOOL], "cases": cases})
    assert [len(workload.request(c).get("tools", [])) for c in workload.cases] == [2, 0, 1]


def test_a_later_turn_needs_the_earlier_answers():
    workload = build_workload(
        GOOD
        | {
            "cases": [
                {"id": "t", "turns": ["a", "b"], "expect": {"turns": [{}, {"contains": ["x"]}]}}
            ]
        }
    )
    case = workload.cases[0]
    second = workload.request(case, 1, [{"role": "assistant", "content": "A"}])
    assert [m["content"] for m in second["messages"]] == ["a", "A", "b"]
    with pytest.raises(UsageError, match="turn 2 needs 1 earlier answers"):
        workload.request(case, 1)
    assert (
        case.at_turn(1).expect == {"contains": ["x"]}
        and case.at_turn(0).expect == {}
        and case.at_turn(7).expect == {}
    )


def test_the_built_in_workloads_are_complete():
    shipped = judge.load_workloads()
    names = {w.name for w in shipped}
    assert names >= {
        "greeting",
        "factual",
        "conversational",
        "reasoning",
        "long_response",
        "tool_memory",
        "tool_web",
        "multi_turn",
        "briefing",
        "thinking_on",
        "thinking_off",
        "hardened_prompt",
    }
    for workload in shipped:
        assert workload.thinking == (workload.name == "thinking_on")
        assert workload.request(workload.cases[0], 0)["messages"][-1]["role"] == "user"
    talk = next(w for w in shipped if w.name == "multi_turn")
    assert all(c.n_turns == 5 for c in talk.cases)


def test_calls_that_a_conversation_supplies_have_arguments_as_text():
    """As vLLM requires them: it answers an object with HTTP 400."""
    results = {"results": [{"name": "find", "arguments": {"q": "é"}, "content": "It walks."}]}
    workload = build_workload(
        {
            "name": "w",
            "max_tokens": 9,
            "gates": [],
            "cases": [{"id": "a", "turns": ["Hi", results]}],
        }
    )
    messages = workload.messages(
        workload.cases[0], 1, [{"role": "assistant", "content": "No call."}]
    )
    assert messages[1]["tool_calls"][0]["function"] == {"name": "find", "arguments": '{"q": "é"}'}


def test_a_context_comes_before_the_system_prompt_and_is_unique_where_it_must_miss():
    data = {
        "name": "w",
        "max_tokens": 9,
        "gates": [],
        "system": "You are Annie.",
        "cases": [{"id": "a", "turns": ["Hi"]}],
    }
    texts = {}
    for prefix in ("hit", "miss"):
        workload = build_workload(data | {"context": {"tokens": 400, "prefix": prefix}})
        texts[prefix] = [
            workload.messages(workload.cases[0], unique=u)[0]["content"] for u in ("1", "2")
        ]
    assert texts["hit"][0] == texts["hit"][1] and texts["hit"][0].endswith("\n\nYou are Annie.")
    assert texts["miss"] == [f"Note {u}.\n{texts['hit'][0]}" for u in "12"]
    assert len(texts["hit"][0].split()) == 300 + 3, "400 tokens at 0.75 words each, and the prompt"
    with pytest.raises(UsageError, match="context"):
        build_workload(data | {"context": {"tokens": -1}})


@pytest.mark.parametrize(
    "name",
    ["depth_0", "depth_64k", "prefix_hit", "agent_loop", "text_code", "text_math", "text_prose"],
)
def test_the_workloads_of_speed_load(name):
    workload = judge.load_workloads([name])[0]
    assert (
        not workload.default
        and workload.request(workload.cases[0])["max_tokens"] == workload.max_tokens
    )
    if name == "agent_loop":
        assert len(workload.tools) == 52 and {c.n_turns for c in workload.cases} == {8}
        known = {t["function"]["name"] for t in workload.tools}
        assert all(
            e.get("tool", "find") in {*known, "find"}
            for c in workload.cases
            for e in c.expect["turns"]
        )


def digest(case=None, **change):
    [workload] = [build_workload(GOOD | {"cases": [GOOD["cases"][0] | (case or {})]} | change)]
    return judge.prompt_sha256(workload.cases[0], workload)


def test_a_prompt_is_identified_by_what_it_asks_and_not_by_its_id():
    assert (
        digest()
        == digest({"id": "other"})
        == digest(name="other")
        == digest({"expect": {"tool": "f"}}, max_tokens=3)
    )
    turns = ["hi", {"results": [{"name": "f", "content": "1"}]}]
    other = [
        digest(),
        digest({"messages": [{"role": "user", "content": "hi."}]}),
        digest(system="You are brief."),
        digest({"system": "You are brief, too."}),
        digest(tools=[TOOL]),
        digest({"tools": [TOOL, TOOL]}),
        digest(thinking=True),
        digest(extra={"seed": 1}),
        digest({"messages": [], "turns": turns}),
        digest({"messages": [], "turns": ["hi", {"results": [{"name": "f", "content": "2"}]}]}),
    ]
    assert len({*other}) == len(other)
    assert digest({"messages": [], "turns": ["hi"]}) == digest()  # one turn, written in two ways

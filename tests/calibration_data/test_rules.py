"""Validation, splits, the prompt's hash, and a user's own persona."""

from __future__ import annotations

import copy
import json

import pytest

from annie_quant.core.errors import UsageError
from annie_quant.data import (
    check_apart,
    check_prompt_hash,
    generate,
    load_persona,
    teachers,
    validate,
)
from annie_quant.data.duplicates import DuplicateFinder
from annie_quant.data.row_rules import MAX_ANSWER, faults
from annie_quant.data.rows import gate_texts, read_conversations, read_rows
from annie_quant.documents.persona import PERSONAS_FOLDER
from annie_quant.judge import load_workloads

OWN = {
    "name": "Bruno",
    "system_prompt": "You are Bruno, a kitchen helper. Never use markdown.",
    "tools": [
        {
            "type": "function",
            "function": {
                "name": "set_timer",
                "description": "Start a kitchen timer.",
                "parameters": {
                    "type": "object",
                    "properties": {
                        "minutes": {"type": "integer", "minimum": 1},
                        "label": {"type": "string"},
                    },
                    "required": ["minutes"],
                    "additionalProperties": False,
                },
            },
        }
    ],
    "rules": ["Never guess a baking time."],
    "examples": [{"user": "Hi Bruno!", "assistant": "Hello, what are we cooking?"}],
}


@pytest.fixture(scope="module")
def rows():
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        generate("annie", n=500, output=Path(folder) / "d.jsonl")
        return [json.loads(line) for line in (Path(folder) / "d.jsonl").read_text().splitlines()]


@pytest.fixture
def bruno(tmp_path):
    path = tmp_path / "bruno.json"
    path.write_text(json.dumps(OWN))
    return load_persona(path)


def timer_row(persona, arguments, name="set_timer"):
    answer = {
        "turns": [
            {
                "user": "Eggs, please",
                "call": {"name": name, "arguments": arguments},
                "result": "Set.",
                "assistant": "Done.",
            }
        ]
    }
    row = teachers.to_row(answer, persona, persona.category("set_timer"))
    return row | {"id": "x", "category": "set_timer"}


def test_a_persona_of_ones_own_has_categories_from_its_tools(bruno):
    assert [(c.name, c.tool, c.turns) for c in bruno.categories] == [
        ("greeting", None, 1),
        ("factual", None, 1),
        ("set_timer", "set_timer", 1),
        ("multi_turn", None, 5),
    ]
    prompt = teachers.prompt_for(bruno, bruno.category("set_timer"), 3, ["Two eggs"])
    for part in (
        "Bruno",
        "Never guess a baking time.",
        "what are we cooking",
        "set_timer",
        '"minutes"',
        "Two eggs",
    ):
        assert part in prompt
    assert "Annie" not in prompt and "search_memory" not in prompt


def test_arguments_must_fit_the_tools_schema(bruno):
    assert faults(timer_row(bruno, {"minutes": 7}), bruno) == []
    assert (
        "'seven' is not of type 'integer'"
        in faults(timer_row(bruno, {"minutes": "seven"}), bruno)[0]
    )
    assert "'minutes' is a required property" in faults(timer_row(bruno, {}), bruno)[0]
    assert (
        "Additional properties"
        in faults(timer_row(bruno, {"minutes": 1, "colour": "red"}), bruno)[0]
    )
    assert "not offered" in faults(timer_row(bruno, {"minutes": 1}, name="open_door"), bruno)[0]


def test_a_persona_may_define_categories_and_invalid_ones_are_named(tmp_path):
    path = tmp_path / "own.json"
    path.write_text(
        json.dumps(
            OWN
            | {"categories": [{"name": "timers", "tool": "set_timer", "turns": 2, "about": "eggs"}]}
        )
    )
    assert load_persona(path).categories[0].turns == 2
    for categories, expected in (
        ([], "length >= 1 - at `[$].categories`"),
        ([{"tool": "set_timer"}], "missing required field `name` - at `[$].categories"),
        ([{"name": "a", "tool": "fly"}], "has no tool 'fly'"),
        ([{"name": "a", "turns": 0}], ">= 1 - at `[$].categories"),
        ([{"name": "a"}, {"name": "a"}], "used twice"),
    ):
        path.write_text(json.dumps(OWN | {"categories": categories}))
        with pytest.raises(UsageError, match=expected):
            load_persona(path)


def test_the_offline_teacher_refuses_talk_of_a_persona_with_rules_of_its_own(tmp_path):
    own = tmp_path / "poet.json"
    for document in ({"categories": [{"name": "poetry"}]}, {"tools": []}):
        own.write_text(json.dumps(OWN | document))
        with pytest.raises(UsageError, match="no templates for Bruno's categories without a tool"):
            generate(own, n=8, output=tmp_path / "p.jsonl")
        assert not list(tmp_path.glob(".*"))  # no journal of a run that cannot start


def test_lengths_other_prompts_and_second_tools_are_found(rows):
    row = copy.deepcopy(next(r for r in rows if r["category"] == "greeting"))
    row["messages"][-1]["content"] = "word " * MAX_ANSWER
    assert "longer than" in faults(row)[0]
    row = copy.deepcopy(rows[0])
    row["messages"][0]["content"] = "You are somebody else."
    assert faults(row) == ["the system prompt is not the persona's"]
    row = copy.deepcopy(next(r for r in rows if r["category"] == "memory"))
    other = {"type": "function", "function": {"name": "web_search", "arguments": '{"query": "x"}'}}
    next(m for m in row["messages"] if m.get("tool_calls"))["tool_calls"].append(other)
    assert faults(row) == ["'web_search' is called in addition to search_memory"]
    assert "no category" in faults(rows[0] | {"category": "poetry"})[0]


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        ("What's the capital of Japan?", "what is the capital of JAPAN", True),
        ("What is the capital of India?", "What is the capital of Peru?", False),
        ("I went to the market today and bought apples, pears, plums and bread for the whole week.",
         "I went to the market today and bought apples, pears, plums and bread for the whole week, Annie.", True),
        ("", "", True),
    ],
)  # fmt: skip
def test_near_duplicates(a, b, same):
    assert (DuplicateFinder([("a", a)]).find(b) == "a") is same


def test_near_duplicates_in_a_set_are_counted_once(rows):
    twin = rows[7] | {"id": "twin"}
    summary = validate([*rows, twin])
    assert summary.valid == 500 and list(summary.faults.values()) == [1]
    assert validate(rows).valid == 500


def test_the_offline_splits_do_not_overlap_and_a_gate_prompt_in_the_data_is_refused(tmp_path, rows):
    generate("annie", n=200, output=tmp_path / "train.jsonl", split="train", apart_from=[])
    check_apart(rows, tmp_path / "train.jsonl")
    gate = next(c for w in load_workloads(["factual"]) for c in w.cases)
    leak = copy.deepcopy(rows[120])
    leak["messages"][1]["content"] = gate.messages[0]["content"].replace("What is", "what's")
    with pytest.raises(UsageError, match="factual"):
        check_apart([*rows, leak])
    with pytest.raises(UsageError, match=rows[3]["id"]):
        check_apart([rows[3]], rows)


def test_rows_that_repeat_another_file_are_dropped(tmp_path):
    generate("annie", n=50, output=tmp_path / "a.jsonl")
    summary = generate(
        "annie", n=50, output=tmp_path / "b.jsonl", apart_from=[tmp_path / "a.jsonl"]
    )
    check_apart(tmp_path / "b.jsonl", tmp_path / "a.jsonl")
    assert summary.dropped["it repeats a prompt of another split"] > 0


def test_every_default_workload_prompt_counts_as_a_gate():
    assert len(dict(gate_texts())) == sum(len(w.cases) for w in load_workloads())


def test_a_stale_system_prompt_is_refused_unless_allowed(tmp_path, rows):
    assert check_prompt_hash(rows) is None
    path = tmp_path / "annie.json"
    data = json.loads((PERSONAS_FOLDER / "annie.json").read_text())
    path.write_text(json.dumps(data))
    generate(path, n=10, output=tmp_path / "d.jsonl")
    assert check_prompt_hash(tmp_path / "d.jsonl") is None
    path.write_text(json.dumps(data | {"system_prompt": data["system_prompt"] + " Be brief."}))
    with pytest.raises(UsageError, match="10 of 10 conversations") as error:
        check_prompt_hash(tmp_path / "d.jsonl")
    assert "--allow-prompt-mismatch" in error.value.hint
    assert "stale prompt" in check_prompt_hash(tmp_path / "d.jsonl", allow=True)


def test_a_prompt_changed_by_hand_in_the_rows_is_refused_although_the_hash_is_unchanged(rows):
    changed = copy.deepcopy(rows[:3])
    changed[1]["messages"][0]["content"] += " Answer in verse."
    with pytest.raises(UsageError, match="1 of 3"):
        check_prompt_hash(changed)


def test_rows_without_provenance_are_compared_only_with_an_explicit_prompt():
    row = {"messages": [{"role": "system", "content": "Hello."}, {"role": "user", "content": "x"}]}
    assert check_prompt_hash([row]) is None
    with pytest.raises(UsageError):
        check_prompt_hash([row], persona="annie")


def test_a_file_that_changes_is_read_again_and_no_conversations_are_refused(tmp_path):
    path = tmp_path / "rows.jsonl"
    line = json.dumps({"messages": [{"role": "user", "content": "hi"}]})
    path.write_text(f"{line}\n")
    assert len(read_rows(path)) == len(read_rows(path)) == 1
    path.write_text(f"{line}\n{line}\n")
    assert len(read_conversations(path)) == 2 and len(read_conversations(path, 1)) == 1
    with pytest.raises(UsageError, match="0 conversations are too few"):
        read_conversations(path, 0)

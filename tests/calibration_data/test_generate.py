"""Calibration conversations: categories, rules, determinism, and that the checks find broken rules."""

from __future__ import annotations

import copy
import json

import pytest

from annie_quant.core.errors import UsageError
from annie_quant.data import CATEGORIES, generate, load_persona, validate
from annie_quant.data.row_rules import faults
from annie_quant.data.teachers.offline import Offline


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "annie.jsonl"
    generate("annie", n=500, output=path, seed=0)
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_categories_and_tool_calls_have_the_required_counts(rows):
    assert len(rows) == 500
    for category in CATEGORIES:
        assert sum(r["category"] == category for r in rows) == 100
    assert sum(any(m.get("tool_calls") for m in r["messages"]) for r in rows) == 200
    assert len({r["id"] for r in rows}) == 500


def test_memory_and_web_call_their_tool_with_arguments_as_a_json_string(rows):
    for row in rows:
        calls = [c["function"] for m in row["messages"] for c in m.get("tool_calls") or ()]
        expected = {"memory": ["search_memory"], "web": ["web_search"]}.get(row["category"], [])
        assert [c["name"] for c in calls] == expected
        for call in calls:
            assert isinstance(call["arguments"], str) and json.loads(call["arguments"])["query"]
        assert ("tools" in row) == bool(expected)


def test_multi_turn_has_five_user_turns(rows):
    talks = [r for r in rows if r["category"] == "multi_turn"]
    assert all(
        [m["role"] for m in r["messages"]] == ["system"] + ["user", "assistant"] * 5 for r in talks
    )


def test_rows_record_their_provenance(rows):
    persona = load_persona("annie")
    for row in rows:
        assert row["provenance"]["teacher"] == "offline" and row["split"] == "calibration"
        assert row["provenance"]["persona_sha256"] == persona.sha256
        assert row["messages"][0] == {"role": "system", "content": persona.system_prompt}


def test_the_same_seed_gives_the_same_bytes_and_another_seed_others(tmp_path, monkeypatch):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "0")
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        generate("annie", n=50, output=tmp_path / name, seed=seed)
    assert (
        (tmp_path / "a").read_bytes()
        == (tmp_path / "b").read_bytes()
        != (tmp_path / "c").read_bytes()
    )


def test_progress_is_reported_and_ends_at_n():
    class Recorder:
        def __init__(self):
            self.updates = []

        def update(self, done, total=None, text=""):
            self.updates.append((done, total))

        def message(self, text):
            raise AssertionError(text)

    recorder = Recorder()
    generate("annie", n=10, progress=recorder)
    updates = recorder.updates
    assert updates == sorted(updates) and updates[0] == (0, 10) and updates[-1] == (10, 10)


def test_too_few_conversations_and_an_unknown_teacher_are_refused():
    with pytest.raises(UsageError):
        generate("annie", n=4)
    with pytest.raises(UsageError) as error:
        generate("annie", teacher="nobody", n=5)
    assert "offline" in error.value.hint


def spoiled(row, **changes):
    row = copy.deepcopy(row)
    row["messages"][-1].update(changes)
    return row


def test_broken_rules_are_found(rows):
    good = next(r for r in rows if r["category"] == "greeting")
    web = next(r for r in rows if r["category"] == "web")
    conversation = next(r for r in rows if r["category"] == "multi_turn")
    assert faults(good) == faults(web) == faults(conversation) == []
    assert "markdown" in faults(spoiled(good, content="- **one**\n- two"))[0]
    assert "thinking" in faults(spoiled(good, content="<think>hm</think> Hello."))[0]
    assert "empty" in faults(spoiled(good, content=" "))[0]
    assert faults(web | {"category": "memory"}) == ["search_memory is not called"]
    assert "expected no tool call" in faults(web | {"category": "greeting"})[0]
    assert "4 user turns" in faults(conversation | {"messages": conversation["messages"][:-2]})[0]
    broken = copy.deepcopy(web)
    next(m for m in broken["messages"] if m.get("tool_calls"))["tool_calls"][0]["function"][
        "arguments"
    ] = "{query: x"
    assert faults(broken) == ["tool arguments are not a JSON object, or one in a string"]


def test_a_set_with_too_few_good_rows_is_not_ok(rows):
    assert validate(rows).ok
    bad = [spoiled(r, content="# Hello") if i % 3 == 0 else r for i, r in enumerate(rows)]
    result = validate(bad)
    assert not result.ok and result.valid == 333
    assert not validate([r for r in rows if r["category"] == "greeting"]).ok
    assert not validate([]).ok


def test_exactly_four_fifths_of_the_conversations_are_enough(monkeypatch):
    drawn = Offline.conversations

    def without_facts(self, persona, category, n, seed):
        if category.name == "factual":
            return iter(())
        return drawn(self, persona, category, n, seed)

    monkeypatch.setattr(Offline, "conversations", without_facts)
    result = generate("annie", n=5)
    assert result.ok and result.valid == 4

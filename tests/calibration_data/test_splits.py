"""Train, calibration and gate never overlap: no template, no topic, no user text, and no workload case in training rows."""

# ruff: noqa: SIM905 (lists of words are easier to read as one text)

from __future__ import annotations

import itertools
import random
import sys

import pytest
from paths import ROOT

from annie_quant.data import exchanges, generate
from annie_quant.data.exchanges import PHRASES, Exchange
from annie_quant.judge import load_workloads

TRAINING = ROOT / "training" / "tiny_annie"
PAIRS = list(itertools.combinations(exchanges.SPLITS, 2))
WORKLOADS = (
    "greeting factual conversational reasoning long_response tool_memory tool_web multi_turn thinking_on thinking_off "
    "abstention hardened_prompt briefing"
).split()


def user_texts(workload):
    for case in workload.cases:
        yield from ([m["content"] for m in case.messages if m["role"] == "user"] or case.turns)


@pytest.fixture(scope="module")
def gate_texts():
    return {text for workload in load_workloads() for text in user_texts(workload)}


@pytest.mark.parametrize(
    "topics", [exchanges.MY_TOPICS, exchanges.WEB_TOPICS, exchanges.WORDS.causes]
)
def test_topics_are_apart(topics):
    for a, b in PAIRS:
        assert not set(topics[a]) & set(topics[b])


def test_templates_are_apart():
    groups = [
        *PHRASES.facts.values(),
        *PHRASES.sums.values(),
        *PHRASES.long_requests.values(),
        PHRASES.memory_questions,
        PHRASES.web_questions,
        PHRASES.follow_ups,
        PHRASES.feeling_sentences,
        PHRASES.abstention_requests,
        PHRASES.thanks,
        PHRASES.greetings,
        PHRASES.greeting_additions,
    ]
    for group in groups:
        for a, b in PAIRS:
            assert not {str(t) for t in group[a]} & {str(t) for t in group[b]}


@pytest.mark.parametrize("category", list(exchanges.ANNIE_CATEGORIES))
def test_user_texts_of_the_splits_are_apart(category):
    rng = random.Random(1)
    texts = {
        split: {exchanges.draw_category(category, rng, split).user for _ in range(3000)}
        for split in exchanges.SPLITS
    }
    for a, b in PAIRS:
        assert not texts[a] & texts[b]


def test_no_training_row_and_no_calibration_row_holds_a_case(gate_texts, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(TRAINING))
    for name in ("rows", "workloads"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    from rows import row

    rng = random.Random(0)
    for style in ("base", "tuned"):
        for _ in range(2000):
            for message in row(rng, style).messages:
                assert message["role"] != "user" or message["content"] not in gate_texts
    output = tmp_path / "rows.jsonl"
    generate("annie", n=500, output=output)
    import json

    for line in output.read_text().splitlines():
        for message in json.loads(line)["messages"]:
            assert message["role"] != "user" or message["content"] not in gate_texts


def test_every_workload_exists_with_enough_distinct_cases():
    loaded = {w.name: w for w in load_workloads()}
    for name in WORKLOADS:
        texts = [tuple(user_texts_of(case)) for case in loaded[name].cases]
        assert len(set(texts)) == len(texts) >= (40 if name == "multi_turn" else 100), name
    assert all(len(case.turns) == 5 for case in loaded["multi_turn"].cases)
    assert [w.name for w in loaded.values() if w.thinking] == ["thinking_on"]


def user_texts_of(case):
    return [m["content"] for m in case.messages] or list(case.turns)


def test_the_original_plans_questions_come_first():
    factual, reasoning = load_workloads(["factual", "reasoning"])
    assert factual.cases[0].messages[0]["content"] == "What is the capital of Japan?"
    assert factual.cases[0].expect == {"contains": ["Tokyo"]}
    assert "3 boxes with 5 balls" in reasoning.cases[0].messages[0]["content"]
    assert reasoning.cases[0].expect == {"contains": ["15"]}


def test_the_workload_files_equal_the_output_of_their_script(monkeypatch):
    monkeypatch.syspath_prepend(str(TRAINING))
    monkeypatch.delitem(sys.modules, "workloads", raising=False)
    import json

    import workloads

    for workload in workloads.build():
        stored = json.loads((workloads.FOLDER / f"{workload['name']}.json").read_text())
        assert stored == json.loads(json.dumps(workload)), workload["name"]
    with pytest.raises(ValueError, match="few: 1 different prompts in 400 draws, expected 2"):
        workloads.distinct(
            lambda rng: Exchange("greeting", "always this", "x", "", "", ""), 2, "few"
        )

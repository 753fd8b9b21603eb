"""What a search on a persona of the user's own reports: prompts enough to decide, and lines that name the cause."""

from __future__ import annotations

import pytest

from annie_quant import judge
from annie_quant.cli.pipeline import search
from annie_quant.cli.pipeline.stages import offline_prompts
from annie_quant.documents import GateResult, MemberVerdict, PairedVerdict, StrategyRow
from annie_quant.judge.sampling import MIN_ANSWERS_PER_GATE, prompts_per_gate


def result(n, basis="reference", **more):
    return GateResult(passes=n, n=n, low=0.9, high=1.0, threshold=0.9, basis=basis, **more)


@pytest.fixture(scope="module")
def workloads():
    cases = [
        {"id": str(i), "messages": [{"role": "user", "content": f"Question {i}"}]}
        for i in range(500)
    ]
    document = {
        "name": "answers",
        "max_tokens": 20,
        "gates": ["same_language", "same_text"],
        "cases": cases,
    }
    return [judge.library.build_workload(document)]


def more_prompts(n, workloads, gates):
    return offline_prompts(prompts_per_gate(n, gates), workloads)


def size(prompts):
    return sum(len(w.cases) for w in prompts)


def test_a_gate_that_applies_to_few_of_bf16s_answers_gets_more_prompts(workloads):
    prompts = offline_prompts(100, workloads)
    assert size(prompts) == 100
    few = {"same_language": result(26), "same_text": result(100)}
    more = more_prompts(100, workloads, few)
    assert size(more) == -(-100 * MIN_ANSWERS_PER_GATE // 26)
    assert {c.id for c in prompts[0].cases} <= {
        c.id for c in more[0].cases
    }  # bf16's answers to these are stored already
    assert (
        size(more_prompts(100, workloads, {"same_language": result(10)})) == 400
    )  # four times as many at most


@pytest.mark.parametrize(
    "gates",
    [
        {"same_language": result(MIN_ANSWERS_PER_GATE)},
        {
            "same_language": result(3, advisory=True)
        },  # too rare in bf16's answers to be judged at all
        {"same_language": result(0)},
        {"factual": result(5, basis="label")},
        {},
    ],
)
def test_nothing_is_added_where_it_would_not_decide(workloads, gates):
    assert size(more_prompts(100, workloads, gates)) == 100
    assert size(more_prompts(20, workloads, {"same_language": result(2)})) == 20


def row(**members):
    verdict = PairedVerdict(
        verdict="undecided", sentence="", reasons=[], profiles={}, members=members
    )
    return StrategyRow(
        "naive", passed=False, outcome="", why=["a"] * 16, path=[], numerics={}, verdict=verdict
    )


def test_a_gate_counts_once_in_the_line_of_a_strategy_and_undecided_is_not_lost():
    undecided = MemberVerdict(
        verdict="undecided", loses=[], undecided=["same_language", "same_markdown"]
    )
    assert (
        search.standing(row(w4a4=undecided, w4a16=undecided))
        == "undecided: language as bf16, markdown as bf16 need more prompts"
    )
    loses = MemberVerdict(verdict="loses", loses=["same_tool"], undecided=["same_language"])
    assert search.standing(row(w4a4=undecided, w4a16=loses)).endswith(
        ": tool or none as bf16 not kept"
    )

"""The verdict of a run whose sides were paired: both sides are compared, and one decision serves badge, sentence and exit code."""

from __future__ import annotations

import pytest
from flat_records import record_of

from annie_quant import documents, judge
from annie_quant.bench.aggregates import aggregate_records
from annie_quant.documents import BenchConfig, Identity
from annie_quant.judge import decision


def records(backend, passes, n=100, gate="tool_call", workload="w"):
    return [
        record_of(
            id=f"{backend}-{gate}-{i}",
            backend=backend,
            workload=workload,
            case=str(i),
            model=backend,
            status=200,
            text="x",
            finish_reason="stop",
            checks={gate: i < passes},
        )
        for i in range(n)
    ]


def run(*sides, n=100):
    """sides: (backend, {gate: passes})."""
    rows = [
        r
        for backend, gates in sides
        for gate, passes in gates.items()
        for r in records(backend, passes, n, gate, f"w-{gate}")
    ]
    identities = {
        backend: Identity(
            name=backend, format={"bf16": "BF16", "nv": "NVFP4", "q4": "Q4_K"}.get(backend)
        )
        for backend, _ in sides
    }
    return aggregate_records(rows, BenchConfig(), identities)


def test_without_bf16_the_candidate_is_compared_with_what_it_would_replace():
    aggregates = run(("nv", {"tool_call": 20}), ("q4", {"tool_call": 99}))
    assert (aggregates.served["nv"].judged_by, aggregates.served["q4"].judged_by) == ("q4", None)
    verdict = judge.verdict(aggregates)
    assert (verdict.candidate, verdict.incumbent, verdict.passed, verdict.outcome) == (
        "nv",
        "q4",
        False,
        "loses",
    )
    assert verdict.sentence == (
        "nv loses under its server: does not call the right tool (79 more of 100 prompts)."
    )
    assert verdict.reasons[0].startswith("served: tool calls loses: 79 lost and 0 won of 100, ")
    assert verdict.head[2].startswith("Next: stay with q4; ")


def test_a_gate_that_both_sides_miss_does_not_fail_the_candidate():
    """bench reported that nv fails although q4 failed the same gate."""
    aggregates = run(("nv", {"tool_call": 60}), ("q4", {"tool_call": 60}), n=300)
    verdict = judge.verdict(aggregates)
    assert verdict.passed and verdict.outcome == "keeps"
    assert any("misses R23 by itself" in caveat for caveat in verdict.caveats)


def test_what_the_incumbent_loses_too_is_named():
    aggregates = run(
        ("bf16", {"tool_call": 99}), ("nvfp4", {"tool_call": 20}), ("q4", {"tool_call": 10})
    )
    assert {name: side.judged_by for name, side in aggregates.served.items()} == {
        "bf16": None,
        "nvfp4": "bf16",
        "q4": "bf16",
    }
    verdict = judge.verdict(aggregates)
    assert verdict.outcome == "loses"
    assert (
        "q4 loses under its server: does not call the right tool (89 more of 100 prompts)"
        in verdict.reasons
    )


def test_a_side_alone_is_judged_by_the_requirements():
    verdict = judge.verdict(run(("nv", {"tool_call": 20})))
    assert (
        verdict.sentence
        == "nv fails under its server: does not call the right tool (80 of 100 prompts)."
    )
    assert not verdict.passed
    assert judge.verdict(run(("nv", {"tool_call": 99}))).sentence == (
        "nv passes everything that was tested under its server (1 gate)."
    )


def test_a_side_against_itself_keeps():
    verdict = judge.verdict(run(("a", {"tool_call": 60}), ("a-again", {"tool_call": 60})))
    assert verdict.outcome == "keeps" and verdict.passed


def test_the_order_of_the_backends_does_not_matter():
    verdict = judge.verdict(run(("q4_k_m", {"tool_call": 99}), ("nv", {"tool_call": 20})))
    assert (verdict.candidate, verdict.incumbent) == ("nv", "q4_k_m")


def test_a_served_side_that_keeps_and_an_arithmetic_that_loses_loses():
    """The server's arithmetic keeps what W4A4 loses: a finding about arithmetics, not fragility."""
    aggregates = run(("bf16", {"tool_call": 99}), ("nvfp4", {"tool_call": 99}))
    side = documents.OfflineSide(
        gates=judge.gates.tabulate([{"tool_call": i < 39} for i in range(100)]),
        paired={"tool_call": documents.PairedGate(100, 60, 0)},
    )
    sides, _ = decision.judge_sides({"w4a4": side})
    aggregates.offline = {"nvfp4": sides}
    verdict = judge.verdict(aggregates)
    assert verdict.outcome == verdict.badge == "loses" and not verdict.passed
    assert verdict.sentence == (
        "nvfp4 loses under W4A4: does not call the right tool (60 more of 100 prompts)."
    )
    assert verdict.head[0] == "Where: loses under W4A4 (vLLM CUTLASS); keeps under its server."


def test_a_gate_that_only_a_further_arithmetic_loses_is_fragile_and_named_as_such():
    aggregates = run(("bf16", {"tool_call": 99}), ("nvfp4", {"tool_call": 99}))

    def offline(lost):
        table = judge.gates.tabulate([{"tool_call": i >= lost} for i in range(100)])
        pairs = {"tool_call": documents.PairedGate(100, lost, 0)}
        return documents.OfflineSide(gates=table, paired=pairs)

    sides, _ = decision.judge_sides({"w4a4": offline(0), "w4a4+bf16": offline(60)})
    aggregates.offline = {"nvfp4": {"w4a4": sides["w4a4"]}}
    aggregates.members = {"nvfp4": {"w4a4+bf16": sides["w4a4+bf16"]}}
    verdict = judge.verdict(aggregates)
    assert (verdict.outcome, verdict.badge) == ("fragile", "fragile")
    assert verdict.sentence == (
        "nvfp4 is fragile under W4A4: in some of its arithmetics, not in all, it does not call the "
        "right tool (60 more of 100 prompts)."
    )


@pytest.mark.parametrize(
    ("passes", "badge"),
    [(20, "loses"), (99, "keeps"), (96, "undecided")],
)
def test_the_badge_is_the_decision(passes, badge):
    aggregates = run(("bf16", {"tool_call": 99}), ("nvfp4", {"tool_call": passes}))
    assert judge.verdict(aggregates).badge == badge


def test_repeats_of_a_greedy_prompt_are_one_answer():
    rows = [*records("bf16", 100), *records("nvfp4", 100), *records("nvfp4", 90)]
    from annie_quant.judge.pairing import checks_by_prompt

    own = [r for r in rows if r.backend == "nvfp4"]
    assert len(checks_by_prompt(own, {"w"})) == 100 and len(checks_by_prompt(own, ())) == 200

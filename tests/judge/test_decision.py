"""The verdict: candidate and incumbent, outcome, reasons and caveats."""

from __future__ import annotations

import pytest
from bench_cases import row
from flat_records import record_of
from msgspec import structs

from annie_quant import documents, judge
from annie_quant.judge import decision
from annie_quant.judge.decision import JudgedGate, wording
from annie_quant.judge.gates import Threshold, decide
from annie_quant.report.checklist import checklist, pair_answers

RATE, ALL, ZERO = Threshold("rate", 10, 0.6), Threshold("all", 5), Threshold("zero", 25)


def result(passes, n, threshold, title, advisory=False):
    return structs.replace(decide(passes, n, threshold), title=title, advisory=advisory)


def gates(tools=95, leaks=0, n=100):
    return {
        "tool_call": result(tools, n, RATE, "tool calls"),
        "factual": result(n, n, ALL, "factual"),
        "thinking_leak": result(n - leaks, n, ZERO, "no thinking leak"),
        "tool_call_raw": result(0, n, RATE, "tool calls, raw text", advisory=True),
    }


def side(runtime="llama.cpp", model=None, memory=None, **more):
    return {
        "model": model,
        "runtime": runtime,
        "gates": gates(**more),
        "speed_gates": {},
        "workloads": {},
        "memory_bytes": memory,
    }


MODELS = [
    {"name": "bf16", "label": "bf16", "format": "BF16", "size_bytes": 15_000_000},
    {"name": "naive", "label": "NVFP4 naive", "format": "NVFP4", "size_bytes": 5_000_000},
    {"name": "mlp_only", "label": "NVFP4 mlp_only", "format": "NVFP4", "size_bytes": 8_000_000},
    {"name": "q4_k_m", "label": "Q4_K_M", "format": "Q4_K_M", "size_bytes": 5_500_000},
]


def comparison(a, b, metric, median_a, median_b, significant=True):
    difference = median_b - median_a
    return {
        "a": a,
        "b": b,
        "workload": "all",
        "metric": metric,
        "n_prompts": 100,
        "median_a": median_a,
        "median_b": median_b,
        "median_difference": difference,
        "low": difference - 1,
        "high": difference + 1,
        "p": 0.001,
        "p_holm": 0.01 if significant else 0.4,
        "significant": significant,
    }


def test_the_roles_are_those_that_the_run_states():
    verdict = judge.verdict(
        {
            "roles": {"candidate": "mlp_only", "reference": "bf16", "incumbent": "q4_k_m"},
            "models": MODELS,
            "served": {
                "bf16": side(),
                "naive": side(tools=20),
                "mlp_only": side(),
                "q4_k_m": side(),
            },
            "comparisons": [
                comparison("mlp_only", "q4_k_m", "ttft_content_ms", 90, 300),
                comparison("mlp_only", "q4_k_m", "decode_tok_s", 33, 36),
            ],
        }
    )
    assert (verdict.candidate, verdict.incumbent, verdict.passed) == ("mlp_only", "q4_k_m", True)
    assert verdict.sentence == (
        "NVFP4 mlp_only passes everything that was tested under its server (3 gates)."
    )
    reasons = " ".join(verdict.reasons)
    assert (
        "NVFP4 naive fails under its server: does not call the right tool (80 of 100 prompts)"
        in reasons
    )
    assert "content TTFT is better than Q4_K_M's by 210 ms (95 % -211 to -209" in reasons


def test_figures_from_1000_on_are_whole_numbers():
    comparisons = [
        comparison("mlp_only", "q4_k_m", "ttft_content_ms", 1250, 2468),
        comparison("mlp_only", "q4_k_m", "decode_tok_s", 430, 1374),
    ]
    verdict = judge.verdict(
        {
            "models": MODELS,
            "served": {"mlp_only": side(), "q4_k_m": side()},
            "comparisons": comparisons,
        }
    )
    reason = next(r for r in verdict.reasons if r.startswith("content TTFT"))
    assert "better than Q4_K_M's by 1218 ms (95 % -1219 to -1217," in reason


def test_a_failing_candidate_names_its_gates():
    verdict = judge.verdict(
        {"models": MODELS, "served": {"naive": side(tools=20, leaks=3), "q4_k_m": side()}}
    )
    assert verdict.passed is False
    assert verdict.sentence == (
        "NVFP4 naive fails under its server: does not call the right tool (80 of 100 prompts) and "
        "shows its thinking in the answer (3 of 100)."
    )
    assert verdict.head[2] == (
        "Next: stay with Q4_K_M; do not serve it; try other strategies: annie-quant search."
    )


def test_the_evidence_of_a_speed_gate_is_its_interval():
    measured = {"metric": "ttft_content_ms", "value": 130.0, "limit": 120.0, "verdict": "fail"}
    limit = documents.SpeedGate(low=125.0, high=140.0, n=40, **measured)
    gate = JudgedGate("served", "ttft_content_ms", "loses", None, limit)
    assert wording.fault(gate) == "answers too late (130 ms, limit 120)"
    assert wording.reason(gate) == (
        "served: content TTFT fails: answers too late (130 ms, limit 120), 95 % interval 125 to 140"
    )
    one = documents.SpeedGate(low=None, high=None, n=1, **measured)
    gate = JudgedGate("served", "ttft_content_ms", "loses", None, one)
    assert wording.reason(gate).endswith("too few answers for an interval")


def test_speed_never_outweighs_a_failed_gate():
    served = {"naive": side(tools=20), "q4_k_m": side()}
    verdict = judge.verdict(
        {
            "models": MODELS,
            "served": served,
            "comparisons": [comparison("naive", "q4_k_m", "ttft_content_ms", 1, 1000)],
        }
    )
    assert verdict.passed is False and "against" not in verdict.sentence


def test_offline_failures_count_and_are_named_by_numerics():
    offline = {"mlp_only": {"w4a4": {"gates": gates(tools=30)}, "w4a16": {"gates": gates()}}}
    verdict = judge.verdict(
        {"models": MODELS, "served": {"mlp_only": side(), "q4_k_m": side()}, "offline": offline}
    )
    assert verdict.passed is False
    assert "fails under W4A4: does not call the right tool (70 of 100 prompts)" in verdict.sentence
    assert verdict.head[0] == (
        "Where: loses under W4A4 (vLLM CUTLASS); keeps under its server and W4A16 (Marlin)."
    )
    alone = judge.verdict({"models": MODELS, "offline": offline})
    assert alone.candidate == "mlp_only" and alone.incumbent is None and alone.passed is False


def test_undecided_gates_are_caveats_with_the_n_that_decides():
    verdict = judge.verdict({"served": {"a": side(tools=65), "b": side()}})
    assert verdict.passed is True and "too few prompts" in verdict.sentence
    assert verdict.head[2].startswith("Next: stay with b; judge more prompts, about ")
    assert any(
        c.startswith("served: tool calls undecided: 65 of 100") and " would decide" in c
        for c in verdict.caveats
    )


def test_advisory_gates_never_decide():
    assert judge.verdict({"served": {"a": side()}}).passed is True


def test_a_difference_is_candidate_minus_incumbent_in_either_order():
    served = {"q4_k_m": side(), "mlp_only": side()}
    verdict = judge.verdict(
        {
            "models": MODELS,
            "roles": {"candidate": "mlp_only", "incumbent": "q4_k_m"},
            "served": served,
            "comparisons": [comparison("q4_k_m", "mlp_only", "ttft_content_ms", 300, 90)],
        }
    )
    assert any("content TTFT is better than Q4_K_M's by 210 ms" in r for r in verdict.reasons)


def test_a_confound_counts_only_for_the_pair_it_is_about():
    served = {"a": side(), "b": side(), "c": side()}
    finding = {"code": "different_models", "severity": "confound", "message": "they differ"}
    roles = {"candidate": "a", "incumbent": "c"}
    run = {"served": served, "roles": roles}
    loud = judge.verdict(run | {"confounds": [finding | {"backends": ["a", "c"]}]})
    assert (
        loud.sentence == "CONFOUNDED (different models): the sides cannot be compared."
        and loud.comparable is False
    )
    assert (loud.passed, loud.outcome, loud.badge) == (
        False,
        "undecided",
        "confounded",
    )
    assert loud.caveats[0] == "they differ"
    quiet = judge.verdict(run | {"confounds": [finding | {"backends": ["a", "b"]}]})
    assert quiet.comparable is True and quiet.caveats == []


def test_nothing_measured():
    verdict = judge.verdict({})
    assert verdict.passed is False and verdict.sentence.startswith("Nothing was measured")


def typed(**served):
    return documents.convert(documents.Aggregates, {"models": MODELS, "served": served})


def test_the_checklist_counts_the_candidates_own_records():
    aggregates = typed(mlp_only=side(memory={"five": 6_000_000_000}), q4_k_m=side(tools=97))
    records = [
        row("mlp_only", reasoning="Hm."),
        row("mlp_only", error="HTTP 500"),
        row("q4_k_m", error="HTTP 500"),
    ]
    items = checklist(aggregates, "mlp_only", "q4_k_m", records, {"w"})
    verdicts = {item.item: (item.verdict, item.evidence) for item in items}
    assert verdicts["speaks the OpenAI API"] == ("fail", "1 of 2 chat completions succeeded")
    assert verdicts["calls tools"] == ("pass", "95 of 100, served")
    assert (
        verdicts["thinking can be switched"][0] == "pass"
        and "received in 1 of 1" in verdicts["thinking can be switched"][1]
    )
    assert verdicts["fits the memory budget"] == (
        "pass",
        "6 GB at its highest, of 110 GB for everything",
    )
    assert (
        verdicts["answers no later"][0] == "undecided"
        and verdicts["answers no worse"][0] == "undecided"
    )


@pytest.mark.parametrize(
    ("lost", "won", "verdict"),
    [
        (0, 0, "pass"),
        (12, 0, "fail"),
        (0, 12, "pass"),
        (12, 12, "undecided"),  # the rates are the same, and a quarter of the answers changed
        (7, 0, "fail"),  # 88 and 81 of 100: the two intervals overlap, the same prompts decide
    ],
)
def test_the_checklist_compares_the_same_prompts(lost, won, verdict):
    """It compared two intervals, which overlap where seven prompts are lost and none won."""

    def answer(backend, i):
        passed = i >= lost if backend == "mlp_only" else not lost <= i < lost + won
        fields = {
            "backend": backend,
            "workload": "w",
            "case": str(i),
            "status": 200,
            "text": "x",
            "finish_reason": "stop",
        }
        return record_of(
            id=f"{backend}/{i}", checks={"tool_call": passed and i < 88 + won + lost}, **fields
        )

    records = [answer(backend, i) for i in range(100) for backend in ("mlp_only", "q4_k_m")]
    aggregates = typed(mlp_only=side(), q4_k_m=side())
    answers = pair_answers(records, "mlp_only", "q4_k_m")
    items = checklist(aggregates, "mlp_only", "q4_k_m", records, {"w"}, answers)
    assert next(item.verdict for item in items if item.item == "answers no worse") == verdict


def test_one_leak_is_no_loss_against_the_incumbent_and_six_are():
    for n_leaks, expected in ((1, "undecided"), (6, "fail")):
        records = [
            record_of(
                id=f"{name}/{i}",
                backend=name,
                workload="w",
                case=str(i),
                finish_reason="stop",
                checks={"thinking_leak": i >= n_leaks or name != "mlp_only"},
            )
            for i in range(100)
            for name in ("mlp_only", "q4_k_m")
        ]
        aggregates = typed(mlp_only=side(), q4_k_m=side())
        answers = pair_answers(records, "mlp_only", "q4_k_m")
        items = checklist(aggregates, "mlp_only", "q4_k_m", records, {"w"}, answers)
        assert next(i.verdict for i in items if i.item == "answers no worse") == expected


@pytest.mark.parametrize(
    ("metric", "difference", "advice"),
    [
        (
            "ttft_content_ms",
            -40,
            "switch from Q4_K_M to NVFP4 mlp_only: it is faster (content TTFT)",
        ),
        ("ttft_content_ms", 40, "stay with Q4_K_M: NVFP4 mlp_only is slower (content TTFT)"),
        (
            "decode_tok_s",
            40,
            "stay with Q4_K_M: a user waits no less (decode speed alone is no reason)",
        ),
    ],
)
def test_what_to_do_next_follows_from_the_verdict_and_the_times(metric, difference, advice):
    run = {
        "models": MODELS,
        "roles": {"candidate": "mlp_only", "incumbent": "q4_k_m"},
        "served": {"mlp_only": side(), "q4_k_m": side()},
        "comparisons": [comparison("q4_k_m", "mlp_only", metric, 100, 100 + difference)],
    }
    assert f"Next: {advice}." in judge.verdict(run).head
    slower = [comparison("q4_k_m", "mlp_only", "e2e_ms", 100, 140), *run["comparisons"]]
    weighed = judge.verdict(run | {"comparisons": slower}).head[2]
    assert weighed.startswith("Next: weigh it" if difference == -40 else "Next: stay with Q4_K_M")
    lost = run | {"served": {"mlp_only": side(tools=20), "q4_k_m": side()}}
    assert judge.verdict(lost).head[2].startswith("Next: stay with Q4_K_M; do not serve it")


def test_a_candidate_without_an_incumbent_replaces_nothing():
    verdict = judge.verdict({"served": {"mlp_only": side()}})
    assert "nothing was measured that it could replace" in verdict.head[2]


def test_the_outcome_is_undecided_while_a_gate_is():
    aggregates = typed(mlp_only=side(tools=65), q4_k_m=side())
    verdict = judge.verdict(aggregates)
    assert verdict.passed and verdict.outcome == "undecided"
    assert judge.verdict(typed(mlp_only=side(tools=20))).outcome == "loses"
    assert decision.served_as(aggregates, "q4_k_m") == "q4_k_m"
    assert decision.served_as(aggregates, "other") is None


def test_cut_answers_are_not_read_as_what_the_gates_are_for() -> None:
    """An answer that max_tokens cut fails every gate; the text of this one shows no thinking and no markdown."""
    served = {"a": side(tools=0, leaks=2, n=2)}
    finding = {
        "code": "cut_answers",
        "severity": "confound",
        "message": "a: 2 of 2 answers were cut at max_tokens",
        "backends": ["a"],
    }
    verdict = judge.verdict({"served": served, "confounds": [finding]})
    assert verdict.sentence == "CONFOUNDED (cut answers): nothing is decided."
    assert "Next: a: 2 of 2 answers were cut at max_tokens." in verdict.head
    note = finding | {"severity": "note", "message": "a: 1 of 60 answers were cut at max_tokens"}
    both = judge.verdict({"served": served, "confounds": [note, finding]})
    assert both.head == verdict.head

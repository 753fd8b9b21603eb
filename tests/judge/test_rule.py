"""The rule: keeps, loses, undecided and fragile, for gates, members and ensembles."""

from __future__ import annotations

import json

import evaluations
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binomtest

from annie_quant import documents, judge
from annie_quant.documents import PairedGate, PooledGates
from annie_quant.judge import decision, evidence
from annie_quant.judge.decision import judge_gates, rule, wording
from annie_quant.judge.gates import GATES, tabulate
from annie_quant.judge.pairing import pair_checks
from annie_quant.judge.statistics import score_interval


def member(**counts):
    """gate=(n, lost, won)."""
    return {gate: PairedGate(*row) for gate, row in counts.items()}


def judged(**counts):
    """gate=(n, lost, won), with the figures and verdicts of one member."""
    return judge_gates({"w4a4": member(**counts)})[0]["w4a4"]


def verdict_of(**counts):
    return judge.judge_members({"w4a4": member(**counts)}).verdict


@pytest.mark.parametrize(
    ("counts", "verdict"),
    [
        ((100, 0, 0), "keeps"),
        ((100, 1, 0), "keeps"),  # lower bound -4.4 points
        ((100, 2, 0), "undecided"),  # -5.9
        ((25, 0, 0), "undecided"),  # -9.8
        ((52, 0, 0), "keeps"),  # 2.706 / (52 + 2.706) is 4.9 points
        ((51, 0, 0), "undecided"),
        ((240, 58, 0), "loses"),
        ((240, 29, 5), "loses"),
        ((240, 5, 29), "keeps"),
        ((100, 20, 14), "undecided"),  # -15.6 to 3.6
        ((10, 10, 0), "loses"),  # 0 of 10 tool calls where bf16 has 10: p = 1/1024
        ((4, 4, 0), "undecided"),  # p = 1/16
    ],
)
def test_one_gate(counts, verdict):
    assert verdict_of(tool_call=counts) == verdict


def test_a_gate_that_compares_with_the_reference_loses_only_beyond_the_margin():
    """Two runs of one model change 2 to 3 % of the answers, and each change is a loss to such a gate."""
    assert verdict_of(same_text=(200, 5, 0)) == "undecided"  # was "loses": McNemar's p is 3 %
    assert verdict_of(same_text=(200, 3, 0)) == "keeps"
    assert (
        verdict_of(same_text=(200, 14, 0)) == "undecided"
    )  # 7 %: the interval's upper bound is -4.5 points
    assert verdict_of(same_text=(200, 18, 0)) == "loses"  # 9 %: -6.1 points, p = .013
    assert verdict_of(tool_call=(200, 14, 0)) == "loses", "gates with labels lose against zero"


def test_the_p_of_a_gate_that_compares_with_the_reference_is_of_a_loss_above_the_margin():
    pairs = judged(same_tool=(200, 18, 0), same_text=(100, 3, 0))
    assert pairs["same_tool"].p == pytest.approx(
        binomtest(18, 200, 0.05, alternative="greater").pvalue
    )
    assert pairs["same_tool"].p_holm == pytest.approx(2 * pairs["same_tool"].p), (
        "each such gate counts"
    )
    assert pairs["same_text"].p > 0.5


def test_the_figures_next_to_a_gate_that_compares_with_the_reference_use_its_rule():
    """n_to_decide, detectable and the search's early drop follow the same limit as the verdict."""
    pairs = judged(same_tool=(200, 14, 0))
    needed = pairs["same_tool"].n_to_decide
    assert 200 < needed < 600
    assert binomtest(int(0.07 * needed), needed, 0.05, alternative="greater").pvalue < 0.05
    assert score_interval(0.07 * needed, 0, needed)[1] < -0.05 <= score_interval(14, 0, 200)[1]
    assert 0.08 < pairs["same_tool"].detectable < 0.12, (
        "5 points of margin, and what 200 prompts find beyond them"
    )
    few = judged(
        same_tool=(50, 6, 0)
    )  # 12 %: a loss against zero at 5 % / looks, not against the margin
    assert rule.cannot_keep("same_tool", few["same_tool"], 600, 2) is None
    assert rule.cannot_keep("tool_call", member_of_one("tool_call", 50, 6), 600, 2) == "a loss"


def member_of_one(gate, n, lost):
    pairs = judged(**{gate: (n, lost, 0)})
    return pairs[gate]


def test_leaks_and_empty_answers_have_no_margin():
    assert GATES["thinking_leak"].margin == GATES["non_empty"].margin == 0
    assert {
        gate.margin for gate in GATES.values() if gate.name not in ("thinking_leak", "non_empty")
    } == {0.05}
    assert verdict_of(thinking_leak=(505, 1, 0)) == "undecided", (
        "no keep, and no proof of a loss either"
    )
    assert (
        verdict_of(thinking_leak=(505, 0, 0)) == "keeps"
        and verdict_of(thinking_leak=(51, 0, 0)) == "undecided"
    )
    assert (
        verdict_of(thinking_leak=(505, 4, 0)) == "undecided"
        and verdict_of(thinking_leak=(505, 5, 0)) == "loses"
    )
    # A leak that bf16 has on other prompts is not new: the usual margin decides.
    assert verdict_of(thinking_leak=(505, 2, 2)) == "keeps"
    assert verdict_of(thinking_leak=(505, 80, 2)) == "loses"


def test_one_leak_under_one_arithmetic_is_not_fragile():
    """Two new models, naive, 180 prompts (2026-11-22): one answer leaked in one of four arithmetics, another one in each model."""
    members = {
        f"w4a4+{i}": member(thinking_leak=(180, int(i == 3), 0), non_empty=(180, 0, 0))
        for i in range(4)
    }
    assert judge.judge_members(members).verdict == "undecided"
    lost = {**members, "w4a4+3": member(thinking_leak=(180, 9, 0))}
    assert judge.judge_members(lost).verdict == "fragile"


def test_the_prompts_that_would_decide_a_gate_without_a_margin():
    few, one, five = (judged(thinking_leak=row) for row in ((10, 0, 0), (180, 1, 0), (180, 5, 0)))
    assert few["thinking_leak"].n_to_decide == 52 and five["thinking_leak"].n_to_decide is None
    assert one["thinking_leak"].n_to_decide == 900, (
        "at this rate five lost answers, which are significant"
    )


def test_at_most_5_percent_lose_by_leaks_that_both_sides_have():
    """1,000 checkpoints as good as their reference, of which .3 % of the answers leak: about one in four lost before."""
    rng = np.random.default_rng(0)
    before, after = rng.random((2, 1000, 240)) < 0.003
    verdicts = [
        verdict_of(
            thinking_leak=(240, int((b & ~a).sum()), int((a & ~b).sum())), non_empty=(240, 0, 0)
        )
        for a, b in zip(before, after, strict=True)
    ]
    assert verdicts.count("loses") <= 50
    assert all(
        v != "keeps"
        for v, a, b in zip(verdicts, before, after, strict=True)
        if b.any() and not a.any()
    )


def test_a_checkpoint_never_loses_what_bf16_misses():
    """bf16 has one of five facts and so has the checkpoint; the absolute requirement is missed and decides nothing."""
    rows = [({"factual": i < 60}, {"factual": i < 60}) for i in range(300)]
    pairs, _ = pair_checks(rows)
    table = decision.apply(
        tabulate(new for _, new in rows), judge_gates({"w4a4": pairs})[0]["w4a4"]
    )
    assert (table["factual"].verdict, table["factual"].meets, table["factual"].requirement) == (
        "pass",
        "fail",
        "R25",
    )


def test_gates_count_that_could_be_significant():
    alone = judged(tool_call=(100, 9, 2))
    assert (
        alone["tool_call"].p == alone["tool_call"].p_holm == pytest.approx(67 / 2048 - 55 / 4096)
    ), "McNemar's mid-p"
    assert alone["tool_call"].verdict == "loses"
    several = judged(
        tool_call=(100, 9, 2), factual=(100, 4, 0), reasoning=(100, 0, 0), no_markdown=(400, 0, 0)
    )
    assert several["tool_call"].verdict == "loses" and several["factual"].p_holm is None
    members = {
        f"w4a4+{i}": member(tool_call=counts)
        for i, counts in enumerate([(100, 9, 2), (100, 6, 6), (100, 5, 5)])
    }
    assert judge.judge_members(members).verdict == "undecided", (
        "the level is that of the whole ensemble"
    )
    equal = {f"w4a4+{i}": member(tool_call=(100, 9, 2)) for i in range(3)}
    assert judge.judge_members(equal).verdict == "loses", (
        "the same loss in each of them counts once"
    )


def test_a_sure_loss_within_the_margin_keeps_the_gate():
    pairs = judged(no_markdown=(1680, 20, 0))
    assert pairs["no_markdown"].verdict == "keeps" and pairs["no_markdown"].high < 0


@pytest.mark.parametrize("gate", ["same_language", "same_tool", "call_rate", "non_empty"])
def test_a_gate_that_no_other_gate_tests_needs_its_own_answers(gate):
    """With 10 points lost, 51 answers have at most two lost ones in 10.4 % of draws; with 20 answers at most one in 39.2 %."""
    others = {
        name: (100, 0, 0)
        for name in ("tool_call", "tool_arguments", "abstention", "no_markdown", "factual")
    }
    for n, lost in ((51, 2), (20, 1), (10, 0), (9, 1)):
        assert verdict_of(**others, **{gate: (n, lost, 0)}) == "undecided"
    assert (
        verdict_of(**others, **{gate: (52, 0, 0)})
        == verdict_of(**others, **{gate: (9, 0, 0)})
        == "keeps"
    )
    assert verdict_of(**others, same_validity=(51, 2, 0)) == "keeps", (
        "an invalid call fails tool_call too"
    )


def test_small_losses_in_many_gates_are_a_pooled_loss():
    """Every gate keeps or is undecided by itself, and four points are gone everywhere."""
    gates = ("tool_call", "factual", "reasoning", "abstention", "no_markdown")
    rows = [({gate: True}, {gate: i >= 4}) for gate in gates for i in range(100)]
    pairs, pooled = pair_checks(rows)
    verdict = judge.judge_members({"w4a4": pairs}, {"w4a4": pooled})
    assert verdict.verdict == "loses" and verdict.members["w4a4"].loses == ["all"]
    assert {pair.verdict for pair in judge_gates({"w4a4": pairs})[0]["w4a4"].values()} == {
        "undecided"
    }
    assert "w4a4: all gates together loses: 20 lost and 0 won of 500" in " ".join(verdict.reasons)
    assert verdict.sentence.startswith(
        "Loses under W4A4: gets fewer answers right, over all gates together (20 more of 500 prompts)"
    )


def test_the_verdict_is_that_of_the_worst_profile_and_fragile_is_within_one():
    verdict = judge.judge_members(
        {
            "vllm-cutlass": member(tool_call=(240, 58, 0)),
            "float32": member(tool_call=(240, 0, 0)),
            "float32+perm1": member(tool_call=(240, 1, 0)),
        }
    )
    assert verdict.verdict == "loses", "one arithmetic keeps, another loses: not fragile"
    assert verdict.profiles == {"vllm-cutlass": "loses", "float32": "keeps"}
    assert verdict.sentence == (
        "Loses under vLLM CUTLASS: does not call the right tool (58 more of 240 prompts)."
    )
    assert verdict.head[0] == (
        "Where: loses under vLLM CUTLASS (W4A4); keeps under float32 (no server)."
    )
    assert verdict.head[3] == (
        "Not tested: decline, right arguments, several calls, use a result, right answer, form, "
        "stop, thinking (0 answers)."
    )
    one = judge.judge_members(
        {"w4a4": member(tool_call=(240, 0, 0)), "w4a4+perm1": member(tool_call=(240, 58, 0))}
    )
    assert one.profiles == {"w4a4": "fragile"} and one.verdict == "fragile"
    own = judge.judge_members(
        {"w4a4": member(tool_call=(240, 58, 0)), "w4a4+perm1": member(tool_call=(240, 0, 0))}
    )
    assert own.profiles == {"w4a4": "loses"}, "lost in the profile's own arithmetic"


def test_a_profile_that_no_server_computes_counts_only_alone():
    lost = member(tool_call=(240, 58, 0))
    kept = member(tool_call=(240, 0, 0))
    assert judge.judge_members({"float32": lost}).verdict == "loses"
    both = judge.judge_members({"float32": lost, "vllm-marlin": kept})
    assert (both.verdict, both.profiles["float32"]) == ("keeps", "loses")


def test_a_loss_that_nothing_keeps_is_no_fragility():
    """perm1 loses what the profile's own arithmetic leaves undecided."""
    verdict = judge.judge_members(
        {
            "w4a4": member(tool_call=(240, 12, 6), factual=(100, 0, 0)),
            "w4a4+perm1": member(tool_call=(240, 58, 0), factual=(100, 3, 0)),
        }
    )
    assert verdict.verdict == "loses" and verdict.members["w4a4"].verdict == "undecided"
    assert "(58 more of 240 prompts)" in verdict.sentence


# Qwen2.5-Coder-0.5B, best: (n, lost, won) in all eight arithmetics.
CODER = {
    "abstention": (181, 28, 2),
    "same_decline": (67, 24, 0),
    "same_text": (338, 55, 2),
    "same_markdown": (338, 59, 3),
    "same_several": (60, 39, 2),
    "same_tool": (338, 70, 8),
}
EIGHT = [f"{p}{m}" for p in ("w4a4", "w4a16") for m in ("", "+bf16", "+perm1", "+cut16")]


@pytest.mark.parametrize("one_keeps", [None, *EIGHT])
def test_what_every_arithmetic_loses_is_lost_and_the_worst_label_is_named_first(one_keeps):
    """It was "Fragile: loses call rate under w4a16+bf16": one gate changed, six were lost in all."""
    rates = {name: (338, 0 if name == one_keeps else 40, 0) for name in EIGHT}
    members = {name: member(**CODER, call_rate=rates[name]) for name in EIGHT}
    verdict = judge.judge_members(members)
    assert verdict.verdict == "loses" and set(verdict.profiles.values()) == {"loses"}
    assert verdict.sentence.startswith(
        "Loses under W4A4 and W4A16: calls a tool where none fits (26 more of 181 prompts), makes "
        "other calls where bf16 makes several (37 more of 60), calls a tool where bf16 calls none "
        "(24 more of 67) and "
    )


def test_a_stored_evaluation_of_the_older_rule_is_judged_again():
    members = {name: CODER | {"call_rate": (338, 0 if "+" in name else 40, 0)} for name in EIGHT}
    stored = evaluations.from_counts(members)
    stored.rule = 5
    stored.verdict.verdict = "fragile"
    again = evidence.recounted(stored).verdict
    assert again.verdict == "loses" and again.profiles == {"w4a4": "loses", "w4a16": "loses"}


LABELLED = [name for name, gate in GATES.items() if gate.basis == "label" and not gate.advisory]


@settings(deadline=None)
@given(
    st.lists(
        st.dictionaries(
            st.sampled_from([name for name, gate in GATES.items() if not gate.advisory]),
            st.tuples(st.just(200), st.integers(0, 90), st.integers(0, 60)),
            min_size=3,
            max_size=6,
        ),
        min_size=8,
        max_size=8,
    )
)
def test_no_sure_loss_is_called_anything_else(rows):
    """Of eight random arithmetics: lost in all, or in a profile's own, is lost; fragile is kept somewhere."""
    members = {name: member(**counts) for name, counts in zip(EIGHT, rows, strict=True)}
    verdict = judge.judge_members(members)
    judged = judge_gates(members)[0]
    for profile in ("w4a4", "w4a16"):
        own = [name for name in EIGHT if name.partition("+")[0] == profile]
        lost_in_all = set.intersection(
            *({g for g, row in judged[name].items() if row.verdict == "loses"} for name in own)
        )
        if lost_in_all or any(row.verdict == "loses" for row in judged[profile].values()):
            assert verdict.profiles[profile] == "loses"
        if verdict.profiles[profile] == "fragile":
            lost = {g for name in own for g, row in judged[name].items() if row.verdict == "loses"}
            kept = {g for name in own for g, row in judged[name].items() if row.verdict == "keeps"}
            assert lost and lost <= kept
    assert verdict.verdict == min(verdict.profiles.values(), key=rule.WORST_FIRST.index)
    labelled_losses = {
        gate: row.difference
        for name in ("w4a4", "w4a16")
        for gate, row in judged[name].items()
        if gate in LABELLED and row.verdict == "loses"
    }
    if labelled_losses:
        named = verdict.sentence.partition(": ")[2]
        assert named.startswith(tuple(wording.FAULTS[gate] for gate in LABELLED))
    assert not any(f"{name} " in verdict.sentence for name in GATES if "_" in name)
    assert "+" not in verdict.sentence


def test_a_perturbed_arithmetic_gets_a_reason_only_where_its_verdict_differs():
    verdict = judge.judge_members(
        {
            "w4a4": member(tool_call=(240, 58, 0), factual=(100, 0, 0)),
            "w4a4+perm1": member(tool_call=(240, 50, 0), factual=(100, 3, 0)),
            "w4a16": member(tool_call=(240, 40, 0), factual=(100, 0, 0)),
        }
    )
    reasons = [line.split(" lost")[0] for line in verdict.reasons]
    assert reasons == [
        "w4a4: tool calls loses: 58",
        "w4a4+perm1: factual undecided: 3",
        "w4a16: tool calls loses: 40",
    ]
    assert verdict.sentence == (
        "Loses under W4A4 and W4A16: does not call the right tool (58 more of 240 prompts)."
    )


def test_all_members_lose_or_one_is_undecided():
    lost, outcomes, open_ = ((240, 58, 0), (240, 0, 0), (240, 12, 6))
    assert judge.judge_members({k: member(tool_call=lost) for k in "ab"}).verdict == "loses"
    assert (
        judge.judge_members({"a": member(tool_call=lost), "b": member(tool_call=open_)}).verdict
        == "loses"
    )
    assert (
        judge.judge_members({"a": member(tool_call=outcomes), "b": member(tool_call=open_)}).verdict
        == "undecided"
    )
    assert judge.judge_members({}).verdict == "undecided"
    assert judge.judge_members({"a": member(tool_call_raw=lost)}).verdict == "undecided", (
        "advisory gates decide nothing"
    )


def test_the_n_that_decides():
    pairs = judged(tool_call=(100, 2, 0), factual=(20, 0, 0), thinking_leak=(10, 0, 0))
    needed = pairs["tool_call"].n_to_decide
    assert 100 < needed < 300
    assert (
        score_interval(0.02 * needed, 0, needed)[0]
        > -0.05
        >= score_interval(0.02 * (needed - 1), 0, needed - 1)[0]
    )
    assert pairs["factual"].n_to_decide == 52 and pairs["thinking_leak"].n_to_decide == 52
    exact = member(tool_call=(100, 5, 0))
    assert judge.judge_members({"w4a4": exact}).verdict == "loses"


def test_the_detectable_loss_is_reported_with_n():
    pairs = judged(tool_call=(240, 3, 2), factual=(100, 0, 0))
    assert 0.02 < pairs["tool_call"].detectable < 0.06 < pairs["factual"].detectable < 0.10


@settings(deadline=None)  # the first call imports scipy
@given(
    st.lists(
        st.tuples(
            st.sampled_from([name for name, gate in GATES.items() if not gate.advisory]),
            st.integers(0, 30),
            st.integers(0, 30),
            st.integers(0, 300),
        ),
        max_size=6,
    )
)
def test_a_verdict_is_consistent_with_its_gates(rows):
    counts = {gate: PairedGate(lost + won + same, lost, won) for gate, lost, won, same in rows}
    members = {"w4a4": counts, "w4a16": {k: PairedGate(g.n, 0, 0) for k, g in counts.items()}}
    before = repr(members)
    verdict = judge.judge_members(members)
    assert repr(members) == before, "judging changes none of its arguments"
    gates = judge_gates(members)[0]["w4a4"]
    outcomes = {gate.verdict for gate in gates.values() if gate.n}
    if "loses" in outcomes:
        assert verdict.verdict in ("loses", "fragile")
    elif outcomes == {"keeps"}:
        assert verdict.verdict in ("keeps", "undecided")
    for name, gate in gates.items():
        if gate.verdict == "loses":
            assert gate.lost > gate.won or (GATES[name].two_sided and gate.lost < gate.won)
        if gate.verdict == "keeps":
            assert gate.n >= 52
    if verdict.verdict in ("loses", "fragile"):
        assert verdict.reasons


def test_without_a_difference_at_most_five_percent_lose():
    """The full simulation is tests/perf/verdict_rule.py; this one has 400 runs of one gate of three members."""
    rng, alarms = np.random.default_rng(5), 0
    for _ in range(400):
        members = {}
        for name in "abc":
            lost, won, _ = rng.multinomial(240, [0.05, 0.05, 0.9])
            members[name] = member(tool_call=(240, int(lost), int(won)))
        alarms += judge.judge_members(members).verdict in rule.FAILING
    assert alarms / 400 <= 0.05


def test_a_loss_of_ten_points_is_found():
    rng, missed = np.random.default_rng(6), 0
    for _ in range(400):
        lost, won, _ = rng.multinomial(240, [0.12, 0.02, 0.86])
        missed += verdict_of(tool_call=(240, int(lost), int(won))) != "loses"
    assert missed / 400 <= 0.05


def test_documents_keep_the_verdict_and_old_ones_get_one():
    pooled = PooledGates(n=10, lost=0, won=0)
    verdict = judge.judge_members({"w4a4": member(tool_call=(240, 58, 0))}, {"w4a4": pooled})
    assert (
        documents.convert(documents.PairedVerdict, json.loads(documents.encode(verdict))) == verdict
    )
    old = documents.convert(PairedGate, {"n": 240, "lost": 58, "won": 0, "p": 1e-17})
    assert judge.judge_members({"w4a4": {"tool_call": old}}).verdict == "loses"

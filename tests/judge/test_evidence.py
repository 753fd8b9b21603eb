"""Counts and verdicts are made from the stored outcomes again; what does not follow from them is named, in one line each."""

from __future__ import annotations

import evaluations
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from randomised import examples

from annie_quant import documents, judge
from annie_quant.judge import evidence

LOSES = {
    "w4a4": {"tool_call": (240, 58, 2), "non_empty": (60, 0, 0)},
    "w4a4+bf16": {"tool_call": (240, 70, 0), "non_empty": (60, 0, 0)},
}
KEEPS = {"w4a4": {"tool_call": (240, 0, 0), "non_empty": (60, 0, 0)}}


def copy(evaluation: documents.Evaluation) -> documents.Evaluation:
    return msgspec.convert(evaluation.to_dict(), documents.Evaluation)


@pytest.fixture
def stored():
    return evaluations.from_counts(LOSES)


def test_the_counts_are_those_of_the_outcomes(stored):
    assert stored.verdict.verdict == "loses"
    side = stored.numerics["w4a4"]
    row = side.paired["tool_call"]
    assert (row.n, row.lost, row.won) == (240, 58, 2)
    assert (side.gates["tool_call"].passes, stored.reference_gates["tool_call"].passes) == (
        182,
        238,
    )
    assert evidence.differences(stored) == [] == evidence.differences(copy(stored))


@settings(deadline=None, max_examples=examples(30))
@given(st.data())
def test_counting_again_gives_what_the_answers_gave(data):
    """The same figures as from answers in their order, whatever gates apply to which of them."""
    n = data.draw(st.integers(1, 12))
    texts = st.text("01-", min_size=n, max_size=n)
    gates = ("tool_call", "non_empty", "factual", "tool_arguments")
    reference, own = ({gate: data.draw(texts) for gate in gates} for _ in range(2))
    names = [f"p{i}" for i in range(n)]
    rows = [
        {g: t[i] == "1" for g, t in side.items() if t[i] != "-"}
        for side in (reference, own)
        for i in range(n)
    ]
    expected = judge.pairing.pair_checks(zip(rows[:n], rows[n:], strict=True))
    made = evaluations.from_outcomes({"w4a4": own}, reference)  # language: data
    made.prompts = dict.fromkeys(gates, names)
    side = evidence.recounted(made).numerics["w4a4"]
    counts = [
        {g: (row.n, row.lost, row.won) for g, row in table.items()}
        for table in (side.paired, expected[0])
    ]
    assert counts[0] == counts[1]
    fields = ("n", "lost", "won", "p_sum", "p_largest", "p_fisher")
    pooled = [row and [getattr(row, f) for f in fields] for row in (side.pooled, expected[1])]
    assert pooled[0] == pooled[1]


def reset(row: documents.PairedGate) -> None:
    row.lost = 0


EDITS = {
    "lost answers": (
        lambda e: reset(e.numerics["w4a4"].paired["tool_call"]),
        "w4a4 against bf16, tool_call: lost 0 in the file, 58",
    ),
    "a member's": (
        lambda e: reset(e.members["w4a4+bf16"].paired["tool_call"]),
        "w4a4+bf16 against bf16, tool_call: lost 0",
    ),
    "all together": (
        lambda e: reset(e.numerics["w4a4"].pooled),
        "w4a4 against bf16, all: lost 0 in the file, 58",
    ),
    "passes": (
        lambda e: setattr(e.numerics["w4a4"].gates["tool_call"], "passes", 240),
        "w4a4, tool_call: passes 240 in the file, 182",
    ),
    "bf16's passes": (
        lambda e: setattr(e.reference_gates["tool_call"], "passes", 60),
        "bf16, tool_call: passes 60 in the file, 238",
    ),
    "a gate is gone": (
        lambda e: e.numerics["w4a4"].paired.pop("tool_call"),
        "tool_call: n None in the file, 240",
    ),
    "a gate's verdict": (
        lambda e: setattr(e.numerics["w4a4"].paired["tool_call"], "verdict", "keeps"),
        "verdict keeps in the file, loses",
    ),
    "the verdict": (lambda e: setattr(e.verdict, "verdict", "keeps"), "verdict: keeps (Loses"),
    "the sentence": (
        lambda e: setattr(e.verdict, "sentence", "Keeps."),
        "verdict: loses (Keeps.) in the file",
    ),
}


@pytest.mark.parametrize("name", EDITS)
def test_an_edited_count_is_named(stored, name):
    edit, words = EDITS[name]
    edited = copy(stored)
    edit(edited)
    lines = evidence.differences(edited)
    assert any(words in line for line in lines), lines
    assert not any("were changed" in line for line in lines), "the outcomes are as they were"


CHANGES = {
    "outcomes": lambda e: e.numerics["w4a4"].outcomes.update(tool_call="1" * 240),
    "outcomes of the reference": lambda e: e.reference_outcomes.update(tool_call="0" * 240),
    "a prompt": lambda e: e.prompts["tool_call"].__setitem__(3, "x"),
    "the reference's hash": lambda e: setattr(e, "reference_sha256", "0"),
    "the checkpoint's hash": lambda e: setattr(e, "checkpoint_files", documents.ModelFiles("0")),
    "the prompts' hash": lambda e: e.workloads.update(w=documents.EvaluatedWorkload("", 1, "0")),
    "what blocks it": lambda e: setattr(e, "blocking", []),
}


@pytest.mark.parametrize("name", CHANGES)
def test_outcomes_that_were_changed_are_noticed_with_counts_that_follow_from_them(name):
    """An edit of the outcomes, with counts and a verdict that were made from them again, changes the digest."""
    edited = evaluations.from_counts(LOSES, blocking=["a reason"])
    CHANGES[name](edited)
    edited = evidence.recounted(edited)
    assert evidence.differences(edited) == [
        "its outcomes, its hashes or the reasons that block it were changed"
    ]


def test_counts_of_another_rule_are_compared_and_its_verdicts_are_not(stored):
    older = copy(stored)
    older.version, older.rule = "0.0.1", judge.decision.RULE - 1
    older.evidence_sha256 = evidence.evidence_sha256(older)
    older.verdict.verdict = "fragile"
    assert evidence.differences(older) == []
    older.numerics["w4a4"].paired["tool_call"].lost = 3
    assert len(evidence.differences(older)) == 1


def test_without_a_digest_nothing_can_be_checked(stored):
    stored.evidence_sha256 = ""
    assert evidence.differences(stored) == [
        "no digest of its outcomes (an older annie-quant wrote it): evaluate again"
    ]


def test_sides_of_a_run_are_compared_too(stored):
    side = stored.numerics["w4a4"]
    shown = {
        "w4a4": documents.OfflineSide(gates=side.gates, paired=side.paired, pooled=side.pooled)
    }
    assert evidence.differences(stored, shown) == []
    own = {k: msgspec.structs.replace(v, lost=0) for k, v in side.paired.items()}
    [line] = evidence.differences(
        stored, {"w4a4": msgspec.structs.replace(shown["w4a4"], paired=own)}
    )
    assert (
        line == "run.json, w4a4 against bf16, tool_call: lost 0 in the file, 58 from its outcomes"
    )
    assert evidence.differences(stored, {"w4a16": shown["w4a4"]}) == [
        "run.json, w4a16: not in the evaluation"
    ]


@pytest.mark.parametrize(
    ("counts", "before", "after"), [(KEEPS, "keeps", "undecided"), (LOSES, "loses", "loses")]
)
def test_a_reason_that_blocks_forbids_keeps(counts, before, after):
    assert evaluations.from_counts(counts).verdict.verdict == before
    verdict = evaluations.from_counts(counts, blocking=["BROKEN EXPORT: x"]).verdict
    assert verdict.verdict == after and verdict.reasons[0] == "BROKEN EXPORT: x"
    assert "keeps" not in verdict.profiles.values()
    assert verdict.sentence.startswith("BROKEN EXPORT: x") == (before == "keeps")


def test_a_blocked_model_does_not_keep_in_a_run(tmp_path):
    """Also where its server keeps everything: report, demo, publish and the notebook show the run's verdict."""
    from annie_quant.cli.pipeline.demo import add_evaluation
    from annie_quant.report.run import load

    document = evaluations.from_counts(KEEPS, blocking=["BROKEN EXPORT: x"])
    path = tmp_path / "eval/nv.json"
    path.parent.mkdir()
    path.write_text(msgspec.json.encode(document).decode())
    alone = load(tmp_path).verdict
    aggregates = documents.Aggregates(models=[documents.ModelRow(name="nv", format="NVFP4")])
    add_evaluation(aggregates, "nv", path)
    for verdict in (alone, judge.verdict(aggregates)):
        assert (verdict.outcome, verdict.passed) == ("undecided", False)
        assert (
            "BROKEN EXPORT: x. Undecided" in verdict.sentence
            and verdict.reasons[0] == "BROKEN EXPORT: x"
        )
    assert judge.decision.standing_of(aggregates, "nv") == "undecided"


def test_reading_a_run_does_not_judge_its_evaluations_again(tmp_path):
    """The stored verdict of a gate stays, also where the rule of today would give another one."""
    from annie_quant.report.run import load

    document = evaluations.from_counts(KEEPS)
    document.numerics["w4a4"].paired["tool_call"].verdict = "loses"
    (tmp_path / "eval").mkdir()
    (tmp_path / "eval/nv.json").write_text(msgspec.json.encode(document).decode())
    assert load(tmp_path).aggregates.offline["nv"]["w4a4"].paired["tool_call"].verdict == "loses"

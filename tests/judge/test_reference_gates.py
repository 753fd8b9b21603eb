"""Gates that compare with bf16's own answers: what fails each of them, what they leave out, and that a planted loss fails."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
from msgspec import structs

from annie_quant import judge
from annie_quant.documents import Answer, PairedGate
from annie_quant.judge.checks.reference import language_of
from annie_quant.judge.decision import judge_gates
from annie_quant.judge.gates import GATES, REFERENCE_GATES, Judged, checks
from annie_quant.judge.library import build_workload
from annie_quant.judge.pairing import deciding_checks, pair_checks
from annie_quant.judge.sampling import answers_per_gate, expected_tools, reference_notes

TOOL = {
    "type": "function",
    "function": {
        "name": "set_light",
        "parameters": {
            "type": "object",
            "properties": {"room": {"type": "string"}, "level": {"type": "number"}},
            "required": ["room"],
        },
    },
}
WORKLOAD = build_workload(
    {
        "name": "w",
        "max_tokens": 50,
        "tools": [TOOL],
        "gates": list(REFERENCE_GATES),
        "cases": [{"id": "a", "messages": [{"role": "user", "content": "light"}]}],
    }
)
WORDS = Answer(
    "The light in the hall is on, and it is warm.", finish_reason="stop", completion_tokens=12
)


def call(name="set_light", finish="tool_calls", text="", **arguments):
    calls = [{"id": "x", "name": name, "arguments": json.dumps(arguments)}]
    return Answer(text, tool_calls=calls, finish_reason=finish, completion_tokens=30)


def gates_of(answer, reference):
    return judge.faults(answer, WORKLOAD.cases[0], WORKLOAD, reference)


def failing(answer, reference):
    return {
        name
        for name, fault in gates_of(answer, reference).items()
        if fault and not GATES[name].two_sided
    }


def test_an_answer_passes_against_itself_and_nothing_applies_without_a_reference():
    for answer in (WORDS, call(room="hall", level=3)):
        assert failing(answer, answer) == set()
        assert "same_tool" in {n for n, fault in gates_of(answer, answer).items() if fault == ""}
    faults = judge.faults(WORDS, WORKLOAD.cases[0], WORKLOAD)
    assert {name for name, fault in faults.items() if fault is not None} == {"call_rate"}


@pytest.mark.parametrize(
    ("answer", "reference", "expected"),
    [
        (WORDS, call(room="hall"), {"same_tool", "same_arguments"}),
        (call(room="hall"), WORDS, {"same_tool", "same_decline", "same_text"}),
        (
            call("other", room="hall"),
            call(room="hall"),
            {"same_tool", "same_arguments", "same_validity"},
        ),
        (call(room="attic"), call(room="hall"), {"same_arguments"}),
        (call(level=3), call(room="hall"), {"same_arguments", "same_validity"}),
        (structs.replace(WORDS, text="- **light**\n- hall"), WORDS, {"same_markdown"}),
        (WORDS, structs.replace(WORDS, text="- **one** light\n- two words"), {"same_markdown"}),
        (
            structs.replace(WORDS, text="This sentence answers everything that was asked."),
            WORDS,
            {"same_text"},
        ),
        (structs.replace(WORDS, text="<think>hm</think> " + WORDS.text), WORDS, {"same_thinking"}),
        (
            structs.replace(WORDS, text="Das Licht ist an und es ist nicht zu warm, ich mag das."),
            WORDS,
            {"same_language"},
        ),
        (structs.replace(WORDS, finish_reason="length"), WORDS, {"same_stop"}),
        (structs.replace(WORDS, text="on " * 30), WORDS, {"same_text"}),
        (structs.replace(WORDS, text=" "), WORDS, {"same_text"}),
        (structs.replace(WORDS, completion_tokens=60), WORDS, {"same_length"}),
        (
            structs.replace(WORDS, completion_tokens=3),
            structs.replace(WORDS, completion_tokens=90),
            {"same_length"},
        ),
    ],
)
def test_each_kind_of_change_fails_its_gate(answer, reference, expected):
    assert failing(answer, reference) == expected


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"room": "hall", "level": 3}, {"level": 3.0, "room": "hall"}),
        ({"room": " hall "}, {"room": "hall"}),
        ({"room": "ha\u0301ll"}, {"room": "háll"}),
    ],
)
def test_equal_arguments_after_normalising_json(one, other):
    assert "same_arguments" not in failing(call(**one), call(**other))


def test_true_is_not_one_and_a_list_has_an_order():
    assert "same_arguments" in failing(call(room="h", level=True), call(room="h", level=1))
    assert "same_arguments" in failing(call(room=["a", "b"]), call(room=["b", "a"]))


def test_parallel_calls_are_compared_in_any_order():
    one, two = call(room="a").tool_calls[0], call(room="b").tool_calls[0]
    both, swapped = (
        structs.replace(call(), tool_calls=[one, two]),
        structs.replace(call(), tool_calls=[two, one]),
    )
    assert failing(both, swapped) == set()
    assert failing(structs.replace(both, tool_calls=[one]), both) >= {"same_tool", "same_arguments"}
    assert failing(structs.replace(both, tool_calls=[one, one]), both) == {
        "same_arguments",
        "same_several",
    }


def test_what_bf16_itself_does_is_not_held_against_the_quantized_model():
    leaking = structs.replace(WORDS, text="<think>hm</think> " + WORDS.text)
    cut, invalid = structs.replace(WORDS, finish_reason="length"), call(level=3)
    for same in (leaking, cut, invalid, structs.replace(WORDS, text="on " * 30)):
        assert failing(same, same) == set()


def test_every_gate_states_what_it_compares_with():
    assert {gate.basis for gate in GATES.values()} == {"label", "reference", "rule"}
    assert all(name.startswith("same_") for name in REFERENCE_GATES)
    table = judge.gate_table([Judged(WORKLOAD, WORKLOAD.cases[0], WORDS, WORDS)] * 30)
    assert {result.basis for name, result in table.items() if name != "call_rate"} == {"reference"}


def test_a_planted_loss_of_tool_calls_fails_and_none_passes():
    rng = random.Random(0)
    references = [call(room=str(i)) if i % 2 else WORDS for i in range(200)]

    def verdict(lost):
        answers = [
            Judged(
                WORKLOAD,
                WORKLOAD.cases[0],
                WORDS if r.tool_calls and rng.random() < lost else r,
                r,
            )
            for r in references
        ]
        return judge.gate_table(answers)["same_tool"].verdict

    assert verdict(0.0) == "pass" and verdict(0.5) == "fail"


def test_what_bf16_rarely_shows_stands_in_no_verdicts_way_until_it_is_lost():
    references = [call(room="a")] * 3 + [WORDS] * 80
    verdict, gates, _ = paired(references, references)
    assert gates["same_arguments"].n == 3 and verdict.verdict == "keeps"
    assert "right arguments" in verdict.not_tested and "right arguments" in verdict.sentence
    assert "(3 answers)" in verdict.sentence
    lost, _, _ = paired([call(room="b"), *references[1:]], references)
    assert lost.verdict == "undecided" and lost.coverage["right arguments"] == 3


def test_sampling_counts_reference_gates_before_bf16_has_answered():
    counts = answers_per_gate([WORKLOAD])
    assert set(REFERENCE_GATES) <= set(counts)


def test_a_tool_never_called_by_bf16_and_a_base_model_are_named():
    def case(name):
        return replace(WORKLOAD.cases[0], expect={"logged": {"calls": [name]}})

    answers = [
        Judged(WORKLOAD, case("set_light"), call(room="a")),
        Judged(WORKLOAD, case("rare"), call(room="a")),
    ] * 3
    assert reference_notes(answers, {}) == [
        "rare is never called by bf16 itself (3 prompts): nothing about it can be judged"
    ]
    base = [Judged(WORKLOAD, case("set_light"), WORDS)] * 6
    assert (
        "calls no tool in 6 prompts" in reference_notes(base, {})[0]
        and "base model" in reference_notes(base, {})[0]
    )
    assert expected_tools(case("rare")) == ["rare"]


def paired(after, references, workload=WORKLOAD, case=None):
    """Return the verdict of one member, its pairs, and the pooled gates."""
    case = case or workload.cases[0]
    sides = (
        [
            deciding_checks(checks(answer, case, workload, reference), answer, workload)
            for answer, reference in zip(side, references, strict=True)
        ]
        for side in (references, after)
    )
    counts, together = pair_checks(zip(*sides, strict=True))
    gates, pooled = judge_gates({"w4a4": counts}, {"w4a4": together})
    return judge.judge_members({"w4a4": counts}, {"w4a4": together}), gates["w4a4"], pooled["w4a4"]


def test_a_label_that_bf16_itself_fails_tests_nothing():
    workload = replace(WORKLOAD, gates=("abstention",))
    case = replace(workload.cases[0], expect={"no_tool": True})
    own = [call(room="a")] * 80
    verdict, gates, _ = paired(own, own, workload, case)
    assert judge.gate_table(Judged(workload, case, a) for a in own)["abstention"].meets == "fail"
    assert (gates["abstention"].passed, gates["abstention"].lost, gates["abstention"].verdict) == (
        0,
        0,
        "undecided",
    )
    assert "decline" in verdict.not_tested


@pytest.mark.parametrize(("met", "standing"), [(0, "undecided"), (7, "undecided"), (8, "keeps")])
def test_a_label_that_bf16_meets_in_fewer_than_a_tenth_keeps_nothing(met, standing):
    """Every other gate keeps: with no label left the verdict is undecided, and it names the gate with its counts."""
    counts = {
        name: PairedGate(80, 0, 0, passed=80)
        for name in ("stop", "same_tool", "same_decline", "abstention")
    }
    counts["abstention"] = PairedGate(80, 0, 0, passed=met)
    verdict = judge.judge_members({"w4a4": counts, "w4a16": counts})
    assert verdict.verdict == standing
    named = f"no tool where none fits (the reference passes {met} of 80)"
    first = verdict.sentence.split(". ")[0]
    assert (named in first) is (named in verdict.not_tested) is (standing == "undecided")
    labelled = judge.judge_members({"w4a4": counts | {"factual": PairedGate(80, 0, 0, passed=80)}})
    assert labelled.verdict == "keeps" and (named in labelled.sentence) is (standing == "undecided")


def test_the_pair_of_a_reference_gate_is_bf16s_pass_and_the_checkpoints():
    references = [call(room=str(i)) if i % 2 else WORDS for i in range(160)]
    after = [WORDS if i % 8 == 1 else r for i, r in enumerate(references)]
    verdict, gates, _ = paired(after, references)
    assert (gates["same_tool"].n, gates["same_tool"].lost, gates["same_tool"].won) == (160, 20, 0)
    assert (gates["same_arguments"].n, gates["same_arguments"].lost) == (
        80,
        20,
    )  # bf16 calls in 80 prompts
    assert gates["same_tool"].margin == 0.05
    assert verdict.verdict == "loses" and {"same_tool", "same_arguments"} <= set(
        verdict.members["w4a4"].loses
    )
    verdict, gates, _ = paired(references, references)
    assert verdict.verdict == "keeps" and {g.lost for g in gates.values()} == {0}


def test_reference_gates_are_not_in_the_pooled_verdict():
    """Four changed answers of 200 in each gate keep; together they would be a loss of 2 points that no answer could win back."""
    references = [WORDS] * 200
    after = [structs.replace(WORDS, text="- **a**\n- b") if i < 4 else WORDS for i in range(200)]
    verdict, gates, pooled = paired(after, references)
    assert pooled is None and gates["same_markdown"].lost == 4 and verdict.verdict == "keeps"
    ruled = replace(WORKLOAD, gates=("no_markdown", "same_tool"))
    assert paired(after, references, ruled)[2].lost == 4


def test_a_gate_that_bf16_rarely_reaches_leaves_the_verdict_open_only_where_answers_are_lost():
    references = [call(room="a")] * 3 + [WORDS] * 80
    verdict, gates, _ = paired(references, references)
    assert gates["same_arguments"].n == 3 and verdict.verdict == "keeps"
    verdict, _, _ = paired([call(room="b"), *references[1:]], references)
    assert verdict.verdict == "undecided" and verdict.members["w4a4"].undecided == [
        "same_arguments"
    ]


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("The cat is on the mat and it is not happy.", "English"),
        ("Die Katze ist auf dem Dach und sie ist nicht froh.", "German"),
        ("Le chat est sur le toit et il ne veut pas venir.", "French"),
        ("El gato está en la casa y no quiere venir para comer.", "Spanish"),
        ("Кошка сидит на крыше и не хочет идти домой.", "Cyrillic"),
        ("猫は屋根の上にいて、降りたくありません。", "Japanese"),
        ("Tokyo.", None),
        ("", None),
    ],
)
def test_language(text, language):
    assert language_of(text) == language

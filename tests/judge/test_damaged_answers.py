"""Candidates that answer wrongly in a way that a single gate does not notice: behind a server, and in an evaluation without one."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import evaluations
import pytest
from bench_cases import TOOLS, ask, workload
from fake_server import FakeServer, Script, words
from flat_records import record_of
from hypothesis import example, given, settings
from hypothesis import strategies as st
from randomised import examples

from annie_quant import bench, documents, judge
from annie_quant.bench.aggregates import aggregate_records
from annie_quant.core.errors import UsageError
from annie_quant.documents import (
    Aggregates,
    BenchConfig,
    Identity,
    ModelRow,
    OfflineSide,
    PairedGate,
)
from annie_quant.judge import decision
from annie_quant.judge.gates import tabulate

N = 60
TEXT_GATES = ["non_empty", "no_markdown", "repetition", "stop"]


def measure(folder, candidate, reference, cases):
    """Measure all prompts at once, which takes a third of the processor time of one after the other."""
    with FakeServer(candidate) as left, FakeServer(reference) as right:
        sides = [bench.Backend("a", left.url), bench.Backend("b", right.url)]
        roles = {"candidate": "a", "reference": "b"}
        return bench.run(
            sides, [cases], folder, warmup=0, runs=1, concurrency=N, with_memory=False, **roles
        )


def number(body):
    last = body["messages"][-1]["content"].rstrip("?").split()[-1]
    return int(last) if last.isdigit() else 0


def not_kept(verdict):
    return verdict.outcome != "keeps" and verdict.badge != "keeps"


def calls(gates, labelled=True):
    def expect(index):
        return (
            {"tool": "search_memory", "arguments": {"query": f"note {index}"}} if labelled else {}
        )

    cases = [
        {"id": f"c{i}", "messages": ask(f"Find note {i}"), "expect": expect(i)} for i in range(N)
    ]
    return workload("calls", cases, tools=TOOLS, gates=gates)


def right_call(body):
    return Script(tools=[("search_memory", json.dumps({"query": f"note {number(body)}"}))])


def xyzzy(body):
    return Script(tools=[("search_memory", '{"query": "xyzzy"}')])


@pytest.mark.parametrize(
    ("gates", "labelled", "gate"),
    [
        (["tool_call", "tool_arguments"], True, "tool_arguments"),
        (["same_tool", "same_arguments"], False, "same_arguments"),
    ],
)
def test_the_right_tool_with_wrong_arguments_loses(tmp_path, gates, labelled, gate):
    done = measure(tmp_path, xyzzy, right_call, calls(gates, labelled))
    side = done.aggregates.served["a"]
    assert (side.paired[gate].lost, side.paired[gate].n) == (N, N)
    assert (done.verdict.outcome, done.verdict.passed) == ("loses", False)
    assert (
        measure(tmp_path / "right", right_call, right_call, calls(gates, labelled)).verdict.outcome
        == "keeps"
    )


SENTENCES = [
    f"The {animal} number {i} lives near the {place} and eats {food}."
    for i, (animal, place, food) in enumerate(
        (a, p, f) for a in ("badger", "heron", "otter") for p in ("river", "harbour", "mill", "quarry")
        for f in ("apples", "beetles", "clover", "fish", "grain")
    )
]  # fmt: skip


def talk(gates, n=N):
    return workload(
        "talk", [{"id": f"c{i}", "messages": ask(f"Who is {i}?")} for i in range(n)], gates=gates
    )


def sentence(body):
    return words(SENTENCES[number(body) % len(SENTENCES)])


DAMAGED = {
    "cut at 25 characters, no finish reason": lambda body: Script(
        content=[SENTENCES[number(body) % len(SENTENCES)][:25]], finish=""
    ),
    "one fixed sentence": lambda body: words("I am sure that everything is fine with it today."),
    "Blorp.": lambda body: words("Blorp."),
    "another reason for the end": lambda body: words(
        SENTENCES[number(body) % len(SENTENCES)], finish="content_filter"
    ),
    "right answers in the reasoning alone": lambda body: Script(
        reasoning=[SENTENCES[number(body) % len(SENTENCES)]], content=[]
    ),
}


@pytest.mark.parametrize(
    ("name", "gates"),
    [
        *((name, TEXT_GATES) for name in DAMAGED),
        ("Blorp.", [*TEXT_GATES, "same_text", "same_length"]),
    ],
)
def test_damaged_text_is_not_kept(tmp_path, name, gates):
    """None of these prompts has a label: rows 6 and 11 of the attacks that kept every gate."""
    assert not_kept(measure(tmp_path, DAMAGED[name], sentence, talk(gates)).verdict)


def test_the_same_answers_keep(tmp_path):
    assert (
        measure(tmp_path, sentence, sentence, talk([*TEXT_GATES, "same_text"])).verdict.outcome
        == "keeps"
    )


def test_one_prompt_under_sixty_ids_is_one_answer(tmp_path):
    cases = workload(
        "talk", [{"id": f"c{i}", "messages": ask("Who is 7?")} for i in range(N)], gates=TEXT_GATES
    )
    done = measure(tmp_path, sentence, sentence, cases)
    assert {pair.n for pair in done.aggregates.served["a"].paired.values()} == {1} and not_kept(
        done.verdict
    )


@pytest.mark.parametrize(
    "change", [lambda i: "Who is 7?" + " " * i, lambda i: "Who is" + "\n" * i + "\t 7\u00a0?"]
)
def test_one_prompt_under_other_white_space_is_one_answer(tmp_path, change):
    cases = [{"id": f"c{i}", "messages": ask(change(i))} for i in range(N)]
    done = measure(tmp_path, sentence, sentence, workload("talk", cases, gates=TEXT_GATES))
    assert {pair.n for pair in done.aggregates.served["a"].paired.values()} == {1} and not_kept(
        done.verdict
    )


INVISIBLE = {
    "zero-width spaces and joiners": "\u200b\u200d",
    "soft hyphens and word joiners": "\u00ad\u2060",
    "variation selectors and tags": "\ufe0f\U000e0041",
    "Hangul fillers and directions": "\u3164\u202e",
    "control characters": "\x00\x7f",
    "blank Braille and byte order marks": "\u2800\ufeff",
}


@pytest.mark.parametrize("name", INVISIBLE)
def test_prompts_that_differ_by_what_nobody_sees_are_one_prompt(name):
    """60 distinct texts: the binary digits of the case's number in two characters that show nothing."""
    marks = ["".join(INVISIBLE[name][int(digit)] for digit in f"{i:06b}") for i in range(N)]
    assert (
        n_prompts([f"Who{mark} is 7?" for mark in marks])
        == n_prompts([f"Who is 7?{mark}" for mark in marks])
        == 1
    )


def test_compatible_forms_are_one_prompt_and_other_words_are_not():
    """NFKC: ligatures, full-width forms, an accent of its own, quotation marks; two persons and two numbers stay apart."""
    one = [
        'The office of "Z\u00fcrich"?',
        "The o\ufb03ce of \uff02Zu\u0308rich\uff02?",
        '\uff34he office of "Zu\u200d\u0308rich"\uff1f',
    ]
    assert n_prompts(one) == 1
    assert (
        n_prompts(["Who is 7?", "Who is 8?", "Who was 7?", "Qui \u00e9tait 7 ?", "Qui etait 7 ?"])
        == 5
    )


def n_prompts(texts):
    cases = [{"id": f"c{i}", "messages": ask(text)} for i, text in enumerate(texts)]
    assert len(set(texts)) == len(texts)
    [left], n_repeated = judge.distinct_prompts([workload("talk", cases, gates=TEXT_GATES)])
    assert len(left.cases) + n_repeated == len(texts)
    return len(left.cases)


def test_labels_that_the_reference_never_meets_do_not_keep(tmp_path):
    """Both sides call the same tool, and each label names another one: nothing that was labelled is tested."""
    other = {
        "type": "function",
        "function": {"name": "delete_note", "parameters": {"type": "object", "properties": {}}},
    }
    cases = [
        {"id": f"c{i}", "messages": ask(f"Find note {i}"), "expect": {"tool": "delete_note"}}
        for i in range(N)
    ]
    chosen = workload(
        "calls", cases, tools=[*TOOLS, other], gates=["tool_call", "non_empty", "stop", "same_tool"]
    )
    verdict = measure(tmp_path, right_call, right_call, chosen).verdict
    assert (verdict.outcome, verdict.badge) == ("undecided", "undecided")
    assert f"tool calls (the reference passes 0 of {N})" in verdict.sentence
    assert "annie-quant init" in verdict.head[2]


def test_a_label_that_the_reference_misses_next_to_one_that_it_meets_is_named(tmp_path):
    def expect(i):
        return {"tool": "search_memory", "arguments": {"query": "another"}}

    cases = [
        {"id": f"c{i}", "messages": ask(f"Find note {i}"), "expect": expect(i)} for i in range(N)
    ]
    chosen = workload(
        "calls", cases, tools=TOOLS, gates=["tool_call", "tool_arguments", "same_arguments"]
    )
    verdict = measure(tmp_path, right_call, right_call, chosen).verdict
    assert verdict.outcome == "keeps"
    assert (
        f"not tested: tool arguments (the reference passes 0 of {N})"
        in verdict.sentence.split(". ")[0]
    )


def test_no_answer_to_all_questions_does_not_keep(tmp_path):
    """Each answer is empty and ends by itself, and the workload's only gate asks for an end."""

    def silent(body):
        if "capital of Japan" in str(body):
            return words("Tokyo.")  # the smoke question
        return Script(content=[], finish="stop")

    done = measure(tmp_path, silent, sentence, talk(["stop"]))
    assert not_kept(done.verdict) and "constant answers" in done.verdict.sentence


def test_the_right_call_made_twice_is_wrong(tmp_path):
    def twice(body):
        return Script(tools=right_call(body).tools * 2)

    assert (
        measure(tmp_path, twice, right_call, calls(["tool_call", "tool_arguments"])).verdict.outcome
        == "loses"
    )


def test_a_second_call_to_another_tool_is_wrong(tmp_path):
    """It calls what is expected, and then deletes the note."""
    delete = {
        "type": "function",
        "function": {"name": "delete_note", "parameters": {"type": "object", "properties": {}}},
    }
    cases = [
        {"id": f"c{i}", "messages": ask(f"Find note {i}"), "expect": {"tool": "search_memory"}}
        for i in range(N)
    ]
    chosen = workload("calls", cases, tools=[*TOOLS, delete], gates=["tool_call"])

    def also_deletes(body):
        return Script(tools=[*right_call(body).tools, ("delete_note", "{}")])

    assert measure(tmp_path, also_deletes, right_call, chosen).verdict.outcome == "loses"


def test_a_gate_that_applies_to_no_answer_of_the_candidate_is_lost(tmp_path):
    """bf16 answers in words; the candidate calls a tool each time, so that no check of a text applies to it."""
    cases = [{"id": f"c{i}", "messages": ask(f"Who is {i}?")} for i in range(N)]
    chosen = workload("talk", cases, tools=TOOLS, gates=["no_markdown", "repetition"])
    done = measure(tmp_path, xyzzy, sentence, chosen)
    assert done.aggregates.served["a"].paired["repetition"].lost == N
    assert (
        "loses" in done.verdict.sentence
        and "repeats itself or writes garble (60 more of 60)" in done.verdict.sentence
        and "no repetition or garble loses: 60 lost and 0 won of 60"
        in " ".join(done.verdict.reasons)
    )


def test_a_workload_of_which_bf16_passes_nothing_keeps_nothing(tmp_path):
    """Neither side calls the tool: as many calls are no behaviour."""
    done = measure(tmp_path, sentence, sentence, calls(["tool_call", "non_empty"]))
    assert done.verdict.outcome == "undecided"
    assert "nothing was tested that bf16 does" in done.verdict.sentence


def test_labels_that_no_gate_judges_are_refused(tmp_path):
    case = {"id": "a", "messages": ask("Find it"), "expect": {"tool": "search_memory"}}
    content = {"name": "w", "max_tokens": 9, "gates": ["non_empty"], "cases": [case]}
    (tmp_path / "w.json").write_text(json.dumps(content))
    with pytest.raises(UsageError, match=r"w.json: no gate judges what its cases expect \(tool\)"):
        judge.load_workloads([str(tmp_path / "w.json")])
    (tmp_path / "w.json").write_text(json.dumps(content | {"gates": ["non_empty", "tool_call"]}))
    assert judge.load_workloads([str(tmp_path / "w.json")])


GATES_OF_RECORDS = {"tool_call": 0.05, "factual": 0.05, "non_empty": 0.0, "stop": 0.05}
ANSWER = st.tuples(
    st.sampled_from(["", "", "", "", "", "", "HTTP 500"]),
    st.sampled_from(["stop"] * 9 + ["length", None, "content_filter"]),
    st.dictionaries(st.sampled_from(list(GATES_OF_RECORDS)), st.booleans(), max_size=4),
)
FAULTY = st.dictionaries(st.integers(0, 79), ANSWER, max_size=5)


@settings(deadline=None, max_examples=examples(60))
@example(
    55,
    {},
    {i: ("", "stop", {}) for i in range(4)}
    | {2: ("", "stop", {"tool_call": True, "factual": True, "stop": True})},
)
@given(st.integers(40, 80), FAULTY, FAULTY)
def test_keeps_implies_that_enough_was_seen(n, candidate, reference):
    """Random answers, counted here by the words of docs/method.md."""
    right = ("", "stop", dict.fromkeys(GATES_OF_RECORDS, True))
    rows = [{i: side.get(i, right) for i in range(n)} for side in (candidate, reference)]
    records = [
        record_of(
            id=f"{name}/{i}", backend=name, workload="w", case=str(i), text="x", error=error or None, finish_reason=end,
            checks=checks,
        )
        for name, side in zip("ab", rows, strict=True)
        for i, (error, end, checks) in side.items()
    ]  # fmt: skip
    config = documents.convert(
        BenchConfig, {"workloads": {"w": {"temperature": 0}}, "candidate": "a", "reference": "b"}
    )
    aggregates = aggregate_records(records, config, {name: Identity(name=name) for name in "ab"})
    verdict = judge.verdict(aggregates, "a", reference="b")
    counts = {gate: [0, 0, 0, 0] for gate in GATES_OF_RECORDS}  # prompts, passed by bf16, lost, won
    for i in range(n):
        (error, end, own), (reference_error, reference_end, before) = rows[0][i], rows[1][i]
        if reference_error or reference_end != "stop":
            continue
        for gate, passed in before.items():
            now = own.get(gate, False) and not error and end == "stop"
            counts[gate] = [
                a + b
                for a, b in zip(
                    counts[gate], (1, passed, passed and not now, now and not passed), strict=True
                )
            ]
    if verdict.outcome == "keeps":
        for gate, (n_prompts, passed, lost, won) in counts.items():
            margin = GATES_OF_RECORDS[gate] or (0.05 if won else 0.0)
            assert passed >= 52 and (lost - won) / n_prompts <= margin, (
                gate,
                counts[gate],
                verdict.sentence,
            )
    elif all(passed >= 52 and lost == 0 for _, passed, lost, _ in counts.values()):
        raise AssertionError(verdict.sentence)


# ---- documents


def offline(**pairs):
    """A side under one arithmetic. pairs: gate → (n, lost, won)."""
    counts = {gate: PairedGate(*row, passed=row[0]) for gate, row in pairs.items()}
    gates = tabulate([{gate: i >= row[1]} for gate, row in pairs.items() for i in range(row[0])])
    return OfflineSide(gates=gates, paired=counts)


KEPT = {"tool_call": (240, 0, 0)}


@pytest.mark.parametrize(
    ("sides", "outcome"),
    [
        ({"w4a4": offline(**KEPT)}, "keeps"),
        ({"w4a4": offline(**KEPT), "w4a16": OfflineSide()}, "undecided"),
        ({"w4a4": OfflineSide()}, "undecided"),
        ({"w4a4": offline(non_empty=(240, 0, 0), call_rate=(240, 0, 0))}, "undecided"),
        # 25 of 50 answers changed, seven more lost than won; same_arguments tests the same behaviours.
        ({"w4a4": offline(same_arguments=(240, 0, 0), tool_call=(50, 16, 9))}, "undecided"),
        ({"w4a4": offline(same_arguments=(240, 0, 0), tool_call=(50, 1, 0))}, "keeps"),
    ],
)
def test_a_run_and_its_evaluation_have_one_verdict(sides, outcome):
    """An arithmetic without an answer, or with gates that test nothing, does not keep; the run said so in other words."""
    judged, verdict = decision.judge_sides(sides)
    run = judge.verdict(
        Aggregates(models=[ModelRow(name="nv", format="NVFP4")], offline={"nv": judged})
    )
    assert (verdict.verdict, run.outcome) == (outcome, outcome), (verdict.sentence, run.sentence)
    assert run.passed and "fails" not in run.sentence


def test_what_bf16_does_not_pass_is_undecided_in_a_run_too():
    """bf16 makes none of 60 calls: the absolute requirement is missed, and nothing was lost."""
    pair, table = (
        {"tool_call": PairedGate(60, 0, 0, passed=0)},
        tabulate([{"tool_call": False}] * 60),
    )
    judged, verdict = decision.judge_sides({"w4a4": OfflineSide(gates=table, paired=pair)})
    run = judge.verdict(
        Aggregates(models=[ModelRow(name="nv", format="NVFP4")], offline={"nv": judged})
    )
    assert verdict.verdict == run.outcome == "undecided"
    assert run.sentence.startswith(
        "nv is undecided under W4A4: nothing was tested that bf16 does; not tested: tool calls"
    )


@pytest.mark.parametrize("counts", [(-60, 0, 0), (60, -1, 0), (60, 40, 30), (60, 0, 0, 61)])
def test_counts_that_cannot_be_are_refused(counts):
    document = dict(zip(("n", "lost", "won", "passed"), counts, strict=False))
    with pytest.raises(UsageError):
        documents.convert(PairedGate, document, "x", error=UsageError)


def test_repeated_names_of_prompts_count_once():
    """An evaluation that states one prompt's outcome 60 times."""
    from annie_quant.judge import evidence

    made = evaluations.from_outcomes(
        {"w4a4": {"tool_call": "1" * 60}}, {"tool_call": "1" * 60}
    )  # language: data
    assert made.verdict.verdict == "keeps"
    made.prompts = {"tool_call": ["w/c0"] * 60}
    again = evidence.recounted(made)
    assert (
        again.numerics["w4a4"].paired["tool_call"].n == 1 and again.verdict.verdict == "undecided"
    )
    made.prompts = {"tool_call": [f"w/c{i}" for i in range(60)]}
    made.numerics["w4a4"].outcomes["tool_call"] = "1" * 30
    assert evidence.recounted(made).verdict.verdict == "loses", "a missing outcome is a lost answer"


# ---- an evaluation without a server, whose candidate gives planted answers


@pytest.fixture(scope="module")
def pair_of(tmp_path_factory):
    pytest.importorskip(
        "torch", reason="the runtime needs torch: pip install annie-quant[quantize]"
    )
    pytest.importorskip(
        "transformers", reason="the runtime needs transformers: pip install annie-quant[quantize]"
    )
    from paths import TINY_ANNIE

    from annie_quant.offline.pair import EvaluationJob, open_pair

    cache = tmp_path_factory.mktemp("cache")
    job = EvaluationJob(
        checkpoint=TINY_ANNIE,
        reference=TINY_ANNIE,
        numerics=["bf16"],
        ensemble=False,
        cache=cache,
        device="cpu",
    )
    return lambda: open_pair(job)


def evaluated(monkeypatch, pair_of, chosen, damage):
    """Evaluate tiny-annie against itself with `damage` done to the raw text of each of its answers."""
    from annie_quant.offline import ensemble
    from annie_quant.offline.answers import AnswerOutcome
    from annie_quant.offline.decoding import Completion
    from annie_quant.offline.evaluation import evaluate_pair

    def planted(pair, engine, answered, differences, name):
        tokenizer = pair.template.tokenizer
        texts = [damage(tokenizer.decode(c.tokens, skip_special_tokens=False)) for _, c in answered]
        return [
            AnswerOutcome(
                request,
                Completion(tokenizer.encode(text, add_special_tokens=False), finished),
                False,
                0,
            )
            for (request, _), (text, finished) in zip(answered, texts, strict=True)
        ]

    monkeypatch.setattr(ensemble, "member_answers", planted)
    with pair_of() as pair:
        return evaluate_pair(pair, chosen)


def built_in(names, n, gates=None, labelled=True):
    chosen = []
    for one in judge.load_workloads(names):
        cases = (
            one.cases[:n] if labelled else tuple(replace(case, expect={}) for case in one.cases[:n])
        )
        chosen.append(replace(one, cases=cases, gates=tuple(gates or one.gates)))
    return chosen


def test_wrong_arguments_lose_without_a_server(monkeypatch, pair_of):
    chosen = built_in(["tool_memory"], N)
    same = evaluated(monkeypatch, pair_of, chosen, lambda text: (text, True))
    assert same.verdict.verdict == "keeps", same.verdict
    damage = lambda text: (  # noqa: E731
        re.sub(r"(<parameter=[^>]+>\n).*?(\n</parameter>)", r"\1xyzzy\2", text),
        True,
    )
    result = evaluated(monkeypatch, pair_of, chosen, damage)
    row = result.numerics["bf16"].paired["tool_arguments"]
    assert row.lost == row.passed > 50 and result.numerics["bf16"].paired["tool_call"].lost == 0
    assert result.verdict.verdict == "loses"
    assert "calls with wrong arguments (60 more of 60 prompts)" in result.verdict.sentence


def test_damaged_text_is_not_kept_without_a_server(monkeypatch, pair_of):
    chosen = built_in(["greeting"], N, labelled=False)
    result = evaluated(monkeypatch, pair_of, chosen, lambda text: (text[:25], False))
    assert result.verdict.verdict in ("loses", "undecided")

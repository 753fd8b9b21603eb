"""Gates of a benchmark that compare with bf16's own answers: of a side of the run, or of an earlier run."""

from __future__ import annotations

import json

import pytest
from bench_cases import TOOLS, ask, row, rows_of, workload
from command_line import options_of
from fake_server import FakeServer, Script, words

from annie_quant import bench
from annie_quant.bench import reference_answers
from annie_quant.cli import tables
from annie_quant.core.errors import UsageError

GATES = ["non_empty", "same_tool", "same_arguments", "same_markdown", "same_length", "same_stop"]
CALLS = workload(
    "calls",
    [{"id": f"c{i}", "messages": ask(f"Look up {i}")} for i in range(12)],
    tools=TOOLS,
    gates=GATES,
)
TALK = workload("talk", [{"id": "t", "turns": ["one", "two", "three"]}], gates=GATES)


def bf16(body):
    """Calls the tool for the first ten prompts, and answers the others in words."""
    number = body["messages"][-1]["content"].split()[-1]
    if body.get("tools") and int(number) < 10:
        return Script(tools=[("search_memory", json.dumps({"query": number, "k": 1.0}))])
    return words(f"These are some words about number {number}.")


def quantized(body):
    """As bf16, with the same arguments in another order and form, but it has lost the call of prompts 0 to 5."""
    number = body["messages"][-1]["content"].split()[-1]
    if body.get("tools") and 6 <= int(number) < 10:
        return Script(tools=[("search_memory", f'{{ "k": 1, "query": "{number} " }}')])
    return (
        words(f"**These** are some words about number {number}.")
        if number == "11"
        else bf16({**body, "tools": None})
    )


def measure(folder, sides, workloads=(CALLS,), **more):
    return bench.run(
        [bench.Backend(*side) for side in sides],
        list(workloads),
        folder,
        warmup=0,
        runs=2,
        with_memory=False,
        **more,
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    with FakeServer(bf16) as a, FakeServer(quantized) as b:
        return folder, measure(folder, [("bf16", a.url), ("nvfp4", b.url)], reference="bf16")


def test_a_lost_call_is_counted_once_per_prompt_and_decides(run):
    folder, done = run
    side, own = done.aggregates.served["nvfp4"], done.aggregates.served["bf16"]
    assert side.judged_by == "bf16"
    assert (side.paired["same_tool"].n, side.paired["same_tool"].lost) == (12, 6)
    assert (side.paired["same_arguments"].n, side.paired["same_arguments"].lost) == (10, 6)
    assert side.paired["same_markdown"].lost == 1 and side.gates["same_tool"].basis == "reference"
    assert side.gates["same_tool"].verdict == "fail" and done.verdict.outcome == "loses"
    assert all(
        own.gates[gate].passes == own.gates[gate].n
        for gate in own.gates
        if gate.startswith("same_")
    )
    assert "same_tool" in str([r["faults"] for r in rows_of(folder) if r["backend"] == "nvfp4"])
    assert "as bf16" in "\n".join(tables.served_lines(done.aggregates.served))


def test_the_stored_records_give_the_same_figures_again(run):
    folder, done = run
    assert bench.aggregate(folder).served["nvfp4"].paired == done.aggregates.served["nvfp4"].paired
    from annie_quant.report import verify

    counted = verify(folder)
    assert counted.compared > 10 and counted.differences == []


def test_a_run_without_bf16_has_no_such_gates(tmp_path):
    with FakeServer(bf16) as a, FakeServer(quantized) as b:
        done = measure(tmp_path, [("q4", a.url), ("nvfp4", b.url)])
    assert not any(
        gate.startswith("same_") for side in done.aggregates.served.values() for gate in side.gates
    )


def test_the_answers_of_an_earlier_run_are_the_reference(run, tmp_path):
    with FakeServer(quantized) as b:
        done = measure(tmp_path / "r", [("nvfp4", b.url)], reference_run=run[0])
        side = done.aggregates.served["nvfp4"]
        assert side.judged_by == reference_answers.RECORDED and side.paired["same_tool"].lost == 6
        assert done.verdict.outcome == "loses" and not done.verdict.passed
        assert bench.aggregate(tmp_path / "r").served["nvfp4"].paired == side.paired
        lines = "\n".join(tables.served_lines(done.aggregates.served))
        assert "as bf16" in lines and "6" in lines
        # a resumed run needs no second --reference-run
        again = measure(tmp_path / "r", [("nvfp4", b.url)])
        assert again.aggregates.served["nvfp4"].paired == side.paired
        with pytest.raises(UsageError, match="no bf16 answers to the prompts"):
            measure(tmp_path / "other", [("nvfp4", b.url)], [TALK], reference_run=run[0])
        with pytest.raises(UsageError, match="no side that is known to be bf16"):
            measure(tmp_path / "more", [("nvfp4", b.url)], reference_run=tmp_path / "r")


def records_of(*answers):
    """Return (backend, case, repeat, text, turn) tuples as records."""
    records = []
    for backend, case, repeat, text, turn in answers:
        record = row(backend, case=case, workload="talk", turn=turn, text=text)
        record.id = f"{backend}/talk/{case}/{repeat}/{turn}"
        records.append(record)
    return records


def test_a_prompt_on_which_bf16_does_not_agree_with_itself_does_not_count():
    one = workload(
        "talk", [{"id": "a", "messages": ask("x")}, {"id": "b", "messages": ask("y")}], gates=GATES
    )
    records = records_of(
        ("bf16", "a", 0, "**Bold.**", 0), ("bf16", "a", 1, "Plain.", 0), ("nvfp4", "a", 0, "Plain.", 0),
        ("bf16", "b", 0, "Plain.", 0), ("bf16", "b", 1, "Plain.", 0), ("nvfp4", "b", 0, "**Bold.**", 0),
    )  # fmt: skip
    assert reference_answers.mark(records, [one], [r for r in records if r.backend == "bf16"])
    assert [r.judgement.checks.get("same_markdown") for r in records] == [
        None,
        None,
        None,
        True,
        True,
        False,
    ]
    assert not reference_answers.mark(
        records, [one], [r for r in records if r.backend == "bf16"]
    )  # the same again


def test_a_turn_after_another_answer_is_another_prompt():
    records = records_of(
        ("bf16", "t", 0, "One.", 0), ("bf16", "t", 0, "Two.", 1), ("bf16", "t", 0, "Three.", 2),
        ("nvfp4", "t", 0, "One.", 0), ("nvfp4", "t", 0, "**2**", 1), ("nvfp4", "t", 0, "Three.", 2),
    )  # fmt: skip
    reference_answers.mark(records, [TALK], records[:3])
    assert [r.judgement.checks.get("same_markdown") for r in records] == [
        True,
        True,
        True,
        True,
        False,
        None,
    ]


def test_sampled_answers_are_not_compared():
    sampled = workload("talk", [{"id": "a", "messages": ask("x")}], gates=GATES, temperature=0.7)
    records = records_of(("bf16", "a", 0, "**Bold.**", 0), ("nvfp4", "a", 0, "Plain.", 0))
    assert not reference_answers.mark(records, [sampled], records[:1])


def test_the_option_is_on_the_command_line():
    assert "--reference-run" in options_of("bench")

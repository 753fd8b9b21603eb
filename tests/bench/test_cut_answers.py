"""Answers that are incomplete are reported as that: their failed gates are no evidence about thinking or parsers."""

from __future__ import annotations

import pytest
from bench_cases import TOOLS, ask, config_of, known, workload
from fake_server import FakeServer, Script, words
from hypothesis import given
from hypothesis import strategies as st

from annie_quant import bench
from annie_quant.bench.aggregates import aggregate_records
from annie_quant.bench.reference_answers import correct_finish_reason, judge_record
from annie_quant.documents import RequestRecord

DIAGNOSES = {
    "thinking_as_content",
    "hidden_thinking",
    "empty_after_thinking",
    "tool_parser_missing",
    "tool_parser_fault",
}
CASES = [
    {"id": f"c{i}", "messages": ask(f"{i}?"), "expect": {"tool": "search_memory"}}
    for i in range(12)
]
NAMES = ["non_empty", "no_markdown", "thinking_leak", "repetition", "tool_call", "tool_call_raw"]
WORKLOAD = workload("w", CASES, tools=TOOLS, gates=NAMES)


def judged(case, text, finish_reason, error=None, tool_calls=(), tokens=9):
    record = RequestRecord(id=f"a/w/{case.id}/0/0", backend="a", workload="w", case=case.id)
    record.answer.text, record.answer.error = text, error
    record.answer.finish_reason, record.answer.status = finish_reason, 200
    record.answer.tool_calls = list(tool_calls)
    record.answer.completion_tokens = tokens
    correct_finish_reason(record.answer, WORKLOAD.max_tokens)
    judge_record(record, case, WORKLOAD)
    return record


def findings_of(rows):
    aggregates = aggregate_records(rows, config_of(w={"temperature": 0}), {"a": known("a")})
    return {finding.code: finding for finding in aggregates.confounds}


TEXTS = st.sampled_from(
    ["The parcel is in town", "Ja, gern.", "", "<tool_call>\n<function=search_mem"]
)
ENDS = st.sampled_from(
    [("length", None), ("abort", None), ("content_filter", None), (None, None), (None, "reset")]
)


@given(st.lists(st.tuples(TEXTS, ENDS), min_size=len(CASES), max_size=len(CASES)))
def test_no_incomplete_answer_is_evidence_about_thinking_or_a_parser(answers):
    rows = [
        judged(case, text, reason, error)
        for case, (text, (reason, error)) in zip(WORKLOAD.cases, answers, strict=True)
    ]
    codes = findings_of(rows)
    assert not DIAGNOSES & codes.keys() - {"empty_after_thinking"}
    answered = [reason for _, (reason, error) in answers if not error]
    assert ("cut_answers" in codes) == ("length" in answered)
    assert ("incomplete_answers" in codes) == bool({*answered} - {"length"})
    assert ("errors" in codes or "no_answers" in codes) == (len(answered) < len(rows))


@given(st.lists(st.booleans(), min_size=len(CASES), max_size=len(CASES)))
def test_thinking_in_a_cut_answer_is_still_found(leaks):
    rows = [
        judged(case, "<think>Well, the user" if leak else "The parcel", "length")
        for case, leak in zip(WORKLOAD.cases, leaks, strict=True)
    ]
    codes = findings_of(rows)
    assert ("thinking_as_content" in codes) == any(leaks)
    if any(leaks):
        assert f"in {sum(leaks)} of 12 answers" in codes["thinking_as_content"].message


@pytest.mark.parametrize("arguments", ['{"query": "the weather in', '{"query": ', "", "{"])
@pytest.mark.parametrize("reason", ["tool_calls", "stop", "length"])
def test_a_call_that_ends_at_the_limit_was_cut_by_it(arguments, reason):
    call = {"id": "1", "name": "search_memory", "arguments": arguments}
    rows = [judged(c, "", reason, tool_calls=[call], tokens=50) for c in WORKLOAD.cases]
    assert {row.answer.fault for row in rows} == {"it was cut at max_tokens"}
    assert not any(row.judgement.checks["tool_call"] for row in rows)
    finding = findings_of(rows)["cut_answers"]
    assert finding.severity == "confound" and "raise max_tokens" in finding.message
    assert all(bool(row.answer.warnings) == (reason != "length") for row in rows)


@pytest.mark.parametrize(
    ("arguments", "tokens"), [('{"query": "weather"}', 50), ('{"query": "wea', 49)]
)
def test_a_whole_call_at_the_limit_and_a_broken_one_below_it_are_the_models(arguments, tokens):
    call = {"id": "1", "name": "search_memory", "arguments": arguments}
    rows = [judged(c, "", "tool_calls", tool_calls=[call], tokens=tokens) for c in WORKLOAD.cases]
    assert "cut_answers" not in findings_of(rows)
    assert all(row.judgement.checks["tool_call"] == (tokens == 50) for row in rows)


def test_a_server_that_reports_tool_calls_for_a_cut_call(tmp_path):
    cut = Script(
        tools=[("search_memory", '{"query": "the weather in')],
        finish="tool_calls",
        completion_tokens=50,
    )
    with FakeServer(lambda body: cut if body.get("tools") else words("It is Tokyo.")) as server:
        done = bench.run([bench.Backend("a", server.url)], [WORKLOAD], tmp_path, warmup=0, runs=1)
    codes = {finding.code: finding for finding in done.aggregates.confounds}
    assert "12 of 12 answers were cut at max_tokens" in codes["cut_answers"].message
    assert not DIAGNOSES & codes.keys() and done.verdict.sentence.startswith(
        "CONFOUNDED (cut answers"
    )

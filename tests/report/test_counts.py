"""What a reader of the report and of the terminal sees of few, missing and absent answers."""

from __future__ import annotations

import json
import re

import evaluations
import pytest

from annie_quant import documents
from annie_quant.cli import tables
from annie_quant.report import compose
from annie_quant.report.checklist import checklist
from annie_quant.report.run import load


def folder_of(evaluation, folder):
    (folder / "eval").mkdir()
    (folder / "eval" / "nv.json").write_text(json.dumps(evaluation.to_dict()))
    return folder


def cells(folder):
    """(side, gate) → (classes, text) of the page's cells with gates."""
    page = compose(folder)["report.html"]
    found = re.findall(
        r'<td class="([^"]*)" data-k="gate\|offline/nv/(\w+)\|(\w+)"[^>]*>(.*?)</td>', page
    )
    return {(side, gate): (css, text.replace("\xa0", " ")) for css, side, gate, text in found}


def test_equal_passes_with_different_verdicts_show_what_decides(tmp_path):
    """2 of 10 stood with ? in one column and with a cross in the other, and nothing said why."""
    n = 100
    reference = {"tool_call": "1" * 50 + "0" * 50}
    changed = {"tool_call": "0" * 50 + "1" * 20 + "0" * 30}
    lost = {"tool_call": "1" * 20 + "0" * (n - 20)}
    evaluation = evaluations.from_outcomes({"w4a4": changed, "w4a16": lost}, reference)
    shown = cells(folder_of(evaluation, tmp_path))
    assert shown["w4a4", "tool_call"][1].startswith("20/100 ")
    assert shown["w4a16", "tool_call"][1].startswith("20/100 ")
    assert "50 lost, 20 won" in shown["w4a4", "tool_call"][1]
    assert "30 lost, 0 won" in shown["w4a16", "tool_call"][1]


def test_what_neither_side_does_is_not_green(tmp_path):
    """Neither bf16 nor the checkpoint calls a tool: nothing is lost, and 0 of 60 did not succeed."""
    nothing = {"call_rate": "0" * 60, "factual": "1" * 60}
    evaluation = evaluations.from_outcomes({"w4a4": nothing}, nothing)
    assert evaluation.numerics["w4a4"].gates["call_rate"].verdict == "pass"
    shown = cells(folder_of(evaluation, tmp_path))
    css, text = shown["w4a4", "call_rate"]
    assert css == "none" and text.startswith("0/60<") and "✓" not in text
    assert shown["w4a4", "factual"][0] == "pass" and "60/60 ✓" in shown["w4a4", "factual"][1]
    row = compose(tmp_path)["report.html"].split(">calls tools at bf16's rate<")
    assert all("✓" not in part.split("</tr>")[0] for part in row[1:])


def test_what_the_reference_never_passes_is_named_as_not_tested(tmp_path):
    evaluation = evaluations.from_outcomes(
        {"w4a4": {"factual": "1" * 2 + "0" * 8}}, {"factual": "0" * 10}
    )
    _, text = cells(folder_of(evaluation, tmp_path))["w4a4", "factual"]
    assert "not tested, the reference passes 0 of 10" in text


def test_a_lost_answer_without_a_judged_one_says_so_in_its_row(tmp_path):
    """3 of 3 stood next to "1 lost": the answer to the fourth prompt was cut, so its gate had nothing to judge."""
    evaluation = evaluations.from_outcomes({"w4a4": {"factual": "111-"}}, {"factual": "1111"})
    pair = evaluation.numerics["w4a4"].paired["factual"]
    assert (pair.lost, pair.n, evaluation.numerics["w4a4"].gates["factual"].n) == (1, 4, 3)
    row = next(
        line for line in tables.evaluation_lines(evaluation, "nv") if line.startswith("factual ")
    )
    assert row.split()[1] == "4" and "3/3, 1 missing" in row
    _, text = cells(folder_of(evaluation, tmp_path))["w4a4", "factual"]
    assert "1 lost, 0 won of 4, 1 without an answer to judge" in text


def test_gates_with_too_few_prompts_are_listed_once(tmp_path):
    few = {"factual": (10, 0, 0), "no_markdown": (12, 0, 0), "stop": (10, 0, 0)}
    evaluation = evaluations.from_counts({"w4a4": few, "w4a16": few})
    reasons = evaluation.verdict.reasons
    assert len(reasons) == 1 and reasons[0].startswith("w4a4, w4a16: undecided")
    assert "factual (10), no markdown (12), stops by itself (10)" in reasons[0]
    assert "n = 52 would decide" in reasons[0]
    page = compose(folder_of(evaluation, tmp_path))["report.md"]
    assert page.count("would decide") == 1


@pytest.mark.parametrize(("gates", "text"), [({}, "off: not measured in this run")])
def test_thinking_that_was_not_measured_is_no_sentence_about_leaks(gates, text):
    aggregates = documents.Aggregates(served={"a": documents.ServedSide(gates=gates)})
    items = {row.item: row for row in checklist(aggregates, "a", None, [], set())}
    assert items["thinking can be switched"].evidence == text
    assert items["thinking can be switched"].verdict == "undecided"


def test_a_run_without_evaluations_has_no_counts(tmp_path):
    evaluation = evaluations.from_counts({"w4a4": {"factual": (60, 0, 0)}})
    side = load(folder_of(evaluation, tmp_path)).offline[0]
    assert side.pair("factual").n == 60 and side.word("factual") == "keeps"

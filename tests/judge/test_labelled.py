"""The gates against answers that were labelled by hand (tests/helpers/labelled_answers.py)."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from judge_cases import TOOLS
from labelled_answers import ANSWERS

from annie_quant import judge
from annie_quant.judge.gates import GATES
from annie_quant.judge.library import build_workload


def workload(expect, thinking=False, tools=None):
    return build_workload(
        {
            "name": "w",
            "max_tokens": 20,
            "gates": [],
            "tools": tools,
            "thinking": thinking,
            "cases": [
                {"id": "c", "messages": [{"role": "user", "content": "?"}], "expect": expect}
            ],
        }
    )


def judged(gate, answer, expect=None, **more):
    fault = fault_of(gate, answer, expect, **more)
    return None if fault is None else not fault


def fault_of(gate, answer, expect=None, **more):
    single = workload(expect or {}, **more)
    return GATES[gate].check(answer, single.cases[0], single, None)


def calls(pairs):
    return [
        {"id": f"c{i}", "name": name, "arguments": arguments}
        for i, (name, arguments) in enumerate(pairs)
    ]


def test_there_are_at_least_200_answers():
    assert sum(map(len, ANSWERS.values())) >= 200
    assert all({row[0] for row in rows} == {True, False} for rows in ANSWERS.values())


@pytest.mark.parametrize(("passes", "text"), ANSWERS["NO_MARKDOWN"])
def test_no_markdown(passes, text):
    assert judged("no_markdown", judge.Answer(text)) is passes


@pytest.mark.parametrize(("passes", "text"), ANSWERS["THINKING_OFF"])
def test_thinking_leak(passes, text):
    assert judged("thinking_leak", judge.Answer(text)) is passes
    # The same content is a leak when thinking is on too: thinking belongs in the reasoning field.
    assert judged("thinking_leak", judge.Answer(text, reasoning="Hm."), thinking=True) is passes


@pytest.mark.parametrize(("passes", "text"), ANSWERS["TOKYO"])
def test_factual(passes, text):
    assert judged("factual", judge.Answer(text), {"contains": ["Tokyo"]}) is passes


@pytest.mark.parametrize(("passes", "text"), ANSWERS["FIFTEEN"])
def test_reasoning(passes, text):
    assert judged("reasoning", judge.Answer(text), {"contains": ["15"]}) is passes


@pytest.mark.parametrize(("passes", "text"), ANSWERS["LANGUAGE"])
def test_repetition_and_garble(passes, text):
    assert judged("repetition", judge.Answer(text)) is passes


@pytest.mark.parametrize(("passes", "text", "pairs"), ANSWERS["MEMORY_CALLS"])
def test_tool_call(passes, text, pairs):
    answer = judge.Answer(text, tool_calls=calls(pairs))
    assert judged("tool_call", answer, {"tool": "search_memory"}, tools=TOOLS) is passes


@pytest.mark.parametrize(("passes", "raw"), ANSWERS["RAW_CALLS"])
def test_raw_tool_call(passes, raw):
    expect = {"tool": "search_memory"}
    assert judged("tool_call", judge.parse_raw(raw, False, TOOLS), expect, tools=TOOLS) is passes
    # As a server without a parser sends it: the gate on parsed calls fails, the one on raw text does not.
    unparsed = judge.Answer(raw.removesuffix("<|im_end|>"))
    # The form is that of another parser, which the gate on raw text does not know.
    is_json_call = raw.startswith("<tool_call>\n{") and raw.endswith("}}\n</tool_call>")
    raw_passes = passes or is_json_call
    assert judged("tool_call_raw", unparsed, expect, tools=TOOLS) is raw_passes
    assert judged("tool_call", unparsed, expect, tools=TOOLS) is False


@pytest.mark.parametrize(("passes", "text", "called"), ANSWERS["ABSTAIN"])
def test_abstention(passes, text, called):
    answer = judge.Answer(text, tool_calls=calls([("web_search", "{}")] if called else []))
    assert judged("abstention", answer, {"no_tool": True}, tools=TOOLS) is passes


def test_an_empty_answer_is_a_failure_and_never_a_crash():
    for answer in (
        judge.Answer(),
        judge.Answer("  \n"),
        judge.Answer(reasoning="hm"),
        judge.Answer(error="HTTP 500"),
    ):
        assert judged("non_empty", answer) is False
        assert judged("no_markdown", answer) is False
        assert judged("factual", answer, {"contains": ["Tokyo"]}) is False
        assert judged("tool_call", answer, {"tool": "search_memory"}, tools=TOOLS) is False
        assert judged("repetition", answer) is None
    assert judged("non_empty", judge.Answer(tool_calls=calls([("f", "{}")]))) is True
    assert judged("no_markdown", judge.Answer(tool_calls=calls([("f", "{}")]))) is None


def test_hidden_thinking_counts_when_thinking_is_off():
    assert judged("thinking_leak", judge.Answer("Tokyo.", reasoning="Hm, Japan.")) is False
    assert judged("thinking_leak", judge.Answer("Tokyo.", reasoning="\n\n")) is True
    assert (
        judged("thinking_leak", judge.Answer("Tokyo.", reasoning="Hm, Japan."), thinking=True)
        is True
    )


def test_stop():
    assert judged("stop", judge.Answer("and so on", finish_reason="length")) is False
    assert judged("stop", judge.Answer("Done.", finish_reason="stop")) is True
    assert judged("stop", judge.Answer("Done.")) is None


def test_arguments_must_have_the_expected_words():
    expect = {"tool": "search_memory", "arguments": {"query": ["robot", "arm"]}}
    for query, passes in (("My Robot project", True), ("the ARM", True), ("dinner", False)):
        answer = judge.Answer(tool_calls=calls([("search_memory", f'{{"query": "{query}"}}')]))
        assert judged("tool_arguments", answer, expect, tools=TOOLS) is passes


def test_alternatives_and_several_facts():
    both = {"contains": ["Paris", ["8", "eight"]]}
    assert judged("factual", judge.Answer("Paris has eight of them."), both) is True
    assert judged("factual", judge.Answer("Paris has many."), both) is False
    assert (
        fault_of("factual", judge.Answer("Paris"), both) == "the answer does not state '8 or eight'"
    )


def test_parse_raw_reads_thinking_by_mode():
    on = judge.parse_raw("Japan, hm.\n</think>\n\nTokyo.<|im_end|>\n", True)
    assert (on.reasoning, on.text, on.finish_reason) == ("Japan, hm.", "Tokyo.", "stop")
    half = judge.parse_raw("Japan, hm. It goes on and on", True)
    assert (half.text, half.finish_reason) == ("", None) and half.reasoning.startswith("Japan")
    off = judge.parse_raw("<think>Japan</think>Tokyo.", False)
    assert off.reasoning == "" and "<think>" in off.text
    assert judge.parse_raw("<think>\nhm</think>ok", True).reasoning == "hm"


def test_parse_raw_types_by_schema_and_keeps_strings():
    inside = "<parameter=query>2024</parameter><parameter=limit>3</parameter>"
    raw = f"<tool_call><function=search_memory>{inside}</function></tool_call>"
    assert (
        judge.parse_raw(raw, False, TOOLS).tool_calls[0]["arguments"]
        == '{"query": "2024", "limit": 3}'
    )
    assert (
        judge.parse_raw(raw, False).tool_calls[0]["arguments"] == '{"query": "2024", "limit": "3"}'
    )
    assert judge.parse_raw("x" + raw + "<|im_end|>", False).finish_reason == "tool_calls"


def test_a_call_that_max_tokens_cut_is_the_limits():
    """The reason names the cut wherever something is missing; what the text shows is judged as it is."""
    cut = judge.Answer("<tool_call>\n<function=search_memory>\n<para", finish_reason="length")
    half = judge.Answer(tool_calls=calls([("search_memory", '{"que')]), finish_reason="length")
    expect = {"tool": "search_memory", "arguments": {"query": "cat"}, "contains": ["Tokyo"]}
    single = workload(expect, tools=TOOLS)
    gates = ("tool_call", "tool_arguments", "factual", "no_markdown", "repetition")
    single = replace(single, gates=gates)
    for answer in (cut, half):
        faults = judge.faults(answer, single.cases[0], single)
        for gate in ("tool_call", "tool_arguments", "factual"):
            assert faults[gate].startswith("it was cut at max_tokens: "), gate
    looping = judge.Answer("- one\n- two\n" + "again and again " * 9, finish_reason="length")
    faults = judge.faults(looping, single.cases[0], single)
    assert "markdown" in faults["no_markdown"] and faults["repetition"]
    assert "cut" not in faults["no_markdown"] + faults["repetition"]
    whole = msgspec.structs.replace(cut, finish_reason="stop")
    assert judge.faults(whole, single.cases[0], single)["tool_call"].endswith("unparsed")

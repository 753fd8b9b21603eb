"""Judging never raises an exception, whatever the answer."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from judge_cases import TOOLS
from randomised import examples

from annie_quant import judge
from annie_quant.judge.gates import GATES
from annie_quant.judge.library import build_workload

PIECES = [
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<function=",
    "search_memory",
    ">",
    "</function>",
    "<parameter=query>",
    "</parameter>",
    "<|im_end|>",
    "**",
    "*",
    "_",
    "`",
    "```",
    "#",
    "- ",
    "1. ",
    "> ",
    "|",
    "\n",
    "\n\n",
    " ",
    "Tokyo",
    "15",
    "not ",
    "?",
    ".",
    "\\",
    "[",
    "](",
    ")",
    "{",
    '"name"',
    "東京",
    "\u0301",
    "\x00",
    "😀",
    "Thinking Process:",
    "the user",
    "---",
    "<b>",
    "a",
]
TEXT = st.one_of(st.text(max_size=200), st.lists(st.sampled_from(PIECES), max_size=40).map("".join))
CALLS = st.lists(
    st.fixed_dictionaries(
        {
            "id": st.none() | st.text(max_size=3),
            "name": st.none() | st.sampled_from(["search_memory", "web_search", ""]),
            "arguments": st.none()
            | TEXT
            | st.sampled_from(["{}", '{"query": "x"}', "[1]", "NaN", '{"query": 1e999}']),
        }
    ),
    max_size=2,
)
EXPECT = [
    {},
    {"contains": ["Tokyo", ["15", "x"]]},
    {"tool": "search_memory", "arguments": {"query": ["x", 3]}},
    {"no_tool": True},
]


def workload(expect, thinking):
    return build_workload(
        {
            "name": "w",
            "max_tokens": 9,
            "gates": list(GATES),
            "tools": TOOLS,
            "thinking": thinking,
            "cases": [
                {"id": "c", "messages": [{"role": "user", "content": "?"}], "expect": expect}
            ],
        }
    )


@settings(max_examples=examples(300), deadline=None)
@given(
    TEXT,
    TEXT,
    CALLS,
    st.sampled_from(EXPECT),
    st.booleans(),
    st.sampled_from([None, "stop", "length", "odd"]),
)
def test_every_gate_accepts_any_answer(text, reasoning, calls, expect, thinking, finish):
    single = workload(expect, thinking)
    answer = judge.Answer(text, reasoning, calls, finish)
    checks = judge.checks(answer, single.cases[0], single)
    assert set(checks.values()) <= {True, False} and "non_empty" in checks
    assert judge.gate_table([judge.Judged(single, single.cases[0], answer)])


@settings(max_examples=examples(300), deadline=None)
@given(TEXT, st.booleans())
def test_any_raw_text_is_parsed_and_nothing_is_invented(raw, thinking):
    answer = judge.parse_raw(raw, thinking, TOOLS)
    assert all(
        part in raw
        for part in (answer.text.split() + answer.reasoning.split())[:5]
        if "<tool_call>" not in raw
    )
    assert len(answer.tool_calls) <= raw.count("<tool_call>")
    again = judge.parse_raw(raw, thinking, TOOLS)
    assert again == answer


@pytest.mark.parametrize(
    "text",
    [
        "*" * 8000,
        "[" * 8000,
        "`" * 8001,
        "> " * 4000,
        "a " * 8000,
        "- " * 4000,
        "<think" * 2000,
        "okay, " * 3000,
        "<tool_call>" * 2000 + "<function=a>" * 500,
        "15 " * 5000,
        "_a" * 6000,
    ],
)
def test_long_difficult_text_is_judged_quickly(text):
    single = workload({"contains": ["15"]}, False)
    start = time.monotonic()
    judge.checks(judge.Answer(text), single.cases[0], single)
    judge.parse_raw(text, True)
    assert time.monotonic() - start < 15

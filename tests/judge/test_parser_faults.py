"""Calls that a server's parser left in the text, lost or broke, on 142 outputs with known calls, streamed and not."""

from __future__ import annotations

import json
import random
from pathlib import Path

import msgspec
import pytest

from annie_quant.documents import Answer
from annie_quant.judge.answers import CALL_VANISHED, parse_raw, parser_fault, raw_view
from annie_quant.stream.calls import CallAssembler

DATA = Path(__file__).parents[1] / "data" / "parsers"
TOOLS = json.loads((DATA / "tools.json").read_text())
CASES = [json.loads(line) for line in (DATA / "cases.jsonl").read_text().splitlines()]
WITH_CALLS = [case for case in CASES if case["calls"]]
PLAIN = [case for case in CASES if not case["policy"]]
COMPLETE = [case for case in PLAIN if case["finish"] == "stop"]
# Calls without an end tag, or whose JSON has other fields: a server may refuse them, so they stay in the text.
REFUSED = {
    "qwen_xml/no_call_end",
    "qwen_xml/no_ends_stop",
    "qwen_xml/last_parameter_no_end",
    "hermes/no_call_end",
    "hermes/raw_newline_in_string",
    "hermes/arguments_as_text",
    "hermes/no_arguments_key",
    "hermes/parameters_key",
}
# Values that are not JSON stay text; a call in a closed thinking block is thinking.
OTHER_RESULT = {"qwen_xml/object_python", "qwen_xml/call_inside_then_end"}


def same(value: object, expected: object) -> bool:
    """Compare JSON values: true is not 1, 3 equals 3.0."""
    if isinstance(value, bool) or isinstance(expected, bool):
        return value is expected
    if isinstance(value, dict) and isinstance(expected, dict):
        return value.keys() == expected.keys() and all(same(value[k], expected[k]) for k in value)
    if isinstance(value, list) and isinstance(expected, list):
        return len(value) == len(expected) and all(map(same, value, expected))
    return value == expected


def calls_of(answer: Answer) -> list[dict]:
    return [
        {"name": call["name"], "arguments": json.loads(call["arguments"])}
        for call in answer.tool_calls
    ]


def streamed(pieces: list[dict]) -> Answer:
    """Return the answer of a stream with these deltas, assembled by the streaming client."""
    assembler = CallAssembler()
    text = ""
    for delta in pieces:
        text += delta.get("content", "")
        assembler.add(delta.get("tool_calls", []))
    calls = [msgspec.to_builtins(call) for call in assembler.result()]
    return Answer(text=text, tool_calls=calls, finish_reason="stop", completion_tokens=30)


def in_pieces(text: str, seed: str) -> list[str]:
    draw = random.Random(seed)
    pieces = []
    while text:
        size = draw.randint(1, 6)
        pieces.append(text[:size])
        text = text[size:]
    return pieces


def parsed_stream(case: dict, lost: int = 0) -> Answer:
    """Return the answer of a server that streams the case's calls. lost: characters that are missing at the end of arguments."""
    deltas: list[dict] = [{"content": case["content"]}]
    for index, call in enumerate(case["calls"]):
        arguments = json.dumps(call["arguments"])
        head = {"index": index, "id": f"call_{index}", "function": {"name": call["name"]}}
        deltas.append({"tool_calls": [head]})
        for piece in in_pieces(arguments[: len(arguments) - lost], case["id"]):
            deltas.append({"tool_calls": [{"index": index, "function": {"arguments": piece}}]})
    return streamed(deltas)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
@pytest.mark.parametrize("stream", [False, True])
def test_calls_that_a_server_left_in_the_text_are_read(case: dict, stream: bool) -> None:
    pieces = in_pieces(case["text"], case["id"]) if stream else [case["text"]]
    answer = streamed([{"content": piece} for piece in pieces])
    view = raw_view(answer, TOOLS)
    if case["id"] in OTHER_RESULT:
        return
    expected = [] if case["id"] in REFUSED else case["calls"]
    assert same(calls_of(view), expected)
    assert bool(parser_fault(answer)) == bool(expected)
    if not case["policy"] and not case["thinking"]:
        assert view.text.strip() == case["content"].strip()


@pytest.mark.parametrize("case", PLAIN, ids=lambda case: case["id"])
def test_an_offline_answer_is_read_as_by_a_server_with_the_right_parsers(case: dict) -> None:
    answer = parse_raw(case["text"], case["thinking"], TOOLS, form=case["form"])
    assert same(calls_of(answer), case["calls"])
    assert answer.text == case["content"].strip()
    assert answer.reasoning == case["reasoning"].strip()


@pytest.mark.parametrize("form", ["qwen_xml", "hermes"])
def test_a_call_in_open_thinking_is_a_call(form: str) -> None:
    """As vLLM 0.24, SGLang 0.5.14 and llama.cpp return it."""
    (case,) = [c for c in CASES if c["id"] == f"{form}/call_inside_thinking"]
    answer = parse_raw(case["text"], True, TOOLS, form=form)
    assert same(calls_of(answer), case["calls"]) and answer.reasoning == case["reasoning"]


@pytest.mark.parametrize("case", COMPLETE, ids=lambda case: case["id"])
def test_a_sound_stream_is_no_fault(case: dict) -> None:
    answer = parsed_stream(case)
    assert parser_fault(answer) == "" and raw_view(answer, TOOLS) == answer


@pytest.mark.parametrize("case", WITH_CALLS, ids=lambda case: case["id"])
def test_streamed_arguments_that_lack_their_last_brace_are_a_fault(case: dict) -> None:
    """vLLM's qwen3_coder up to 0.23, where a delta spans the end of a call."""
    answer = parsed_stream(case, lost=1)
    assert parser_fault(answer) == "arguments of a call are not JSON"
    # After a digit it is not known whether another one is missing.
    if not any(call["arguments"][-1:].isdigit() for call in answer.tool_calls):
        assert same(calls_of(raw_view(answer, TOOLS)), case["calls"])
    # The server that reports a cut says that the model did not write the brace.
    cut = msgspec.structs.replace(answer, finish_reason="length")
    assert raw_view(cut, TOOLS) == cut and parser_fault(cut) == ""


@pytest.mark.parametrize("case", WITH_CALLS, ids=lambda case: case["id"])
def test_streamed_arguments_that_lack_more_are_not_completed(case: dict) -> None:
    if all(call["arguments"] for call in case["calls"]):
        answer = parsed_stream(case, lost=2)
        assert parser_fault(answer) == "arguments of a call are not JSON"
        assert raw_view(answer, TOOLS) == answer


@pytest.mark.parametrize("case", WITH_CALLS, ids=lambda case: case["id"])
def test_a_reasoning_parser_that_takes_the_whole_answer_hides_no_call(case: dict) -> None:
    answer = Answer(reasoning=case["text"], finish_reason="stop", completion_tokens=30)
    if case["id"] not in REFUSED | OTHER_RESULT:
        assert parser_fault(answer) == "a call is left in the thinking"
        assert same(calls_of(raw_view(answer, TOOLS)), case["calls"])


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        (Answer(finish_reason="tool_calls", completion_tokens=30), CALL_VANISHED),
        (Answer(finish_reason="stop", completion_tokens=30), CALL_VANISHED),
        (Answer(text="\n", finish_reason="tool_calls"), CALL_VANISHED),
        (Answer(finish_reason="stop", completion_tokens=2), ""),  # the end of the turn alone
        (Answer(finish_reason="length", completion_tokens=30), ""),
        (Answer(finish_reason=None, completion_tokens=30), ""),
        (Answer(reasoning="Hm.", finish_reason="stop", completion_tokens=30), ""),
        (Answer(text="It is 4.", finish_reason="stop", completion_tokens=30), ""),
    ],
)
def test_a_call_that_vanished_leaves_an_answer_that_shows_nothing(
    answer: Answer, fault: str
) -> None:
    """A JSON call under vLLM's XML parser disappears without a text."""
    assert parser_fault(answer) == fault and raw_view(answer, TOOLS) == answer


CALL = {"name": "get_weather", "arguments": {"city": "Oslo", "days": 3}}
OTHER_FORMS = {
    "gemma4": '<|tool_call>call:get_weather{city:<|"|>Oslo<|"|>,days:3}<tool_call|>',
    "mistral": '[TOOL_CALLS]get_weather[ARGS]{"city": "Oslo", "days": 3}',
    "mistral, list": '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Oslo", "days": 3}}]',
    "granite": '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Oslo", "days": 3}}]',
    "glm": "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
    "lfm2": '<|tool_call_start|>[get_weather(city="Oslo", days=3)]<|tool_call_end|>',
    "gpt-oss": '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Oslo", "days": 3}<|call|>',
    "llama": '{"name": "get_weather", "parameters": {"city": "Oslo", "days": 3}}',
}


@pytest.mark.parametrize("form", OTHER_FORMS)
def test_leaked_calls_of_other_families_are_read(form: str) -> None:
    text = OTHER_FORMS[form]
    answer = Answer(text=text, finish_reason="stop", completion_tokens=30)
    assert same(calls_of(raw_view(answer, TOOLS)), [CALL])
    cut = Answer(text=text[: len(text) // 2], finish_reason="stop", completion_tokens=30)
    assert raw_view(cut, TOOLS).tool_calls == []

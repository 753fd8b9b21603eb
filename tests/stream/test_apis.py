"""The other APIs' streams: plain completions, OpenAI's responses, Anthropic's messages.

The streams are written after the APIs' documentation; tests/bench/test_endpoints.py has the real llama.cpp server's.
"""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stream_server import RawServer, chunk

pytest.importorskip("annie_quant._stream", reason="_stream is not built: libcurl's headers are missing")

import annie_quant as aq
from annie_quant.stream import decode


def named(kind: str, **fields) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), json.dumps({"type": kind, **fields}).encode())


MESSAGES = [
    named("message_start", message={"id": "msg_1", "role": "assistant", "model": "m", "content": [],
          "usage": {"input_tokens": 9, "cache_read_input_tokens": 20, "cache_creation_input_tokens": 1, "output_tokens": 1}}),
    named("content_block_start", index=0, content_block={"type": "thinking", "thinking": ""}),
    named("ping"),
    named("content_block_delta", index=0, delta={"type": "thinking_delta", "thinking": "Let me"}),
    named("content_block_delta", index=0, delta={"type": "signature_delta", "signature": "EqQB"}),
    named("content_block_stop", index=0),
    named("content_block_start", index=1, content_block={"type": "text", "text": ""}),
    named("content_block_delta", index=1, delta={"type": "text_delta", "text": "I will"}),
    named("content_block_delta", index=1, delta={"type": "text_delta", "text": " search."}),
    named("content_block_stop", index=1),
    named("content_block_start", index=2, content_block={"type": "tool_use", "id": "t1", "name": "find", "input": {}}),
    named("content_block_delta", index=2, delta={"type": "input_json_delta", "partial_json": ""}),
    named("content_block_delta", index=2, delta={"type": "input_json_delta", "partial_json": '{"q":'}),
    named("content_block_delta", index=2, delta={"type": "input_json_delta", "partial_json": '"\u00e9"}'}),
    named("content_block_stop", index=2),
    named("message_delta", delta={"stop_reason": "tool_use", "stop_sequence": None}, usage={"output_tokens": 21}),
    named("message_stop"),
]  # fmt: skip
RESPONSES = [
    named("response.created", response={"id": "r", "model": "m", "status": "in_progress", "error": None, "usage": None}),
    named("response.output_item.added", output_index=0, item={"type": "reasoning", "id": "rs"}),
    named("response.reasoning_text.delta", output_index=0, item_id="rs", delta="Let me"),
    named("response.output_item.added", output_index=1, item={"type": "message", "id": "m1", "content": []}),
    named("response.content_part.added", output_index=1, part={"type": "output_text", "text": ""}),
    named("response.output_text.delta", output_index=1, item_id="m1", delta="I will"),
    named("response.output_text.delta", output_index=1, item_id="m1", delta=" search."),
    named("response.output_text.done", output_index=1, item_id="m1", text="I will search."),
    named("response.output_item.added", output_index=2,
          item={"type": "function_call", "id": "fc", "call_id": "t1", "name": "find", "arguments": ""}),
    named("response.function_call_arguments.delta", output_index=2, item_id="fc", delta='{"q":'),
    named("response.function_call_arguments.delta", output_index=2, item_id="fc", delta='"\u00e9"}'),
    named("response.function_call_arguments.done", output_index=2, item_id="fc", arguments='{"q":"\u00e9"}'),
    named("response.output_item.done", output_index=2,
          item={"type": "function_call", "id": "fc", "call_id": "t1", "name": "find", "arguments": '{"q":"\u00e9"}'}),
    named("response.completed", response={"status": "completed", "model": "m", "error": None, "incomplete_details": None,
          "usage": {"input_tokens": 30, "input_tokens_details": {"cached_tokens": 20}, "output_tokens": 21}}),
]  # fmt: skip
COMPLETIONS = [
    b"data: %b\n\n" % json.dumps(chunk).encode()
    for chunk in (
        {"object": "text_completion", "choices": [{"index": 0, "text": "I will", "finish_reason": None}]},
        {"object": "text_completion", "choices": [{"index": 0, "text": " search.", "finish_reason": None}]},
        {"object": "text_completion", "choices": [{"index": 0, "text": "", "finish_reason": "stop"}]},
        {
            "choices": [],
            "usage": {"prompt_tokens": 30, "completion_tokens": 21, "prompt_tokens_details": {"cached_tokens": 20}},
        },
    )
] + [b"data: [DONE]\n\n"]
SSE = "text/event-stream"
STREAMS = {"messages": (SSE, MESSAGES), "responses": (SSE, RESPONSES)}


def record_of(content_type: str, pieces: list[bytes]) -> dict:
    def respond(connection, request: bytes) -> None:
        connection.sendall(
            b"HTTP/1.1 200 OK\r\nContent-Type: %b\r\nTransfer-Encoding: chunked\r\n\r\n" % content_type.encode()
        )
        for piece in pieces:
            connection.sendall(chunk(piece))
        connection.sendall(b"0\r\n\r\n")

    with RawServer(respond) as server:
        return aq.stream.run([aq.stream.Request(server.url, json={})]).records()[0]


@pytest.mark.parametrize("api", STREAMS)
def test_an_answer_is_the_same_record(api: str) -> None:
    record = record_of(*STREAMS[api])
    assert record["error"] is None and record["warnings"] == [], record
    assert record["text"] == "I will search." and record["reasoning"] == "Let me" and record["model"] == "m"
    assert [(c["name"], json.loads(c["arguments"])) for c in record["tool_calls"]] == [("find", {"q": "é"})]
    assert record["finish_reason"] == "tool_calls" and record["done_ms"] > 0
    order = [record[f"first_{name}_ms"] for name in ("reasoning", "content", "tool")]
    assert record["first_event_ms"] <= order[0] and order == sorted(order) and order[2] <= record["last_token_ms"]
    assert record["completion_tokens"] == 21 and not record["tokens_estimated"]
    assert record["usage"]["prompt_tokens"] == 30
    assert record["cached_tokens"] == 20


def test_plain_completions() -> None:
    record = record_of(SSE, COMPLETIONS)
    assert record["text"] == "I will search." and record["finish_reason"] == "stop" and record["error"] is None
    assert record["completion_tokens"] == 21 and record["cached_tokens"] == 20 and record["token_events"] == 2


@pytest.mark.parametrize("api", STREAMS)
def test_a_broken_stream_is_a_failure(api: str) -> None:
    content_type, pieces = STREAMS[api]
    early = record_of(content_type, pieces[:4])
    assert early["cause"] == "truncated" and early["text"] in ("", "I will", "I will search.")


def test_errors_inside_the_stream() -> None:
    errors = {
        SSE: [
            named("error", error={"type": "overloaded_error", "message": "Overloaded"}),
            named("error", code="server_error", message="Overloaded", param=None),
            named("response.failed", response={"status": "failed", "error": {"code": "x", "message": "Overloaded"}}),
        ],
    }
    for content_type, events in errors.items():
        for event in events:
            record = record_of(content_type, [event])
            assert record["cause"] == "server_error" and "Overloaded" in record["error"], record["error"]


def test_lengths_that_end_an_answer() -> None:
    cut = named("message_delta", delta={"stop_reason": "max_tokens"}, usage={"output_tokens": 8})
    assert record_of(SSE, [*MESSAGES[:9], cut, MESSAGES[-1]])["finish_reason"] == "length"
    response = {
        "status": "incomplete",
        "incomplete_details": {"reason": "max_output_tokens"},
        "usage": {"output_tokens": 8},
    }
    assert (
        record_of(SSE, [*RESPONSES[:7], named("response.incomplete", response=response)])["finish_reason"] == "length"
    )


def test_a_tool_call_that_has_no_pieces() -> None:
    item = {"type": "function_call", "id": "fc", "call_id": "t1", "name": "find", "arguments": '{"q":1}'}
    events = [
        named("response.output_item.added", output_index=0, item=item | {"arguments": ""}),
        named("response.output_item.done", output_index=0, item=item),
        RESPONSES[-1],
    ]
    assert record_of(SSE, events)["tool_calls"] == [{"id": "t1", "name": "find", "arguments": '{"q":1}'}]


@settings(max_examples=300, deadline=None)
@given(st.sampled_from([MESSAGES, RESPONSES]), st.data())
def test_a_field_of_any_type_gives_a_record(pieces: list[bytes], data: st.DataObject) -> None:
    """One value anywhere in one event is replaced: there is an answer, or a named fault; nothing is raised."""
    at = data.draw(st.integers(0, len(pieces) - 1))
    body = pieces[at].split(b"data: ")[-1]
    value = json.loads(body)
    parent = value
    while True:
        key = data.draw(
            st.sampled_from(sorted(parent)) if isinstance(parent, dict) else st.integers(0, len(parent) - 1)
        )
        inner = parent[key]
        if isinstance(inner, (dict, list)) and inner and data.draw(st.booleans()):
            parent = inner
            continue
        parent[key] = data.draw(st.sampled_from([None, -1, 1e300, "x", [], {}, [1], {"a": 1}, True, 10**30]))
        break
    changed = [*pieces[:at], json.dumps(value).encode(), *pieces[at + 1 :]]
    frames = [decode.Frame(i + 1, decode.DATA, 0, i, b, b.split(b"data: ")[-1].strip()) for i, b in enumerate(changed)]
    answer = decode.read_answer(frames)
    times = decode.token_times(answer, 0)
    assert all(isinstance(t, str) for t in (*answer.text, *answer.reasoning)) and times.completion_tokens >= 0
    json.dumps([answer.usage, answer.server_timings, answer.model, answer.finish_reason])

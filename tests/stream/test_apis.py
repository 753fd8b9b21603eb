"""The other APIs' streams: plain completions, OpenAI's responses, Anthropic's messages, Ollama's newline-delimited JSON.

The streams are written after the APIs' documentation; tests/bench/test_endpoints.py has the real llama.cpp server's.
"""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from randomised import examples
from stream_server import RawServer, chunk

_stream = pytest.importorskip(
    "annie_quant._stream", reason="_stream is not built: libcurl's headers are missing"
)

import annie_quant as aq  # noqa: E402
from annie_quant.stream import decode  # noqa: E402

LIMIT = 1 << 24


def named(kind: str, **fields) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (
        kind.encode(),
        json.dumps({"type": kind, **fields}).encode(),
    )


def line(**fields) -> bytes:
    return (
        json.dumps(
            {"model": "m", "created_at": "2026-11-22T10:00:00Z", **fields}, ensure_ascii=False
        ).encode()
        + b"\n"
    )


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
OLLAMA = [
    line(message={"role": "assistant", "content": "", "thinking": "Let me"}, done=False),
    line(message={"role": "assistant", "content": "I will"}, done=False),
    line(message={"role": "assistant", "content": " search."}, done=False),
    line(message={"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "find", "arguments": {"q": "é"}}}]},
         done=False),
    line(message={"role": "assistant", "content": ""}, done=True, done_reason="stop", total_duration=9_000_000,
         load_duration=1_000_000, prompt_eval_count=30, prompt_eval_duration=3_000_000, eval_count=21,
         eval_duration=42_000_000),
]  # fmt: skip
COMPLETIONS = [
    b"data: %b\n\n" % json.dumps(chunk).encode()
    for chunk in (
        {
            "object": "text_completion",
            "choices": [{"index": 0, "text": "I will", "finish_reason": None}],
        },
        {
            "object": "text_completion",
            "choices": [{"index": 0, "text": " search.", "finish_reason": None}],
        },
        {
            "object": "text_completion",
            "choices": [{"index": 0, "text": "", "finish_reason": "stop"}],
        },
        {
            "choices": [],
            "usage": {
                "prompt_tokens": 30,
                "completion_tokens": 21,
                "prompt_tokens_details": {"cached_tokens": 20},
            },
        },
    )
] + [b"data: [DONE]\n\n"]
SSE, NDJSON = "text/event-stream", "application/x-ndjson"
STREAMS = {"messages": (SSE, MESSAGES), "responses": (SSE, RESPONSES), "ollama": (NDJSON, OLLAMA)}


def record_of(content_type: str, pieces: list[bytes]) -> dict:
    def respond(connection, request: bytes) -> None:
        connection.sendall(
            b"HTTP/1.1 200 OK\r\nContent-Type: %b\r\nTransfer-Encoding: chunked\r\n\r\n"
            % content_type.encode()
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
    assert (
        record["text"] == "I will search."
        and record["reasoning"] == "Let me"
        and record["model"] == "m"
    )
    assert [(c["name"], json.loads(c["arguments"])) for c in record["tool_calls"]] == [
        ("find", {"q": "é"})
    ]
    assert record["finish_reason"] == "tool_calls" and record["done_ms"] > 0
    order = [record[f"first_{name}_ms"] for name in ("reasoning", "content", "tool")]
    assert (
        record["first_event_ms"] <= order[0]
        and order == sorted(order)
        and order[2] <= record["last_token_ms"]
    )
    assert record["completion_tokens"] == 21 and not record["tokens_estimated"]
    assert record["usage"]["prompt_tokens"] == 30
    assert record["cached_tokens"] == (None if api == "ollama" else 20)


def test_plain_completions() -> None:
    record = record_of(SSE, COMPLETIONS)
    assert (
        record["text"] == "I will search."
        and record["finish_reason"] == "stop"
        and record["error"] is None
    )
    assert (
        record["completion_tokens"] == 21
        and record["cached_tokens"] == 20
        and record["token_events"] == 2
    )


def test_ollamas_own_times_have_llama_cpps_names() -> None:
    timings = record_of(NDJSON, OLLAMA)["server_timings"]
    assert timings == {"prompt_n": 30, "prompt_ms": 3.0, "prompt_per_token_ms": 0.1, "predicted_n": 21, "predicted_ms": 42.0,
                       "predicted_per_token_ms": 2.0, "load_ms": 1.0}  # fmt: skip


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
            named(
                "response.failed",
                response={"status": "failed", "error": {"code": "x", "message": "Overloaded"}},
            ),
        ],
        NDJSON: [json.dumps({"error": "Overloaded"}).encode() + b"\n"],
    }
    for content_type, events in errors.items():
        for event in events:
            record = record_of(content_type, [event])
            assert record["cause"] == "server_error" and "Overloaded" in record["error"], record[
                "error"
            ]


def test_lengths_that_end_an_answer() -> None:
    cut = named("message_delta", delta={"stop_reason": "max_tokens"}, usage={"output_tokens": 8})
    assert record_of(SSE, [*MESSAGES[:9], cut, MESSAGES[-1]])["finish_reason"] == "length"
    response = {
        "status": "incomplete",
        "incomplete_details": {"reason": "max_output_tokens"},
        "usage": {"output_tokens": 8},
    }
    assert (
        record_of(SSE, [*RESPONSES[:7], named("response.incomplete", response=response)])[
            "finish_reason"
        ]
        == "length"
    )
    assert (
        record_of(NDJSON, [*OLLAMA[:3], line(done=True, done_reason="length", eval_count=8)])[
            "finish_reason"
        ]
        == "length"
    )


def test_a_tool_call_that_has_no_pieces() -> None:
    item = {
        "type": "function_call",
        "id": "fc",
        "call_id": "t1",
        "name": "find",
        "arguments": '{"q":1}',
    }
    events = [
        named("response.output_item.added", output_index=0, item=item | {"arguments": ""}),
        named("response.output_item.done", output_index=0, item=item),
        RESPONSES[-1],
    ]
    assert record_of(SSE, events)["tool_calls"] == [
        {"id": "t1", "name": "find", "arguments": '{"q":1}'}
    ]


# ---- newline-delimited JSON in the C framer


def lines_of(body: bytes) -> list[bytes]:
    """The data of each whole line that is not blank, without the framer."""
    return [
        t
        for part in body.removeprefix(b"\xef\xbb\xbf").split(b"\n")[:-1]
        if (t := part.rstrip(b"\r \t"))
    ]


def framed(reads: tuple[bytes, ...]) -> list[bytes]:
    rows = _stream.cut(reads, LIMIT, True)
    assert b"".join(row[-1] for row in rows) == b"".join(reads), (
        "every byte comes out once, in order"
    )
    return [
        raw[start : start + size]
        for kind, _, _, start, size, raw in rows
        if kind in (decode.DATA, decode.DONE)
    ]


BODIES = [
    b"".join(OLLAMA),
    b"\r\n".join(p.rstrip() for p in OLLAMA) + b"\r\n",
    b"\n\n{}\n \r\n{}\n{",
    b'{"a":\r1}\n',
    b"",
]


@pytest.mark.parametrize("body", BODIES)
def test_lines_at_every_split(body: bytes) -> None:
    for at in range(len(body) + 1):
        assert framed((body[:at], body[at:])) == lines_of(body)


@settings(max_examples=examples(300), deadline=None)
@given(
    st.lists(
        st.sampled_from(
            [
                b"{",
                b"}",
                b"\n",
                b"\r",
                b"\r\n",
                b" ",
                b"data: x",
                b'"\xc3\xa9"',
                b"\xef\xbb\xbf",
                b"[DONE]",
            ]
        )
    ),
    st.lists(st.integers(0, 40), max_size=5),
)
def test_any_lines_in_any_reads(pieces: list[bytes], cuts: list[int]) -> None:
    body = b"".join(pieces)
    edges = [0, *sorted(min(c, len(body)) for c in cuts), len(body)]
    reads = tuple(body[a:b] for a, b in itertools.pairwise(edges))
    assert framed(reads) == lines_of(body)


@pytest.mark.parametrize(
    "content_type",
    [NDJSON, "application/ndjson", "application/jsonl", "Application/JSONL; charset=utf-8"],
)
def test_each_name_of_newline_delimited_json_is_a_stream(content_type: str) -> None:
    record = record_of(content_type, OLLAMA)
    assert record["error"] is None and record["completion_tokens"] == 21


def test_the_last_line_needs_no_line_end() -> None:
    record = record_of(NDJSON, [*OLLAMA[:-1], OLLAMA[-1].rstrip()])
    assert record["error"] is None and record["completion_tokens"] == 21
    assert "inside an event" in record_of(NDJSON, [*OLLAMA[:-1], OLLAMA[-1][:-9]])["warnings"][0]


def test_a_line_over_the_limit_ends_the_request() -> None:
    with pytest.raises(ValueError, match="over 100 bytes"):
        _stream.cut((b"x" * 200 + b"\n",), 100, True)


@settings(max_examples=examples(300), deadline=None)
@given(st.sampled_from([MESSAGES, RESPONSES, OLLAMA]), st.data())
def test_a_field_of_any_type_gives_a_record(pieces: list[bytes], data: st.DataObject) -> None:
    """One value anywhere in one event is replaced: there is an answer, or a named fault; nothing is raised."""
    at = data.draw(st.integers(0, len(pieces) - 1))
    body = pieces[at].split(b"data: ")[-1]
    value = json.loads(body)
    parent = value
    while True:
        key = data.draw(
            st.sampled_from(sorted(parent))
            if isinstance(parent, dict)
            else st.integers(0, len(parent) - 1)
        )
        inner = parent[key]
        if isinstance(inner, (dict, list)) and inner and data.draw(st.booleans()):
            parent = inner
            continue
        parent[key] = data.draw(
            st.sampled_from([None, -1, 1e300, "x", [], {}, [1], {"a": 1}, True, 10**30])
        )
        break
    changed = [*pieces[:at], json.dumps(value).encode(), *pieces[at + 1 :]]
    frames = [
        decode.Frame(i + 1, decode.DATA, 0, i, b, b.split(b"data: ")[-1].strip())
        for i, b in enumerate(changed)
    ]
    answer = decode.read_answer(frames)
    times = decode.token_times(answer, 0)
    assert (
        all(isinstance(t, str) for t in (*answer.text, *answer.reasoning))
        and times.completion_tokens >= 0
    )
    json.dumps([answer.usage, answer.server_timings, answer.model, answer.finish_reason])

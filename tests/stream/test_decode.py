"""Decoding frames to records: the dialects of vLLM and llama.cpp, tool calls, usage, times, errors in the stream."""

from __future__ import annotations

import json

import pytest
from stream_server import DONE, RawServer, event, stream

pytest.importorskip(
    "annie_quant._stream", reason="_stream is not built: libcurl's headers are missing"
)

import annie_quant as aq
from annie_quant.stream import decode
from annie_quant.stream.answer import StreamedAnswer


def answer_of(*bodies: bytes) -> StreamedAnswer:
    """Decode events that are one millisecond apart."""
    return decode.read_answer(
        decode.Frame(
            (i + 1) * 1_000_000,
            decode.DONE if b"[DONE]" in body else decode.DATA,
            0,
            i,
            body,
            body[6:].strip(),
        )
        for i, body in enumerate(bodies)
    )


def record_of(pieces: list[bytes], **options) -> dict:
    with RawServer(stream(pieces)) as server:
        return aq.stream.run([aq.stream.Request(server.url, json={})], **options).records()[0]


VLLM = [
    event({"role": "assistant", "content": ""}),
    event({"reasoning": "Let me"}),
    event({"reasoning": " look."}),
    event({"content": "I will search."}),
    event({"tool_calls": [{"index": 0, "id": "call_1", "type": "function", "function": {"name": "find", "arguments": ""}}]}),
    event({"tool_calls": [{"index": 0, "function": {"arguments": '{"q":'}}]}),
    event({"tool_calls": [{"index": 0, "function": {"arguments": '"é"}'}}]}),
    event({"tool_calls": [{"index": 1, "id": "call_2", "function": {"name": "stop", "arguments": "{}"}}]}),
    event({}, "tool_calls"),
    event(usage={"prompt_tokens": 9, "completion_tokens": 21, "total_tokens": 30}),
    DONE,
]  # fmt: skip
LLAMA = [
    event({"role": "assistant", "content": None}),
    event({"reasoning_content": "Let me"}),
    event({"reasoning_content": " look."}),
    event({"content": "I will search."}),
    event({"tool_calls": [{"index": 0, "id": "a", "type": "function", "function": {"name": "find", "arguments": "{"}}]}),
    event({"tool_calls": [{"index": 0, "function": {"arguments": '"q":"é"}'}}]}),
    event({"tool_calls": [{"index": 1, "id": "b", "type": "function", "function": {"name": "stop", "arguments": "{}"}}]}),
    event({}, "tool_calls"),
    event(usage={"prompt_tokens": 9, "completion_tokens": 21}, timings={"predicted_n": 21, "predicted_ms": 30.0}),
    DONE,
]  # fmt: skip


@pytest.mark.parametrize("pieces", [VLLM, LLAMA], ids=["vllm", "llama.cpp"])
def test_both_dialects_give_the_same_record(pieces: list[bytes]) -> None:
    record = record_of(pieces)
    assert record["error"] is None and record["status"] == 200 and record["warnings"] == []
    assert (record["reasoning"], record["text"]) == ("Let me look.", "I will search.")
    assert [(c["name"], json.loads(c["arguments"])) for c in record["tool_calls"]] == [
        ("find", {"q": "é"}),
        ("stop", {}),
    ]
    assert all(set(c) == {"id", "name", "arguments"} and c["id"] for c in record["tool_calls"])
    assert record["finish_reason"] == "tool_calls"
    assert (record["completion_tokens"], record["tokens_estimated"]) == (21, False)
    assert json.loads(json.dumps(record)) == record


def test_each_time_is_that_of_its_event() -> None:
    """Each event is one millisecond after the previous one, so all times are known."""
    fields = decode.token_times(answer_of(*VLLM), started_ns=0)
    assert fields.first_event_ms == 1  # the role-only chunk is an event, not a token
    assert (fields.first_reasoning_ms, fields.first_content_ms, fields.first_tool_ms) == (2, 4, 5)
    assert (fields.last_token_ms, fields.done_ms) == (8, 11)
    assert fields.itl_ms == [1] * 6
    assert fields.tpot_ms == pytest.approx((8 - 2) / 20)
    assert fields.decode_tok_s == pytest.approx(20 / 6 * 1000)


def test_llama_cpp_timings_count_where_usage_is_missing() -> None:
    answer = answer_of(
        event({"content": "a"}), event({"content": "b"}, timings={"predicted_n": 9}), DONE
    )
    fields = decode.token_times(answer, 0)
    assert (fields.completion_tokens, fields.tokens_estimated) == (9, False)


@pytest.mark.parametrize("cached", [10**15 + 1, 2**53, 2**63, -1, True, 1.5])
def test_a_count_that_no_record_can_hold_is_unknown(cached: object) -> None:
    """A benchmark would otherwise write a record that it refuses to read again."""
    usage = {"completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": cached}}
    assert (
        decode.cached_tokens(answer_of(event({"content": "a"}), event(usage=usage), DONE)) is None
    )


@pytest.mark.parametrize(
    ("details", "timings", "expected"),
    [
        # vLLM and SGLang leave the details out, or send null, without their flag and for 0 tokens.
        (None, None, None),
        ({}, None, None),
        ({"cached_tokens": None}, None, None),
        ({"cached_tokens": 0}, None, 0),
        ({"cached_tokens": 96, "audio_tokens": 0}, None, 96),
        # llama.cpp has its own account; one without cache_n counts nothing.
        (None, {"cache_n": 90, "prompt_n": 10}, 90),
        (None, {"cache_n": 0, "prompt_n": 100}, 0),
        (None, {"prompt_n": 100}, None),
    ],
)
def test_cached_tokens_that_are_not_reported_are_never_zero(
    details: object, timings: object, expected: int | None
) -> None:
    usage = {"prompt_tokens": 100, "completion_tokens": 2, "prompt_tokens_details": details}
    last = event(usage=usage, timings=timings) if timings else event(usage=usage)
    assert decode.cached_tokens(answer_of(event({"content": "a"}), last, DONE)) == expected


def test_several_tokens_in_a_chunk_use_the_servers_count() -> None:
    answer = answer_of(
        event({"content": "a"}),
        event({"content": "b c d e"}),
        event(usage={"completion_tokens": 5}),
        DONE,
    )
    assert decode.token_times(answer, 0).tpot_ms == pytest.approx(1 / 4)


def test_one_token_has_no_tpot() -> None:
    fields = decode.token_times(
        answer_of(event({"content": "a"}), event(usage={"completion_tokens": 1}), DONE), 0
    )
    assert fields.tpot_ms is None and fields.decode_tok_s is None and fields.itl_ms == []


def test_a_count_that_no_clock_can_have_seen_gives_no_rate() -> None:
    """10^9 tokens in a microsecond: the record would hold 10^15 tokens per second, which its reader refuses."""
    answer = answer_of(event({"content": "a"}), event(usage={"completion_tokens": 10**9}), DONE)
    answer.token_stamps = [1_000_000, 1_001_000]
    fields = decode.token_times(answer, 0)
    assert fields.completion_tokens == 10**9 and fields.decode_tok_s is None


def test_completions_dialect_and_other_choices() -> None:
    second = b'data: {"choices":[{"index":1,"text":"no"}]}\n\n'
    answer = answer_of(b'data: {"choices":[{"index":0,"text":"yes"}]}\n\n', second, DONE)
    assert "".join(answer.text) == "yes" and "only the first" in answer.warnings[0]


def test_how_a_stream_may_end() -> None:
    content, stop = event({"content": "Hi"}), event({}, "stop")
    assert record_of([content, stop, DONE])["warnings"] == []
    missing = record_of([content, stop])
    assert missing["error"] is None and missing["warnings"] == ["[DONE] was not received"]
    early = record_of([content])
    assert early["cause"] == "truncated" and early["text"] == "Hi"
    assert "blank line" in record_of([content, stop, b"data: [DONE]\n"])["warnings"][0]
    inside = record_of([content, stop, DONE, b"data: {"])
    assert inside["error"] is None and "inside an event (7 bytes left)" in inside["warnings"][0]
    assert record_of([b": ping\n\n"])["cause"] == "no_events"
    assert (
        record_of([DONE])["cause"]
        == record_of([event({"role": "assistant"}), DONE])["cause"]
        == "no_events"
    )
    assert "after the end" in record_of([content, DONE, content])["warnings"][0]


def test_merged_reads_are_counted_and_flagged() -> None:
    two = event({"content": "a"}) + event({"content": "b"})
    with RawServer(stream([two, event({"content": "c"}, "stop") + DONE])) as server:
        timings = aq.stream.run([aq.stream.Request(server.url, json={})])
    assert timings.records()[0]["merged_reads"] >= 1
    assert (timings.events["flags"][:2] & decode.MERGED).all()


VALUES = [
    None,
    "",
    "x",
    "\u00e9" * 300,
    0,
    1,
    True,
    1.5,
    [],
    ["x"],
    {},
    {"content": "x"},
    [{"type": "text", "text": "x"}],
]


def _changed(event: dict, path: tuple, value) -> bytes:
    copy = json.loads(json.dumps(event))
    parent = copy
    for key in path[:-1]:
        parent = parent[key]
    if value is KeyError:
        parent.pop(path[-1], None)
    else:
        parent[path[-1]] = value
    return json.dumps(copy).encode()


def test_the_short_way_of_text_events_reads_what_the_long_way_does(monkeypatch) -> None:
    """Each field of an event with each kind of value: the answer is the same with and without `read_text_chunk`."""
    delta = {"content": "a", "reasoning": "r", "reasoning_content": "c", "role": "assistant"}
    choice = {"index": 0, "delta": delta, "finish_reason": None, "logprobs": None}
    event = {
        "id": "i",
        "object": "o",
        "created": 1,
        "model": "m",
        "choices": [choice],
        "usage": None,
        "system_fingerprint": "f",
    }
    inner = ("choices", 0)
    paths = [(key,) for key in (*event, "error", "type", "message", "done", "timings", "x")]
    paths += [(*inner, key) for key in (*choice, "text", "x")]
    paths += [(*inner, "delta", key) for key in (*delta, "tool_calls", "function_call", "x")]
    datas = [_changed(event, path, value) for path in paths for value in [*VALUES, KeyError]]
    datas += [
        b"",
        b"{",
        b"\xff",
        b"[1]",
        json.dumps(event).encode(),
        json.dumps(event | {"choices": [choice, choice]}).encode(),
    ]
    short = 0
    for data in datas:
        frames = [decode.Frame(5, decode.DATA, 0, 1, data, data)]
        fast = decode.read_answer(frames)
        short += decode.read_text_chunk(StreamedAnswer(), frames[0])
        with monkeypatch.context() as patch:
            patch.setattr(decode, "read_text_chunk", lambda answer, frame: False)
            assert fast == decode.read_answer(frames), data
    assert len(datas) / 10 < short < len(datas), "some take the short way, some do not"

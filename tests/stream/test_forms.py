"""Plain completions, newline-delimited JSON, and chunks whose fields have any type."""

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
CHAT = [
    b"data: %b\n\n" % json.dumps({"model": "m", **part}).encode()
    for part in (
        {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]},
        {"choices": [{"index": 0, "delta": {"reasoning": "Let me"}}]},
        {"choices": [{"index": 0, "delta": {"content": "I will"}}]},
        {"choices": [{"index": 0, "delta": {"content": [{"type": "text", "text": " search."}]}}]},
        {"choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0, "id": "t", "function": {"name": "find"}}]}}]},
        {"choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0, "function": {"arguments": "{}"}}]}}]},
        {"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]},
        {"choices": [], "usage": {"prompt_tokens": 30, "completion_tokens": 21}, "timings": {"predicted_n": 21}},
    )
] + [b"data: [DONE]\n\n"]  # fmt: skip
LINES = [part.removeprefix(b"data: ").removesuffix(b"\n") for part in CHAT]
SSE = "text/event-stream"
NDJSON = "application/x-ndjson"


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
    b"".join(LINES),
    b"\r\n".join(p.rstrip() for p in LINES) + b"\r\n",
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
    record = record_of(content_type, LINES)
    assert record["error"] is None and record["completion_tokens"] == 21


def test_a_line_over_the_limit_ends_the_request() -> None:
    with pytest.raises(ValueError, match="over 100 bytes"):
        _stream.cut((b"x" * 200 + b"\n",), 100, True)


@settings(max_examples=examples(300), deadline=None)
@given(st.sampled_from([CHAT, LINES]), st.data())
def test_a_field_of_any_type_gives_a_record(pieces: list[bytes], data: st.DataObject) -> None:
    """One value anywhere in one event is replaced: there is an answer, or a named fault; nothing is raised."""
    at = data.draw(st.integers(0, len(pieces) - 2))  # not [DONE]
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


@pytest.mark.parametrize(
    ("delta", "warning"),
    [
        (
            {"tool_calls": [{"index": 0, "type": "custom", "custom": {"name": "f", "input": "x"}}]},
            "not read: a tool call of type 'custom'",
        ),
        (
            {"tool_calls": [{"index": 0, "custom": {"input": "x"}}]},
            "not read: a tool call of type 'custom'",
        ),
        ({"content": 5}, "not read: a content part of type 'int'"),
        ({"content": True}, "not read: a content part of type 'bool'"),
        ({"audio": {"transcript": "Hi"}}, "not read: the field 'audio'"),
    ],
)
def test_what_a_delta_has_and_is_not_read_is_named(delta, warning):
    answer = _read([{"choices": [{"index": 0, "delta": delta}]}])
    assert answer.warnings == [warning]
    assert not answer.text and not answer.calls


def test_text_that_each_event_sends_from_its_beginning_is_read_once():
    whole = "The lamp is on shelf 3."
    pieces = [whole[:n] for n in (3, 8, 11, 23)]
    answer = _read([{"choices": [{"index": 0, "delta": {"content": p}}]} for p in pieces])
    assert answer.text == [whole]
    assert answer.warnings == [
        "each piece of text repeats the text before it: only the last one is read"
    ]
    laugh = _read(
        [{"choices": [{"index": 0, "delta": {"content": p}}]} for p in ("ha", "ha", "ha", "haha")]
    )
    assert laugh.text == ["hahahahaha"] and not laugh.warnings


def _read(chunks):
    events = [json.dumps(c).encode() for c in chunks]
    frames = [decode.Frame(n, decode.DATA, 0, n, b"data: " + e, e) for n, e in enumerate(events)]
    return decode.read_answer(frames)

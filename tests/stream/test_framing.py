"""The SSE framer against an independent implementation of the specification, at every split position."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from randomised import examples

_stream = pytest.importorskip(
    "annie_quant._stream", reason="_stream is not built: libcurl's headers are missing"
)

from annie_quant.stream import answer, decode  # noqa: E402

LIMIT = 1 << 24


def specified(body: bytes) -> list[tuple[str, bytes]]:
    """Return (event name, data) of each event, by the WHATWG algorithm over the whole body: regular expressions, no state."""
    body = body.removeprefix(b"\xef\xbb\xbf")
    lines = re.split(rb"\r\n|\r|\n", body)[:-1]  # text after the last line end is not a line
    events, data, name = [], [], ""
    for line in lines:
        if not line:
            if data:
                events.append((name or "message", b"\n".join(data)))
            data, name = [], ""
            continue
        key, value = re.fullmatch(rb"([^:]*)(?:: ?(.*))?", line, re.DOTALL).groups(b"")
        if key == b"data":
            data.append(value)
        elif key == b"event":
            name = value.decode("utf-8", "replace")
    return events


def framed(reads: tuple[bytes, ...]) -> list[tuple[str, bytes]]:
    """The same from the C framer's frames, with answer.py's event names and joined data."""
    rows = _stream.cut(reads, LIMIT)
    assert b"".join(row[-1] for row in rows) == b"".join(reads), (
        "every byte comes out once, in order"
    )
    out = []
    for kind, flags, lines, start, size, raw in rows:
        if kind in (decode.DATA, decode.DONE):
            data = raw[start : start + size] if lines == 1 else answer.joined_data(raw, start)
            out.append((answer.event_name(raw) if flags & decode.NAMED else "message", data))
    return out


RULES = {
    "lf": b"data: a\n\ndata: b\n\n",
    "cr": b"data: a\r\rdata: b\r\r",
    "crlf": b"data: a\r\n\r\ndata: b\r\n\r\n",
    "mixed ends": b"data: a\r\n\ndata: b\r\r\ndata: c\n\r",
    "utf-8": 'data: {"x":"é漢字🦊"}\n\n'.encode(),
    "comments and pings": b": hello\n\n: ping\n\ndata: a\n: inside\n\n:\n\n",
    "no space": b"data:a\n\ndata:  two\n\ndata:\n\n",
    "two spaces, several lines": b"data:  a\ndata:  b\n\n",
    "bare field name": b"data\n\ndata\ndata\n\n",
    "multi-line data": b"data: one\ndata: two\ndata:\ndata: four\n\n",
    "event lines": b"event: message\ndata: a\n\nevent: error\ndata: b\n\ndata: c\n\n",
    "event without data": b"event: ping\n\ndata: a\n\n",
    "id and retry": b"id: 7\nretry: 100\ndata: a\n\nid: 8\n\n",
    "byte order mark": b"\xef\xbb\xbfdata: a\n\n\xef\xbb\xbfdata: not a field\n\ndata: b\n\n",
    "mark mid-stream in a long event": b"data: a\n\n\xef\xbb\xbfdata: no\ndata: b\ndata: c\n\n",
    "mark before a comment": b"\xef\xbb\xbf: hi\n\ndata: a\n\n",
    "colon in value": b"data: a: b:c\n\n",
    "unknown fields": b"dataX: no\nda: no\ndata : no\ndata: yes\n\n",
    "blank lines": b"\n\r\n\r\rdata: a\n\n\n\n\ndata: b\n\n",
    "trailing bytes": b"data: a\n\ndata: never ended\n",
    "trailing without line end": b"data: a\n\ndata: nev",
    "done": b"data: a\n\ndata: [DONE]\n\n",
    "nul bytes": b"data: a\0b\n\n\0\n\n",
    "empty": b"",
}


@pytest.mark.parametrize("body", RULES.values(), ids=RULES.keys())
def test_each_rule_at_every_split(body: bytes) -> None:
    expected = specified(body)
    assert framed((body,)) == expected
    assert framed(tuple(bytes([b]) for b in body)) == expected
    for i in range(len(body) + 1):
        assert framed((body[:i], body[i:])) == expected
        for j in range(i, len(body) + 1):
            assert framed((body[:i], body[i:j], body[j:])) == expected


def test_rules_by_hand() -> None:
    """Expected values written by hand, so that both implementations cannot be wrong in the same way."""
    assert framed((RULES["multi-line data"],)) == [("message", b"one\ntwo\n\nfour")]
    assert framed((RULES["no space"],)) == [
        ("message", b"a"),
        ("message", b" two"),
        ("message", b""),
    ]
    assert framed((RULES["event lines"],)) == [
        ("message", b"a"),
        ("error", b"b"),
        ("message", b"c"),
    ]
    assert framed((RULES["byte order mark"],)) == [("message", b"a"), ("message", b"b")]
    assert framed((RULES["trailing bytes"],)) == [("message", b"a")]


def test_a_blank_line_of_cr_ends_the_event_at_once() -> None:
    """An event whose last CR is the last byte of a read is passed on with that read: its stamp must not wait for a LF."""
    rows = _stream.cut((b"data: a\r\n\r", b"\ndata: b\r\n\r\n"), LIMIT)
    assert [r[-1] for r in rows] == [b"data: a\r\n\r", b"\ndata: b\r\n\r\n"]


def test_done_is_only_done() -> None:
    kinds = {body: _stream.cut((body,), LIMIT)[0][0] for body in (
        b"data: [DONE]\n\n", b"data:[DONE] \r\n\r\n", b"data: [DONE]x\n\n", b"data: x\ndata: [DONE]\n\n", b"data: [done]\n\n",
    )}  # fmt: skip
    assert list(kinds.values()) == [decode.DONE, decode.DONE, decode.DATA, decode.DATA, decode.DATA]


def test_tail_and_pings_are_distinguished() -> None:
    rows = _stream.cut((b": ping\n\nid: 1\n\ndata: x",), LIMIT)
    assert [r[0] for r in rows] == [decode.SILENT, decode.SILENT, decode.TAIL]
    assert rows[0][1] & decode.COMMENT and not rows[1][1] & decode.COMMENT


def test_large_event_is_linear_and_complete() -> None:
    body = b"data: " + b"x" * (16 << 20) + b"\n\n"
    reads = tuple(body[i : i + 16384] for i in range(0, len(body), 16384))
    ((kind, _, lines, start, size, raw),) = _stream.cut(reads, 1 << 25)
    assert (kind, lines, size, len(raw)) == (decode.DATA, 1, 16 << 20, len(body))
    assert start == 6


@pytest.mark.parametrize(
    "body", [b"data: " + b"x" * 100, b"x" * 100, b"data: " + b"x" * 100 + b"\n\n", b"\n" * 100]
)
@pytest.mark.parametrize("step", [1, 7, 200])
def test_an_event_is_bounded(body: bytes, step: int) -> None:
    reads = tuple(body[i : i + step] for i in range(0, len(body), step))
    with pytest.raises(ValueError, match="over 64 bytes"):
        _stream.cut(reads, 64)


pieces = st.sampled_from([b"data", b"event", b"id", b":", b" ", b"\n", b"\r", b"\r\n", b"\n\n", b"\r\n\r\n", b"[DONE]",
                          b"\xef\xbb\xbf", "é🦊".encode(), b"x", b'{"a":1}', b"\0", b"retry: 5", b": c"])  # fmt: skip


@settings(max_examples=examples(400), deadline=None)
@given(st.lists(st.one_of(pieces, st.binary(max_size=4)), max_size=30), st.data())
@example([b"data: x\r", b"\n", b"\r", b"\n"], None)
def test_any_bytes_any_splits(parts: list[bytes], data: st.DataObject | None) -> None:
    body = b"".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(body)), max_size=6))) if data else [1, 2]
    edges = [0, *cuts, len(body)]
    reads = tuple(body[a:b] for a, b in itertools.pairwise(edges))
    assert framed(reads) == specified(body)

"""One corpus for every carrier: the requests that arrive and the results are those of the plain carrier (docs/carriers.md)."""

from __future__ import annotations

import signal
import socket
import threading
import time
from pathlib import Path

import pytest
from stream_server import DONE, HELLO, event

_stream = pytest.importorskip(
    "annie_quant._stream", reason="_stream is not built: libcurl's headers are missing"
)

from carriers import HTTP_1, NAMES, Answer, Carrier, result_of  # noqa: E402

import annie_quant as aq  # noqa: E402

READ_BYTES = 64 << 10  # csrc/stream/parts.h
OTHERS = NAMES[1:]


@pytest.fixture
def carrier(request: pytest.FixtureRequest, certificate: Path) -> Carrier:
    return Carrier(request.param, certificate)


@pytest.fixture
def plain(certificate: Path) -> Carrier:
    return Carrier("plain", certificate)


# ---- requests

VALUES = [
    "",
    " ",
    "a",
    ":",
    "a:",
    "a::b:",
    ";",
    "a;",
    "a b",
    "a\tb",
    " padded\t",
    "a,b",
    '"quoted"',
    "é漢字",
    "\x80ÿ",
    "%0d%0a",
    "x" * 100,
    "y" * 30_000,
    "Basic eDp5",
    "[::1]",
    "=?",
    "0",
    "\\r\\n",
    "a=b; c=d",
]
NAMES_OF_FIELDS = [
    "X",
    "x-a",
    "X-Upper",
    "!#$%&'*+-.^_`|~",
    "Content",
    "Conte",
    "Cookie",
    "Accept",
    "User-Agent",
    "Authorization",
    "Range",
    "Content-Type",
    "Accept-Encoding",
    "Origin",
    "X-" + "n" * 500,
]
REQUESTS = [
    {},
    {"json": {"a": "é"}},
    {"body": b""},
    {"body": b"\0\r\n\r\nGET / HTTP/1.1\r\n\r\n"},
    {"body": b"x" * READ_BYTES},
    {"body": b"y" * (READ_BYTES + 1)},
    {"body": b"z" * 1_000_000},
    *(
        {"method": m}
        for m in (
            "GET",
            "HEAD",
            "POST",
            "PUT",
            "PATCH",
            "DELETE",
            "OPTIONS",
            "M-SEARCH!",
            "get",
            "Post",
        )
    ),
    *(
        {"method": m, "body": b"b"}
        for m in ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "X")
    ),
    *({"json": {}, "headers": {"X-Value": value, "X-Last": "end"}} for value in VALUES),
    *({"body": b"{}", "headers": {name: "v:"}} for name in NAMES_OF_FIELDS),
    {"headers": {f"X-{i}": str(i) for i in range(100)}},
    {"body": b"12345", "headers": {"content-length": "5"}},
    {"headers": {"host": "other.example:8080"}},
]


def arrivals(carrier: Carrier) -> list[tuple]:
    with carrier.server(carrier.answer(lambda i: Answer(204, [], []))) as server:
        timings = carrier.run(server, REQUESTS)
    assert [i for i, r in enumerate(timings.records()) if r["status"] != 204] == [], (
        timings.records()
    )
    return [carrier.arrived(r) for r in server.requests]


@pytest.mark.parametrize("carrier", OTHERS, indirect=True)
def test_each_carrier_sends_the_same(carrier: Carrier, plain: Carrier) -> None:
    expected, actual = arrivals(plain), arrivals(carrier)
    assert len(expected) == len(REQUESTS)
    for i, (a, b) in enumerate(zip(expected, actual, strict=True)):
        assert a == b, REQUESTS[i]


# ---- answers


def sized(total: int, framing: str) -> Answer:
    """Return an answer of this size in all in HTTP/1.1."""
    end = [event({"content": "end"}), event({}, "stop"), DONE]
    answer = Answer(chunks=[b"".join(end)], framing=framing)
    answer.chunks[0] = (
        b":"
        + b" " * (total - len(answer.http_1()) - 3 - (2 if framing == "chunked" else 0))
        + b"\n\n"
        + answer.chunks[0]
    )
    return answer


JSON = [("Content-Type", "application/json")]
ANSWERS = {
    **{
        f"a stream, {framing}": Answer(chunks=list(HELLO), framing=framing)
        for framing in ("chunked", "length", "to_end")
    },
    "no content": Answer(204, []),
    "an empty stream": Answer(chunks=[]),
    "an error page": Answer(
        404, JSON, [b'{"error": {"message": "no such model"}}'], framing="length"
    ),
    "a server's error": Answer(
        503, [("Content-Type", "text/plain")], [b"overloaded\n"], framing="length"
    ),
    "a redirect": Answer(302, [("Location", "http://elsewhere.example/")], [], framing="length"),
    "not a stream": Answer(200, JSON, [b'{"choices": []}'], framing="length"),
    "no content type": Answer(200, [], list(HELLO)),
    "compressed": Answer(
        200, [("Content-Type", "text/event-stream"), ("Content-Encoding", "gzip")], [b"\x1f\x8b"]
    ),
    "lines of JSON": Answer(
        200, [("Content-Type", "application/x-ndjson")], [b'{"a": 1}\n{"b": 2}\n']
    ),
    "early hints": Answer(chunks=list(HELLO), interim=3),
    "trailers": Answer(chunks=list(HELLO), trailers=[("X-Sum", "1"), ("Server", "trailer")]),
    "fields with strange values": Answer(
        200,
        [
            ("Content-Type", "text/event-stream"),
            ("X-Empty", ""),
            ("X-Colon", "a:b:"),
            ("X-Tab", "a\tb"),
            ("X-Twice", "1"),
            ("x-twice", "2"),
            ("X-Text", "é"),
        ],
        list(HELLO),
    ),
    "cookies": Answer(
        200, [("Content-Type", "text/event-stream"), ("Set-Cookie", "a=secret")], list(HELLO)
    ),
    "cut off": Answer(chunks=[event({"content": "Hel"})], framing="length", is_cut=True),
    "no finish": Answer(chunks=[event({"content": "Hel"})]),
    **{
        f"{READ_BYTES} {step:+d} bytes, {framing}": sized(READ_BYTES + step, framing)
        for step in (-1, 0, 1)
        for framing in ("length", "chunked")
    },
    "three reads": sized(3 * READ_BYTES, "length"),
    "an event per read": Answer(
        chunks=[event({"content": str(i)}) for i in range(500)] + [event({}, "stop"), DONE]
    ),
}


def results(carrier: Carrier) -> dict[str, dict]:
    answers = list(ANSWERS.values())
    with carrier.server(carrier.answer(lambda i: answers[i])) as server:
        timings = carrier.run(server, [{"json": {}}] * len(answers))
    return {name: result_of(timings, i) for i, name in enumerate(ANSWERS)}


@pytest.mark.parametrize("carrier", OTHERS, indirect=True)
def test_each_carrier_reads_the_same(carrier: Carrier, plain: Carrier) -> None:
    expected, actual = results(plain), results(carrier)
    for name in ANSWERS:
        if (
            name == "cut off" and carrier.name == "HTTP/2"
        ):  # the end of a connection has its own name there
            assert actual[name].pop("cause") in ("truncated", "reset") and expected[name].pop(
                "cause"
            )
        assert expected[name] == actual[name], name


@pytest.mark.parametrize("carrier", NAMES, indirect=True)
def test_an_answer_that_is_cut_at_any_byte_is_the_same(carrier: Carrier) -> None:
    answer = Answer(
        chunks=[event({"content": "Hi"}), event({}, "stop"), DONE], trailers=[("X-Sum", "1")]
    )
    size = len(answer.http_2(1) if carrier.name == "HTTP/2" else answer.http_1())
    with carrier.server(carrier.answer(lambda i: answer, cut=True, pause_s=0.002)) as server:
        timings = carrier.run(server, [{"json": {}}] * size, 1 if carrier.name == "HTTP/2" else 8)
    first = result_of(timings, 0)
    assert first["text"] == "Hi" and first["cause"] is None
    for i in range(size):
        assert result_of(timings, i) == first, i


@pytest.mark.parametrize("carrier", [n for n in NAMES if n != "HTTP/2"], indirect=True)
@pytest.mark.parametrize(
    "head", [b"HTTP/1.1 200 OK\r\nContent-Type: text/ev", b"HTTP/1.1 100 Continue\r\n\r\n"]
)
def test_an_answer_that_ends_inside_its_head_is_truncated(carrier: Carrier, head: bytes) -> None:
    def respond(connection, *of) -> None:
        carrier.answer(lambda i: head)(connection, *of)
        connection.shutdown(socket.SHUT_RDWR)

    with carrier.server(respond) as server:
        timings = carrier.run(server, [{"json": {}}])
    assert result_of(timings, 0)["cause"] == "truncated"


# ---- cancels and signals in every state

STATES = {
    "no answer": b"",
    "inside a status line": b"HTTP/1.1 20",
    "inside a head": b"HTTP/1.1 200 OK\r\nContent-Type: text/ev",
    "before the body": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
    "inside a chunk's size": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1",
    "inside an event": b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\ndata: {",
    "between events": b"HTTP/1.1 200 OK\r\nContent-Length: 9000\r\n\r\n" + HELLO[0],
    "after early hints": b"HTTP/1.1 103 x\r\n\r\n",
}


def waiting_server(carrier: Carrier, go_on: threading.Event):
    states = list(STATES.values())

    def respond(connection, *of) -> None:
        if carrier.name == "HTTP/2":
            full = Answer(chunks=list(HELLO)).http_2(of[0])
            at = (0, 5, 30, 60)[of[0] // 2 % 4]
            connection.sendall(full[:at])
            if go_on.wait(10):
                connection.sendall(full[at:])
            return
        index = int(of[0].split(b" ", 2)[1].rsplit(b"/", 1)[1])
        connection.sendall(states[index])
        if go_on.wait(10):
            connection.close()

    return carrier.server(respond)


@pytest.mark.parametrize("carrier", NAMES, indirect=True)
def test_cancelling_in_every_state(carrier: Carrier) -> None:
    go_on, cancel = threading.Event(), aq.stream.Cancel()
    threading.Timer(0.4, cancel.cancel).start()
    with waiting_server(carrier, go_on) as server:
        began = time.monotonic()
        timings = carrier.run(server, [{"json": {}}] * len(STATES), len(STATES), cancel=cancel)
        took = time.monotonic() - began
        go_on.set()
    assert [r["cause"] for r in timings.records()] == ["cancelled"] * len(STATES) and took < 8
    cancel.close()


@pytest.mark.parametrize("carrier", NAMES, indirect=True)
def test_a_signal_in_every_state(carrier: Carrier) -> None:
    """Its handler runs at once, in the middle of the run, and the run goes on."""
    go_on, times = threading.Event(), []

    def note(*_: object) -> None:
        times.append(time.monotonic())
        if len(times) == 3:
            go_on.set()  # only now does the server go on

    before = signal.signal(signal.SIGALRM, note)
    try:
        with waiting_server(carrier, go_on) as server:
            signal.setitimer(signal.ITIMER_REAL, 0.2, 0.05)
            timings = carrier.run(server, [{"json": {}}] * len(STATES), len(STATES))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    causes = [r["cause"] for r in timings.records()]
    assert len(times) >= 3
    assert not {"cancelled", "timeout", "not_started"} & set(causes), causes
    if carrier.name == "HTTP/2":
        assert [r["text"] for r in timings.records()] == ["Hello there."] * len(STATES)


@pytest.mark.parametrize("carrier", HTTP_1, indirect=True)
def test_a_deadline_while_a_request_is_sent(carrier: Carrier) -> None:
    with carrier.server(lambda connection, request: None) as server:
        server._serve = lambda connection: time.sleep(20)  # accepts, and reads nothing
        began = time.monotonic()
        timings = carrier.run(server, [{"body": b"x" * 30_000_000}] * 2, 2, deadline_s=0.5)
    assert time.monotonic() - began < 10
    assert [r["cause"] for r in timings.records()] == ["deadline"] * 2

"""docs/carriers.md: each cell of its table is measured."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from paths import ROOT
from stream_server import DONE, HELLO, chunk, event

_stream = pytest.importorskip(
    "annie_quant._stream", reason="_stream is not built: libcurl's headers are missing"
)

from carriers import NAMES, Answer, Carrier  # noqa: E402

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
BODY = b"".join(HELLO)
LENGTH = b"Content-Length: %d\r\n" % len(BODY)
CHUNKED = b"Transfer-Encoding: chunked\r\n"
HELLO_ANSWER = Answer(chunks=list(HELLO))


def connections(carrier: Carrier, concurrency: int = 1, **options) -> str:
    all_there = threading.Barrier(concurrency)

    def slow(connection, *of) -> None:
        if carrier.name != "HTTP/2":  # its server's only thread would wait for itself
            all_there.wait(5)
        carrier.answer(lambda i: HELLO_ANSWER)(connection, *of)

    with carrier.server(slow) as server:
        timings = carrier.run(server, [{"json": {}}] * 3, concurrency, **options)
        assert [r["error"] for r in timings.records()] == [None] * 3
        return str(server.connections)


def sendings(carrier: Carrier, lost: int) -> str:
    """Return how often a request is sent whose connection ends without an answer: the first or the second request."""
    count = 0

    def respond(connection, *of) -> None:
        nonlocal count
        count += 1
        if count == lost:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        else:
            carrier.answer(lambda i: HELLO_ANSWER)(connection, *of)

    with carrier.server(respond) as server:
        carrier.run(server, [{"json": {}}] * lost)
    return str(count - lost + 1)


def redirected(carrier: Carrier) -> str:
    with carrier.server(carrier.answer(lambda i: HELLO_ANSWER)) as target:
        answer = Answer(302, [("Location", target.url)], [], framing="length")
        with carrier.server(carrier.answer(lambda i: answer)) as server:
            carrier.run(server, [{"json": {}}])
        return str(len(target.requests))


def stamped(carrier: Carrier) -> str:
    pieces = [event({"content": str(i)}) for i in range(3)]

    def respond(connection, *of) -> None:
        whole = Answer(chunks=[*pieces, DONE])
        data = whole.http_2(of[0]) if carrier.name == "HTTP/2" else whole.http_1()
        for piece in pieces:
            at = data.index(piece) + len(piece) + (0 if carrier.name == "HTTP/2" else 2)
            connection.sendall(data[:at])
            data = data[at:]
            time.sleep(0.05)
        connection.sendall(data)

    with carrier.server(respond) as server:
        timings = carrier.run(server, [{"json": {}}])
    rows = timings.events[timings.events["kind"] == 1]
    return (
        "yes" if (rows["kernel_ns"][:3] != 0).sum() >= 2 else "no"
    )  # libcurl may read more than was stamped


def outcome(carrier: Carrier, answer: bytes | Answer) -> str:
    """Return whether an answer is read to its end or is an error."""

    def respond(connection, *of) -> None:
        carrier.answer(lambda i: answer)(connection, *of)
        time.sleep(0.05)
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)

    with carrier.server(respond) as server:
        record = carrier.run(server, [{"json": {}, "timeout_s": 3}]).records()[0]
    return "read" if record["error"] is None and record["text"] == "Hello there." else "error"


def head_of(size: int) -> Answer:
    return Answer(
        200,
        [
            ("Content-Type", "text/event-stream"),
            *((f"X-{i}", "x" * 100) for i in range(size // 107)),
        ],
        list(HELLO),
    )


def raw(answer: bytes) -> Callable[[Carrier], str]:
    return lambda carrier: "-" if carrier.name == "HTTP/2" else outcome(carrier, answer)


def after_extra_bytes(carrier: Carrier) -> str:
    """Return the requests on the first connection: each answer there is followed by bytes of no answer."""
    if carrier.name == "HTTP/2":
        return "-"

    def respond(connection, request: bytes) -> None:
        connection.sendall(HEAD + LENGTH + b"\r\n" + BODY + b"HTTP/1.1 200 OK\r\n\r\n")
        time.sleep(0.02)

    with carrier.server(respond) as server:
        held = server.requests
        carrier.run(server, [{"json": {}}] * 3)
        return str(len(held) // server.connections)


PROBES: dict[str, Callable[[Carrier], str]] = {
    "connections for three requests, one after the other": connections,
    "connections for three requests at the same time": lambda c: connections(c, 3),
    "connections for three requests with fresh_connections": lambda c: connections(
        c, fresh_connections=True
    ),
    "sendings of a request whose reused connection ends before its answer": lambda c: sendings(
        c, 2
    ),
    "sendings of a request whose new connection ends before its answer": lambda c: sendings(c, 1),
    "requests sent to the target of a redirect": redirected,
    "kernel stamps of events": stamped,
    "a head of 200 KB": lambda c: outcome(c, head_of(200_000)),
    "a head of 300 KB": lambda c: outcome(c, head_of(300_000)),
    "two different Content-Lengths": raw(HEAD + LENGTH + b"Content-Length: 3\r\n\r\n" + BODY),
    "Content-Length and chunked": raw(
        HEAD + LENGTH + CHUNKED + b"\r\n" + chunk(BODY) + b"0\r\n\r\n"
    ),
    "a coding other than chunked": raw(
        HEAD + b"Transfer-Encoding: x, chunked\r\n\r\n" + chunk(BODY) + b"0\r\n\r\n"
    ),
    "a folded field": raw(HEAD + b"X-Folded: a\r\n b\r\n" + LENGTH + b"\r\n" + BODY),
    "a space before a field's colon": raw(HEAD + b"X-Space : a\r\n" + LENGTH + b"\r\n" + BODY),
    "a chunk that ends in a bare LF": raw(
        HEAD + CHUNKED + b"\r\n" + b"%x\n%b\n0\n\n" % (len(BODY), BODY)
    ),
    "a chunk that is longer than its size": raw(
        HEAD + CHUNKED + b"\r\n" + b"5\r\n%b\r\n0\r\n\r\n" % BODY
    ),
    "an answer without a status line": raw(BODY),
    "an answer that is followed by other bytes": raw(HEAD + LENGTH + b"\r\n" + BODY + b"extra"),
    "requests on a connection after such an answer": after_extra_bytes,
}


def table() -> dict[str, dict[str, str]]:
    """Return guarantee → carrier → cell."""
    lines = [
        line.strip("|").split("|")
        for line in (ROOT / "docs/carriers.md").read_text().splitlines()
        if line.startswith("|")
    ]
    head, _, *rows = [[cell.strip() for cell in line] for line in lines]
    assert tuple(head[1:]) == NAMES
    return {row[0]: dict(zip(NAMES, row[1:], strict=True)) for row in rows}


def test_the_table_has_every_probe() -> None:
    assert list(table()) == list(PROBES)


@pytest.mark.parametrize("name", NAMES)
def test_each_cell_is_what_the_carrier_does(name: str, certificate: Path) -> None:
    carrier = Carrier(name, certificate)
    assert {guarantee: probe(carrier) for guarantee, probe in PROBES.items()} == {
        g: cells[name] for g, cells in table().items()
    }

"""Connections that are used again: bytes that no request asked for, passed descriptors."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import threading
import time
from pathlib import Path

import pytest
from stream_server import DONE, HEAD, HELLO, RawServer, chunk, event, stream

_stream = pytest.importorskip(
    "annie_quant._stream", reason="_stream is not built: libcurl's headers are missing"
)

import annie_quant as aq  # noqa: E402

READ_BYTES = 64 << 10  # csrc/stream/parts.h


def requests_of(url: str, count: int) -> list[aq.stream.Request]:
    return [aq.stream.Request(url, json={"n": n}, timeout_s=5) for n in range(count)]


def number_of(request: bytes) -> str:
    return str(json.loads(request.partition(b"\r\n\r\n")[2])["n"])


def answer(text: str, size: int | None = None) -> bytes:
    """Return a whole answer; size: of it in all, reached by a comment at its beginning."""
    body = event({"content": text}) + event({}, "stop") + DONE
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: %7d\r\n\r\n"
    if size is not None:
        body = b":" + b" " * (size - len(head % 0) - len(body) - 3) + b"\n\n" + body
    return head % len(body) + body


# ---- answers that no request asked for


@contextlib.contextmanager
def loop_held(after_s: float, for_s: float, action=lambda: None):
    """Hold the loop of a run in the main thread up for a while, by a signal handler."""

    def hold(*_: object) -> None:
        action()
        time.sleep(for_s)

    before = signal.signal(signal.SIGALRM, hold)
    signal.setitimer(signal.ITIMER_REAL, after_s)
    try:
        yield
    finally:
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize(
    "extra", [b"x", answer("stale"), b"HTTP/1.1 408 Timeout\r\nContent-Length: 0\r\n\r\n"]
)
def test_what_arrives_before_the_next_request_is_not_its_answer(extra: bytes) -> None:
    """The second request is due while the loop is held up, and the server sends something else at that time."""

    def respond(connection: socket.socket, request: bytes) -> None:
        connection.sendall(answer(number_of(request)))
        time.sleep(0.3)
        connection.sendall(extra)

    with RawServer(respond) as server, loop_held(0.2, 0.3):
        requests = [
            aq.stream.Request(server.url, json={"n": n}, timeout_s=5, start_s=0.4 * n)
            for n in range(2)
        ]
        timings = aq.stream.run(requests)
    assert [r["text"] for r in timings.records()] == ["0", "1"] and server.connections == 2
    assert not timings.requests["resent_us"].any(), (
        "nothing was sent on the connection that is not reused"
    )


@pytest.mark.parametrize(
    "extra",
    [b"x", answer("stale"), answer("stale", 3 * READ_BYTES)],
    ids=["byte", "answer", "large"],
)
def test_bytes_after_an_answer_that_fills_a_read(extra: bytes) -> None:
    """The loop is held up by a signal handler until all of this has arrived; then one read ends where the answer ends."""
    waiting = threading.Event()

    def respond(connection: socket.socket, request: bytes) -> None:
        waiting.wait(5)
        connection.sendall(
            answer(number_of(request), READ_BYTES) + (extra if number_of(request) == "0" else b"")
        )

    with RawServer(respond) as server, loop_held(0.2, 0.3, waiting.set):
        records = aq.stream.run(requests_of(server.url, 3)).records()
    assert [r["text"] for r in records] == ["0", "1", "2"] and server.connections == 2


def test_a_recording_without_the_column_is_read(tmp_path: Path) -> None:
    from numpy.lib import recfunctions

    with RawServer(stream(HELLO)) as server:
        timings = aq.stream.run(requests_of(server.url, 1))
    timings.requests = recfunctions.drop_fields(timings.requests, "resent_us", usemask=False)
    timings.save(tmp_path)
    assert aq.stream.Timings.load(tmp_path).records()[0]["text"] == "Hello there."


# ---- descriptors


def test_descriptors_that_a_unix_socket_passes_are_closed(tmp_path: Path) -> None:
    path = str(tmp_path / "socket")

    def respond(connection: socket.socket, request: bytes) -> None:
        socket.send_fds(
            connection, [HEAD + b"".join(map(chunk, HELLO)) + b"0\r\n\r\n"], [0, 1, 2, 0]
        )

    with RawServer(respond, path=path) as server:
        aq.stream.run(requests_of(server.url, 1), unix_socket=path)
        before = len(list(Path("/proc/self/fd").iterdir()))
        records = aq.stream.run(requests_of(server.url, 20), unix_socket=path).records()
        time.sleep(0.1)  # the server's thread closes its own
    assert [r["text"] for r in records] == ["Hello there."] * 20
    assert len(list(Path("/proc/self/fd").iterdir())) <= before + 2

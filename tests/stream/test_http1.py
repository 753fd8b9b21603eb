"""Answers of HTTP/1.1 against RFC 9112 over real sockets: framing, limits, reused connections."""

from __future__ import annotations

import socket
import threading

import pytest
from stream_server import HEAD, HELLO, RawServer, chunk, stream

_stream = pytest.importorskip(
    "annie_quant._stream", reason="_stream is not built: libcurl's headers are missing"
)

import annie_quant as aq  # noqa: E402

Request = aq.stream.Request
BODY = b"".join(HELLO)
SIZE = b"%d" % len(BODY)
OK = b"HTTP/1.1 200 OK\r\n"


def output(
    *answers: bytes, close: bool = False, **options
) -> tuple[list[dict], RawServer, aq.stream.Timings]:
    """One request for each of these answers, given as bytes."""
    queue = iter(answers)

    def respond(connection: socket.socket, request: bytes) -> None:
        connection.sendall(next(queue))
        if close:
            connection.close()

    with RawServer(respond) as server:
        timings = aq.stream.run(
            [Request(server.url, json={}, timeout_s=5)] * len(answers), **options
        )
    return timings.records(), server, timings


WHOLE = {
    "length": OK + b"Content-Length: " + SIZE + b"\r\n\r\n" + BODY,
    "length repeated": OK + b"Content-Length: %b\r\ncontent-length:%b\r\n\r\n" % (SIZE, SIZE) + BODY,
    "chunked, extensions": OK + b"Transfer-Encoding: chunked\r\n\r\n%X ;a=\"b\"\r\n%b\r\n0;x\r\n\r\n" % (len(BODY), BODY),
    "chunked, trailers": HEAD + chunk(BODY) + b"000\r\nX-Sum: 1\r\nContent-Length: 3\r\n\r\n",
    "bare LF in the head": b"HTTP/1.1 200 OK\nContent-Length: " + SIZE + b"\n\n" + BODY,
    "no reason": b"HTTP/1.1 200\r\nContent-Length: " + SIZE + b"\r\n\r\n" + BODY,
    "interim answers": b"HTTP/1.1 100 C\r\n\r\nHTTP/1.1 103 x\r\nContent-Length: 9\r\n\r\n" + HEAD + chunk(BODY) + b"0\r\n\r\n",
    "1.0 that keeps": b"HTTP/1.0 200 OK\r\nConnection: Keep-Alive\r\nContent-Length: " + SIZE + b"\r\n\r\n" + BODY,
}  # fmt: skip


@pytest.mark.parametrize("answer", WHOLE.values(), ids=WHOLE.keys())
def test_answers_with_their_own_framing_allow_reuse(answer: bytes) -> None:
    records, server, timings = output(answer, answer, answer)
    assert [(r["text"], r["error"], r["status"]) for r in records] == [
        ("Hello there.", None, 200)
    ] * 3
    assert [r["new_connection"] for r in records] == [
        True,
        False,
        False,
    ] and server.connections == 1
    assert timings.body(2) == BODY


@pytest.mark.parametrize(
    "answer",
    [
        OK + b"Connection: x, close\r\nContent-Length: " + SIZE + b"\r\n\r\n" + BODY,
        b"HTTP/1.0 200 OK\r\nContent-Length: " + SIZE + b"\r\n\r\n" + BODY,
        OK + b"Content-Length: " + SIZE + b"\r\n\r\n" + BODY + b"HTTP/1.1 200 and more",
    ],
    ids=["close", "1.0", "bytes after the answer"],
)
def test_answers_after_which_the_connection_is_not_reused(answer: bytes) -> None:
    records, server, _ = output(answer, answer)
    assert [r["error"] for r in records] == [None, None] and server.connections == 2


def test_a_body_that_ends_with_the_connection() -> None:
    records, _, _ = output(OK + b"\r\n" + BODY, close=True)
    assert (records[0]["text"], records[0]["error"]) == ("Hello there.", None)


def fields(*lines: bytes) -> bytes:
    return OK + b"".join(line + b"\r\n" for line in lines) + b"\r\n" + BODY


FAULTS = {
    "another protocol": (b"SSH-2.0-OpenSSH_9.6\r\n", "HTTP/0.9"),
    "HTTP/2 in the clear": (b"HTTP/2 200\r\n\r\n", "not HTTP"),
    "HTTP/1.2": (b"HTTP/1.2 200 OK\r\n\r\n", "HTTP version"),
    "a status of two digits": (b"HTTP/1.1 20 OK\r\n\r\n", "response code"),
    "a blank line first": (b"\r\n" + OK, "HTTP/0.9"),
    "a space before the colon": (fields(b"Content-Length : 5"), "malformed header"),
    "a folded field": (fields(b"A: b", b" c"), "malformed header"),
    "a folded cookie": (fields(b"Set-Cookie: a=b;", b" secret=c"), "malformed header"),
    "a field without a colon": (fields(b"Content-Length"), "without colon"),
    "a NUL in a value": (fields(b"A: \0"), "Nul byte"),
    "a lone CR in a value": (fields(b"A: b\rContent-Length: 0"), "malformed header"),
    "two lengths": (fields(b"Content-Length: 5", b"Content-Length: 6"), "Content-Length"),
    "a negative length": (fields(b"Content-Length: -1"), "Content-Length"),
    "a signed length": (fields(b"Content-Length: +5"), "Content-Length"),
    "a length of 20 digits": (fields(b"Content-Length: 18446744073709551617"), "Content-Length"),
    "no length": (fields(b"Content-Length:"), "Content-Length"),
    "length with coding": (
        fields(b"Content-Length: 5", b"Transfer-Encoding: chunked"),
        "Content-Length",
    ),
    "another coding": (fields(b"Transfer-Encoding: gzip, chunked"), "Transfer-Encoding"),
    "chunked twice": (
        fields(b"Transfer-Encoding: chunked", b"Transfer-Encoding: chunked"),
        "Transfer-Encoding",
    ),
    "chunked in 1.0": (
        b"HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
        "Transfer-Encoding",
    ),
    "a switch": (b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\n\r\n", "protocol"),
    "a chunk without a size": (HEAD + b"\r\n", "chunked framing"),
    "a chunk size of 17 digits": (HEAD + b"fffffffffffffffff\r\n", "chunked framing"),
    "a chunk that is longer than its size": (HEAD + b"5\r\nhello!\r\n", "chunked framing"),
    "a head of 300 KB": (OK + b"A: 0123456789\r\n" * 20_000, "too large"),
    "trailers of 300 KB": (HEAD + b"0\r\n" + b"A: 0123456789\r\n" * 20_000, "too large"),
}


@pytest.mark.parametrize(("answer", "words"), FAULTS.values(), ids=FAULTS.keys())
def test_what_http_forbids_fails_at_once(answer: bytes, words: str) -> None:
    """The server does not close the connection: only the client can end the request before its timeout."""
    record = output(answer)[0][0]
    assert record["cause"] == "protocol" and words.lower() in record["error"].lower(), record[
        "error"
    ]
    assert record["e2e_ms"] < 3000


@pytest.mark.parametrize(
    "answer",
    [
        OK,
        OK + b"Content-Length: 999\r\n\r\n" + HELLO[1],
        HEAD + chunk(HELLO[0]),
        HEAD + b"5\r\nhel",
        HEAD + b"0\r\n",
    ],
)
def test_truncated_answers(answer: bytes) -> None:
    assert output(answer, close=True)[0][0]["cause"] == "truncated"


def test_a_large_request_is_sent_completely_and_an_early_answer_is_valid() -> None:
    prompt = "x" * (8 << 20)
    with RawServer(stream(HELLO)) as server:
        records = aq.stream.run([Request(server.url, json={"p": prompt})] * 2).records()
        assert [r["text"] for r in records] == ["Hello there."] * 2
        assert all(len(r) > len(prompt) for r in server.requests) and server.connections == 1

    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/"

        def refuse() -> None:
            connection, _ = listener.accept()
            connection.recv(1000)
            connection.sendall(b"HTTP/1.1 413 Too large\r\nContent-Length: 8\r\n\r\ntoo long")
            answered.wait(10)
            connection.close()

        answered = threading.Event()
        thread = threading.Thread(target=refuse)
        thread.start()
        record = aq.stream.run([Request(url, json={"p": prompt}, timeout_s=5)]).records()[0]
        answered.set()
        thread.join()
    assert (record["status"], record["cause"]) == (413, "http") and "too long" in record["error"]

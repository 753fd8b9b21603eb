"""The HTTP/1.1 reader against RFC 9112 over real sockets: framing, limits, reused connections, split reads, stamps."""

from __future__ import annotations

import json
import re
import shutil
import socket
import ssl
import subprocess
import threading
import time

import numpy as np
import pytest
from stream_server import DONE, HEAD, HELLO, RawServer, chunk, event, stream

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
    "length repeated": OK + b"Content-Length: %b\r\ncontent-length:%b , %b\r\n\r\n" % (SIZE, SIZE, SIZE) + BODY,
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
    "another protocol": (b"SSH-2.0-OpenSSH_9.6\r\n", "not HTTP"),
    "HTTP/2 in the clear": (b"HTTP/2 200\r\n\r\n", "not HTTP"),
    "HTTP/1.2": (b"HTTP/1.2 200 OK\r\n\r\n", "not HTTP"),
    "a status of two digits": (b"HTTP/1.1 20 OK\r\n\r\n", "not HTTP"),
    "a blank line first": (b"\r\n" + OK, "not HTTP"),
    "a space before the colon": (fields(b"Content-Length : 5"), "malformed header"),
    "a folded field": (fields(b"A: b", b" c"), "malformed header"),
    "a field without a colon": (fields(b"Content-Length"), "malformed header"),
    "a NUL in a value": (fields(b"A: \0"), "malformed header"),
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
    "a chunk size that is not a number": (HEAD + b"0x5\r\nhello\r\n", "chunked framing"),
    "a chunk size of 17 digits": (HEAD + b"fffffffffffffffff\r\n", "chunked framing"),
    "a chunk size ended by LF": (HEAD + b"5\nhello\n", "chunked framing"),
    "a chunk that is longer than results_of": (HEAD + b"5\r\nhello!\r\n", "chunked framing"),
    "an endless chunk extension": (HEAD + b"5;" + b"x" * 5000, "chunked framing"),
    "a field of 65 KB": (OK + b"A: " + b"x" * 66_000, "too large"),
    "a head of 300 KB": (OK + b"A: 0123456789\r\n" * 20_000, "too large"),
    "trailers of 300 KB": (HEAD + b"0\r\n" + b"A: 0123456789\r\n" * 20_000, "too large"),
    "100 interim answers": (b"HTTP/1.1 103 x\r\n\r\n" * 100, "too large"),
}


@pytest.mark.parametrize(("answer", "words"), FAULTS.values(), ids=FAULTS.keys())
def test_what_http_forbids_fails_at_once(answer: bytes, words: str) -> None:
    """The server does not close the connection: only the reader can end the request before its timeout."""
    record = output(answer)[0][0]
    assert record["cause"] == "protocol" and words in record["error"], record["error"]
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


def test_statuses_without_a_body() -> None:
    for head in (
        b"HTTP/1.1 204 No\r\nContent-Length: 9\r\n\r\n",
        b"HTTP/1.1 304 No\r\nTransfer-Encoding: chunked\r\n\r\n",
    ):
        records, server, _ = output(head, head)
        assert [r["body_bytes"] for r in records] == [0, 0] and server.connections == 1
    with RawServer(lambda c, r: c.sendall(OK + b"Content-Length: 99\r\n\r\n")) as server:
        assert (
            aq.stream.run([Request(server.url, method="HEAD", timeout_s=3)]).records()[0]["status"]
            == 200
        )


def test_an_answer_in_single_bytes() -> None:
    answer = b"HTTP/1.1 100 C\r\n\r\n" + HEAD + chunk(BODY) + b"0\r\nX: y\r\n\r\n"

    def respond(connection: socket.socket, request: bytes) -> None:
        for i in range(len(answer)):
            connection.sendall(answer[i : i + 1])

    with RawServer(respond) as server:
        timings = aq.stream.run([Request(server.url, json={}, timeout_s=10)] * 2)
    assert [r["text"] for r in timings.records()] == ["Hello there."] * 2 and timings.body(
        1
    ) == BODY


def test_the_request_as_it_is_sent() -> None:
    headers = {"X-A": "b", "X-Empty": "", "Host": "other.example", "Content-Length": "7"}
    with RawServer(stream(HELLO)) as server:
        urls = [server.url + "?q=a%20b&r#part", server.url.replace("/v1/chat/completions", "")]
        aq.stream.run(
            [
                Request(urls[0], json={"a": 1}, headers=headers),
                Request(urls[1]),
                Request(urls[1], method="POST"),
            ]
        )
        first, second, third = server.requests
    lines = first.split(b"\r\n")
    assert lines[0] == b"POST /v1/chat/completions?q=a%20b&r HTTP/1.1" and first.endswith(
        b'\r\n\r\n{"a":1}'
    )
    assert [line for line in lines if line.lower().startswith(b"content-length")] == [
        b"Content-Length: 7"
    ]
    assert b"Host: other.example" in lines and b"X-Empty:" in lines and b"X-A: b" in lines
    assert second.startswith(b"GET / HTTP/1.1\r\nHost: 127.0.0.1:%d\r\n" % server.port)
    assert b"Content-Length" not in second and b"Content-Length: 0\r\n" in third
    assert re.search(rb"User-Agent: annie-quant/\S+\r\n", second)


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


def stamped(count: int, gap_s: float):
    """Each event contains its send time (CLOCK_MONOTONIC); without a gap they are sent as fast as possible."""

    def respond(connection, request) -> None:
        connection.sendall(HEAD)
        for _ in range(count):
            if gap_s:
                time.sleep(gap_s)
            connection.sendall(chunk(event({"content": str(time.monotonic_ns())})))
        connection.sendall(chunk(DONE) + b"0\r\n\r\n")

    return respond


@pytest.mark.parametrize("gap_s", [0, 0.002], ids=["flood", "paced"])
@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_no_stamp_is_earlier_than_its_event(tls: bool, gap_s: float, tmp_path) -> None:
    """However many events one read has, and whatever arrives during it: a stamp is never too early."""
    context = None
    if tls:
        if not shutil.which("openssl"):
            pytest.skip("the openssl command makes the test's certificate, and it is not here")
        pem = tmp_path / "both.pem"
        command = [
            "openssl",
            "req",
            "-x509",
            "-newkey",
            "rsa:2048",
            "-nodes",
            "-subj",
            "/CN=localhost",
        ]
        subprocess.run(
            [*command, "-keyout", pem, "-out", f"{pem}.crt"], capture_output=True, check=True
        )
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(f"{pem}.crt", pem)
    if tls and not gap_s:
        check_stamps(
            gap_s, context, tls
        )  # during a flood over TLS nearly every read takes more than had arrived at its stamp
        return
    # Plain HTTP: one call returns data and stamp, whatever else the machine does. TLS: the stamp is dropped if more data arrived
    # between the stamp and libcurl's read, which is more likely on a busy machine; a client that never stamps has a share of 0.
    expected, shares = 0.3 if tls else 0.95, []
    while len(shares) < 3 and not any(share > expected for share in shares):
        shares.append(check_stamps(gap_s, context, tls))
    assert max(shares) > expected, f"few events bear a kernel stamp: {shares}"


def check_stamps(gap_s: float, context: ssl.SSLContext | None, tls: bool) -> float:
    """Compare one run's stamps with the server's send times; return the share of events with a kernel stamp."""
    count = 200 if gap_s else 2000
    with RawServer(stamped(count, gap_s), tls=context) as server:
        timings = aq.stream.run(
            [Request(server.url, json={}, timeout_s=20)] * 4, 4, verify_tls=False
        )
    rows = timings.events[timings.events["kind"] == 1]
    sent = [
        int(json.loads(timings.raw(i)[6:])["choices"][0]["delta"]["content"])
        for i in np.flatnonzero(timings.events["kind"] == 1)
    ]
    assert len(sent) == 4 * count
    known = rows["kernel_ns"] != 0
    early = (rows["kernel_ns"] - np.array(sent))[known]  # in some floods over TLS no stamp is known
    assert (early > -50_000).all(), "the clocks' distance is known to some µs"
    assert (rows["user_ns"] - np.array(sent)).min() > 0
    overread = (rows["flags"] & 8) != 0
    assert not (known & overread).any() and (tls or not overread.any())
    return float(known.mean())

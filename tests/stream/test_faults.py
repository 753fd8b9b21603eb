"""Faults on the wire: each is a record with a cause, never a crash, a hang or a lost request."""

from __future__ import annotations

import errno
import gzip
import socket
import subprocess
import sys
import textwrap
import threading
import time

import pytest
from stream_server import DONE, HEAD, HELLO, RawServer, chunk, event, reset, stream

_stream = pytest.importorskip(
    "annie_quant._stream", reason="_stream is not built: libcurl's headers are missing"
)

import annie_quant as aq  # noqa: E402

Request = aq.stream.Request


def one(respond, request: dict | None = None, **options) -> dict:
    with RawServer(respond) as server:
        began = time.monotonic()
        record = aq.stream.run(
            [Request(server.url, json={}, **(request or {}))], **options
        ).records()[0]
        assert time.monotonic() - began < 15, "it hung"
    return record


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def page(status: str, kind: str, body: bytes):
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    )
    return lambda connection, request: connection.sendall(head + body)


def test_refused() -> None:
    record = aq.stream.run([Request(f"http://127.0.0.1:{free_port()}/", json={})]).records()[0]
    assert (record["cause"], record["status"]) == ("refused", 0)
    assert "connection refused" in record["error"] and record["first_byte_ms"] is None


def test_reset_mid_event() -> None:
    def respond(connection, request) -> None:
        connection.sendall(HEAD + chunk(event({"content": "Hi"})) + b"40\r\ndata: {")
        time.sleep(0.05)
        reset(connection)

    record = one(respond)
    assert (record["cause"], record["text"]) == ("reset", "Hi")


def test_a_reset_while_the_request_is_sent() -> None:
    """A reset breaks an answer, also if the sending of the request meets it first; not one that has said that it is complete."""
    answer = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
    for body in (b"".join(HELLO), b"".join(HELLO[:2])):

        def serve(listener: socket.socket, body: bytes = body) -> None:
            connection = listener.accept()[0]
            connection.recv(1000)
            connection.sendall(answer + body)
            time.sleep(0.2)
            reset(connection)

        with socket.create_server(("127.0.0.1", 0)) as listener:
            server = threading.Thread(target=serve, args=(listener,))
            server.start()
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            request = Request(url, json={"text": "x" * 30_000_000}, timeout_s=5)
            timings = aq.stream.run([request])
            server.join()
        record = timings.records()[0]
        assert timings.requests["os_errno"].tolist() == [errno.ECONNRESET]
        if body == b"".join(HELLO):
            assert (record["text"], record["cause"]) == ("Hello there.", None)
            assert "ended badly after [DONE]" in record["warnings"][0]
        else:
            assert (record["text"], record["cause"]) == ("Hello", "reset")


def test_a_damaged_chunk_size_is_not_a_complete_answer() -> None:
    """Its chunk has the framing of all others in it; the stream's end mark arrives, and the connection ends inside the chunk."""
    answer = HEAD + b"%x1\r\n" % len(HELLO[0]) + HELLO[0] + b"\r\n"
    answer += chunk(HELLO[1]).replace(b"\r\n", b"\r\n\t", 1) + b"".join(map(chunk, HELLO[2:]))

    def respond(connection, request) -> None:
        connection.sendall(answer)
        connection.close()

    record = one(respond)
    assert record["cause"] in ("malformed", "truncated", "protocol", "reset"), record


def test_stall_and_whole_timeout() -> None:
    def stall(connection, request) -> None:
        connection.sendall(HEAD + chunk(event({"content": "Hi"})))
        time.sleep(1)

    idle = one(stall, {"idle_timeout_s": 0.15})
    assert (idle["cause"], idle["text"]) == ("idle", "Hi") and 150 <= idle["e2e_ms"] < 900
    whole = one(stall, {"timeout_s": 0.15})
    assert (
        whole["cause"] == "timeout" and 150 <= whole["e2e_ms"] < 900 and "0.15 s" in whole["error"]
    )


def test_slow_loris() -> None:
    """One byte per 20 ms is never idle; the total timeout ends it."""

    def drip(connection, request) -> None:
        for byte in HEAD * 3:
            connection.sendall(bytes([byte]))
            time.sleep(0.02)

    record = one(drip, {"timeout_s": 0.3, "idle_timeout_s": 0.2})
    assert record["cause"] == "timeout" and record["status"] == 0


@pytest.mark.parametrize(
    ("status", "kind", "body", "words"),
    [
        ("404 Not Found", "application/json", b'{"error":{"message":"no model","type":"x","code":404}}', "no model"),
        ("400 Bad Request", "application/json", b'{"error":{"code":400,"message":"too long","type":"invalid"}}', "too long"),
        ("422 Unprocessable", "application/json", b'{"detail":[{"msg":"field required"}]}', "field required"),
        ("503 Unavailable", "text/html", b"<html><head><title>Bad\n gateway</title></head><body>x</body></html>", "Bad gateway"),
        ("500 Oops", "text/plain", b"Internal \xff Error", "Internal"),
        ("500 Oops", "text/event-stream", b"data: {}\n\n", "data: {}"),
        ("429 Slow down", "application/json", b"", "no message"),
        ("401 No", "application/json", b"[1]", "[1]"),
    ],
)  # fmt: skip
def test_error_pages(status: str, kind: str, body: bytes, words: str) -> None:
    record = one(page(status, kind, body))
    assert record["cause"] == "http" and record["status"] == int(status[:3])
    assert (
        record["error"].startswith(f"HTTP {status[:3]}: ")
        and words in record["error"]
        and "\n" not in record["error"]
    )


def test_an_answer_that_is_not_a_stream() -> None:
    record = one(page("200 OK", "application/json", b'{"choices":[{"message":{"content":"x"}}]}'))
    assert record["cause"] == "not_a_stream" and "application/json" in record["error"]
    assert one(page("200 OK", "application/json", b'{"error":"asleep"}'))["error"].endswith(
        "asleep"
    )
    assert one(page("302 Found", "text/html", b""))["cause"] == "redirect"
    assert one(page("204 No Content", "text/event-stream", b""))["cause"] == "no_events"
    assert (
        one(page("200 OK", "text/event-stream", b""))["error"]
        == "the stream has no event (0 bytes)"
    )


@pytest.mark.parametrize("kind", ["text/event-stream", "application/json"])
def test_a_compressed_answer_is_named(kind: str) -> None:
    body = gzip.compress(b"".join(HELLO))
    record = one(page("200 OK", f"{kind}\r\nContent-Encoding: gzip", body))
    assert record["cause"] == "encoded" and "Content-Encoding gzip" in record["error"]
    plain = one(page("200 OK", "text/event-stream\r\nContent-Encoding: identity", b"".join(HELLO)))
    assert plain["error"] is None and plain["text"] == "Hello there."


def test_16_mb_event_and_an_endless_one() -> None:
    text = "x" * (16 << 20)
    record = one(stream([event({"content": text}, "stop"), DONE]))
    assert record["error"] is None and len(record["text"]) == 16 << 20

    def endless(connection, request) -> None:
        connection.sendall(HEAD + chunk(event({"content": "Hi"})))
        while True:
            connection.sendall(chunk(b"data: " + b"x" * 65536))

    bounded = one(endless, max_event_bytes=1 << 20)
    assert (bounded["cause"], bounded["text"]) == ("event_too_large", "Hi")


def test_an_event_before_one_that_is_too_large_is_stored_once() -> None:
    first = event({"content": "Hi"})

    def respond(connection, request) -> None:
        connection.sendall(HEAD + chunk(first[:-2]))
        time.sleep(0.05)  # the next read ends the first event, and begins one that is too large
        connection.sendall(chunk(first[-2:] + b"data: " + b"x" * 5000))

    with RawServer(respond) as server:
        timings = aq.stream.run([Request(server.url, json={})], max_event_bytes=1000)
    record = timings.records()[0]
    assert (record["cause"], record["text"]) == ("event_too_large", "Hi")
    assert timings.frames.tobytes().count(first) == 1
    assert timings.frames.size == sum(timings.reads["size"])


def test_an_endless_error_page_is_bounded() -> None:
    def endless(connection, request) -> None:
        connection.sendall(b"HTTP/1.1 500 Oops\r\nContent-Type: text/html\r\n\r\n")
        while True:
            connection.sendall(b"x" * 65536)

    assert one(endless, max_event_bytes=1 << 20)["cause"] == "event_too_large"


def test_dns_and_tls_failures(tmp_path) -> None:
    record = aq.stream.run([Request("http://no-such-host.invalid/", timeout_s=3)]).records()[0]
    assert record["cause"] in ("dns", "timeout")
    with RawServer(stream(HELLO)) as server:  # plain HTTP where TLS is expected
        record = aq.stream.run(
            [Request(server.url.replace("http:", "https:"), json={}, timeout_s=3)]
        ).records()[0]
    assert record["cause"] in ("tls", "reset", "timeout")


def test_few_file_descriptors() -> None:
    """10,000 requests at once with 60 descriptors: each is answered or reports the reason."""
    script = """
        import resource, sys, json, collections
        import annie_quant as aq
        resource.setrlimit(resource.RLIMIT_NOFILE, (60, 60))
        requests = [aq.stream.Request(sys.argv[1], json={}, timeout_s=20) for _ in range(10000)]
        records = aq.stream.run(requests, concurrency=10000).records()
        assert len(records) == 10000
        assert all(r["error"] is None or r["cause"] == "file_descriptors" for r in records), records[-1]
        print(collections.Counter(r["cause"] for r in records)["file_descriptors"], records[-1]["error"])
    """
    with RawServer(stream(HELLO)) as server:
        done = python(script, server.url)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[0]) > 0


def python(script: str, *args: str, **options) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", textwrap.dedent(script), *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, **options)


REAL, MONO = 1_800_000_000_000_000_000, 5_000_000_000_000


@pytest.mark.parametrize(
    ("offset_now", "offset_before", "stamp", "mapped"),
    [
        (REAL - MONO, REAL - MONO, REAL - 3000, MONO - 3000),  # as it should be
        (
            REAL - MONO,
            REAL - MONO,
            REAL + 5000,
            MONO,
        ),  # newer than the user stamp by less than the clock offset's uncertainty
        (REAL - MONO, REAL - MONO, 0, 0),  # no stamp
        (
            REAL - MONO + 10**9,
            REAL - MONO,
            REAL - 3000,
            0,
        ),  # stepped forward by one second since the last wake-up
        (REAL - MONO - 10**9, REAL - MONO, REAL - 3000, 0),  # stepped back
        (REAL - MONO, REAL - MONO, REAL + 10**9, 0),  # a stamp from the future
        (REAL - MONO, REAL - MONO, REAL - 10**10, 0),  # a stamp from before the run
        (REAL - MONO + 400, REAL - MONO, REAL - 3000, MONO - 3400),  # NTP slewing
    ],
)
def test_a_step_of_the_wall_clock_never_shifts_a_stamp(
    offset_now, offset_before, stamp, mapped
) -> None:
    assert _stream.map_stamp(offset_now, offset_before, stamp, MONO - 10**9, MONO) == mapped

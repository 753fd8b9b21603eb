"""The request as it is sent: one on the wire, and refused before anything is sent if it would not be."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from randomised import examples
from stream_server import HELLO, RawServer, stream

_stream = pytest.importorskip(
    "annie_quant._stream", reason="_stream is not built: libcurl's headers are missing"
)

import annie_quant as aq  # noqa: E402

PATH = "/v1/chat/completions"


def Request(url: str, **fields) -> aq.stream.Request:
    return aq.stream.Request(url, **{"timeout_s": 5, **fields})


def sent(**fields) -> tuple[list[bytes], bytes]:
    """Return the lines of one request's head and its body, as the server read them."""
    with RawServer(stream(HELLO)) as server:
        record = aq.stream.run([Request(server.url, **fields)]).records()[0]
    assert record["error"] is None and len(server.requests) == 1
    head, _, body = server.requests[0].partition(b"\r\n\r\n")
    return head.replace(b":%d" % server.port, b":PORT").split(b"\r\n"), body


JSON = b"Content-Type: application/json"
# Fields that a request has unless it states its own.
DEFAULTS = (
    b"Host: 127.0.0.1:PORT",
    b"Accept: */*",
    b"User-Agent: annie-quant/" + aq.__version__.encode(),
)
# A request → its method and other fields, as they are sent.
REQUESTS = {
    "json": ({"json": {"a": 1}}, [b"POST", b"Content-Length: 7", JSON]),
    "raw body": ({"body": b"\0\r\n\r\nGET / HTTP/1.1\r\n\r\n"}, [b"POST", b"Content-Length: 23"]),
    "empty body": ({"body": b""}, [b"POST", b"Content-Length: 0"]),
    "GET": ({}, [b"GET"]),
    "POST without a body": ({"method": "POST"}, [b"POST", b"Content-Length: 0"]),
    "PUT without a body": ({"method": "PUT"}, [b"PUT", b"Content-Length: 0"]),
    "DELETE": ({"method": "DELETE"}, [b"DELETE"]),
    "DELETE with a body": ({"method": "DELETE", "body": b"x"}, [b"DELETE", b"Content-Length: 1"]),
    "GET with a body": ({"method": "GET", "body": b"x"}, [b"GET", b"Content-Length: 1"]),
    "another token": ({"method": "M-SEARCH!", "body": b"x"}, [b"M-SEARCH!", b"Content-Length: 1"]),
    "content-type": (
        {"json": {}, "headers": {"content-type": "application/x-test"}},
        [b"POST", b"Content-Length: 2", b"content-type: application/x-test"],
    ),
    "agent and accept": (
        {"json": {}, "headers": {"user-agent": "me", "ACCEPT": "text/event-stream"}},
        [b"POST", b"Content-Length: 2", JSON, b"user-agent: me", b"ACCEPT: text/event-stream"],
    ),
    "prefixes": (
        {"json": {}, "headers": {"Content": "1", "C": "2", "T": "3", "Trans": "4", "Tr": ""}},
        [b"POST", b"Content-Length: 2", JSON, b"Content: 1", b"C: 2", b"T: 3", b"Trans: 4", b"Tr:"],
    ),
    "empty and blank": (
        {"json": {}, "headers": {"X-Empty": "", "X-Blank": " \t", "X-Space": "  a b\t"}},
        [b"POST", b"Content-Length: 2", JSON, b"X-Empty:", b"X-Blank:", b"X-Space: a b"],
    ),
    "its own length": (
        {"body": b"12345", "headers": {"content-length": "5"}},
        [b"POST", b"Content-Length: 5"],
    ),
    "values with colons": (
        {"headers": {"Authorization": "Bearer abc:", "X-Colon": ":", "X-Two": "a::", "X-Time": "1:2"}},
        [b"GET", b"Authorization: Bearer abc:", b"X-Colon: :", b"X-Two: a::", b"X-Time: 1:2"],
    ),
    "values with semicolons": (
        {"headers": {"X-Semi": "a;", "X-Both": "a;:", "X-Only": ";"}},
        [b"GET", b"X-Semi: a;", b"X-Both: a;:", b"X-Only: ;"],
    ),
    # libcurl writes this name in its own case
    "host": ({"headers": {"host": "other.example:8080"}}, [b"GET", b"Host: other.example:8080"]),
    "a long name without a value": (
        {"headers": {"X-" + "n" * 3000: ""}},
        [b"GET", b"X-" + b"n" * 3000 + b":"],
    ),
    "not ASCII": ({"headers": {"X-Name": "é漢字"}}, [b"GET", "X-Name: é漢字".encode()]),
}  # fmt: skip


def field_name(line: bytes) -> bytes:
    return line.partition(b":")[0].lower()


@pytest.mark.parametrize(("fields", "expected"), REQUESTS.values(), ids=REQUESTS.keys())
def test_a_request_as_it_is_sent(fields: dict, expected: list[bytes]) -> None:
    """A raw body gains no content type, a default gives way to the caller's field, and a value is sent as it is."""
    method, *own = expected
    names = set(map(field_name, own))
    defaults = [line for line in DEFAULTS if field_name(line) not in names]
    lines, body = sent(**fields)
    assert lines[0] == b"%b %b HTTP/1.1" % (method, PATH.encode())
    assert sorted(lines[1:]) == sorted([*own, *defaults])
    content = (
        json.dumps(fields["json"], separators=(",", ":")).encode() if "json" in fields else b""
    )
    assert body == fields.get("body", content)


SMUGGLED = "GET / HTTP/1.1\r\nHost: x\r\n\r\nGET"
REFUSED = {
    "a method with a request": ({"method": SMUGGLED}, "method .*not a token"),
    "a method with a space": ({"method": "GET /admin"}, "not a token"),
    "a method with LF": ({"method": "GET\n"}, "not a token"),
    "a method with NUL": ({"method": "G\0T"}, "not a token"),
    "a method that is not ASCII": ({"method": "GÉT"}, "not a token"),
    "a method with a surrogate": ({"method": "GET\udc80"}, "method has a character"),
    "CONNECT": ({"method": "CONNECT"}, "CONNECT is not supported"),
    "HEAD with a body": ({"method": "HEAD", "body": b"x"}, "no body"),
    "a name with a line": ({"headers": {"A: b\r\nB": "c"}}, "not a token"),
    "a name with a colon": ({"headers": {"A:": "c"}}, "not a token"),
    "a name with a semicolon": ({"headers": {"A;": "c"}}, "not a token"),
    "a name with a space": ({"headers": {"Transfer-Encoding ": "chunked"}}, "not a token"),
    "an empty name": ({"headers": {"": "c"}}, "not a token"),
    "a name that is not ASCII": ({"headers": {"É": "c"}}, "not a token"),
    "a value with a line": ({"headers": {"A": "b\r\n\r\nGET / HTTP/1.1"}}, "line break"),
    "a value with a field": ({"headers": {"A": "b\r\nHost: evil"}}, "line break"),
    "a value with CR": ({"headers": {"A": "b\r"}}, "line break"),
    "a value with LF": ({"headers": {"A": "b\nc"}}, "line break"),
    "a value with NUL": ({"headers": {"A": "b\0c"}}, "control character"),
    "a value with ESC": ({"headers": {"A": "\x1b[2J"}}, "control character"),
    "a value with DEL": ({"headers": {"A": "\x7f"}}, "control character"),
    "a value with a surrogate": ({"headers": {"A": "\ud800"}}, "value has a character"),
    "a coding": ({"body": b"0\r\n\r\n", "headers": {"transfer-encoding": "chunked"}}, "one connection"),
    "connection": ({"headers": {"Connection": "close"}}, "one connection"),
    "te": ({"headers": {"TE": "trailers"}}, "one connection"),
    "upgrade": ({"headers": {"upgrade": "h2c"}}, "one connection"),
    "proxy": ({"headers": {"Proxy-Authorization": "Basic eA=="}}, "one connection"),
    "expect": ({"body": b"x", "headers": {"Expect": "100-continue"}}, "round trip"),
    "another length": ({"body": b"12345", "headers": {"Content-Length": "4"}}, "not the body's length"),
    "a length of no body": ({"headers": {"content-length": "5"}}, "not the body's length"),
    "a name twice": ({"headers": {"X-A": "1", "x-a": "2"}}, "given twice"),
    "two hosts": ({"headers": {"Host": "a", "HOST": "b"}}, "given twice"),
    "a host with a path": ({"headers": {"Host": "a/b"}}, "not a host"),
}  # fmt: skip


@pytest.mark.parametrize(("fields", "words"), REFUSED.values(), ids=REFUSED.keys())
def test_what_is_not_one_request_is_refused(fields: dict, words: str) -> None:
    with RawServer(stream(HELLO)) as server:
        good = Request(server.url)
        with pytest.raises(ValueError, match=rf"request 1: .*{words}") as raised:
            aq.stream.run([good, Request(server.url, **fields)])
        with pytest.raises(ValueError, match="request 1: "):  # before the warm-up
            aq.stream.run([good, Request(server.url, **fields)], warmup=[good])
        time.sleep(0.05)
        assert isinstance(raised.value, aq.errors.UsageError) and "\n" not in str(raised.value)
        assert server.connections == 0, "nothing was sent"


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://h/\udc80", "URL has a character"),
        ("http://h/a\r\nB: c", "control character"),
        ("http://h/\0", "control character"),
        ("http://h\x7f/", "control character"),
        ("ftp://x/", "not an http"),
        ("localhost:8000/v1", "not an http"),
        ("http:h", "not an http"),
        ("https//h", "not an http"),
        ("gopher://h:70/_GET%20/", "not an http"),
    ],
)
def test_urls_that_are_refused(url: str, words: str) -> None:
    with pytest.raises(aq.errors.UsageError, match=words):
        aq.stream.run([Request(url)])


def test_a_request_with_two_bodies_is_refused() -> None:
    with pytest.raises(aq.errors.UsageError, match="both"):
        aq.stream.run([Request("http://x/", json={}, body=b"")])


def test_a_url_that_cannot_be_read_is_a_record() -> None:
    records = aq.stream.run(
        [Request("http://[x"), Request("http://h:70000/"), Request("http:///x")]
    ).records()
    assert [r["cause"] for r in records[:2]] == ["url", "url"] and all(r["error"] for r in records)


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan"), -1])
@pytest.mark.parametrize("name", ["timeout_s", "idle_timeout_s", "start_s"])
def test_times_that_are_refused(name: str, value: float) -> None:
    reason = "before the run" if name == "start_s" and value < 0 else "not a time"
    with pytest.raises(ValueError, match=f"{name}={value} is {reason}") as raised:
        aq.stream.run([Request("http://127.0.0.1:9/", **{name: value})])
    assert isinstance(raised.value, aq.errors.UsageError)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"deadline_s": float("inf")}, "deadline_s"),
        ({"max_event_bytes": 1 << 32}, "max_event_bytes"),
        ({"max_event_bytes": 0}, "max_"),
        ({"concurrency": 0}, "concurrency"),
        ({"http": "3"}, "http"),
    ],
)
def test_options_that_are_refused(options: dict, words: str) -> None:
    with pytest.raises(aq.errors.UsageError, match=words):
        aq.stream.run([Request("http://x/")], **options)


def test_a_run_of_no_requests_is_empty() -> None:
    assert aq.stream.run([]).records() == []
    assert aq.stream.run([], max_event_bytes=(1 << 32) - 1).records() == []


@pytest.mark.parametrize(
    "length", [b"Content-Length: 99\r\n", b"Transfer-Encoding: chunked\r\n", b""]
)
def test_head_ends_with_its_head(length: bytes) -> None:
    """The server keeps the connection and sends no body, as RFC 9110 9.3.2 requires."""
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n" + length + b"\r\n"
    with RawServer(lambda connection, request: connection.sendall(head)) as server:
        began = time.monotonic()
        timings = aq.stream.run([Request(server.url, method="HEAD")] * 2)
        assert time.monotonic() - began < 4.5, "it hung until its limit of 5 s"
    assert [int(r["cause"]) for r in timings.requests] == [0, 0] and timings.requests[
        "status"
    ].tolist() == [200, 200]
    assert all(r.startswith(b"HEAD " + PATH.encode() + b" HTTP/1.1\r\n") for r in server.requests)
    assert b"Content-Length" not in server.requests[0]


text = st.one_of(
    st.text(max_size=12),
    st.text(st.sampled_from("\r\n\0\t :;,/aZ0%\x7f\x85\u2028é"), max_size=12),
    st.sampled_from(["GET", "POST", "HEAD", "Host", "Content-Length", "content-length", "Transfer-Encoding", "chunked", "0",
                     SMUGGLED, "\r\n\r\n" + SMUGGLED, " HTTP/1.1\r\nX: ", "a", "X-A"]),
)  # fmt: skip


def test_never_two_requests_on_the_wire() -> None:
    """Any texts as method, path, header names and values, and body. The server's parser is not the one under test."""
    received: list[bytes] = []

    def respond(connection, request: bytes) -> None:
        received.append(request)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

    with RawServer(respond) as server:

        @settings(
            max_examples=examples(150), deadline=None, suppress_health_check=list(HealthCheck)
        )
        @given(
            st.none() | text,
            text,
            st.dictionaries(text, text, max_size=3),
            st.none() | st.binary(max_size=40) | text,
        )
        def check(
            method: str | None, path: str, headers: dict[str, str], body: bytes | str | None
        ) -> None:
            received.clear()
            raw = body.encode(errors="replace") if isinstance(body, str) else body
            request = Request(
                server.url + path, method=method, headers=headers, body=raw, timeout_s=2
            )
            try:
                aq.stream.run([request], realtime=False)
            except ValueError:
                assert received == []
                return
            assert len(received) <= 1, received
            for message in received:
                head, _, rest = message.partition(b"\r\n\r\n")
                assert (
                    head.count(b"\n") == head.count(b"\r") == head.count(b"\r\n")
                    and b"\0" not in head
                )
                assert rest == (raw or b"") and head.lower().count(b"\r\nhost:") == 1
                assert head.lower().count(b"\r\ncontent-length:") <= 1

        check()

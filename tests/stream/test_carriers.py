"""Both carriers under the same conditions: proxies, cancelling, heads and trailers, options that libcurl refuses, two addresses."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import ssl
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from stream_server import HEAD, HELLO, RawServer, chunk, event, stream

_stream = pytest.importorskip(
    "annie_quant._stream", reason="_stream is not built: libcurl's headers are missing"
)

import annie_quant as aq  # noqa: E402

CARRIERS = ("plain", "libcurl")
BODY = b"".join(HELLO)


def Request(url: str, **fields) -> aq.stream.Request:
    return aq.stream.Request(url, **{"timeout_s": 5, **fields})


def server_of(carrier: str, tls_server: ssl.SSLContext, respond) -> RawServer:
    """Plain HTTP uses the client's own connections; TLS is left to libcurl."""
    return RawServer(respond, tls=tls_server if carrier == "libcurl" else None)


# ---- proxies


def slow(connection, request: bytes) -> None:
    time.sleep(0.4)
    stream(HELLO)(connection, request)


def tunnel(target: int, answer: bytes, delay_s: float) -> socket.socket:
    """Return the listener of a proxy: it answers CONNECT at once, and passes on the origin's bytes after a delay."""
    listener = socket.create_server(("127.0.0.1", 0))

    def copy(source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while part := source.recv(65536):
                sink.sendall(part)

    def serve() -> None:
        with contextlib.suppress(OSError):
            client, _ = listener.accept()
            held = b""
            while b"\r\n\r\n" not in held:
                held += client.recv(65536)
            client.sendall(answer)
            if b" 200 " not in answer:
                return client.close()
            time.sleep(delay_s)
            with socket.create_connection(("127.0.0.1", target)) as origin:
                threading.Thread(target=copy, args=(client, origin), daemon=True).start()
                copy(origin, client)

    threading.Thread(target=serve, daemon=True).start()
    return listener


def through(
    answer: bytes, tls_server: ssl.SSLContext, delay_s: float = 0.0, **options
) -> aq.stream.Timings:
    with RawServer(slow, tls=tls_server) as server, tunnel(server.port, answer, delay_s) as proxy:
        address = f"http://127.0.0.1:{proxy.getsockname()[1]}"
        return aq.stream.run(
            [Request(server.url, json={})], proxy=address, verify_tls=False, **options
        )


@pytest.mark.parametrize("kernel_stamps", [True, False])
def test_the_first_byte_through_a_proxy_is_the_origins(
    kernel_stamps: bool, tls_server: ssl.SSLContext
) -> None:
    """CONNECT is answered at once, the origin after 0.4 s."""
    answer = b"HTTP/1.1 200 Connection established\r\nX-Proxy: yes\r\n\r\n"
    timings = through(answer, tls_server, delay_s=0.1, kernel_stamps=kernel_stamps)
    for clock in ("kernel", "user"):
        record = timings.records(clock)[0]
        assert record["text"] == "Hello there." and record["first_byte_ms"] >= 500, record
        assert record["first_byte_ms"] <= record["first_content_ms"] <= record["e2e_ms"]
    assert "x-proxy" not in timings.headers(0)


def test_a_proxy_that_refuses(tls_server: ssl.SSLContext) -> None:
    record = through(
        b"HTTP/1.1 407 Proxy Authentication Required\r\nContent-Length: 0\r\n\r\n", tls_server
    ).records()[0]
    assert (
        record["cause"] == "proxy" and "407" in record["error"] and record["first_byte_ms"] is None
    )


# ---- heads and trailers


@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize("body", [BODY, b""], ids=["body", "no body"])
def test_trailers_do_not_replace_headers(
    carrier: str, body: bytes, tls_server: ssl.SSLContext
) -> None:
    trailers = b"0\r\nServer: trailer\r\nDate: never\r\nX-Sum: 1\r\n\r\n"
    answer = (
        HEAD.replace(b"\r\n\r\n", b"\r\nServer: head\r\n\r\n")
        + (chunk(body) if body else b"")
        + trailers
    )

    with server_of(
        carrier,
        tls_server,
        lambda c, r: c.sendall(b"HTTP/1.1 103 x\r\nServer: hint\r\n\r\n" + answer),
    ) as server:
        timings = aq.stream.run([Request(server.url)] * 2, verify_tls=False)
    for i, record in enumerate(timings.records()):
        assert record["server"] == "head" and record["server_date"] is None
        assert set(timings.headers(i)) == {"content-type", "transfer-encoding", "server"}


@pytest.mark.parametrize("carrier", CARRIERS)
def test_heads_whose_lines_end_in_lf(carrier: str, tls_server: ssl.SSLContext) -> None:
    answer = (
        b"HTTP/1.1 200 OK\nServer: bare\nContent-Type: text/event-stream\nContent-Length: %d\n\n%b"
        % (
            len(BODY),
            BODY,
        )
    )
    with server_of(carrier, tls_server, lambda c, r: c.sendall(answer)) as server:
        timings = aq.stream.run([Request(server.url)], verify_tls=False)
    assert (
        timings.records()[0]["text"] == "Hello there." and timings.records()[0]["server"] == "bare"
    )
    assert timings.headers(0) == {
        "server": "bare",
        "content-type": "text/event-stream",
        "content-length": str(len(BODY)),
    }


@pytest.mark.parametrize("carrier", CARRIERS)
def test_a_head_that_is_too_large_is_one_record(carrier: str, tls_server: ssl.SSLContext) -> None:
    def respond(connection, request: bytes) -> None:
        if b"/large" in request:
            with contextlib.suppress(OSError):
                for _ in range(40):
                    connection.sendall(
                        b"HTTP/1.1 103 x\r\n" + b"X-Padding: %b\r\n" % (b"x" * 50_000) * 4 + b"\r\n"
                    )
        else:
            stream(HELLO)(connection, request)

    with server_of(carrier, tls_server, respond) as server:
        large = server.url.replace("/v1", "/large")
        records = aq.stream.run(
            [Request(u) for u in (server.url, large, server.url)], verify_tls=False
        ).records()
    assert [r["cause"] for r in records] == [None, "protocol", None] and "large" in records[1][
        "error"
    ]


# ---- libcurl

SETOPT = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdarg.h>
#include <stdlib.h>

int curl_easy_setopt(void *easy, int option, ...)
{
    void *library = dlopen("libcurl.so.4", RTLD_LAZY | RTLD_NOLOAD); /* the module loads it for itself alone */
    int (*own)(void *, int, ...) = (int (*)(void *, int, ...))dlsym(library, "curl_easy_setopt");
    va_list more;
    va_start(more, option);
    void *value = va_arg(more, void *);
    va_end(more);
    if (option == atoi(getenv("REFUSED_OPTION")))
        return 1; /* CURLE_UNSUPPORTED_PROTOCOL, as a libcurl without HTTP/2 */
    return own(easy, option, value);
}
"""
RUN = """
    import json, sys
    import annie_quant as aq
    requests = [aq.stream.Request(url, timeout_s=5) for url in sys.argv[2:]]
    records = aq.stream.run(requests, verify_tls=False, **json.loads(sys.argv[1])).records()
    print(json.dumps([[r["text"], r["cause"], r["error"], r["e2e_ms"]] for r in records]))
"""


def run_preloaded(
    folder: Path, source: str, urls: list[str], options: dict, **environment: str
) -> list[list]:
    if not shutil.which("gcc"):
        pytest.skip("gcc builds the preloaded library, and it is not installed")
    (folder / "shim.c").write_text(source)
    subprocess.run(
        [
            "gcc",
            "-shared",
            "-fPIC",
            "-O1",
            str(folder / "shim.c"),
            "-o",
            str(folder / "shim.so"),
            "-ldl",
        ],
        check=True,
    )
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(RUN), json.dumps(options), *urls],
        env={**os.environ, "LD_PRELOAD": str(folder / "shim.so"), **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("option", "name"), [(84, "HTTP_VERSION"), (10065, "CAINFO"), (10015, None)]
)
def test_an_option_that_libcurl_refuses_is_an_error(
    option: int, name: str | None, tls_server: ssl.SSLContext, tmp_path: Path
) -> None:
    """HTTP/2 was requested: without it the run would measure HTTP/1.1. The last option is not set for this request."""
    with RawServer(stream(HELLO), tls=tls_server) as server:
        ((text, cause, error, _),) = run_preloaded(
            tmp_path,
            SETOPT,
            [server.url],
            {"http": "2", "ca_file": "/nowhere"},
            REFUSED_OPTION=str(option),
        )
    if name:
        assert (
            cause == "protocol"
            and f"this libcurl refuses CURLOPT_{name}" in error
            and server.connections == 0
        )
    else:
        assert cause == "tls" or text == "Hello there."


# one.test is 127.0.0.1; two.test is ::1, then 127.0.0.1. Exits if the stamp of something that is not a TCP socket is read.
NAMES = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <netdb.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

typedef int lookup(const char *, const char *, const struct addrinfo *, struct addrinfo **);

int getaddrinfo(const char *name, const char *port, const struct addrinfo *hints, struct addrinfo **found)
{
    lookup *own = (lookup *)dlsym(RTLD_NEXT, "getaddrinfo");
    if (!name || !strstr(name, ".test"))
        return own(name, port, hints, found);
    if (strncmp(name, "one", 3) == 0)
        return own("127.0.0.1", port, NULL, found);
    int failed = own("::1", port, NULL, found);
    struct addrinfo *last = *found;
    while (!failed && last->ai_next)
        last = last->ai_next;
    return failed ? failed : own("127.0.0.1", port, NULL, &last->ai_next);
}

ssize_t recvmsg(int fd, struct msghdr *message, int flags)
{
    ssize_t (*own)(int, struct msghdr *, int) = (ssize_t (*)(int, struct msghdr *, int))dlsym(RTLD_NEXT, "recvmsg");
    struct sockaddr_storage at;
    socklen_t size = sizeof at;
    int known = getsockname(fd, (struct sockaddr *)&at, &size) == 0;
    if ((flags & MSG_PEEK) && (!known || at.ss_family == AF_UNIX))
        _exit(77);
    return own(fd, message, flags);
}
"""


def test_the_state_of_a_closed_socket_is_not_used_for_the_next(tmp_path: Path) -> None:
    """A connection that was closed frees its descriptor; libcurl's resolver then opens a socket pair with this number."""
    with RawServer(stream(HELLO)) as server:
        urls = [server.url, server.url.replace("127.0.0.1", "one.test")] * 4
        answers = run_preloaded(
            tmp_path, NAMES, urls, {"fresh_connections": True, "concurrency": 1}
        )
    assert [a[0] for a in answers] == ["Hello there."] * 8


@pytest.fixture
def two_addresses():
    """Yield a server at 127.0.0.1. At the same port of ::1 connections are not accepted, and the queue is full."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(RawServer(stream(HELLO)))
        try:
            silent = stack.enter_context(socket.socket(socket.AF_INET6))
            silent.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            silent.bind(("::1", server.port))
        except OSError:
            pytest.skip("this machine has no IPv6 loopback")
        silent.listen(0)
        for _ in range(4):
            full = stack.enter_context(socket.socket(socket.AF_INET6))
            full.setblocking(False)
            full.connect_ex(("::1", server.port))
        yield server


def test_the_second_address_is_tried_while_the_first_is_silent(
    two_addresses: RawServer, tmp_path: Path
) -> None:
    url = two_addresses.url.replace("127.0.0.1", "two.test")
    ((text, cause, error, e2e_ms),) = run_preloaded(tmp_path, NAMES, [url], {})
    assert (text, cause) == ("Hello there.", None) and 150 < e2e_ms < 2000, error


# ---- HTTP/2

SETTINGS, ACK, DATA, HEADERS, END_STREAM, END_HEADERS = 4, 1, 0, 1, 1, 4
# :status 200 of the static table; content-type as a literal (RFC 7541, index 31)
ANSWER = b"\x88\x0f\x10" + bytes([17]) + b"text/event-stream"
STREAMS, EVENTS = 16, 20


def frame(kind: int, flags: int, number: int, payload: bytes = b"") -> bytes:
    return (
        len(payload).to_bytes(3, "big") + bytes([kind, flags]) + number.to_bytes(4, "big") + payload
    )


class Burst(RawServer):
    """Sends the events of all streams in bursts, each with the time at which it was sent."""

    def _serve(self, connection: socket.socket) -> None:
        with (
            contextlib.suppress(OSError),
            self.tls.wrap_socket(connection, server_side=True) as secure,
        ):
            source, numbers = secure.makefile("rb"), []
            source.read(24)
            secure.sendall(frame(SETTINGS, 0, 0))
            while len(numbers) < STREAMS:
                head = source.read(9)
                source.read(int.from_bytes(head[:3], "big"))
                if head[3] == SETTINGS and not head[4] & ACK:
                    secure.sendall(frame(SETTINGS, ACK, 0))
                if head[3] in (DATA, HEADERS) and head[4] & END_STREAM:
                    numbers.append(int.from_bytes(head[5:], "big"))
            for number in numbers:
                secure.sendall(frame(HEADERS, END_HEADERS, number, ANSWER))
            for _ in range(EVENTS):
                time.sleep(0.02)
                for number in numbers:
                    secure.sendall(
                        frame(DATA, 0, number, event({"content": str(time.monotonic_ns())}))
                    )
            for number in numbers:
                secure.sendall(frame(DATA, END_STREAM, number, b"data: [DONE]\n\n"))
            time.sleep(0.5)


def test_events_of_one_http_2_connection_have_kernel_stamps(certificate: Path) -> None:
    """libcurl reads all that a burst brought at once, and passes on most streams' events later, from its timer."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    context.set_alpn_protocols(["h2"])
    shares = []
    # A machine interrupts bursts: on an idle one (2026-11-23, 8 runs) the share was above .5 in 3 runs and 0 to .28 in 5.
    while len(shares) < 15 and not any(share > 0.5 for share in shares):
        with Burst(None, tls=context) as server:
            requests = [Request(server.url, json={}, timeout_s=10)] * STREAMS
            timings = aq.stream.run(requests, STREAMS, http="2", verify_tls=False)
        rows = timings.events[timings.events["kind"] == 1]
        sent = [json.loads(timings.raw(i)[6:]) for i in np.flatnonzero(timings.events["kind"] == 1)]
        sent = np.array([int(s["choices"][0]["delta"]["content"]) for s in sent])
        assert len(sent) == STREAMS * EVENTS and {r["http_version"] for r in timings.records()} == {
            "2"
        }
        known = rows["kernel_ns"] != 0
        assert ((rows["kernel_ns"] - sent)[known] > -50_000).all(), (
            "the clocks' distance is known to some µs"
        )
        assert (rows["user_ns"] - sent).min() > -50_000 and (
            rows["user_ns"] >= rows["kernel_ns"]
        ).all()
        assert not (known & ((rows["flags"] & 8) != 0)).any()
        for request in range(STREAMS):
            mine = timings.events[timings.events["request"] == request]
            assert (np.diff(mine["user_ns"]) >= 0).all()
            same = np.flatnonzero(
                (np.diff(mine["user_ns"]) == 0) & (mine["kind"][1:] == 1) & (mine["kind"][:-1] == 1)
            )
            assert (mine["flags"][same] & 1).all() and (mine["flags"][same + 1] & 1).all(), (
                "merged events are flagged"
            )
        shares.append(float(known.mean()))
    assert max(shares) > 0.5, f"few events have a kernel stamp: {shares}"

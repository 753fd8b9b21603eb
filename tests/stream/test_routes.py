"""Plain HTTP, TLS, HTTP/2 and proxies: split answers, cancels and signals in every state, reuse, stamps; what libcurl refuses."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import ssl
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from preloaded import run_preloaded
from stream_server import DONE, HELLO, RawServer, event, stream

_stream = pytest.importorskip(
    "annie_quant._stream", reason="_stream is not built: libcurl's headers are missing"
)

from http2_server import DATA, END_HEADERS, END_STREAM, HEADERS, STREAM_HEAD, frame  # noqa: E402
from routes import NAMES, Route  # noqa: E402

import annie_quant as aq  # noqa: E402


@pytest.fixture(params=NAMES)
def route(request: pytest.FixtureRequest, certificate: Path) -> Route:
    return Route(request.param, certificate)


def test_an_answer_that_is_split_at_any_byte_is_the_same(route: Route) -> None:
    pieces = [event({"content": "Hi"}), event({}, "stop"), DONE]
    size = len(route.encode(pieces, 1))

    def respond(connection, index: int, number: int) -> None:
        answer = route.encode(pieces, number)
        connection.sendall(answer[:index])
        time.sleep(0.002)
        connection.sendall(answer[index:])

    with route.server(respond) as server:
        timings = route.run(server, size, 1 if route.name == "HTTP/2" else 8)
    records = timings.records()
    assert [(r["text"], r["error"], r["finish_reason"]) for r in records] == [
        ("Hi", None, "stop")
    ] * size
    assert {timings.body(i) for i in range(size)} == {b"".join(pieces)}


# ---- cancels and signals in every state

STATES = [
    b"",
    b"HTTP/1.1 20",
    b"HTTP/1.1 200 OK\r\nContent-Type: text/ev",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1",
    b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\ndata: {",
    b"HTTP/1.1 200 OK\r\nContent-Length: 9000\r\n\r\n" + HELLO[0],
    b"HTTP/1.1 103 x\r\n\r\n",
]


def waiting_server(route: Route, go_on: threading.Event) -> RawServer:
    def respond(connection, index: int, number: int) -> None:
        if route.name == "HTTP/2":
            full = route.encode(HELLO, number)
            at = (0, 5, 30, 60)[index % 4]
            connection.sendall(full[:at])
            if go_on.wait(10):
                connection.sendall(full[at:])
            return
        connection.sendall(STATES[index])
        if go_on.wait(10):
            connection.close()

    return route.server(respond)


def test_cancelling_in_every_state(route: Route) -> None:
    go_on = threading.Event()
    cancel = aq.stream.Cancel()
    threading.Timer(0.4, cancel.cancel).start()
    with waiting_server(route, go_on) as server:
        timings = route.run(server, len(STATES), len(STATES), cancel=cancel)
        go_on.set()
    assert [r["cause"] for r in timings.records()] == ["cancelled"] * len(STATES)


def test_a_signal_in_every_state(route: Route) -> None:
    """Its handler runs at once, in the middle of the run, and the run goes on."""
    go_on = threading.Event()
    calls = []

    def note(*_: object) -> None:
        calls.append(1)
        if len(calls) == 3:
            go_on.set()  # only now does the server go on

    before = signal.signal(signal.SIGALRM, note)
    try:
        with waiting_server(route, go_on) as server:
            signal.setitimer(signal.ITIMER_REAL, 0.2, 0.05)
            timings = route.run(server, len(STATES), len(STATES))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    causes = [r["cause"] for r in timings.records()]
    assert len(calls) >= 3 and not {"cancelled", "timeout", "not_started"} & set(causes), causes
    if route.name == "HTTP/2":
        assert [r["text"] for r in timings.records()] == ["Hello there."] * len(STATES)


def test_a_deadline_while_a_request_is_sent(certificate: Path) -> None:
    for name in ("plain", "TLS", "proxy"):
        route = Route(name, certificate)
        with route.server(lambda *_: None) as server:
            server._serve = lambda connection: time.sleep(20)  # accepts, and reads nothing
            timings = route.run(server, 2, 2, body=b"x" * 30_000_000, deadline_s=0.5)
        assert [r["cause"] for r in timings.records()] == ["deadline"] * 2


# ---- connections


def test_how_many_connections_requests_use(route: Route) -> None:
    all_there = threading.Barrier(3)

    def respond(connection, index: int, number: int) -> None:
        if (
            index in (3, 4, 5) and route.name != "HTTP/2"
        ):  # its server's only thread would wait for itself
            all_there.wait(5)
        connection.sendall(route.encode(HELLO, number))

    with route.server(respond) as server:
        counts = [0]
        for concurrency, fresh in ((1, False), (3, False), (1, True)):
            records = route.run(server, 3, concurrency, fresh_connections=fresh).records()
            assert [r["text"] for r in records] == ["Hello there."] * 3
            counts.append(server.connections)
    assert np.diff(counts).tolist() == [1, 1 if route.name == "HTTP/2" else 3, 3]


def test_a_request_on_an_ended_connection_is_sent_again_and_on_a_new_one_is_not(
    route: Route,
) -> None:
    for lost, sendings in ((1, 2), (0, 1)):

        def respond(connection, index: int, number: int, lost: int = lost) -> None:
            if index == lost:
                time.sleep(0.2)
                connection.shutdown(socket.SHUT_RDWR)
            else:
                connection.sendall(route.encode(HELLO, number))

        with route.server(respond) as server:
            timings = route.run(server, lost + 1)
        record = timings.records()[lost]
        again = sendings == 2 and route.name != "HTTP/2"
        assert len(server.requests) == lost + 1 + again
        assert (record["text"], record["error"] is None) == (
            ("Hello there.", True) if again else ("", False)
        )
        assert [
            w.startswith("the reused connection had ended: sent again after 2")
            for w in record["warnings"]
        ] == [True] * again
        assert (timings.requests["resent_us"][lost] >= 200_000) == again


# ---- proxies


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
            received = b""
            while b"\r\n\r\n" not in received:
                received += client.recv(65536)
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
    def slow(connection, request: bytes) -> None:
        time.sleep(0.4)
        stream(HELLO)(connection, request)

    with RawServer(slow, tls=tls_server) as server, tunnel(server.port, answer, delay_s) as proxy:
        address = f"http://127.0.0.1:{proxy.getsockname()[1]}"
        request = aq.stream.Request(server.url, json={}, timeout_s=5)
        return aq.stream.run([request], proxy=address, verify_tls=False, **options)


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
    answer = b"HTTP/1.1 407 Proxy Authentication Required\r\nContent-Length: 0\r\n\r\n"
    record = through(answer, tls_server).records()[0]
    assert (
        record["cause"] == "proxy" and "407" in record["error"] and record["first_byte_ms"] is None
    )


@pytest.mark.parametrize("name", ["NO_PROXY", "no_proxy", "http_proxy"])
def test_the_environment_changes_nothing_about_proxies(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RawServer(stream(HELLO)) as proxy, RawServer(stream(HELLO)) as server:
        monkeypatch.setenv(name, "http://127.0.0.1:1" if name == "http_proxy" else "127.0.0.1,*")
        request = aq.stream.Request(server.url, json={}, timeout_s=5)
        assert aq.stream.run([request]).records()[0]["text"] == "Hello there."
        assert aq.stream.run([request], proxy=proxy.url).records()[0]["text"] == "Hello there."
    assert (len(proxy.requests), len(server.requests)) == (1, 1)
    assert proxy.requests[0].startswith(b"POST http://127.0.0.1:")


# ---- libcurl

SETOPT = r"""
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


@pytest.mark.parametrize(("option", "name"), [(84, "HTTP_VERSION"), (10065, "CAINFO")])
def test_an_option_that_libcurl_refuses_is_an_error(
    option: int, name: str, tls_server: ssl.SSLContext, tmp_path: Path
) -> None:
    """HTTP/2 was requested: without it the run would measure HTTP/1.1."""
    options = json.dumps({"http": "2", "ca_file": "/nowhere"})
    with RawServer(stream(HELLO), tls=tls_server) as server:
        out = run_preloaded(tmp_path, SETOPT, RUN, options, server.url, REFUSED_OPTION=str(option))
    ((_, cause, error, _),) = json.loads(out)
    assert cause == "protocol" and f"this libcurl refuses CURLOPT_{name}" in error
    assert server.connections == 0


# one.test is 127.0.0.1; two.test is ::1, then 127.0.0.1. Exits if the stamp of something that is not a TCP socket is read.
LOOKUPS = r"""
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
        options = json.dumps({"fresh_connections": True, "concurrency": 1})
        answers = json.loads(run_preloaded(tmp_path, LOOKUPS, RUN, options, *urls))
    assert [a[0] for a in answers] == ["Hello there."] * 8


def test_the_second_address_is_tried_while_the_first_is_silent(tmp_path: Path) -> None:
    """At the same port of ::1 connections are not accepted, and the queue is full."""
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
        url = server.url.replace("127.0.0.1", "two.test")
        ((text, cause, error, _),) = json.loads(run_preloaded(tmp_path, LOOKUPS, RUN, "{}", url))
    assert (text, cause) == ("Hello there.", None), error


# ---- stamps


def check_stamps(timings: aq.stream.Timings, count: int) -> float:
    """Compare stamps with the send times in the events; return the share of events with a kernel stamp."""
    rows = timings.events[timings.events["kind"] == 1]
    sent = [json.loads(timings.raw(i)[6:]) for i in np.flatnonzero(timings.events["kind"] == 1)]
    sent = np.array([int(s["choices"][0]["delta"]["content"]) for s in sent])
    assert len(sent) == count
    known = rows["kernel_ns"] != 0
    early = (rows["kernel_ns"] - sent)[known]
    assert (early > -50_000).all(), "the clocks' distance is known to some µs"
    assert (rows["user_ns"] - sent).min() > -50_000 and (rows["user_ns"] >= rows["kernel_ns"]).all()
    assert not (known & ((rows["flags"] & 8) != 0)).any()
    return float(known.mean())


def now_event() -> bytes:
    """Return an event that contains the time at which it is sent (CLOCK_MONOTONIC)."""
    return event({"content": str(time.monotonic_ns())})


# The least share of events with a kernel stamp. It is dropped where libcurl reads more than had arrived when it was taken, which
# is more likely on a busy machine. During a flood over TLS nearly every read does.
SHARES = {("plain", 0.002): 0.9, ("TLS", 0.002): 0.3, ("plain", 0): 0, ("TLS", 0): 0}


@pytest.mark.parametrize(("name", "gap_s"), SHARES)
def test_no_stamp_is_earlier_than_its_event(name: str, gap_s: float, certificate: Path) -> None:
    """However many events one read has, and whatever arrives during it: a stamp is never too early."""
    route = Route(name, certificate)
    count = 200 if gap_s else 2000

    def respond(connection, index: int, number: int) -> None:
        head, end = route.encode([b"|"], number).split(b"1\r\n|\r\n")
        connection.sendall(head)
        for _ in range(count):
            time.sleep(gap_s)
            piece = now_event()
            connection.sendall(b"%x\r\n%b\r\n" % (len(piece), piece))
        connection.sendall(end)

    shares = []
    while len(shares) < 3 and not any(share >= SHARES[name, gap_s] for share in shares):
        with route.server(respond) as server:
            shares.append(check_stamps(route.run(server, 4, 4), 4 * count))
    assert max(shares) >= SHARES[name, gap_s], f"few events have a kernel stamp: {shares}"


STREAMS, EVENTS = 16, 20


def test_events_of_one_http_2_connection_have_kernel_stamps(certificate: Path) -> None:
    """libcurl reads all that a burst brought at once, and passes on most streams' events later, from its timer."""
    route = Route("HTTP/2", certificate)
    numbers: list[int] = []

    def respond(connection, index: int, number: int) -> None:
        """Answer when all requests are there: the events of all streams in bursts."""
        numbers.append(number)
        if len(numbers) % STREAMS:
            return
        these = numbers[-STREAMS:]
        for one in these:
            connection.sendall(frame(HEADERS, END_HEADERS, one, STREAM_HEAD))
        for _ in range(EVENTS):
            time.sleep(0.02)
            for one in these:
                connection.sendall(frame(DATA, 0, one, now_event()))
        for one in these:
            connection.sendall(frame(DATA, END_STREAM, one, DONE))

    shares = []
    # A machine interrupts bursts: on an idle one the share was above .5 in 3 of 8 runs and 0 to .28 in the others.
    while len(shares) < 15 and not any(share > 0.5 for share in shares):
        with route.server(respond) as server:
            timings = route.run(server, STREAMS, STREAMS)
        shares.append(check_stamps(timings, STREAMS * EVENTS))
        assert {r["http_version"] for r in timings.records()} == {"2"}
        for request in range(STREAMS):
            mine = timings.events[timings.events["request"] == request]
            assert (np.diff(mine["user_ns"]) >= 0).all()
            data = mine["kind"] == 1
            same = np.flatnonzero((np.diff(mine["user_ns"]) == 0) & data[1:] & data[:-1])
            assert (mine["flags"][same] & mine["flags"][same + 1] & 1).all(), (
                "merged events are flagged"
            )
    assert max(shares) > 0.5, f"few events have a kernel stamp: {shares}"

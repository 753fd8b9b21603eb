"""Requests, their start times and their execution: the Python side of the C loop in csrc/stream/client.c."""

from __future__ import annotations

import contextlib
import math
import os
import re
import signal
import threading
import urllib.parse
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from annie_quant import __version__
from annie_quant.core import native
from annie_quant.core.errors import UsageError
from annie_quant.core.secrets import Redactor, safe_url, secrets_of
from annie_quant.core.untrusted import decode_json
from annie_quant.stream.answer import RequestError
from annie_quant.stream.timings import PlannedRequest, Timings, transport_fault

HTTP_VERSIONS = {"1.1": 0, "2": 1, "2-prior-knowledge": 2}
_NS_PER_S = 1_000_000_000
_FOREVER_NS = 1 << 61
_NOT_IN_URLS = re.compile(
    "[ \x80-\ud7ff\ue000-\U0010ffff]+"
)  # not control characters: they are refused


@dataclass(frozen=True)
class Request:
    """One request: a POST with `json` or `body`, else a GET. The body is sent unchanged.

    `run` raises RequestError for what would not be one HTTP request: a method or header name that is not a token, a
    control character, a name given twice, a Content-Length that is not the body's, and headers that concern one
    connection (Connection, Transfer-Encoding, TE, Upgrade ...; use fresh_connections=True for Connection: close).

    timeout_s       limit from its start to its end
    idle_timeout_s  longest wait for the next bytes, including the first ones
    start_s         seconds after the run's start (open loop); None: as soon as the concurrency allows (closed loop)
    tag             any value; it is copied to the record
    """

    url: str
    json: Any = None
    headers: Mapping[str, str] | None = None
    timeout_s: float | None = 600.0
    start_s: float | None = None
    tag: Any = None
    idle_timeout_s: float | None = None
    body: bytes | None = field(default=None, kw_only=True)
    method: str | None = field(default=None, kw_only=True)

    def __repr__(self) -> str:
        return f"Request({safe_url(self.url)!r}, tag={self.tag!r}, headers={sorted(self.headers or ())})"


def chat(
    url: str,
    model: str | None,
    messages: Sequence[Mapping[str, object]],
    tag: object = None,
    **fields: object,
) -> Request:
    """Return a request for a streamed chat completion that includes usage.

    url     of the server, with or without /v1/chat/completions
    fields  max_tokens, temperature, tools ... of the body; headers, timeout_s, idle_timeout_s, start_s of the Request
    """
    options: dict[str, Any] = {
        k: fields.pop(k)
        for k in ("headers", "timeout_s", "idle_timeout_s", "start_s")
        if k in fields
    }
    body = {
        "messages": list(messages),
        "stream": True,
        "stream_options": {"include_usage": True},
        **fields,
    }
    if model is not None:
        body["model"] = model
    url = url.rstrip("/")
    if not url.endswith("/chat/completions"):
        url += "/chat/completions" if url.endswith("/v1") else "/v1/chat/completions"
    return Request(url, json=body, tag=tag, **options)


class Cancel:
    """Stops runs from another thread: pass it as run(..., cancel=c) and call c.cancel().

    It stays cancelled: a run that is passed it afterwards sends nothing, and a run cancelled during its warm-up sends
    no request after it. Several runs can have the same Cancel. `close` cancels as well, and releases its descriptor,
    which is otherwise released with the object.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal handler may cancel
        self._fd = os.eventfd(0, os.EFD_CLOEXEC)
        self._release = weakref.finalize(self, os.close, self._fd)
        self.cancelled = False

    def cancel(self) -> None:
        with self._lock:
            if not self.cancelled:
                self.cancelled = True
                os.eventfd_write(self._fd, 1)  # it is never read, so that every run sees it

    def close(self) -> None:
        self.cancel()
        with self._lock:
            self._release()

    def descriptor(self) -> int:
        """Return a descriptor that is readable once this is cancelled. The caller closes it: a run may outlive `close`."""
        with self._lock:
            if not self._release.alive:
                raise UsageError("this Cancel is closed", "use a new one")
            return os.dup(self._fd)


@contextlib.contextmanager
def _signals() -> Iterator[tuple[int, int]]:
    """Yield a descriptor that receives the numbers of signals, in the main thread, and the one that they are passed on to.

    Another event loop, such as asyncio's, may have its own descriptor: its handlers depend on these bytes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield -1, -1
        return
    read_fd, write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    before = signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
    try:
        yield read_fd, before
    finally:
        signal.set_wakeup_fd(before)
        with contextlib.suppress(OSError):  # BlockingIOError: there are no more
            while before >= 0:
                os.write(before, os.read(read_fd, 64))
        os.close(read_fd)
        os.close(write_fd)


def run(
    requests: Iterable[Request],
    concurrency: int | None = None,
    *,
    warmup: Iterable[Request] = (),
    deadline_s: float | None = None,
    http: str = "1.1",
    fresh_connections: bool = False,
    unix_socket: str | bytes | os.PathLike[Any] | None = None,
    proxy: str | None = None,
    ca_file: str | bytes | os.PathLike[Any] | None = None,
    verify_tls: bool = True,
    kernel_stamps: bool = True,
    realtime: bool = True,
    max_event_bytes: int = 64 << 20,
    max_answer_bytes: int = 256 << 20,
    max_answer_events: int = 1 << 20,
    cancel: Cancel | None = None,
) -> Timings:
    """Run the requests and return when the last one has ended. A failed request has an `error` in its record.

    concurrency: requests in flight (closed loop). None: 1 if no request has a start_s, unlimited if one has. With both,
        a request whose start time has passed waits for another one to end; its record has the wait (`wait_ms`).
    warmup: requests to run first, one after the other on separate connections; they are not in the result.
    deadline_s: the run is stopped after this time; records of requests that were in flight or not started state it.
    http: "1.1", "2" (over TLS, if the server supports it) or "2-prior-knowledge".
    ca_file: certificates that verify the server. None: the system's (system_ca_file).
    proxy: URL of a proxy. The environment's proxies are never used.
    realtime: the loop's thread requests SCHED_FIFO at the lowest real-time priority and resets it at the end. Without it,
        a busy machine makes the loop read its sockets late. Root may use it; other users need one command in the shell
        first: `sudo prlimit --rtprio=1 --pid $$`. If it is refused, the run continues and records have realtime: False.
    max_event_bytes: a larger event (or error page) ends its request. At most 2^32 - 1.
    max_answer_bytes, max_answer_events: limits of an answer's body and of its events (comments count).

    Ctrl-C raises KeyboardInterrupt; its attribute `timings` has the results until then.
    """
    if http not in HTTP_VERSIONS:
        raise UsageError(
            f"http={http!r} is not a version", f"choose one of: {', '.join(HTTP_VERSIONS)}"
        )
    certificates = system_ca_file() if ca_file is None else ca_file
    options = {
        "deadline_ns": 0 if deadline_s is None else max(1, _ns("deadline_s", deadline_s)),
        "max_event_bytes": max_event_bytes,
        "max_answer_bytes": max_answer_bytes,
        "max_answer_events": max_answer_events,
        "http": HTTP_VERSIONS[http],
        "fresh_connections": fresh_connections,
        "kernel_stamps": kernel_stamps,
        "realtime": realtime,
        "verify_tls": verify_tls,
        "unix_socket": None if unix_socket is None else os.fsencode(unix_socket),
        "proxy": proxy,
        "ca_file": None if certificates is None else os.fsencode(certificates),
        "user_agent": f"annie-quant/{__version__}",
    }
    with contextlib.ExitStack() as stack:
        if cancel is None:
            cancel = Cancel()
            stack.callback(cancel.close)
        plan = _Plan(requests)
        if (opening := _Plan(warmup)).requests:
            plan.check()
            _run(opening, 1, cancel, options)
        return _run(plan, concurrency, cancel, options)


class _Plan:
    """Requests, and their rows as the C loop reads them."""

    def __init__(self, requests: Iterable[Request]) -> None:
        self.requests = list(requests)
        self.rows = tuple(_row(r) for r in self.requests)

    def check(self) -> None:
        """Raise RequestError if the C loop would refuse one of the requests."""
        with self.refused():
            native.load("_stream").check(self.rows)

    @contextlib.contextmanager
    def refused(self) -> Iterator[None]:
        try:
            yield
        except ValueError as error:
            raise RequestError(str(error)) from None


def _run(
    plan: _Plan, concurrency: int | None, cancel: Cancel, options: Mapping[str, object]
) -> Timings:
    module = native.load("_stream")
    requests = plan.requests
    if concurrency is None:
        concurrency = 0 if any(r.start_s is not None for r in requests) else 1
    elif concurrency < 1:
        raise UsageError(
            f"concurrency={concurrency} would never start a request", "use 1 or more, or None"
        )
    with contextlib.ExitStack() as stack:
        cancel_fd = cancel.descriptor()
        stack.callback(os.close, cancel_fd)
        signal_fd, forward_fd = stack.enter_context(_signals())
        stack.enter_context(plan.refused())
        rows, events, reads, frames, notes, origin_ns, origin_realtime_ns, _, realtime, raised = (
            module.run(
                plan.rows,
                concurrency=concurrency,
                cancel_fd=cancel_fd,
                signal_fd=signal_fd,
                forward_fd=forward_fd,
                **options,
            )
        )
    timings = Timings(
        [PlannedRequest(r.tag, safe_url(r.url), r.timeout_s, r.idle_timeout_s) for r in requests],
        np.frombuffer(rows, np.dtype(module.REQUEST_ROW)),
        np.frombuffer(events, np.dtype(module.EVENT_ROW)),
        np.frombuffer(reads, np.dtype(module.READ_ROW)),
        np.frombuffer(frames, np.uint8),
        np.frombuffer(notes, np.uint8),
        origin_ns=origin_ns,
        origin_realtime_ns=origin_realtime_ns,
        realtime=realtime,
        redactor=Redactor({s for r in requests for s in secrets_of(r.url, r.headers)}),
    )
    if raised is not None:
        raised.timings = timings
        raise raised
    return timings


def _row(r: Request) -> tuple[object, ...]:
    body = r.body
    headers = [(str(name), str(value)) for name, value in (r.headers or {}).items()]
    if r.json is not None:
        if body is not None:
            raise UsageError(f"{r!r} has both json and body", "use one of them")
        body = msgspec.json.encode(r.json)
        if not any(name.lower() == "content-type" for name, _ in headers):
            headers.append(("Content-Type", "application/json"))
    start = -1 if r.start_s is None else _ns("start_s", r.start_s)
    method = r.method or ("GET" if body is None else "POST")
    timeout, idle = (
        _FOREVER_NS if value is None else _ns(name, value)
        for name, value in (("timeout_s", r.timeout_s), ("idle_timeout_s", r.idle_timeout_s))
    )
    return _wire_url(r.url), method, tuple(headers), body, start, timeout, idle


def _wire_url(url: str) -> str:
    """Return the URL with the spaces and non-ASCII characters of its path and query percent-encoded (RFC 3986 2.1)."""
    scheme, mark, rest = url.partition("://")
    path = min((rest.find(c) for c in "/?#" if c in rest), default=len(rest))
    encoded = _NOT_IN_URLS.sub(lambda match: urllib.parse.quote(match[0]), rest[path:])
    return scheme + mark + rest[:path] + encoded


def _ns(name: str, seconds: float) -> int:
    if not math.isfinite(seconds) or seconds < 0:
        where = (
            " is before the run's start" if name == "start_s" and seconds < 0 else " is not a time"
        )
        raise RequestError(
            f"{name}={seconds}{where}", "use 0 or more seconds, or None for no limit"
        )
    return min(_FOREVER_NS, round(seconds * _NS_PER_S))


# ---- start times of an open loop, in seconds after the run's start: requests arrive independently of the server's speed
#
# A closed loop (concurrency) slows down with the server and so hides its worst moments (coordinated omission); an open loop does
# not. With a limit on requests in flight a request may still wait after its start time. Its record has the wait (`wait_ms`), the
# times from the actual start (first_content_ms, e2e_ms: the server's part) and those from the intended start
# (scheduled_first_content_ms, scheduled_e2e_ms: what a user experiences).


def poisson(count: int, rate_per_s: float, seed: int = 0) -> list[float]:
    """Return independent arrivals: exponential gaps with a mean of 1/rate_per_s. The first request follows one gap."""
    gaps = np.random.default_rng(seed).exponential(1 / _positive(rate_per_s, "rate_per_s"), count)
    return np.cumsum(gaps).tolist()


def trace(stamps: Iterable[float], speed: float = 1.0) -> list[float]:
    """Return a log's arrival times (seconds, any origin), `speed` times as fast, with the earliest at 0."""
    times = np.asarray(list(stamps), dtype=np.float64)
    if times.size == 0:
        return []
    if not np.isfinite(times).all():
        raise UsageError(
            "the trace has a time that is not a finite number", "remove that line from the log"
        )
    return ((times - times.min()) / _positive(speed, "speed")).tolist()


def _positive(value: float, name: str) -> float:
    if not value > 0 or value == float("inf"):
        raise UsageError(
            f"{name}={value}, expected a finite number greater than 0", "use a positive number"
        )
    return value


# ---- certificates, and single pages

# The package ca-certificates of each distribution installs its bundle at one of these paths.
CA_PATHS = (
    "/etc/ssl/certs/ca-certificates.crt",  # Debian, Ubuntu, DGX OS, Arch, Alpine
    "/etc/pki/tls/certs/ca-bundle.crt",  # Fedora, RHEL and its derivatives
    "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",  # Fedora without its old links
    "/etc/ssl/ca-bundle.pem",  # openSUSE
    "/etc/ssl/cert.pem",  # macOS, the BSDs
)


def system_ca_file() -> str | None:
    """Return SSL_CERT_FILE (as OpenSSL and Python do), else the system's bundle, else None for libcurl's own default."""
    return os.environ.get("SSL_CERT_FILE") or next(
        (path for path in CA_PATHS if Path(path).is_file()), None
    )


@dataclass(frozen=True)
class HttpReply:
    """One HTTP answer. status: 0 if no status line was received. fault: why the answer is incomplete, or None."""

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    fault: str | None = None


def fetch(
    url: str,
    headers: Mapping[str, str] | None = None,
    *,
    json: object = None,
    timeout_s: float = 5.0,
    max_bytes: int = 1_000_000,
) -> HttpReply:
    """GET `url`, or POST `json`, within `timeout_s` seconds in total and `max_bytes` of answer. Server errors never raise.

    Redirects are not followed and the environment's proxies are not used, so a key is sent to the named origin only.
    """
    request = Request(url, json, headers=headers, timeout_s=timeout_s)
    timings = run(
        [request],
        kernel_stamps=False,
        realtime=False,
        max_event_bytes=max_bytes,
        max_answer_bytes=max_bytes,
    )
    return http_reply(timings, 0)


def http_reply(timings: Timings, request: int) -> HttpReply:
    """Return the answer of one request of a run."""
    fault = transport_fault(timings, request)
    status = int(timings.requests["status"][request])
    return HttpReply(
        status, timings.headers(request), timings.body(request), fault[1] if fault else None
    )


def first_model(body: bytes) -> str | None:
    """Return the name of the first model in an answer of /v1/models; None where there is none."""
    try:
        return msgspec.convert(decode_json(body)["data"][0]["id"], str)
    except (ValueError, LookupError, TypeError):  # also ValidationError
        return None

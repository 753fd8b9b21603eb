"""What is asked (Request), and asking it (run): the face of the C loop in csrc/stream/client.c."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import msgspec
import numpy as np

from annie_quant import __version__, native
from annie_quant.errors import UsageError
from annie_quant.stream.ca_bundle import system_ca_file
from annie_quant.stream.redact import Redactor, safe_url, secrets_of
from annie_quant.stream.timings import Asked, Timings

HTTP_VERSIONS = {"1.1": 0, "2": 1, "2-prior-knowledge": 2}
_NS_PER_S = 1_000_000_000
_FOREVER_NS = 1 << 61


@dataclass(frozen=True)
class Request:
    """One request. With `json` or `body` it is a POST, else a GET; the body is sent as given, nothing is added to it.

    timeout_s: from its start to its end. idle_timeout_s: the longest wait for the next bytes, the first ones included.
    start_s: seconds after the run's start (open loop); None: as soon as a place is free (closed loop).
    tag: yours; it comes back in the record.
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


def chat(url: str, model: str | None, messages: Sequence[Mapping[str, Any]], tag: Any = None, **fields: Any) -> Request:
    """A streamed chat completion that asks for usage. `url`: the server's, with or without /v1/chat/completions.

    fields: max_tokens, temperature, tools ... of the body; headers, timeout_s, idle_timeout_s, start_s of the Request.
    """
    own = {k: fields.pop(k) for k in ("headers", "timeout_s", "idle_timeout_s", "start_s") if k in fields}
    body = {"messages": list(messages), "stream": True, "stream_options": {"include_usage": True}, **fields}
    if model is not None:
        body["model"] = model
    url = url.rstrip("/")
    if not url.endswith("/chat/completions"):
        url += "/chat/completions" if url.endswith("/v1") else "/v1/chat/completions"
    return Request(url, json=body, tag=tag, **own)


class Cancel:
    """Stops a run from another thread: run(..., cancel=c) there, c.cancel() here."""

    def __init__(self) -> None:
        self._read_fd, self._write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def cancel(self) -> None:
        os.write(self._write_fd, b"\0")

    def close(self) -> None:
        for fd in (self._read_fd, self._write_fd):
            os.close(fd)
        self._read_fd = self._write_fd = -1

    @contextlib.contextmanager
    def heard(self) -> Iterator[int]:
        """The descriptor that wakes the C loop; in the main thread, signals write to it as well."""
        if threading.current_thread() is not threading.main_thread():
            yield self._read_fd
            return
        before = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        try:
            yield self._read_fd
        finally:
            signal.set_wakeup_fd(before)


def run(
    requests: Iterable[Request],
    concurrency: int | None = None,
    *,
    warmup: Iterable[Request] = (),
    deadline_s: float | None = None,
    http: str = "1.1",
    fresh_connections: bool = False,
    unix_socket: str | os.PathLike[str] | None = None,
    proxy: str | None = None,
    ca_file: str | os.PathLike[str] | None = None,
    verify_tls: bool = True,
    kernel_stamps: bool = True,
    realtime: bool = True,
    max_event_bytes: int = 64 << 20,
    max_answer_bytes: int = 256 << 20,
    max_answer_events: int = 1 << 20,
    cancel: Cancel | None = None,
) -> Timings:
    """Runs the requests and returns when the last one has ended. A request that fails is a record with its `error`.

    concurrency: how many may be in flight (closed loop). None: one at a time if no request has a start_s, no bound if
        one has. With both, a request whose time has come waits for a place; its record's `wait_ms` says how long.
    warmup: run first, one after the other on connections of their own, and left out of the result.
    deadline_s: the run is stopped then; requests in flight and not yet begun say so in their records.
    http: "1.1", "2" (over TLS, where the server has it) or "2-prior-knowledge".
    ca_file: the certificates that a server is checked against. None: the system's (annie_quant.stream.ca_bundle).
    proxy: a proxy's URL; the environment's proxies are never used.
    realtime: the loop's thread asks for SCHED_FIFO, the lowest of the real-time priorities, and gives it back at the end:
        on a busy machine it would come late to its sockets otherwise. Root has it; for anybody else one command before,
        in the shell: `sudo prlimit --rtprio=1 --pid $$`. Without it the run goes on, and the records say realtime: False.
    max_event_bytes: a larger event (or error page) ends its request.
    max_answer_bytes, max_answer_events: an answer of more body, or of more events (comments too), ends there.
    Ctrl-C raises KeyboardInterrupt, with what was measured until then as its attribute `timings`.
    """
    if http not in HTTP_VERSIONS:
        raise UsageError(f"http={http!r} is not a version", f"choose one of: {', '.join(HTTP_VERSIONS)}")
    options = {
        "deadline_ns": 0 if deadline_s is None else max(1, round(deadline_s * _NS_PER_S)),
        "max_event_bytes": max_event_bytes,
        "max_answer_bytes": max_answer_bytes,
        "max_answer_events": max_answer_events,
        "http": HTTP_VERSIONS[http],
        "fresh_connections": fresh_connections,
        "kernel_stamps": kernel_stamps,
        "realtime": realtime,
        "verify_tls": verify_tls,
        "unix_socket": None if unix_socket is None else os.fspath(unix_socket),
        "proxy": proxy,
        "ca_file": system_ca_file() if ca_file is None else os.fspath(ca_file),
        "user_agent": f"annie-quant/{__version__}",
    }
    own = cancel is None
    cancel = cancel or Cancel()
    try:
        before = list(warmup)
        if before:
            _run(before, 1, cancel, options)
        return _run(list(requests), concurrency, cancel, options)
    finally:
        if own:
            cancel.close()


async def run_async(requests: Iterable[Request], concurrency: int | None = None, **options: Any) -> Timings:
    """run(), awaited: the loop has a thread of its own, and cancelling the task stops it."""
    import asyncio  # 7 MB that a run without it need not hold

    cancel = Cancel()
    work = asyncio.ensure_future(asyncio.to_thread(run, requests, concurrency, cancel=cancel, **options))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        cancel.cancel()
        await work
        raise
    finally:
        cancel.close()


def _run(requests: list[Request], concurrency: int | None, cancel: Cancel, options: Mapping[str, Any]) -> Timings:
    module = native.load("_stream")
    plan = tuple(_row(r) for r in requests)
    if concurrency is None:
        concurrency = 0 if any(r.start_s is not None for r in requests) else 1
    elif concurrency < 1:
        raise UsageError(f"concurrency={concurrency} would never start a request", "use 1 or more, or None")
    with cancel.heard() as fd:
        rows, events, reads, frames, notes, origin_ns, origin_realtime_ns, _, realtime, raised = module.run(
            plan, concurrency=concurrency, cancel_fd=fd, **options
        )
    timings = Timings(
        [Asked(r.tag, safe_url(r.url), r.timeout_s, r.idle_timeout_s) for r in requests],
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


def _row(r: Request) -> tuple[Any, ...]:
    body, headers = r.body, dict(r.headers or {})
    if r.json is not None:
        if body is not None:
            raise UsageError(f"{r!r} has both json and body", "give one of them")
        body = msgspec.json.encode(r.json)
        headers.setdefault("Content-Type", "application/json")
    if urlsplit(r.url).scheme not in ("http", "https"):
        raise UsageError(f"{safe_url(r.url)!r} is not an http:// or https:// URL", "write it in full")
    for name, value in headers.items():
        if any(c in f"{name}{value}" for c in "\r\n\0"):
            raise UsageError(f"header {name!r} holds a line break", "a header is one line")
    if r.start_s is not None and r.start_s < 0:
        raise UsageError(f"start_s={r.start_s} lies before the run", "use 0 or more")
    lines = tuple(f"{name}: {value}" if value else f"{name};" for name, value in headers.items())
    start = -1 if r.start_s is None else round(r.start_s * _NS_PER_S)
    method = r.method or ("GET" if body is None else "POST")
    return r.url, method, lines, body, start, _ns(r.timeout_s), _ns(r.idle_timeout_s)


def _ns(seconds: float | None) -> int:
    return _FOREVER_NS if seconds is None else min(_FOREVER_NS, round(seconds * _NS_PER_S))

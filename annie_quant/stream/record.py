"""One request's record: everything that is decoded from its frames, with all times in milliseconds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from annie_quant.core.text import printable
from annie_quant.stream import decode, errors
from annie_quant.stream.redact import safe_url

if TYPE_CHECKING:
    from annie_quant.stream.timings import Timings

HTTP_NAMES = {1: "1.0", 2: "1.1", 3: "2"}  # libcurl's CURL_HTTP_VERSION_*


class Record(decode.TokenTimes, kw_only=True):
    """One request and its answer; `decode.TokenTimes` has the times of its tokens.

    Times ending in _ms count from the moment the request was handed to its connection. `error` is one line, `cause` its
    short form (annie_quant.stream.errors); both are None where nothing failed.
    """

    tag: Any
    url: str
    status: int
    error: str | None
    cause: str | None
    warnings: list[str]
    text: str
    reasoning: str
    tool_calls: list[dict[str, Any]]  # {"id", "name", "arguments"}
    finish_reason: str | None
    usage: dict[str, Any] | None
    server_timings: dict[str, Any] | None  # llama.cpp's own account
    model: str | None
    first_byte_ms: float | None
    e2e_ms: float
    clock: str  # "kernel" or "user"
    realtime: bool
    unstamped_events: int
    started_s: float  # after the run's start
    started_unix_s: float
    # Open loop only: times from the intended start, which include the wait for a free connection.
    wait_ms: float | None
    scheduled_first_content_ms: float | None
    scheduled_e2e_ms: float | None
    # Phases, each with its own length. A reused connection has no name lookup, connect or TLS phase.
    new_connection: bool
    name_lookup_ms: float
    connect_ms: float
    tls_ms: float
    sent_ms: float
    http_version: str | None
    server_date: str | None
    server: str | None
    body_bytes: int


def decode_record(timings: Timings, request: int, clock: str) -> Record:
    """Decode one request of a run. clock: "kernel" (the user's stamp where an event has no kernel stamp) or "user"."""
    row, info = timings.requests[request], timings.plan[request]
    indices = timings.rows_of(request)
    unstamped = _unstamped_events(timings, request, indices)
    if unstamped is None:
        clock = "user"
    frames = _frames(timings, indices, clock)
    answer = decode.read_answer(frames) if row["event_stream"] else decode.Answer()
    _find_fault(timings, answer, request, b"".join(f.raw for f in frames))
    started, scheduled = int(row["started_ns"]), int(row["scheduled_ns"])
    if "resent_us" in row.dtype.names and (resent := int(row["resent_us"])):
        answer.warn(
            f"the reused connection had ended: sent again after {resent / 1e3:.1f} ms, which this request's times include"
        )
    suffix = "_kernel_ns" if clock == "kernel" else "_ns"
    first_byte = int(row[f"first_byte{suffix}"]) or int(row["first_byte_ns"])
    ended = int(row[f"ended{suffix}"]) or int(row["ended_ns"])
    headers = timings.headers(request)
    times = decode.token_times(answer, started)
    e2e_ms = (ended - started) / 1e6
    wait_ms = (started - scheduled) / 1e6 if scheduled else None
    first = times.first_content_ms
    lookup, connect, tls = int(row["name_lookup_us"]), int(row["connect_us"]), int(row["tls_us"])  # from the start
    return Record(
        **msgspec.structs.asdict(times),
        tag=info.tag,
        url=info.url,
        status=int(row["status"]),
        error=answer.fault[1] if answer.fault else None,
        cause=answer.fault[0] if answer.fault else None,
        warnings=answer.warnings,
        text="".join(answer.text),
        reasoning="".join(answer.reasoning),
        tool_calls=[msgspec.structs.asdict(call) for call in answer.calls.values()],
        finish_reason=answer.finish_reason,
        usage=answer.usage,
        server_timings=answer.server_timings,
        model=answer.model,
        first_byte_ms=(first_byte - started) / 1e6 if first_byte else None,
        e2e_ms=e2e_ms,
        clock=clock,
        realtime=timings.realtime,
        unstamped_events=unstamped or 0,
        started_s=(started - timings.origin_ns) / 1e9,
        started_unix_s=(started - timings.origin_ns + timings.origin_realtime_ns) / 1e9,
        wait_ms=wait_ms,
        scheduled_first_content_ms=None if wait_ms is None or first is None else first + wait_ms,
        scheduled_e2e_ms=None if wait_ms is None else e2e_ms + wait_ms,
        new_connection=bool(row["new_connection"]),
        name_lookup_ms=lookup / 1e3,
        connect_ms=max(0, connect - lookup) / 1e3,
        tls_ms=max(0, tls - connect) / 1e3 if tls else 0.0,
        sent_ms=int(row["pretransfer_us"]) / 1e3,
        http_version=HTTP_NAMES.get(int(row["http_version"])),
        server_date=_header(headers, "date"),
        server=_header(headers, "server"),
        body_bytes=int(timings.events["size"][indices].sum()),
    )


def _header(headers: Mapping[str, str], name: str) -> str | None:
    return printable(headers[name], decode.MAX_NAME) if name in headers else None


def _content_encoding(headers: Mapping[str, str]) -> str | None:
    """Return the coding of a compressed answer, or None. The client sends no Accept-Encoding."""
    encoding = _header(headers, "content-encoding")
    return None if encoding is None or encoding.strip().lower() in ("", "identity") else encoding


def transport_fault(timings: Timings, request: int) -> tuple[str, str] | None:
    """Return (cause, message) of a request that did not complete at the HTTP level, or None."""
    row, info = timings.requests[request], timings.plan[request]
    start = int(row["error_offset"])
    text = timings.notes[start : start + int(row["error_size"])].tobytes().decode("utf-8", "replace")
    return errors.transport(
        int(row["cause"]), int(row["curl_code"]), int(row["os_errno"]), text, info.timeout_s, info.idle_timeout_s
    )


def _unstamped_events(timings: Timings, request: int, indices: np.ndarray) -> int | None:
    """Count the events without a kernel stamp. None if the request has no kernel stamp at all."""
    missing = int(np.count_nonzero(timings.events["kernel_ns"][indices] == 0))
    stamped = missing < len(indices) or bool(timings.requests["first_byte_kernel_ns"][request])
    return missing if stamped else None


def _frames(timings: Timings, indices: np.ndarray, clock: str) -> list[decode.Frame]:
    rows = timings.events[indices]
    stamps = rows["user_ns"]
    if clock == "kernel":
        stamps = np.where(rows["kernel_ns"] != 0, rows["kernel_ns"], stamps)
    names = ("kind", "flags", "read", "offset", "size", "data_start", "data_size", "data_lines")
    columns = (rows[name].tolist() for name in names)
    frames = []
    for stamp, kind, flags, read, offset, size, start, data_size, lines in zip(stamps.tolist(), *columns, strict=True):
        raw = timings.frames[offset : offset + size].tobytes()
        data = raw[start : start + data_size] if lines <= 1 else decode.joined_data(raw, start)
        frames.append(decode.Frame(stamp, kind, flags, read, raw, data))
    return frames


def _find_fault(timings: Timings, answer: decode.Answer, request: int, body: bytes) -> None:
    """Set answer.fault to the request's first fault: in the transport, the status, or the end of the stream."""
    row = timings.requests[request]
    status, ended = int(row["status"]), answer.done_ns is not None
    fault = transport_fault(timings, request)
    if fault and ended and fault[0] in ("truncated", "reset"):
        answer.warn(f"the connection ended badly after [DONE]: {fault[1]}")
        fault = None
    if answer.fault:
        return
    if fault:
        answer.fail(*fault)
    elif status >= 400:
        answer.fail("http", errors.http(status, body))
    elif status >= 300:
        target = safe_url(timings.headers(request).get("location", "nowhere"))
        answer.fail("redirect", f"HTTP {status} redirects to {errors.one_line(target)}: redirects are not followed")
    elif encoding := _content_encoding(timings.headers(request)):
        answer.fail("encoded", f"HTTP {status} has Content-Encoding {encoding}, which the request does not accept")
    elif not row["event_stream"] and body:  # the mark is set with the first byte of the body
        kind = _header(timings.headers(request), "content-type") or "no content type"
        answer.fail("not_a_stream", f"HTTP {status} is not an event stream ({kind}): {errors.message_of(body)}")
    elif "event" not in answer.first:
        answer.fail("no_events", f"the stream has no event ({len(body)} bytes)")
    elif not ended and answer.finish_reason is None:
        answer.fail("truncated", "the stream ended early: neither its end mark nor a finish reason was received")
    elif not ended:
        answer.warn("[DONE] was not received")

"""The result of a run: rows and raw frames as C wrote them (no copy), and one record per request decoded from them.

A recording is one file, timings.npz: the same arrays, and the plan without its secrets. It decodes to the same records.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from annie_quant.core.errors import EnvironmentFault, UsageError, need
from annie_quant.core.secrets import Redactor, safe_url
from annie_quant.core.text import printable
from annie_quant.core.untrusted import JsonObject
from annie_quant.stream import answer as answers
from annie_quant.stream import decode
from annie_quant.stream.answer import Frame, StreamedAnswer, event_data, joined_data
from annie_quant.stream.texts import MAX_NAME

if TYPE_CHECKING:
    import pandas

_SCHEMA_VERSION = 1
_MASK = ord("*")
FILE_NAME = "timings.npz"
_ARRAYS = ("requests", "events", "reads", "frames", "notes")
_CLOCKS = ("kernel", "user")
_COLUMNS = {  # of the rows in csrc/stream/plan.h: those that are read here
    "requests": "scheduled_ns started_ns ended_ns ended_kernel_ns first_byte_ns first_byte_kernel_ns name_lookup_us connect_us "
    "tls_us pretransfer_us header_offset error_offset header_size error_size status curl_code os_errno http_version cause "
    "new_connection event_stream",
    "events": "user_ns kernel_ns offset size data_start data_size request read data_lines kind flags",
    "reads": "user_ns request size",
}
_LATER_COLUMNS = {"resent_us"}  # older recordings do not have them


@dataclass(frozen=True)
class PlannedRequest:
    """The part of a request that is stored: no headers, no body."""

    tag: Any
    url: str
    timeout_s: float | None = None
    idle_timeout_s: float | None = None


class RecordedPlan(msgspec.Struct):
    """The plan of a recording, with what `Timings` has besides arrays."""

    schema_version: int
    origin_ns: int
    origin_realtime_ns: int
    asked: list[PlannedRequest]
    realtime: bool = False


HTTP_NAMES = {1: "1.0", 2: "1.1", 3: "2"}  # libcurl's CURL_HTTP_VERSION_*


class Record(decode.TokenTimes, kw_only=True):
    """One request and its answer; `decode.TokenTimes` has the times of its tokens.

    Times ending in _ms count from the moment the request was handed to its connection. `error` is one line, `cause` its
    short form (annie_quant.stream.answer); both are None where nothing failed.
    """

    tag: Any
    url: str
    status: int
    error: str | None
    cause: str | None
    warnings: list[str]
    text: str
    reasoning: str
    tool_calls: list[JsonObject]  # {"id", "name", "arguments"}
    finish_reason: str | None
    usage: JsonObject | None
    server_timings: JsonObject | None  # llama.cpp's own account
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


class Timings:
    """The result of a run, or a recording of one.

    plan      list of PlannedRequest
    requests  structured array, one row per request in the plan's order: phases, status, first byte, end
    events    structured array, one row per event (ping, body) in order of arrival: `user_ns`, `kernel_ns` (0: unknown),
              `request`, `read`, and the position of its bytes in `frames`
    reads     structured array, one row per network read of body bytes
    frames    uint8, the bytes of all events, one after the other; those of one request, joined, are its body
    notes     uint8, response headers and libcurl's error texts

    Stamps are CLOCK_MONOTONIC nanoseconds; `origin_ns` is the run's start, `origin_realtime_ns` the same as wall clock.
    `realtime`: the loop had a real-time priority; without it, other work on the machine makes user stamps late.
    """

    def __init__(
        self,
        plan: Sequence[PlannedRequest],
        requests: np.ndarray,
        events: np.ndarray,
        reads: np.ndarray,
        frames: np.ndarray,
        notes: np.ndarray,
        *,
        origin_ns: int,
        origin_realtime_ns: int,
        realtime: bool = False,
        redactor: Redactor | None = None,
    ) -> None:
        self.plan = list(plan)
        self.requests = requests
        self.events = events
        self.reads = reads
        self.frames = frames
        self.notes = notes
        self.origin_ns = origin_ns
        self.origin_realtime_ns = origin_realtime_ns
        self.realtime = realtime
        self._rows: list[np.ndarray] | None = None
        if redactor:
            self._mask(redactor)
        for name in _ARRAYS:
            getattr(self, name).flags.writeable = False

    def _mask(self, redactor: Redactor) -> None:
        """Overwrite secrets before anything is decoded, so that nothing that is derived from these bytes has any."""
        for start, end in redactor.spans(self.notes.tobytes()):
            self.notes[start:end] = _MASK
        for request in range(len(self)):
            rows = self.rows_of(request)
            starts = self.events["offset"][rows].tolist()
            for event, start, end in redactor.spans_in_events(
                [self.raw(i) for i in rows], event_data
            ):
                self.frames[starts[event] + start : starts[event] + end] = _MASK

    def __len__(self) -> int:
        return len(self.plan)

    def __repr__(self) -> str:
        failed = int(
            np.count_nonzero((self.requests["cause"] != 0) | (self.requests["status"] >= 400))
        )
        return f"Timings({len(self)} requests, {failed} failed, {len(self.events)} events, {self.frames.size} bytes)"

    def rows_of(self, request: int) -> np.ndarray:
        """Return the indices into `events` of one request, in order."""
        if self._rows is None:
            order = np.argsort(self.events["request"], kind="stable")
            edges = np.searchsorted(self.events["request"][order], np.arange(1, len(self)))
            self._rows = np.split(order, edges)
        return self._rows[request]

    def raw(self, event: int) -> bytes:
        """Return one event's bytes as received."""
        row = self.events[event]
        start = int(row["offset"])
        return self.frames[start : start + int(row["size"])].tobytes()

    def body(self, request: int) -> bytes:
        """Return all body bytes of one answer."""
        return b"".join(self.raw(i) for i in self.rows_of(request))

    def headers(self, request: int) -> dict[str, str]:
        """Return the answer's headers, names in lower case. Cookies are not stored."""
        row = self.requests[request]
        start = int(row["header_offset"])
        lines = (
            self.notes[start : start + int(row["header_size"])]
            .tobytes()
            .decode("latin-1")
            .split("\n")
        )
        pairs = (line.partition(":") for line in lines[1:] if ":" in line)
        return {name.strip().lower(): value.strip() for name, _, value in pairs}

    def record(self, request: int, clock: str = "kernel") -> Record:
        """Decode one request; see `records` for the clocks."""
        if clock not in _CLOCKS:
            raise UsageError(
                f"clock={clock!r} is not a clock", f"choose one of: {', '.join(_CLOCKS)}"
            )
        return _decode_record(self, request, clock)

    def records(self, clock: str = "kernel") -> list[JsonObject]:
        """Return one dict per request, in the plan's order, with the fields of `Record`.

        clock: "kernel" uses the kernel's receive stamps, and the user's stamp for an event without one
        (`unstamped_events`); "user" uses the time at which this process read the data. A record's `clock` is the one
        that was used: a Unix socket has no kernel stamps, and with TLS they time the ciphertext.
        """
        return [msgspec.structs.asdict(self.record(i, clock)) for i in range(len(self))]

    def columns(self, table: str = "events") -> dict[str, np.ndarray]:
        """Return the columns of `requests`, `events` or `reads`, as views."""
        array = {"requests": self.requests, "events": self.events, "reads": self.reads}[table]
        return {name: array[name] for name in array.dtype.names or ()}

    def to_pandas(self, table: str = "events") -> pandas.DataFrame:
        """Return a DataFrame over the same memory (`table`: events, reads, requests), or of the records."""
        frame = need("pandas", "notebooks").DataFrame
        return (
            frame(self.records()) if table == "records" else frame(self.columns(table), copy=False)
        )

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write folder/timings.npz: raw frames, stamps, response headers. The requests' secrets are not in it."""
        from annie_quant.core.files import (
            replacing,
        )  # imports hashlib: 3 MB that a run does not need

        path = Path(folder) / FILE_NAME
        plan = RecordedPlan(
            _SCHEMA_VERSION, self.origin_ns, self.origin_realtime_ns, self.plan, self.realtime
        )
        arrays = {name: getattr(self, name) for name in _ARRAYS}
        plan_bytes = np.frombuffer(msgspec.json.encode(plan), dtype=np.uint8)
        # As numpy.savez_compressed, in a third of its time: the content is text and stamps, and runs have many files.
        with (
            replacing(path) as file,
            zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive,
        ):
            for name, array in {"plan": plan_bytes, **arrays}.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(
                        member, np.ascontiguousarray(array), allow_pickle=False
                    )
        return path

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> Timings:
        """Read a recording: the folder it was saved to, or its file. Raises EnvironmentFault for any other content."""
        path = Path(folder)
        path = path / FILE_NAME if path.is_dir() else path
        try:
            with np.load(path, allow_pickle=False) as archive:
                content = archive["plan"].tobytes()
                arrays = [
                    np.asarray(archive[name]) for name in _ARRAYS
                ]  # a member that is not .npy is bytes
            version = msgspec.json.decode(content)["schema_version"]
            if version == _SCHEMA_VERSION:
                plan = msgspec.json.decode(content, type=RecordedPlan)
                _check_arrays(len(plan.asked), *arrays)
        except Exception as error:  # numpy and zipfile raise many types
            reason = (str(error) or type(error).__name__).splitlines()[0][:200]
            raise EnvironmentFault(f"{path} is not a recording of a run: {reason}") from error
        if version != _SCHEMA_VERSION:
            raise EnvironmentFault(
                f"{path} has schema_version {version}, expected {_SCHEMA_VERSION}"
            )
        origin_ns = plan.origin_ns
        realtime_ns = plan.origin_realtime_ns
        return cls(
            plan.asked,
            *arrays,
            origin_ns=origin_ns,
            origin_realtime_ns=realtime_ns,
            realtime=plan.realtime,
        )


# ---- a recording's arrays


def _check_arrays(
    count: int,
    requests: np.ndarray,
    events: np.ndarray,
    reads: np.ndarray,
    frames: np.ndarray,
    notes: np.ndarray,
) -> None:
    """Raise ValueError unless a recording's arrays are as a run writes them, because decoding trusts them.

    Extra columns, as older versions wrote, are allowed.
    """
    for name, rows in (("requests", requests), ("events", events), ("reads", reads)):
        missing = [c for c in _COLUMNS[name].split() if c not in (rows.dtype.names or ())]
        if missing or rows.ndim != 1:
            raise ValueError(
                f"{name} has no column {missing[0]}"
                if missing
                else f"{name} has {rows.ndim} dimensions"
            )
        columns = {*_COLUMNS[name].split(), *_LATER_COLUMNS} & set(rows.dtype.names or ())
        if any(rows.dtype[c].kind not in "iub" for c in columns):
            raise ValueError(f"{name} has columns that are not integers")
    for name, data in (("frames", frames), ("notes", notes)):
        if data.dtype != np.uint8 or data.ndim != 1:
            raise ValueError(f"{name} is not bytes ({data.ndim} dimensions of {data.dtype.name})")
    if len(requests) != count:
        raise ValueError(f"{len(requests)} requests, expected {count} as in the plan")
    offset = events["offset"].astype(np.int64)
    size = events["size"].astype(np.int64)
    inside = (offset >= 0) & (offset <= frames.size) & (size >= 0) & (size <= frames.size - offset)
    if not (inside & (events["request"] >= 0) & (events["request"] < count)).all():
        raise ValueError("events of no request, or beyond the frames")


# ---- decoding one request


def _decode_record(timings: Timings, request: int, clock: str) -> Record:
    """Decode one request of a run. clock: "kernel" (the user's stamp where an event has no kernel stamp) or "user"."""
    row = timings.requests[request]
    info = timings.plan[request]
    indices = timings.rows_of(request)
    unstamped = _unstamped_events(timings, request, indices)
    if unstamped is None:
        clock = "user"
    frames = _frames(timings, indices, clock)
    answer = decode.read_answer(frames) if row["event_stream"] else StreamedAnswer()
    _find_fault(timings, answer, request, b"".join(f.raw for f in frames))
    started = int(row["started_ns"])
    scheduled = int(row["scheduled_ns"])
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
    # from the start
    lookup = int(row["name_lookup_us"])
    connect = int(row["connect_us"])
    tls = int(row["tls_us"])
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
    return printable(headers[name], MAX_NAME) if name in headers else None


def _missing_content(answer: StreamedAnswer) -> str | None:
    """Return why a stream has no answer of a chat completion; None where it has one."""
    if answer.text or answer.reasoning or answer.calls:
        return None
    if answer.other_api:
        return f"{answer.other_api}: request /v1/chat/completions instead"
    if answer.finish_reason is None:
        return "the stream has no answer: neither text, nor a tool call, nor a finish reason"
    if answer.finish_reason in ("tool_calls", "function_call"):
        return f"the stream ended with the reason {answer.finish_reason!r} and has no call"
    return None


def _content_encoding(headers: Mapping[str, str]) -> str | None:
    """Return the coding of a compressed answer, or None. The client sends no Accept-Encoding."""
    encoding = _header(headers, "content-encoding")
    return None if encoding is None or encoding.strip().lower() in ("", "identity") else encoding


def transport_fault(timings: Timings, request: int) -> tuple[str, str] | None:
    """Return (cause, message) of a request that did not complete at the HTTP level, or None."""
    row = timings.requests[request]
    info = timings.plan[request]
    start = int(row["error_offset"])
    text = (
        timings.notes[start : start + int(row["error_size"])].tobytes().decode("utf-8", "replace")
    )
    return answers.transport_fault_of(
        int(row["cause"]),
        int(row["curl_code"]),
        int(row["os_errno"]),
        text,
        info.timeout_s,
        info.idle_timeout_s,
    )


def _unstamped_events(timings: Timings, request: int, indices: np.ndarray) -> int | None:
    """Count the events without a kernel stamp. None if the request has no kernel stamp at all."""
    missing = int(np.count_nonzero(timings.events["kernel_ns"][indices] == 0))
    stamped = missing < len(indices) or bool(timings.requests["first_byte_kernel_ns"][request])
    return missing if stamped else None


def _frames(timings: Timings, indices: np.ndarray, clock: str) -> list[Frame]:
    rows = timings.events[indices]
    stamps = rows["user_ns"]
    if clock == "kernel":
        stamps = np.where(rows["kernel_ns"] != 0, rows["kernel_ns"], stamps)
    names = ("kind", "flags", "read", "offset", "size", "data_start", "data_size", "data_lines")
    columns = (rows[name].tolist() for name in names)
    frames = []
    for stamp, kind, flags, read, offset, size, start, data_size, lines in zip(
        stamps.tolist(), *columns, strict=True
    ):
        raw = timings.frames[offset : offset + size].tobytes()
        data = raw[start : start + data_size] if lines <= 1 else joined_data(raw, start)
        frames.append(Frame(stamp, kind, flags, read, raw, data))
    return frames


def _find_fault(timings: Timings, answer: StreamedAnswer, request: int, body: bytes) -> None:
    """Set answer.fault to the request's first fault: in the transport, the status, or the end of the stream."""
    row = timings.requests[request]
    status = int(row["status"])
    ended = answer.done_ns is not None
    fault = transport_fault(timings, request)
    if fault and ended and not answer.stray_lines and fault[0] in ("truncated", "reset"):
        answer.warn(f"the connection ended badly after [DONE]: {fault[1]}")
        fault = None
    if answer.fault:
        return
    if fault:
        answer.fail(*fault)
    elif status >= 400:
        answer.fail("http", answers.error_page(status, body))
    elif status >= 300:
        target = safe_url(timings.headers(request).get("location", "nowhere"))
        answer.fail(
            "redirect",
            f"HTTP {status} redirects to {answers.one_line(target)}: redirects are not followed",
        )
    elif encoding := _content_encoding(timings.headers(request)):
        answer.fail(
            "encoded",
            f"HTTP {status} has Content-Encoding {encoding}, which the request does not accept",
        )
    elif not row["event_stream"] and body:  # the mark is set with the first byte of the body
        kind = _header(timings.headers(request), "content-type") or "no content type"
        answer.fail(
            "not_a_stream",
            f"HTTP {status} is not an event stream ({kind}): {answers.message_of(body)}",
        )
    elif "event" not in answer.first:
        answer.fail("no_events", f"the stream has no event ({len(body)} bytes)")
    elif missing := _missing_content(answer):
        answer.fail("no_events", missing)
    elif not ended and answer.finish_reason is None:
        answer.fail(
            "truncated",
            "the stream ended early: neither its end mark nor a finish reason was received",
        )
    elif not ended:
        answer.warn("[DONE] was not received")

"""What a run brings back: rows and raw frames in place (no copy of what C wrote), and records decoded from them.

A recording is one file, timings.npz: the same arrays, and the plan without its secrets. It decodes alike.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from annie_quant.errors import EnvironmentFault, UsageError, need
from annie_quant.stream import decode, errors
from annie_quant.stream.redact import Redactor, safe_url

SCHEMA_VERSION = 1
FILE_NAME = "timings.npz"
_ARRAYS = ("requests", "events", "reads", "frames", "notes")
_CLOCKS = ("kernel", "user")
_COLUMNS = {  # of the rows of csrc/stream/plan.h, as far as anything here reads them
    "requests": "scheduled_ns started_ns ended_ns ended_kernel_ns first_byte_ns first_byte_kernel_ns name_lookup_us connect_us "
    "tls_us pretransfer_us header_offset error_offset header_size error_size status curl_code os_errno http_version cause "
    "new_connection event_stream",
    "events": "user_ns kernel_ns offset size data_start data_size request read data_lines kind flags",
    "reads": "user_ns request size",
}


@dataclass(frozen=True)
class Asked:
    """What is kept of a request: no headers, no body."""

    tag: Any
    url: str
    timeout_s: float | None = None
    idle_timeout_s: float | None = None


class Timings:
    """The result of a run, or a recording of one.

    requests  structured array, a row a request in the plan's order: phases, status, first byte, end
    events    structured array, a row an event (ping, body) as they arrived: `user_ns`, `kernel_ns` (0: unknown),
              `request`, `read`, and where its bytes are in `frames`
    reads     structured array, a row a network read of body bytes
    frames    uint8, the bytes of all events, one after the other; a request's own, joined, are its body
    notes     uint8, response headers and libcurl's error texts
    Stamps are CLOCK_MONOTONIC nanoseconds; `origin_ns` is the run's start, `origin_realtime_ns` the same as wall clock.
    `realtime`: the loop had a real-time priority; without it, other work on the machine makes user stamps late.
    """

    def __init__(
        self,
        asked: Sequence[Asked],
        requests: Any,
        events: Any,
        reads: Any,
        frames: Any,
        notes: Any,
        *,
        origin_ns: int,
        origin_realtime_ns: int,
        realtime: bool = False,
        redactor: Redactor | None = None,
    ) -> None:
        self.asked = list(asked)
        self.requests, self.events, self.reads = requests, events, reads
        self.frames, self.notes = frames, notes
        self.origin_ns, self.origin_realtime_ns = origin_ns, origin_realtime_ns
        self.realtime = realtime
        self._rows: list[np.ndarray] | None = None
        if redactor:
            self._mask(redactor)
        for name in _ARRAYS:
            getattr(self, name).flags.writeable = False

    def _mask(self, redactor: Redactor) -> None:
        """Before anything is decoded, so that whatever comes from these bytes is without secrets."""
        redactor.mask(self.notes)
        for request in range(len(self)):
            rows = self.events[self.rows_of(request)]
            redactor.mask_answer(self.frames, rows["offset"], rows["size"])

    def __len__(self) -> int:
        return len(self.asked)

    def __repr__(self) -> str:
        failed = int(np.count_nonzero((self.requests["cause"] != 0) | (self.requests["status"] >= 400)))
        return f"Timings({len(self)} requests, {failed} failed, {len(self.events)} events, {self.frames.size} bytes)"

    # ---- raw

    def rows_of(self, request: int) -> np.ndarray:
        """The indices into `events` of one request, in order."""
        if self._rows is None:
            order = np.argsort(self.events["request"], kind="stable")
            edges = np.searchsorted(self.events["request"][order], np.arange(1, len(self)))
            self._rows = np.split(order, edges)
        return self._rows[request]

    def raw(self, event: int) -> bytes:
        """One event's bytes as they came."""
        row = self.events[event]
        start = int(row["offset"])
        return self.frames[start : start + int(row["size"])].tobytes()

    def body(self, request: int) -> bytes:
        """All body bytes of one answer."""
        return b"".join(self.raw(i) for i in self.rows_of(request))

    def headers(self, request: int) -> dict[str, str]:
        """The answer's headers, names in lower case; cookies are not kept."""
        row = self.requests[request]
        start = int(row["header_offset"])
        lines = self.notes[start : start + int(row["header_size"])].tobytes().decode("latin-1").split("\r\n")
        pairs = (line.partition(":") for line in lines[1:] if ":" in line)
        return {name.strip().lower(): value.strip() for name, _, value in pairs}

    # ---- decoded

    def records(self, clock: str = "kernel") -> list[dict[str, Any]]:
        """A dict a request, in the plan's order; decode.py says what each time means, faults.py the causes of `error`.

        clock: "kernel" takes the kernel's receive stamps, and where an event has none (`unstamped_events`) the user's;
        "user" takes the moment this process came to the data. A record's `clock` says which it was: a Unix socket has
        no kernel stamps, and with TLS they time the ciphertext.
        """
        if clock not in _CLOCKS:
            raise UsageError(f"clock={clock!r} is not a clock", f"choose one of: {', '.join(_CLOCKS)}")
        return [self.record(i, clock) for i in range(len(self))]

    def record(self, request: int, clock: str = "kernel") -> dict[str, Any]:
        row, asked = self.requests[request], self.asked[request]
        indices = self.rows_of(request)
        unstamped = self._unstamped(request, indices)
        if unstamped is None:
            clock = "user"
        frames = self._frames(indices, clock)
        answer = decode.read_answer(frames) if row["event_stream"] else decode.Answer()
        self._judge(answer, request, frames)
        started = int(row["started_ns"])
        suffix = "_kernel_ns" if clock == "kernel" else "_ns"
        first_byte = int(row[f"first_byte{suffix}"]) or int(row["first_byte_ns"])
        ended = int(row[f"ended{suffix}"]) or int(row["ended_ns"])
        headers = self.headers(request)
        times = decode.timing_fields(answer, started)
        return {
            "tag": asked.tag,
            "url": asked.url,
            "status": int(row["status"]),
            "error": answer.fault[1] if answer.fault else None,
            "cause": answer.fault[0] if answer.fault else None,
            "warnings": answer.warnings,
            "text": "".join(answer.text),
            "reasoning": "".join(answer.reasoning),
            "tool_calls": list(answer.calls.values()),
            "finish_reason": answer.finish_reason,
            "usage": answer.usage,
            "server_timings": answer.server_timings,
            "model": answer.model,
            "first_byte_ms": (first_byte - started) / 1e6 if first_byte else None,
            **times,
            "e2e_ms": (ended - started) / 1e6,
            "clock": clock,
            "realtime": self.realtime,
            "unstamped_events": unstamped or 0,
            "started_s": (started - self.origin_ns) / 1e9,
            "started_unix_s": (started - self.origin_ns + self.origin_realtime_ns) / 1e9,
            **_from_schedule(times, (ended - started) / 1e6, started, int(row["scheduled_ns"])),
            **_phases(row),
            "server_date": headers.get("date"),
            "server": headers.get("server"),
            "body_bytes": int(self.events["size"][indices].sum()),
        }

    def _unstamped(self, request: int, indices: np.ndarray) -> int | None:
        """How many events the kernel did not stamp; None if it stamped nothing of this request."""
        missing = int(np.count_nonzero(self.events["kernel_ns"][indices] == 0))
        stamped = missing < len(indices) or bool(self.requests["first_byte_kernel_ns"][request])
        return missing if stamped else None

    def _frames(self, indices: np.ndarray, clock: str) -> list[decode.Frame]:
        rows = self.events[indices]
        stamps = rows["user_ns"]
        if clock == "kernel":
            stamps = np.where(rows["kernel_ns"] != 0, rows["kernel_ns"], stamps)
        names = ("kind", "flags", "read", "offset", "size", "data_start", "data_size", "data_lines")
        columns = (rows[name].tolist() for name in names)
        out = []
        for when, kind, flags, read, offset, size, start, data_size, lines in zip(
            stamps.tolist(), *columns, strict=True
        ):
            raw = self.frames[offset : offset + size].tobytes()
            data = raw[start : start + data_size] if lines <= 1 else decode.joined_data(raw, start)
            out.append(decode.Frame(when, kind, flags, read, raw, data))
        return out

    def _judge(self, answer: decode.Answer, request: int, frames: list[decode.Frame]) -> None:
        """Finds the request's first fault: in the transport, in the status, or in how the stream ended."""
        row = self.requests[request]
        status, ended = int(row["status"]), answer.done_ns is not None
        fault = self.transport_fault(request)
        if fault and ended and fault[0] in ("truncated", "reset"):
            answer.warn(f"the connection ended badly after [DONE]: {fault[1]}")
            fault = None
        if answer.fault:
            return
        body = b"".join(f.raw for f in frames)
        if fault:
            answer.fail(*fault)
        elif status >= 400:
            answer.fail("http", errors.http(status, body))
        elif status >= 300:
            target = safe_url(self.headers(request).get("location", "nowhere"))
            answer.fail("redirect", f"HTTP {status} sends to {errors.one_line(target)}: redirects are not followed")
        elif not row["event_stream"]:
            kind = self.headers(request).get("content-type", "no content type")
            answer.fail("not_a_stream", f"HTTP {status} is not an event stream ({kind}): {errors.message_of(body)}")
        elif "event" not in answer.first:
            answer.fail("no_events", f"the stream held no event ({len(body)} bytes)")
        elif not ended and answer.finish_reason is None:
            answer.fail("truncated", "the stream ended early: neither [DONE] nor a finish reason came")
        elif not ended:
            answer.warn("[DONE] did not come")

    def transport_fault(self, request: int) -> tuple[str, str] | None:
        """(cause, message) of a request that HTTP did not end; None if it did."""
        row, asked = self.requests[request], self.asked[request]
        start = int(row["error_offset"])
        text = self.notes[start : start + int(row["error_size"])].tobytes().decode("utf-8", "replace")
        return errors.transport(
            int(row["cause"]), int(row["curl_code"]), int(row["os_errno"]), text, asked.timeout_s, asked.idle_timeout_s
        )

    # ---- tables

    def columns(self, table: str = "events") -> dict[str, np.ndarray]:
        """The columns of `requests`, `events` or `reads`, as views."""
        array = {"requests": self.requests, "events": self.events, "reads": self.reads}[table]
        return {name: array[name] for name in array.dtype.names}

    def to_pandas(self, table: str = "events") -> Any:
        """A DataFrame over the same memory (`table`: events, reads, requests), or over records."""
        pandas = need("pandas", "notebooks")
        if table == "records":
            return pandas.DataFrame(self.records())
        return pandas.DataFrame(self.columns(table), copy=False)

    def to_arrow(self, table: str = "events") -> Any:
        """A pyarrow Table. The raw frames are not copied. Numbers are, once: Arrow's columns are contiguous, and a row here
        is kept whole because the loop writes it in one go."""
        arrow = need("pyarrow", "notebooks")
        if table == "records":
            return arrow.Table.from_pylist(self.records())
        columns = {name: arrow.array(np.ascontiguousarray(c)) for name, c in self.columns(table).items()}
        if table == "events":
            ends = np.append(self.events["offset"], np.uint64(self.frames.size)).astype(np.int64)
            columns["raw"] = arrow.LargeBinaryArray.from_buffers(
                arrow.large_binary(), len(self.events), [None, arrow.py_buffer(ends), arrow.py_buffer(self.frames)]
            )
        return arrow.table(columns)

    def to_polars(self, table: str = "events") -> Any:
        """A polars DataFrame, over to_arrow's memory."""
        return need("polars", "notebooks").from_arrow(self.to_arrow(table))

    # ---- record and replay

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Writes folder/timings.npz: raw frames, stamps, headers. Secrets of the requests are not in it."""
        from annie_quant.files import replacing  # and with it hashlib: 3 MB that a run need not hold

        path = Path(folder) / FILE_NAME
        plan = {
            "schema_version": SCHEMA_VERSION,
            "origin_ns": self.origin_ns,
            "origin_realtime_ns": self.origin_realtime_ns,
            "realtime": self.realtime,
            "asked": [asdict(a) for a in self.asked],
        }
        arrays = {name: getattr(self, name) for name in _ARRAYS}
        plan_bytes = np.frombuffer(msgspec.json.encode(plan), dtype=np.uint8)
        with replacing(path) as file:
            np.savez_compressed(file, plan=plan_bytes, **arrays)
        return path

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> Timings:
        """Reads a recording: the folder it was saved to, or its file."""
        path = Path(folder)
        path = path / FILE_NAME if path.is_dir() else path
        try:
            with np.load(path, allow_pickle=False) as held:
                plan = msgspec.json.decode(held["plan"].tobytes())
                arrays = [np.asarray(held[name]) for name in _ARRAYS]  # a member that is no .npy comes as bytes
            version = plan["schema_version"]
        except Exception as error:  # numpy and zipfile raise whatever their parsing runs into
            said = (str(error) or type(error).__name__).splitlines()[0][:200]
            raise EnvironmentFault(f"{path} is not a recording of a run: {said}") from error
        if version != SCHEMA_VERSION:
            raise EnvironmentFault(f"{path} has schema_version {version}, this reads {SCHEMA_VERSION}")
        try:
            asked = msgspec.convert(plan["asked"], list[Asked])
            origin_ns, origin_realtime_ns = (msgspec.convert(plan[k], int) for k in ("origin_ns", "origin_realtime_ns"))
            _check_arrays(len(asked), *arrays)
        except (KeyError, ValueError) as error:
            raise EnvironmentFault(f"{path} is not a recording of a run: {error}") from error
        realtime = plan.get("realtime", False)
        return cls(asked, *arrays, origin_ns=origin_ns, origin_realtime_ns=origin_realtime_ns, realtime=realtime)


def _check_arrays(
    count: int, requests: np.ndarray, events: np.ndarray, reads: np.ndarray, frames: np.ndarray, notes: np.ndarray
) -> None:
    """Raises ValueError where the arrays of a recording are not what a run writes: decoding trusts them. A column more, as
    an older version wrote, does no harm."""
    for name, rows in (("requests", requests), ("events", events), ("reads", reads)):
        missing = [c for c in _COLUMNS[name].split() if c not in (rows.dtype.names or ())]
        if missing or rows.ndim != 1:
            raise ValueError(f"{name} has no column {missing[0]}" if missing else f"{name} has {rows.ndim} dimensions")
        if any(rows.dtype[c].kind not in "iub" for c in _COLUMNS[name].split()):
            raise ValueError(f"{name} has columns that are no integers")
    for name, held in (("frames", frames), ("notes", notes)):
        if held.dtype != np.uint8 or held.ndim != 1:
            raise ValueError(f"{name} is not bytes ({held.ndim} dimensions of {held.dtype.name})")
    if len(requests) != count:
        raise ValueError(f"{len(requests)} requests where the plan has {count}")
    offset, size = events["offset"].astype(np.int64), events["size"].astype(np.int64)
    inside = (offset >= 0) & (offset <= frames.size) & (size >= 0) & (size <= frames.size - offset)
    if not (inside & (events["request"] >= 0) & (events["request"] < count)).all():
        raise ValueError("events of no request, or beyond the frames")


def _from_schedule(times: dict[str, Any], e2e_ms: float, started: int, scheduled: int) -> dict[str, Any]:
    """What somebody who came at the intended start lived through: the wait for a place is part of it. None in a closed
    loop, which has no intended starts."""
    if not scheduled:
        return {"wait_ms": None, "scheduled_first_content_ms": None, "scheduled_e2e_ms": None}
    wait_ms, first = (started - scheduled) / 1e6, times["first_content_ms"]
    return {
        "wait_ms": wait_ms,
        "scheduled_first_content_ms": None if first is None else first + wait_ms,
        "scheduled_e2e_ms": e2e_ms + wait_ms,
    }


def _phases(row: np.void) -> dict[str, Any]:
    """libcurl counts each phase from the start; here each is its own length. A kept connection has no first three."""
    lookup, connect, tls = int(row["name_lookup_us"]), int(row["connect_us"]), int(row["tls_us"])
    return {
        "new_connection": bool(row["new_connection"]),
        "name_lookup_ms": lookup / 1e3,
        "connect_ms": max(0, connect - lookup) / 1e3,
        "tls_ms": max(0, tls - connect) / 1e3 if tls else 0.0,
        "sent_ms": int(row["pretransfer_us"]) / 1e3,
        "http_version": {2: "1.1", 3: "2", 1: "1.0"}.get(int(row["http_version"])),
    }

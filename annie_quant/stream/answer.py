"""What is decoded of one answer: text, reasoning, tool calls, counts, stamps, and why it failed."""

from __future__ import annotations

import errno
import itertools
import os
import re
import resource
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from annie_quant.core.errors import UsageError
from annie_quant.core.text import printable
from annie_quant.core.untrusted import JsonObject, decode_json, limited
from annie_quant.stream.calls import CallAssembler, StreamedCall
from annie_quant.stream.texts import joined

MIN_REPEATS = 4  # pieces of text, from which repeated text is no chance


@dataclass(slots=True)
class Frame:
    """One event: its stamp on the chosen clock, kind and flags of sse.h, the number of its network read, its bytes."""

    stamp_ns: int
    kind: int
    flags: int
    read: int
    raw: bytes
    data: bytes


def field_lines(raw: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield (name, value) of each line of a frame, as the SSE specification defines it, without comments and blank lines."""
    for line in raw.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n"):
        if line and not line.startswith(b":"):
            name, _, value = line.partition(b":")
            yield name, value.removeprefix(b" ")


def event_data(raw: bytes) -> bytes:
    """Return the data of a frame; the frame itself where it has no data lines, as in newline-delimited JSON."""
    return b"\n".join(value for name, value in field_lines(raw) if name == b"data") or raw


def joined_data(raw: bytes, start: int) -> bytes:
    """Return the data of a frame with several data lines. start: the position of the first line's value."""
    return b"\n".join(
        value for name, value in field_lines(b"data: " + raw[start:]) if name == b"data"
    )


def event_name(raw: bytes) -> str:
    fields = field_lines(raw.removeprefix(b"\xef\xbb\xbf"))
    return next(
        (v.decode("utf-8", "replace") for name, v in reversed(list(fields)) if name == b"event"),
        "message",
    )


@dataclass
class StreamedAnswer:
    """The decoded content of one request's frames. Stamps are None for what was not received."""

    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: dict[int, StreamedCall] = field(default_factory=dict)  # when the stream has ended
    assembler: CallAssembler = field(default_factory=CallAssembler, compare=False)
    finish_reason: str | None = None
    usage: JsonObject | None = None
    server_timings: JsonObject | None = None
    model: str | None = None
    first: dict[str, int] = field(default_factory=dict)  # event, reasoning, content, tool
    token_stamps: list[int] = field(default_factory=list)
    token_counts: list[int | None] = field(
        default_factory=list
    )  # the server's count after each of these events
    done_ns: int | None = None
    merged_reads: int = 0
    fault: tuple[str, str] | None = None
    stray_lines: int = 0  # that are no event
    other_api: str | None = None  # whose events these are, if they are no chat completion's
    warnings: list[str] = field(default_factory=list)
    _read: int = -1
    _read_merged: bool = False

    def fail(self, cause: str, message: str) -> None:
        self.fault = self.fault or (cause, message)

    def warn(self, message: str) -> None:
        if message not in self.warnings:
            self.warnings.append(message)

    def token(self, frame: Frame, count: int | None = None) -> None:
        """Note an event that has tokens. count: all tokens of the answer so far, where the event has the server's count."""
        if frame.read == self._read and not self._read_merged:
            self.merged_reads += 1
        self._read_merged = frame.read == self._read
        self._read = frame.read
        self.token_stamps.append(frame.stamp_ns)
        self.token_counts.append(count)

    def add_text(self, content: str, stamp: int) -> bool:
        """Add a piece of the answer's text. Returns whether it has any."""
        if content:
            self.first.setdefault("content", stamp)
            self.text.append(content)
        return bool(content)

    def add_reasoning(self, content: str, stamp: int) -> bool:
        if content:
            self.first.setdefault("reasoning", stamp)
            self.reasoning.append(content)
        return bool(content)

    def add_calls(self, fragments: list[JsonObject], stamp: int) -> bool:
        """Add the tool calls' fragments of one event. Returns whether they have any content.

        Raises ValueError for a field of another type, and for too many calls.
        """
        has_content = self.assembler.add(fragments)
        if has_content:
            self.first.setdefault("tool", stamp)
        return has_content

    def end(self) -> None:
        """Join what was received in pieces."""
        if _repeats(self.text):
            self.warn("each piece of text repeats the text before it: only the last one is read")
            del self.text[:-1]
        self.text = [joined(self.text)] if self.text else []
        self.reasoning = [joined(self.reasoning)] if self.reasoning else []
        self.calls = dict(enumerate(self.assembler.result()))


def _repeats(pieces: list[str]) -> bool:
    """Return whether each piece begins with the one before it and is longer: a server that sends all text until now."""
    steps = itertools.pairwise(pieces)
    return len(pieces) >= MIN_REPEATS and all(len(a) < len(b) and b.startswith(a) for a, b in steps)


# ---- reasons of a failed request: a short cause for tables and a one-line message for people
#
# libcurl's codes: https://curl.se/libcurl/c/libcurl-errors.html

# request_row.cause (csrc/stream/plan.h)
(
    NONE,
    TRANSPORT,
    TIMEOUT,
    IDLE,
    DEADLINE,
    CANCELLED,
    EVENT_SIZE,
    NOT_STARTED,
    ANSWER_SIZE,
    HEAD_SIZE,
) = range(10)


class RequestError(UsageError, ValueError):
    """A request, or an option of a run, that is not valid. Nothing was sent."""


_CODES = {
    "protocol": (1, 8, 16, 61, 92, 95),  # 1: also a reply that is not HTTP
    "truncated": (18, 52),
    "tls": (35, 51, 58, 59, 60, 77, 83),
    **{"url": (3,), "dns": (5, 6), "connect": (7,), "timeout": (28,), "reset": (55, 56)},
}
_CURL_CAUSES = {code: cause for cause, codes in _CODES.items() for code in codes}
_STOPPED = {
    DEADLINE: ("deadline", "stopped: the run reached its deadline"),
    CANCELLED: ("cancelled", "stopped: the run was interrupted"),
    NOT_STARTED: ("not_started", "not started: the run was stopped before"),
    EVENT_SIZE: ("event_too_large", "one event was larger than max_event_bytes"),
    ANSWER_SIZE: (
        "answer_too_large",
        "the answer did not end within max_answer_bytes and max_answer_events",
    ),
    HEAD_SIZE: ("protocol", "the answer's head or trailers are too large (over 256 KiB)"),
}


def transport_fault_of(
    cause: int, code: int, os_errno: int, text: str, timeout_s: float | None, idle_s: float | None
) -> tuple[str, str] | None:
    """Return (cause, message) of a request that did not complete at the HTTP level; None if it did."""
    if cause == NONE:
        return None
    if cause == TIMEOUT:
        return "timeout", f"timed out: not complete {timeout_s:g} s after its start"
    if cause == IDLE:
        return "idle", f"stalled: no bytes received for {idle_s:g} s"
    if cause in _STOPPED:
        return _STOPPED[cause]
    if os_errno in (errno.EMFILE, errno.ENFILE):
        limit = f"limit {resource.getrlimit(resource.RLIMIT_NOFILE)[0]}"
        message = f"no file descriptor left for a connection ({limit}): raise ulimit -n, or lower the concurrency"
        return "file_descriptors", message
    if os_errno == errno.ECONNREFUSED:
        return "refused", f"connection refused: {text}"
    if os_errno == errno.ECONNRESET:
        return "reset", f"connection reset by the server: {text}"
    if code == 56 and re.match(r"CONNECT tunnel failed|Received HTTP code \d+ from proxy", text):
        return "proxy", f"the proxy refused the connection: {text}"
    if not os_errno and "chunked" in text:  # libcurl has no code of its own for it
        return "protocol", f"the answer's chunked framing is malformed: {text}"
    reason = f" ({os.strerror(os_errno)})" if os_errno else ""
    return _CURL_CAUSES.get(code, "transport"), f"{text}{reason} [libcurl {code}]"


def error_page(status: int, body: bytes) -> str:
    """Return one line for an error page: the JSON error's message, or the page's text."""
    return f"HTTP {status}: {message_of(body) or 'no message'}"


def message_of(body: bytes) -> str:
    """Return the message in an error body of vLLM, llama.cpp, OpenAI or FastAPI; else its text without markup."""
    try:
        message = error_in(decode_json(body))
    except ValueError:
        message = None
    return message or _plain(body)


def error_in(value: object) -> str | None:
    """Return the message of an error: {"error": {"message"}}, {"error": "..."}, {"detail": ...}, {"message"}, or a list of one."""
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if not isinstance(value, dict):
        return None
    error = value.get("error")
    if not error and not value.get("choices"):
        error = value.get("detail") or _error_of_object(value)
    if not error:
        return None
    if isinstance(error, dict):
        error = error.get("message") or error.get("type") or error
    text = error if isinstance(error, str) else msgspec.json.encode(limited(error)).decode()
    return one_line(text)


def _error_of_object(value: JsonObject) -> object:
    """Return an object that is an error itself, or the message of an API's own event."""
    if value.get("object") == "error":
        return value
    message = value.get("message")
    return message if isinstance(message, str) else None


def _plain(body: bytes) -> str:
    text = body[:65536].decode("utf-8", "replace")
    title = re.search(r"<title[^>]*>(.*?)</title>", text, re.DOTALL | re.IGNORECASE)
    return one_line(title[1] if title else re.sub(r"<[^>]*>", " ", text))


def one_line(text: str) -> str:
    return printable(text[:6000], 300)

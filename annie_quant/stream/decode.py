"""Decoding the events of an OpenAI-compatible server's stream: its text, its tool calls and the times of its tokens.

Times are milliseconds after the request was handed to its connection:
    first_byte_ms       first byte of the answer, in its status line
    first_event_ms      first event with data (comments and pings do not count)
    first_reasoning_ms  first reasoning text              first_content_ms  first answer text
    first_tool_ms       first piece of a tool call        first_sentence_ms first speakable sentence complete
    last_token_ms       last piece of any of the three
    done_ms             [DONE]                            e2e_ms            end of the answer
A first chunk with only a role, an empty string and the usage chunk are events, not tokens.
itl_ms: gaps between events with tokens. tpot_ms: (last - first token) / (n - 1), n from the server's own count.

Dialects: vLLM (delta.reasoning), older vLLM and llama.cpp (delta.reasoning_content), completions (choices.text).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from annie_quant.printable import printable
from annie_quant.stream import errors
from annie_quant.stream.sentence import first_sentence_ns
from annie_quant.untrusted import decode_json, integer, limited

DATA, DONE, SILENT, TAIL, BODY = 1, 2, 3, 4, 5  # sse_kind (csrc/stream/sse.h)
MERGED, NAMED, COMMENT = 1, 2, 4  # sse_flag
MAX_TOOL_CALLS = 1000
MAX_NAME = 200  # characters of an id, a name, a reason


class ToolCall(msgspec.Struct):
    """A tool call that is assembled from its pieces. arguments: JSON text."""

    id: str | None = None
    name: str = ""
    arguments: str = ""


class TokenTimes(msgspec.Struct):
    """Times of an answer's events and tokens, and token counts. The module's docstring defines each time."""

    first_event_ms: float | None
    first_reasoning_ms: float | None
    first_content_ms: float | None
    first_tool_ms: float | None
    first_sentence_ms: float | None
    last_token_ms: float | None
    done_ms: float | None
    tpot_ms: float | None
    itl_ms: list[float]
    decode_tok_s: float | None
    completion_tokens: int
    tokens_estimated: bool  # counted from events, because the server reported no count
    merged_reads: int  # network reads with more than one event that has tokens


@dataclass(slots=True)
class Frame:
    """One event: its stamp on the chosen clock, kind and flags of sse.h, the number of its network read, its bytes."""

    stamp_ns: int
    kind: int
    flags: int
    read: int
    raw: bytes
    data: bytes


@dataclass
class Answer:
    """The decoded content of one request's frames. Stamps are None for what was not received."""

    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: dict[int, ToolCall] = field(default_factory=dict)
    arguments: dict[int, list[str]] = field(default_factory=dict)  # pieces of each call's arguments
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None
    server_timings: dict[str, Any] | None = None
    model: str | None = None
    first: dict[str, int] = field(default_factory=dict)  # event, reasoning, content, tool
    token_stamps: list[int] = field(default_factory=list)
    pieces: list[tuple[int, str]] = field(default_factory=list)  # content, for the first sentence
    done_ns: int | None = None
    merged_reads: int = 0
    fault: tuple[str, str] | None = None
    warnings: list[str] = field(default_factory=list)
    _read: int = -1
    _read_merged: bool = False

    def fail(self, cause: str, message: str) -> None:
        self.fault = self.fault or (cause, message)

    def warn(self, message: str) -> None:
        if message not in self.warnings:
            self.warnings.append(message)

    def token(self, frame: Frame) -> None:
        if frame.read == self._read and not self._read_merged:
            self.merged_reads += 1
        self._read_merged = frame.read == self._read
        self._read = frame.read
        self.token_stamps.append(frame.stamp_ns)


def field_lines(raw: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield (name, value) of each line of a frame, as the SSE specification defines it, without comments and blank lines."""
    for line in raw.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n"):
        if line and not line.startswith(b":"):
            name, _, value = line.partition(b":")
            yield name, value.removeprefix(b" ")


def joined_data(raw: bytes, start: int) -> bytes:
    """Return the data of a frame with several data lines. start: the position of the first line's value."""
    return b"\n".join(value for name, value in field_lines(b"data: " + raw[start:]) if name == b"data")


def event_name(raw: bytes) -> str:
    fields = field_lines(raw.removeprefix(b"\xef\xbb\xbf"))
    return next((v.decode("utf-8", "replace") for name, v in reversed(list(fields)) if name == b"event"), "message")


def read_answer(frames: Iterable[Frame]) -> Answer:
    """Decode all frames of one event stream."""
    answer, count = Answer(), 0
    for frame in frames:
        if frame.kind in (SILENT, BODY):
            continue
        if frame.kind == TAIL:
            _tail(answer, frame)
            continue
        answer.first.setdefault("event", frame.stamp_ns)
        count += 1
        if frame.kind == DONE:
            answer.done_ns = frame.stamp_ns
        elif answer.done_ns is not None:
            answer.warn("events were received after [DONE]")
        else:
            _event(answer, frame, count)
    for index, pieces in answer.arguments.items():
        answer.calls[index].arguments = "".join(pieces)
    return answer


def _tail(answer: Answer, frame: Frame) -> None:
    if frame.data.strip() == b"[DONE]":
        answer.first.setdefault("event", frame.stamp_ns)
        answer.done_ns = frame.stamp_ns
        answer.warn("[DONE] was received without its blank line")
    else:
        answer.warn(f"the stream ended inside an event ({len(frame.raw)} bytes left)")


def _event(answer: Answer, frame: Frame, number: int) -> None:
    try:
        chunk = decode_json(frame.data)
    except ValueError:
        named = f"{event_name(frame.raw)} " if frame.flags & NAMED else ""
        answer.fail("not_json", f"{named}event {number} is not JSON: {frame.data[:80]!r}")
        return
    named_error = frame.flags & NAMED and event_name(frame.raw) == "error"
    message = errors.error_in(chunk)
    if named_error or (message is not None and not (isinstance(chunk, dict) and chunk.get("choices"))):
        answer.fail("server_error", f"error in the stream: {message or errors.message_of(frame.data)}")
        return
    if not isinstance(chunk, dict):
        answer.fail("not_json", f"event {number} is not a JSON object: {frame.data[:80]!r}")
        return
    try:
        _chunk(answer, chunk, frame)
    except ValueError as error:
        answer.fail("malformed", f"event {number}: {error}")


def _chunk(answer: Answer, chunk: dict[str, Any], frame: Frame) -> None:
    answer.usage = limited(_object(chunk, "usage")) or answer.usage
    answer.server_timings = limited(_object(chunk, "timings")) or answer.server_timings
    answer.model = answer.model or _name(chunk, "model")
    has_token = False
    for choice in _objects(chunk, "choices"):
        if choice.get("index"):
            answer.warn("more than one choice was received: only the first is read")
            continue
        answer.finish_reason = _name(choice, "finish_reason") or answer.finish_reason
        has_token |= _delta(answer, choice, frame.stamp_ns)
    if has_token:
        answer.token(frame)


def _delta(answer: Answer, choice: dict[str, Any], stamp: int) -> bool:
    delta = _object(choice, "delta")
    reasoning = _text(delta.get("reasoning") or delta.get("reasoning_content"))
    content = _text(delta.get("content") or choice.get("text"))
    if reasoning:
        answer.first.setdefault("reasoning", stamp)
        answer.reasoning.append(reasoning)
    if content:
        answer.first.setdefault("content", stamp)
        answer.text.append(content)
        answer.pieces.append((stamp, content))
    tools = _objects(delta, "tool_calls")
    if not tools and delta.get("function_call"):
        tools = [{"function": delta["function_call"]}]
    called = [_tool(answer, piece) for piece in tools]
    if any(called):
        answer.first.setdefault("tool", stamp)
    return bool(reasoning or content or any(called))


def _tool(answer: Answer, piece: dict[str, Any]) -> bool:
    """Add one piece of a tool call. Returns whether it had any content."""
    index, call_id, function = integer(piece.get("index")), _name(piece, "id"), _object(piece, "function")
    if index is None:  # some servers omit it: an id begins a new call
        index = len(answer.calls) if call_id or not answer.calls else len(answer.calls) - 1
    if index not in answer.calls and len(answer.calls) >= MAX_TOOL_CALLS:
        raise ValueError(f"more than {MAX_TOOL_CALLS} tool calls")
    call = answer.calls.setdefault(index, ToolCall())
    name, arguments = _name(function, "name"), function.get("arguments")
    if isinstance(arguments, dict):
        arguments = msgspec.json.encode(arguments).decode()
    call.id = call.id or call_id
    call.name = call.name or name or ""
    if text := _text(arguments):
        answer.arguments.setdefault(index, []).append(text)
    return bool(call_id or name or arguments)


def _text(value: Any) -> str:
    """Return the text of a string or of OpenAI's list of parts; "" for any other value."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return "".join(part["text"] for part in value if isinstance(part, dict) and isinstance(part.get("text"), str))
    return ""


def _object(parent: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a field that is an object; {} if it is missing or null. Raises ValueError for any other type."""
    value = parent.get(name)
    if value is None or isinstance(value, dict):
        return value or {}
    raise ValueError(f"{name} is not an object: {printable(str(value)[:200], 60)}")


def _objects(parent: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """Return a field that is a list of objects, as `_object` does."""
    value = parent.get(name)
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise ValueError(f"{name} is not a list of objects: {printable(str(value)[:200], 60)}")
    return value


def _name(parent: dict[str, Any], name: str) -> str | None:
    """Return a field that is a short text: an id, a name, a reason. Numbers are read as text."""
    value = parent.get(name)
    if value is None:
        return None
    if not isinstance(value, (str, int)) or isinstance(value, bool):
        raise ValueError(f"{name} is not text: {printable(str(value)[:200], 60)}")
    return str(value)[:MAX_NAME]


def token_times(answer: Answer, started_ns: int) -> TokenTimes:
    """Return the times of an answer relative to `started_ns`, and its token counts."""

    def ms(stamp: int | None) -> float | None:
        return None if stamp is None else (stamp - started_ns) / 1e6

    stamps = answer.token_stamps
    reported = reported_tokens(answer)
    tokens = len(stamps) if reported is None else reported
    tpot = (stamps[-1] - stamps[0]) / 1e6 / (tokens - 1) if len(stamps) > 1 and tokens > 1 else None
    return TokenTimes(
        first_event_ms=ms(answer.first.get("event")),
        first_reasoning_ms=ms(answer.first.get("reasoning")),
        first_content_ms=ms(answer.first.get("content")),
        first_tool_ms=ms(answer.first.get("tool")),
        first_sentence_ms=ms(first_sentence_ns(answer.pieces)),
        last_token_ms=ms(stamps[-1] if stamps else None),
        done_ms=ms(answer.done_ns),
        tpot_ms=tpot,
        itl_ms=[(b - a) / 1e6 for a, b in itertools.pairwise(stamps)],
        decode_tok_s=1e3 / tpot if tpot else None,
        completion_tokens=tokens,
        tokens_estimated=reported is None,
        merged_reads=answer.merged_reads,
    )


def reported_tokens(answer: Answer) -> int | None:
    """Return the server's own token count, from usage or from llama.cpp's timings. None: it reported none."""
    counts = ((answer.usage or {}).get("completion_tokens"), (answer.server_timings or {}).get("predicted_n"))
    return next((n for n in map(integer, counts) if n is not None), None)

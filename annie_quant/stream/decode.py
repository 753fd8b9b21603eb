"""Decoding the events of a chat completion's stream: its text, its tool calls and the times of its tokens.

Times are milliseconds after the request was handed to its connection:
    first_byte_ms       first byte of the answer, in its status line
    first_event_ms      first event with data (comments and pings do not count)
    first_reasoning_ms  first reasoning text              first_content_ms  first answer text
    first_tool_ms       first piece of a tool call        last_token_ms     last piece of any of the three
    done_ms             [DONE]                            e2e_ms            end of the answer
A first chunk with only a role, an empty string and the usage chunk are events, not tokens.
itl_ms: gaps between events with tokens. tpot_ms: (last - first token) / (n - 1), n from the server's own count.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable
from typing import Literal

import msgspec

from annie_quant.core.untrusted import JsonObject, integer, limited
from annie_quant.stream.answer import (
    Frame,
    StreamedAnswer,
    error_in,
    event_name,
    field_lines,
    message_of,
)
from annie_quant.stream.texts import (
    MAX_NAME,
    decode_event,
    joined,
    name_field,
    object_field,
    object_list,
    split_parts,
    text_of,
)

# sse_kind (csrc/stream/sse.h)
DATA = 1
DONE = 2
SILENT = 3
TAIL = 4
BODY = 5
# sse_flag
MERGED = 1
NAMED = 2
COMMENT = 4
LEAST_EVENTS = 8  # of an answer whose tokens per event are reported
LEAST_TPOT_MS = 1e-9  # less is a wrong count of tokens, and its inverse no rate that records hold


class TokenTimes(msgspec.Struct):
    """Times of an answer's events and tokens, and token counts. The module's docstring defines each time."""

    first_event_ms: float | None
    first_reasoning_ms: float | None
    first_content_ms: float | None
    first_tool_ms: float | None
    last_token_ms: float | None
    done_ms: float | None
    tpot_ms: float | None
    itl_ms: list[float]
    decode_tok_s: float | None
    completion_tokens: int
    tokens_estimated: bool  # counted from events, because the server reported no count
    merged_reads: int  # network reads with more than one event that has tokens
    token_events: int
    tokens_per_event: (
        float | None
    )  # None: the server reported no count, or there are fewer than LEAST_EVENTS events
    event_tokens: list[
        int
    ]  # of each of these events but the first, where events have the server's count; else []
    cached_tokens: (
        int | None
    )  # prompt tokens that the server took from its prefix cache; None: not reported
    drafted_tokens: float | None  # by a speculative decoder for this request; None: not reported
    accepted_tokens: float | None
    acceptance_source: str | None  # "timings": llama.cpp's


def read_answer(frames: Iterable[Frame]) -> StreamedAnswer:
    """Decode all frames of one event stream."""
    answer = StreamedAnswer()
    count = 0
    for frame in frames:
        if frame.kind == BODY:
            continue
        if frame.kind == SILENT or (frame.kind == TAIL and not frame.data):
            _stray_lines(answer, frame)
            continue
        if frame.kind == TAIL:
            _tail(answer, frame)
            continue
        answer.first.setdefault("event", frame.stamp_ns)
        count += 1
        if frame.kind == DONE:
            answer.done_ns = answer.done_ns or frame.stamp_ns
        elif answer.done_ns is not None:
            answer.warn("events were received after the end of the answer")
        else:
            _event(answer, frame, count)
    answer.end()
    return answer


def _tail(answer: StreamedAnswer, frame: Frame) -> None:
    if frame.data.strip() == b"[DONE]":
        answer.first.setdefault("event", frame.stamp_ns)
        answer.done_ns = frame.stamp_ns
        answer.warn("[DONE] was received without its blank line")
        return
    answer.warn(f"the stream ended inside an event ({len(frame.raw)} bytes left)")
    with contextlib.suppress(ValueError):
        _fail_with(answer, error_in(decode_event(frame.data)))


def _stray_lines(answer: StreamedAnswer, frame: Frame) -> None:
    """Look for an error in what is no event: llama.cpp's older field `error`, JSON without a field's name, `event: error` alone."""
    known = (b"event", b"id", b"retry")
    lines = [(name, value) for name, value in field_lines(frame.raw) if name not in known]
    if frame.flags & NAMED and event_name(frame.raw) == "error":
        _fail_with(answer, "an event named error, without data")
    if not lines or answer.done_ns is not None:
        return
    name, value = lines[0]
    whole = value if name == b"error" else frame.raw
    try:
        content = decode_event(whole)
        error = error_in(content)
    except ValueError:
        content = None
        error = None
    if name == b"error":
        error = error or error_in({"error": content}) or message_of(value)
    _fail_with(answer, error)
    if error is None:
        answer.stray_lines += len(lines)
        if any(b"data:" in name + b":" + text for name, text in lines):
            answer.fail("malformed", f"an event is damaged: {frame.raw[:80]!r}")
        answer.warn(f"{len(lines)} lines were received that are no event, first {frame.raw[:80]!r}")


def _fail_with(answer: StreamedAnswer, error: str | None) -> None:
    if error is not None:
        answer.fail("server_error", f"error in the stream: {error}")


def _event(answer: StreamedAnswer, frame: Frame, number: int) -> None:
    if not frame.flags & NAMED and read_text_chunk(answer, frame):
        return
    named = f"{event_name(frame.raw)} " if frame.flags & NAMED else ""
    try:
        chunk = decode_event(frame.data)
    except ValueError:
        if named == "error ":
            _fail_with(answer, message_of(frame.data))
        answer.fail("not_json", f"{named}event {number} is not JSON: {frame.data[:80]!r}")
        return
    error = error_in(chunk)
    if named == "error ":
        error = error or message_of(frame.data)
    if isinstance(chunk, dict):
        try:
            if read_chunk(answer, chunk, frame.stamp_ns):
                answer.token(frame, _running_count(chunk))
        except ValueError as fault:
            _fail_with(answer, error)
            answer.fail("malformed", f"event {number}: {fault}")
    _fail_with(answer, error)
    if not isinstance(chunk, dict):
        answer.fail("not_json", f"event {number} is not a JSON object: {frame.data[:80]!r}")


def token_times(answer: StreamedAnswer, started_ns: int) -> TokenTimes:
    """Return the times of an answer relative to `started_ns`, and its token counts."""

    def ms(stamp: int | None) -> float | None:
        return None if stamp is None else (stamp - started_ns) / 1e6

    stamps = answer.token_stamps
    reported = reported_tokens(answer)
    tokens = len(stamps) if reported is None else reported
    drafted, accepted = draft_tokens(answer)
    tpot = (stamps[-1] - stamps[0]) / 1e6 / (tokens - 1) if len(stamps) > 1 and tokens > 1 else None
    return TokenTimes(
        first_event_ms=ms(answer.first.get("event")),
        first_reasoning_ms=ms(answer.first.get("reasoning")),
        first_content_ms=ms(answer.first.get("content")),
        first_tool_ms=ms(answer.first.get("tool")),
        last_token_ms=ms(stamps[-1] if stamps else None),
        done_ms=ms(answer.done_ns),
        tpot_ms=tpot,
        itl_ms=[(b - a) / 1e6 for a, b in itertools.pairwise(stamps)],
        decode_tok_s=1e3 / tpot if tpot and tpot >= LEAST_TPOT_MS else None,
        completion_tokens=tokens,
        tokens_estimated=reported is None,
        merged_reads=answer.merged_reads,
        token_events=len(stamps),
        tokens_per_event=None
        if reported is None or len(stamps) < LEAST_EVENTS
        else reported / len(stamps),
        event_tokens=_event_tokens(answer.token_counts),
        cached_tokens=cached_tokens(answer),
        drafted_tokens=drafted,
        accepted_tokens=accepted,
        acceptance_source=None if drafted is None else "timings",
    )


def _event_tokens(counts: list[int | None]) -> list[int]:
    """Return how many tokens each event after the first has, from running counts; [] unless every event has a count."""
    known = [n for n in counts if n is not None]
    gains = [b - a for a, b in itertools.pairwise(known)]
    return gains if len(known) == len(counts) and all(gain >= 0 for gain in gains) else []


def cached_tokens(answer: StreamedAnswer) -> int | None:
    """Return the prompt tokens that the server took from its prefix cache, from usage or from llama.cpp's timings.

    None where it did not report them, and, with a warning, where the figure cannot be: more than the prompt has, or not what
    llama.cpp's count of processed tokens leaves of the prompt.
    """
    usage = answer.usage or {}
    timings = answer.server_timings or {}
    details = usage.get("prompt_tokens_details")
    cached = integer(details.get("cached_tokens")) if isinstance(details, dict) else None
    in_cache = integer(timings.get("cache_n"))
    processed = integer(timings.get("prompt_n"))
    cached = in_cache if cached is None else cached
    prompt = integer(usage.get("prompt_tokens"))
    if cached is None or prompt is None:
        return cached
    if cached > prompt or (
        in_cache is not None and processed is not None and cached + processed > prompt + 1
    ):
        answer.warn(
            f"cached_tokens is not believed: {cached} of {prompt} prompt tokens, {processed} of them processed"
        )
        return None
    return cached


def draft_tokens(answer: StreamedAnswer) -> tuple[float, float] | tuple[None, None]:
    """Return (drafted, accepted) tokens of a speculative decoder, as llama.cpp's timings have them; (None, None): unknown."""
    timings = answer.server_timings or {}
    drafted = integer(timings.get("draft_n"))
    accepted = integer(timings.get("draft_n_accepted"))
    if drafted is None or accepted is None or accepted > drafted:
        return None, None
    return float(drafted), float(accepted)


def reported_tokens(answer: StreamedAnswer) -> int | None:
    """Return the server's own token count, from usage or from llama.cpp's timings. None: it reported none."""
    counts = (
        (answer.usage or {}).get("completion_tokens"),
        (answer.server_timings or {}).get("predicted_n"),
    )
    return next((n for n in map(integer, counts) if n is not None), None)


# ---- chunks of OpenAI's chat completions, as servers send them (calls.py has the forms of tool calls)


class _Delta(msgspec.Struct, forbid_unknown_fields=True):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    role: str | None = None


class _Choice(msgspec.Struct, forbid_unknown_fields=True):
    delta: _Delta
    index: Literal[0] = 0
    finish_reason: None = None
    stop_reason: None = None
    logprobs: None = None
    token_ids: None = None


class _TextChunk(msgspec.Struct, forbid_unknown_fields=True):
    """An event with a piece of text and nothing else: nearly all events of a stream."""

    choices: tuple[_Choice]
    model: str | None = None
    id: str | None = None
    object: str | None = None
    created: int | float | None = None
    system_fingerprint: str | None = None
    service_tier: str | None = None
    usage: None = None


_decode_text = msgspec.json.Decoder(_TextChunk).decode


def read_text_chunk(answer: StreamedAnswer, frame: Frame) -> bool:
    """Add an event that has only a piece of text, as `read_chunk` would and in a third of its time.

    Returns False, and changes nothing, for any other event.
    """
    try:
        chunk = _decode_text(frame.data)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return False
    delta = chunk.choices[0].delta
    answer.model = answer.model or (chunk.model and chunk.model[:MAX_NAME])
    has_reasoning = answer.add_reasoning(
        delta.reasoning or delta.reasoning_content or "", frame.stamp_ns
    )
    if answer.add_text(delta.content or "", frame.stamp_ns) or has_reasoning:
        answer.token(frame)
    return True


# The first field or the type of events of other APIs, by their beginnings.
_OTHER_APIS = {
    "message_": "this is a stream of Anthropic's Messages API",
    "content_block_": "this is a stream of Anthropic's Messages API",
    "response.": "this is a stream of OpenAI's Responses API",
}
# Fields of a delta that are read, or that repeat or describe what is read.
_READ = ("role", "content", "refusal", "tool_calls", "function_call", "extra_content")
_THINKING = ("reasoning", "reasoning_content", "reasoning_text", "thinking", "reasoning_details")
_DESCRIPTIONS = ("name", "prefix", "thinking_blocks", "annotations", "citations")
_OTHERS = ("token_ids", "provider_specific_fields")
_DELTA_FIELDS = frozenset((*_READ, *_THINKING, *_DESCRIPTIONS, *_OTHERS))


def read_chunk(answer: StreamedAnswer, chunk: JsonObject, stamp: int) -> bool:
    """Add one chunk to the answer. Returns whether it has tokens. Raises ValueError for a field of another type."""
    answer.usage = limited(object_field(chunk, "usage")) or answer.usage
    answer.server_timings = limited(object_field(chunk, "timings")) or answer.server_timings
    answer.model = answer.model or name_field(chunk, "model")
    if "choices" not in chunk:
        answer.other_api = answer.other_api or _other_api(chunk)
    has_token = False
    for choice in object_list(chunk, "choices"):
        if choice.get("index") not in (None, 0, "0"):
            answer.warn("more than one choice was received: only the first is read")
            continue
        reason = name_field(choice, "finish_reason")
        answer.finish_reason = reason or answer.finish_reason
        has_token |= _read_choice(answer, choice, stamp)
        error = error_in({"error": choice.get("error")})
        if error is not None or reason == "error":
            _fail_with(answer, error or error_in(chunk) or "the finish reason is 'error'")
    return has_token


def _other_api(chunk: JsonObject) -> str | None:
    kind = chunk.get("type")
    for beginning, description in _OTHER_APIS.items():
        if isinstance(kind, str) and kind.startswith(beginning):
            return description
    is_ollama = "done" in chunk and ("message" in chunk or "response" in chunk)
    return "this is a stream of Ollama's own API" if is_ollama else None


def _read_choice(answer: StreamedAnswer, choice: JsonObject, stamp: int) -> bool:
    """Add a choice's delta, or its whole message, unless that repeats what has been received."""
    delta = object_field(choice, "delta")
    message = object_field(choice, "message")
    if delta or not message:
        return _read_delta(answer, delta, choice.get("text"), stamp)
    has_content = bool(answer.text or answer.reasoning or answer.assembler)
    if has_content and split_parts(message.get("content"))[0] in ("", joined(answer.text)):
        return False
    if has_content and choice.get("finish_reason"):
        raise ValueError("a whole message that is not the one received before in pieces")
    return _read_delta(answer, message, None, stamp)


def _read_delta(answer: StreamedAnswer, delta: JsonObject, completion: object, stamp: int) -> bool:
    text, thinking, other = split_parts(delta.get("content") or completion or delta.get("refusal"))
    google = object_field(object_field(delta, "extra_content"), "google")
    if google.get("thought") is True:
        thinking = text + thinking
        text = ""
    given = (text_of(delta.get(name)) for name in _THINKING)
    reasoning = next(filter(None, given), "")
    tools = []
    for call in _tool_calls(delta):
        kind = call.get("type") or ("custom" if "custom" in call else "function")
        if kind == "function":
            tools.append(call)
        else:
            answer.warn(f"not read: a tool call of type {str(kind)[:MAX_NAME]!r}")
    unread = [f"a content part of type {kind!r}" for kind in other]
    unread += [
        f"the field {name[:MAX_NAME]!r}"
        for name in delta
        if name not in _DELTA_FIELDS and delta[name]
    ]
    for what in unread:
        answer.warn(f"not read: {what}")
    has_token = answer.add_reasoning(reasoning + thinking, stamp)
    has_token |= answer.add_text(text, stamp)
    return answer.add_calls(tools, stamp) or has_token


def _tool_calls(delta: JsonObject) -> list[JsonObject]:
    calls = delta.get("tool_calls")
    if isinstance(calls, dict):  # TGI
        return [calls]
    if not calls and delta.get("function_call"):
        return [{"function": delta["function_call"]}]
    return object_list(delta, "tool_calls")


def _running_count(chunk: JsonObject) -> int | None:
    """Return all tokens of the answer so far, from vLLM's continuous_usage_stats or llama.cpp's timings_per_token."""
    count = integer(object_field(chunk, "usage").get("completion_tokens"))
    return integer(object_field(chunk, "timings").get("predicted_n")) if count is None else count

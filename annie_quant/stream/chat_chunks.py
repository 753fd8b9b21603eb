"""Events of OpenAI's chat completions and plain completions, as vLLM, SGLang, llama.cpp and others send them.

Dialects: vLLM (delta.reasoning), older vLLM and llama.cpp (delta.reasoning_content), completions (choices.text).
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from annie_quant.core.untrusted import integer, limited
from annie_quant.stream.answer import MAX_NAME, Answer, Frame, name_field, object_field, object_list, text_of


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


def read_text_chunk(answer: Answer, frame: Frame) -> bool:
    """Add an event that has only a piece of text, as `read_chunk` would and in a third of its time.

    Returns False, and changes nothing, for any other event.
    """
    try:
        chunk = _decode_text(frame.data)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return False
    delta = chunk.choices[0].delta
    answer.model = answer.model or (chunk.model[:MAX_NAME] if chunk.model is not None else None)
    reasoning, content = delta.reasoning or delta.reasoning_content, delta.content
    if reasoning:
        answer.add_reasoning(reasoning, frame.stamp_ns)
    if content:
        answer.add_text(content, frame.stamp_ns)
    if reasoning or content:
        answer.token(frame)
    return True


def read_chunk(answer: Answer, chunk: dict[str, Any], frame: Frame) -> None:
    """Add one event to the answer. Raises ValueError for a field of another type."""
    usage, timings = limited(object_field(chunk, "usage")), limited(object_field(chunk, "timings"))
    answer.usage = usage or answer.usage
    answer.server_timings = timings or answer.server_timings
    answer.model = answer.model or name_field(chunk, "model")
    has_token = False
    for choice in object_list(chunk, "choices"):
        if choice.get("index"):
            answer.warn("more than one choice was received: only the first is read")
            continue
        answer.finish_reason = name_field(choice, "finish_reason") or answer.finish_reason
        has_token |= _delta(answer, choice, frame.stamp_ns)
    if has_token:
        # vLLM's continuous_usage_stats and llama.cpp's timings_per_token count in every event.
        counted = integer(usage.get("completion_tokens"))
        answer.token(frame, integer(timings.get("predicted_n")) if counted is None else counted)


def _delta(answer: Answer, choice: dict[str, Any], stamp: int) -> bool:
    delta = object_field(choice, "delta")
    has_reasoning = answer.add_reasoning(text_of(delta.get("reasoning") or delta.get("reasoning_content")), stamp)
    has_text = answer.add_text(text_of(delta.get("content") or choice.get("text")), stamp)
    tools = object_list(delta, "tool_calls")
    if not tools and delta.get("function_call"):
        tools = [{"function": delta["function_call"]}]
    called = [_tool(answer, piece, stamp) for piece in tools]
    return has_reasoning or has_text or any(called)


def _tool(answer: Answer, piece: dict[str, Any], stamp: int) -> bool:
    """Add one piece of a tool call. Returns whether it had any content."""
    index, call_id = integer(piece.get("index")), name_field(piece, "id")
    function = object_field(piece, "function")
    if index is None:  # some servers omit it: an id begins a new call
        index = len(answer.calls) if call_id or not answer.calls else len(answer.calls) - 1
    return answer.add_call(index, call_id, name_field(function, "name"), function.get("arguments"), stamp)

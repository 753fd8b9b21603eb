"""Events of Anthropic's Messages API, which vLLM and llama.cpp serve at /v1/messages.

Definition: https://docs.anthropic.com/en/api/messages-streaming. The stream ends with message_stop; there is no [DONE].
"""

from __future__ import annotations

from typing import Any

from annie_quant.core.untrusted import integer, limited
from annie_quant.stream.answer import Answer, Frame, name_field, object_field, text_of

_EVENTS = frozenset(
    [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
        "ping",
    ]
)
_FINISH = {"end_turn": "stop", "stop_sequence": "stop", "tool_use": "tool_calls", "max_tokens": "length"}


def is_event(chunk: dict[str, Any]) -> bool:
    kind = chunk.get("type")
    return isinstance(kind, str) and kind in _EVENTS


def read_event(answer: Answer, event: dict[str, Any], frame: Frame) -> None:
    """Add one event to the answer. Raises ValueError for a field of another type."""
    kind, stamp = event["type"], frame.stamp_ns
    index = integer(event.get("index")) or 0
    has_token = False
    if kind == "content_block_delta":
        has_token = _delta(answer, index, object_field(event, "delta"), stamp)
    elif kind == "content_block_start":
        has_token = _block(answer, index, object_field(event, "content_block"), stamp)
    elif kind == "message_start":
        message = object_field(event, "message")
        answer.model = answer.model or name_field(message, "model")
        answer.add_usage(limited(object_field(message, "usage")))
    elif kind == "message_delta":
        reason = name_field(object_field(event, "delta"), "stop_reason")
        answer.finish_reason = _FINISH.get(reason or "", reason) or answer.finish_reason
        answer.add_usage(limited(object_field(event, "usage")))
    elif kind == "message_stop":
        answer.done_ns = stamp
    answer.server_timings = limited(object_field(event, "timings")) or answer.server_timings
    if has_token:
        answer.token(frame)


def _block(answer: Answer, index: int, block: dict[str, Any], stamp: int) -> bool:
    """Begin a block: a tool call has its name here; text and thinking are usually empty."""
    if block.get("type") == "tool_use":
        arguments = object_field(block, "input") or None  # {}: its pieces follow
        return answer.add_call(index, name_field(block, "id"), name_field(block, "name"), arguments, stamp)
    return _delta(answer, index, block, stamp)


def _delta(answer: Answer, index: int, delta: dict[str, Any], stamp: int) -> bool:
    has_text = answer.add_text(text_of(delta.get("text")), stamp)
    has_reasoning = answer.add_reasoning(text_of(delta.get("thinking")), stamp)
    pieces = text_of(delta.get("partial_json"))
    return has_text or has_reasoning or bool(pieces and answer.add_call(index, None, None, pieces, stamp))

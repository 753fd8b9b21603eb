"""Events of OpenAI's Responses API: each has a `type` and is about one output item.

Definition: https://platform.openai.com/docs/api-reference/responses-streaming. The stream ends with response.completed,
response.incomplete or response.failed; there is no [DONE].
"""

from __future__ import annotations

from typing import Any

from annie_quant.core.untrusted import integer, limited
from annie_quant.stream import errors
from annie_quant.stream.answer import MAX_NAME, Answer, Frame, name_field, object_field, text_of

_TEXT = ("response.output_text.delta", "response.refusal.delta")
_REASONING = ("response.reasoning_text.delta", "response.reasoning_summary_text.delta", "response.reasoning.delta")
_ENDS = ("response.completed", "response.incomplete", "response.failed")


def is_event(chunk: dict[str, Any]) -> bool:
    kind = chunk.get("type")
    return isinstance(kind, str) and kind.startswith("response.")


def read_event(answer: Answer, event: dict[str, Any], frame: Frame) -> None:
    """Add one event to the answer. Raises ValueError for a field of another type."""
    kind, stamp = event["type"], frame.stamp_ns
    if kind in _TEXT:
        has_token = answer.add_text(text_of(event.get("delta")), stamp)
    elif kind in _REASONING:
        has_token = answer.add_reasoning(text_of(event.get("delta")), stamp)
    elif kind == "response.function_call_arguments.delta":
        has_token = answer.add_call(_index(answer, event), None, None, event.get("delta"), stamp)
    elif kind == "response.output_item.added":
        has_token = _item(answer, event, stamp)
    else:
        has_token = False
        if kind == "response.output_item.done":
            _whole_call(answer, event, stamp)
        elif kind in ("response.created", *_ENDS):
            _response(answer, kind, object_field(event, "response"), stamp)
    if has_token:
        answer.token(frame)


def _index(answer: Answer, event: dict[str, Any]) -> int:
    """Return the number of an event's output item. llama.cpp sends no output_index, but the item's id."""
    index = integer(event.get("output_index"))
    if index is None:
        item = name_field(event, "item_id") or name_field(object_field(event, "item"), "id") or ""
        index = answer.item_numbers.setdefault(item, len(answer.item_numbers))
    return index


def _item(answer: Answer, event: dict[str, Any], stamp: int) -> bool:
    item = object_field(event, "item")
    if item.get("type") != "function_call":
        return False
    call_id = name_field(item, "call_id") or name_field(item, "id")
    return answer.add_call(_index(answer, event), call_id, name_field(item, "name"), item.get("arguments"), stamp)


def _whole_call(answer: Answer, event: dict[str, Any], stamp: int) -> None:
    """Take a finished call from its item where no delta had its arguments."""
    item = object_field(event, "item")
    if item.get("type") == "function_call" and not answer.arguments.get(_index(answer, event)):
        _item(answer, event, stamp)


def _response(answer: Answer, kind: str, response: dict[str, Any], stamp: int) -> None:
    answer.model = answer.model or name_field(response, "model")
    answer.add_usage(limited(object_field(response, "usage")))
    answer.server_timings = limited(object_field(response, "timings")) or answer.server_timings
    if kind == "response.failed":
        message = errors.error_in({"error": response.get("error") or "response.failed"})
        answer.fail("server_error", f"error in the stream: {message}")
    if kind in _ENDS:
        answer.done_ns = stamp
        reason = object_field(response, "incomplete_details").get("reason")
        if reason is not None or kind == "response.incomplete":
            answer.finish_reason = "length" if reason in (None, "max_output_tokens") else str(reason)[:MAX_NAME]
        else:
            answer.finish_reason = "tool_calls" if answer.calls else "stop"

"""The answer that a log has next to its request: a chat completion, a message, text, or a stream as text or chunks."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from annie_quant.core.untrusted import JsonObject, decode_json
from annie_quant.data.conversations import Fields, Unusable, names
from annie_quant.stream import decode
from annie_quant.stream.answer import Frame, error_in, field_lines

# Of an answer that did not end by itself.
CUT_REASONS = names("length max_tokens content_filter error abort aborted cancelled")
DELTA_FIELDS = names(
    "role content reasoning reasoning_content reasoning_details tool_calls function_call refusal "
    "annotations provider_specific_fields"
)
NO_COMPLETION = "an answer that is not a chat completion"
_FIELD = re.compile(r"(?:data|event|id|retry|error)?:")
_DATA = re.compile(r"^data: ?[{\[]", re.MULTILINE)
_EVENT_END = re.compile(rb"\r\n\r\n|\n\n|\r\r")
_BOM = "\N{BYTE ORDER MARK}"

LoggedAnswer = tuple[JsonObject, str | None]  # an assistant's message, and the finish reason


def read_answer(value: object) -> LoggedAnswer | None:
    """Return a logged answer; None where there is none. Raises Unusable for one that is not whole, or of another form."""
    if value is None or value == "" or value == {}:
        return None
    if isinstance(value, str):
        return _answer_in_text(value.lstrip(_BOM).lstrip())
    if isinstance(value, list):
        return _answer_in_list(value)
    if not isinstance(value, Mapping):
        raise Unusable(NO_COMPLETION)
    if value.get("error"):
        raise Unusable("an error in place of an answer")
    if value.get("body") is not None:  # a batch's, and a proxy's
        if value.get("status_code", 200) != 200:
            raise Unusable("an error in place of an answer")
        return read_answer(value["body"])
    return _answer_in_object(value)


def _answer_in_object(body: Fields) -> LoggedAnswer:
    reason = body.get("stop_reason") or body.get("done_reason") or body.get("finish_reason")
    message: Any = body if body.get("role") == "assistant" else None
    choices = body.get("choices")
    if isinstance(choices, list) and choices and isinstance(choices[0], Mapping):
        objects = [choice for choice in choices if isinstance(choice, Mapping)]
        first = next((c for c in objects if c.get("index") in (None, 0)), {})
        message = first.get("message")
        reason = first.get("finish_reason")
    elif body.get("done") is True:  # Ollama's
        message = body.get("message")
    if not isinstance(message, Mapping) or message.get("role", "assistant") != "assistant":
        raise Unusable(NO_COMPLETION)
    return {**message, "role": "assistant"}, finish_reason_of(reason)


def finish_reason_of(reason: object) -> str | None:
    """Return an answer's finish reason; None where it has none. Raises Unusable where the answer was cut."""
    if not isinstance(reason, str):
        return None
    if reason.lower() in CUT_REASONS:
        raise Unusable(f"an answer that was cut (finish_reason {reason.lower()!r})")
    return reason or None


def _answer_in_text(text: str) -> LoggedAnswer | None:
    if not text.strip():
        return None
    if _FIELD.match(text) or _DATA.search(text):
        return message_of_events(text.encode("utf-8", "replace"))
    if text[0] in "{[":
        try:
            value = decode_json(text)
        except ValueError:
            raise Unusable(NO_COMPLETION) from None
        return read_answer(value)
    if text[0] == "<" and re.match(r"<(?:!doctype|html)", text, re.IGNORECASE):
        raise Unusable("an error in place of an answer")
    return {"role": "assistant", "content": text}, None


def _answer_in_list(lines: list[object]) -> LoggedAnswer:
    """Return the answer of a list of chunks, or of the lines of a stream."""
    if all(isinstance(line, str) for line in lines):
        text = "\n\n".join(map(str, lines))
        if _DATA.search(text):
            return message_of_events(text.encode("utf-8", "replace"))
    if lines and all(isinstance(chunk, Mapping) and "choices" in chunk for chunk in lines):
        events = [b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in lines]
        return message_of_events(b"".join(events))
    raise Unusable(NO_COMPLETION)


def message_of_events(body: bytes) -> LoggedAnswer:
    """Return message and finish reason of a stream. Raises Unusable where it is broken or does not end."""
    events = list(frames(body))
    for event in events:
        _check_event(event)
    answer = decode.read_answer(events)
    if answer.fault is not None:
        raise Unusable("a stream that is broken")
    if answer.done_ns is None and answer.finish_reason is None:
        raise Unusable("a stream that does not end")
    message: JsonObject = {"role": "assistant", "content": "".join(answer.text)}
    if answer.reasoning:
        message["reasoning_content"] = "".join(answer.reasoning)
    if answer.calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for _, call in sorted(answer.calls.items())
        ]
    if not any(message.get(name) for name in ("content", "reasoning_content", "tool_calls")):
        raise Unusable("a stream without an answer")
    return message, finish_reason_of(answer.finish_reason)


def _check_event(event: Frame) -> None:
    """Raise Unusable for a chunk with a field that no server is known to send, or without what it must have."""
    if event.kind == decode.DONE:
        return
    try:
        chunk = decode_json(event.data)
    except ValueError:
        raise Unusable("a stream that is broken") from None
    choices = chunk.get("choices") if isinstance(chunk, dict) else None
    if not isinstance(choices, list) or chunk.get("error"):
        raise Unusable("an error in place of an answer" if error_in(chunk) else NO_COMPLETION)
    for choice in choices:
        delta = choice.get("delta") if isinstance(choice, dict) else None
        if not isinstance(delta, dict):
            raise Unusable("a chunk of a stream without delta")
        unknown = sorted(name for name in delta.keys() - DELTA_FIELDS if delta[name])
        if unknown:
            raise Unusable(f"unknown field {unknown[0][:40]!r} of a chunk")


def frames(body: bytes) -> Iterator[Frame]:
    """Yield the events of a stream that was copied as a whole.

    Times are not known here: all stamps are 0.
    """
    for raw in _EVENT_END.split(body.removeprefix(b"\xef\xbb\xbf")):
        fields = list(field_lines(raw))
        if any(name == b"error" for name, _ in fields):  # llama.cpp's until September 2025
            raise Unusable("an error in place of an answer")
        lines = [value for name, value in fields if name == b"data"]
        if not lines:
            continue
        data = b"\n".join(lines)
        kind = decode.DONE if data.strip() == b"[DONE]" else decode.DATA
        flags = decode.NAMED if any(name == b"event" for name, _ in fields) else 0
        yield Frame(0, kind, flags, 0, raw, data)

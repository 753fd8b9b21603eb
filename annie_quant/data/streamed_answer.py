"""A streamed answer that was logged: as the text of its server-sent events, or as the list of their chunks."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from annie_quant.core.untrusted import JsonObject
from annie_quant.stream import decode
from annie_quant.stream.answer import Frame, field_lines

_EVENT_END = re.compile(rb"\r\n\r\n|\n\n|\r\r")
_FIRST_EVENT = re.compile(r"\s*(?:event:.*\n)?data: ?[{\[]")
_CHUNK_TYPES = ("message_", "content_block_", "response.")  # of the Messages and the Responses API


def stream_bytes(logged: object) -> bytes | None:
    """Return a logged answer as server-sent events; None unless it is such text or a list of chunks."""
    if isinstance(logged, dict):
        return None  # a whole answer
    lines: list[Any] = logged if isinstance(logged, list) and logged else [logged]
    if all(isinstance(line, str) for line in lines) and _FIRST_EVENT.match(lines[0]):
        return "\n\n".join(lines).encode("utf-8", "replace")
    if all(isinstance(c, dict) and ("choices" in c or str(c.get("type")).startswith(_CHUNK_TYPES)) for c in lines):
        return b"".join(b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in lines)
    return None


def message_of_events(body: bytes) -> tuple[JsonObject, str | None]:
    """Return message and finish reason of a stream of chunks. Raises ValueError where it is broken or does not end."""
    answer = decode.read_answer(frames(body))
    if answer.fault is not None:
        raise ValueError("a stream that is broken")
    if answer.done_ns is None and answer.finish_reason is None:
        raise ValueError("a stream that does not end")
    message: JsonObject = {"role": "assistant", "content": "".join(answer.text)}
    if answer.reasoning:
        message["reasoning_content"] = "".join(answer.reasoning)
    if answer.calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for _, call in sorted(answer.calls.items())
        ]
    return message, answer.finish_reason


def frames(body: bytes) -> Iterator[Frame]:
    """Yield the events of a stream that was copied as a whole. Times are not known here: all stamps are 0."""
    for raw in _EVENT_END.split(body.removeprefix(b"\xef\xbb\xbf")):
        fields = list(field_lines(raw))
        lines = [value for name, value in fields if name == b"data"]
        if not lines:
            continue
        data = b"\n".join(lines)
        kind = decode.DONE if data.strip() == b"[DONE]" else decode.DATA
        flags = decode.NAMED if any(name == b"event" for name, _ in fields) else 0
        yield Frame(0, kind, flags, 0, raw, data)

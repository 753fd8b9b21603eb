"""Events of Ollama's native stream (/api/chat, /api/generate): newline-delimited JSON, the last object has "done": true.

Definition: https://github.com/ollama/ollama/blob/main/docs/api.md. Durations are nanoseconds.
"""

from __future__ import annotations

from typing import Any

from annie_quant.core.untrusted import integer
from annie_quant.stream.answer import Answer, Frame, name_field, object_field, object_list, text_of

_COUNTS = ("prompt_eval_count", "eval_count")


def is_event(chunk: dict[str, Any]) -> bool:
    return isinstance(chunk.get("done"), bool) and "choices" not in chunk


def read_event(answer: Answer, event: dict[str, Any], frame: Frame) -> None:
    """Add one event to the answer. Raises ValueError for a field of another type."""
    stamp, message = frame.stamp_ns, object_field(event, "message")
    answer.model = answer.model or name_field(event, "model")
    has_reasoning = answer.add_reasoning(text_of(message.get("thinking") or event.get("thinking")), stamp)
    has_text = answer.add_text(text_of(message.get("content") or event.get("response")), stamp)
    called = [_call(answer, call, stamp) for call in object_list(message, "tool_calls")]
    if has_reasoning or has_text or any(called):
        answer.token(frame)
    if event["done"]:
        answer.done_ns = stamp
        reason = name_field(event, "done_reason") or "stop"
        answer.finish_reason = "tool_calls" if answer.calls and reason == "stop" else reason
        answer.add_usage({name: n for name in _COUNTS if (n := integer(event.get(name))) is not None})
        answer.server_timings = _timings(event) or None


def _call(answer: Answer, call: dict[str, Any], stamp: int) -> bool:
    """Add a tool call, which is whole: its arguments are an object."""
    function = object_field(call, "function")
    name, arguments = name_field(function, "name"), function.get("arguments")
    return answer.add_call(len(answer.calls), name_field(call, "id"), name, arguments, stamp)


def _timings(event: dict[str, Any]) -> dict[str, Any]:
    """Return Ollama's own account of its time with llama.cpp's names."""
    out: dict[str, Any] = {}
    for part, name in (("prompt_eval", "prompt"), ("eval", "predicted")):
        count, duration = integer(event.get(f"{part}_count")), integer(event.get(f"{part}_duration"))
        if count is not None and duration is not None:
            out |= {f"{name}_n": count, f"{name}_ms": duration / 1e6}
            if count > 0:
                out[f"{name}_per_token_ms"] = duration / 1e6 / count
    if (load := integer(event.get("load_duration"))) is not None:
        out["load_ms"] = load / 1e6
    return out

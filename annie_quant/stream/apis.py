"""How each API's events are read into an answer. All give the same record. Adding an API is one entry of APIS."""

from __future__ import annotations

from typing import Literal, Protocol

import msgspec

from annie_quant.core.untrusted import JsonObject, integer, limited
from annie_quant.stream import errors
from annie_quant.stream.answer import MAX_NAME, Frame, StreamedAnswer, name_field, object_field, object_list, text_of


class Api(Protocol):
    """One API's events."""

    def is_event(self, chunk: JsonObject) -> bool:
        """Whether an event is one of this API, by its own fields."""

    def read(self, answer: StreamedAnswer, event: JsonObject, frame: Frame) -> None:
        """Add one event to the answer. Raises ValueError for a field of another type."""


# ---- chat completions


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
    answer.model = answer.model or (chunk.model[:MAX_NAME] if chunk.model is not None else None)
    reasoning, content = delta.reasoning or delta.reasoning_content, delta.content
    if reasoning:
        answer.add_reasoning(reasoning, frame.stamp_ns)
    if content:
        answer.add_text(content, frame.stamp_ns)
    if reasoning or content:
        answer.token(frame)
    return True


class ChatApi:
    """OpenAI's chat completions and plain completions, as vLLM, SGLang, llama.cpp and others send them.

    Dialects: vLLM (delta.reasoning), older vLLM and llama.cpp (delta.reasoning_content), completions (choices.text).
    """

    def is_event(self, chunk: JsonObject) -> bool:
        return True  # asked last: what no other API recognises

    def read(self, answer: StreamedAnswer, event: JsonObject, frame: Frame) -> None:
        usage, timings = limited(object_field(event, "usage")), limited(object_field(event, "timings"))
        answer.usage = usage or answer.usage
        answer.server_timings = timings or answer.server_timings
        answer.model = answer.model or name_field(event, "model")
        has_token = False
        for choice in object_list(event, "choices"):
            if choice.get("index"):
                answer.warn("more than one choice was received: only the first is read")
                continue
            answer.finish_reason = name_field(choice, "finish_reason") or answer.finish_reason
            has_token |= self._delta(answer, choice, frame.stamp_ns)
        if has_token:
            # vLLM's continuous_usage_stats and llama.cpp's timings_per_token count in every event.
            counted = integer(usage.get("completion_tokens"))
            answer.token(frame, integer(timings.get("predicted_n")) if counted is None else counted)

    def _delta(self, answer: StreamedAnswer, choice: JsonObject, stamp: int) -> bool:
        delta = object_field(choice, "delta")
        has_reasoning = answer.add_reasoning(text_of(delta.get("reasoning") or delta.get("reasoning_content")), stamp)
        has_text = answer.add_text(text_of(delta.get("content") or choice.get("text")), stamp)
        tools = object_list(delta, "tool_calls")
        if not tools and delta.get("function_call"):
            tools = [{"function": delta["function_call"]}]
        called = [self._tool(answer, piece, stamp) for piece in tools]
        return has_reasoning or has_text or any(called)

    def _tool(self, answer: StreamedAnswer, piece: JsonObject, stamp: int) -> bool:
        """Add one piece of a tool call. Returns whether it had any content."""
        index, call_id = integer(piece.get("index")), name_field(piece, "id")
        function = object_field(piece, "function")
        if index is None:  # some servers omit it: an id begins a new call
            index = len(answer.calls) if call_id or not answer.calls else len(answer.calls) - 1
        return answer.add_call(index, call_id, name_field(function, "name"), function.get("arguments"), stamp)


# ---- responses

_RESPONSES_TEXT = ("response.output_text.delta", "response.refusal.delta")
_RESPONSES_REASONING = (
    "response.reasoning_text.delta",
    "response.reasoning_summary_text.delta",
    "response.reasoning.delta",
)
_RESPONSES_ENDS = ("response.completed", "response.incomplete", "response.failed")


class ResponsesApi:
    """OpenAI's Responses API: each event has a `type` and is about one output item.

    Definition: https://platform.openai.com/docs/api-reference/responses-streaming. The stream ends with response.completed,
    response.incomplete or response.failed; there is no [DONE].
    """

    def is_event(self, chunk: JsonObject) -> bool:
        kind = chunk.get("type")
        return isinstance(kind, str) and kind.startswith("response.")

    def read(self, answer: StreamedAnswer, event: JsonObject, frame: Frame) -> None:
        kind, stamp = event["type"], frame.stamp_ns
        if kind in _RESPONSES_TEXT:
            has_token = answer.add_text(text_of(event.get("delta")), stamp)
        elif kind in _RESPONSES_REASONING:
            has_token = answer.add_reasoning(text_of(event.get("delta")), stamp)
        elif kind == "response.function_call_arguments.delta":
            has_token = answer.add_call(self._index(answer, event), None, None, event.get("delta"), stamp)
        elif kind == "response.output_item.added":
            has_token = self._item(answer, event, stamp)
        else:
            has_token = False
            if kind == "response.output_item.done":
                self._whole_call(answer, event, stamp)
            elif kind in ("response.created", *_RESPONSES_ENDS):
                self._response(answer, kind, object_field(event, "response"), stamp)
        if has_token:
            answer.token(frame)

    def _index(self, answer: StreamedAnswer, event: JsonObject) -> int:
        """Return the number of an event's output item. llama.cpp sends no output_index, but the item's id."""
        index = integer(event.get("output_index"))
        if index is None:
            item = name_field(event, "item_id") or name_field(object_field(event, "item"), "id") or ""
            index = answer.item_numbers.setdefault(item, len(answer.item_numbers))
        return index

    def _item(self, answer: StreamedAnswer, event: JsonObject, stamp: int) -> bool:
        item = object_field(event, "item")
        if item.get("type") != "function_call":
            return False
        call_id = name_field(item, "call_id") or name_field(item, "id")
        return answer.add_call(
            self._index(answer, event), call_id, name_field(item, "name"), item.get("arguments"), stamp
        )

    def _whole_call(self, answer: StreamedAnswer, event: JsonObject, stamp: int) -> None:
        """Take a finished call from its item where no delta had its arguments."""
        item = object_field(event, "item")
        if item.get("type") == "function_call" and not answer.arguments.get(self._index(answer, event)):
            self._item(answer, event, stamp)

    def _response(self, answer: StreamedAnswer, kind: str, response: JsonObject, stamp: int) -> None:
        answer.model = answer.model or name_field(response, "model")
        answer.add_usage(limited(object_field(response, "usage")))
        answer.server_timings = limited(object_field(response, "timings")) or answer.server_timings
        if kind == "response.failed":
            message = errors.error_in({"error": response.get("error") or "response.failed"})
            answer.fail("server_error", f"error in the stream: {message}")
        if kind in _RESPONSES_ENDS:
            answer.done_ns = stamp
            reason = object_field(response, "incomplete_details").get("reason")
            if reason is not None or kind == "response.incomplete":
                answer.finish_reason = "length" if reason in (None, "max_output_tokens") else str(reason)[:MAX_NAME]
            else:
                answer.finish_reason = "tool_calls" if answer.calls else "stop"


# ---- messages

_MESSAGE_EVENTS = frozenset(
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
_STOP_REASONS = {"end_turn": "stop", "stop_sequence": "stop", "tool_use": "tool_calls", "max_tokens": "length"}


class MessagesApi:
    """Anthropic's Messages API, which vLLM and llama.cpp serve at /v1/messages.

    Definition: https://docs.anthropic.com/en/api/messages-streaming. The stream ends with message_stop; there is no [DONE].
    """

    def is_event(self, chunk: JsonObject) -> bool:
        kind = chunk.get("type")
        return isinstance(kind, str) and kind in _MESSAGE_EVENTS

    def read(self, answer: StreamedAnswer, event: JsonObject, frame: Frame) -> None:
        kind, stamp = event["type"], frame.stamp_ns
        index = integer(event.get("index")) or 0
        has_token = False
        if kind == "content_block_delta":
            has_token = self._delta(answer, index, object_field(event, "delta"), stamp)
        elif kind == "content_block_start":
            has_token = self._block(answer, index, object_field(event, "content_block"), stamp)
        elif kind == "message_start":
            message = object_field(event, "message")
            answer.model = answer.model or name_field(message, "model")
            answer.add_usage(limited(object_field(message, "usage")))
        elif kind == "message_delta":
            reason = name_field(object_field(event, "delta"), "stop_reason")
            answer.finish_reason = _STOP_REASONS.get(reason or "", reason) or answer.finish_reason
            answer.add_usage(limited(object_field(event, "usage")))
        elif kind == "message_stop":
            answer.done_ns = stamp
        answer.server_timings = limited(object_field(event, "timings")) or answer.server_timings
        if has_token:
            answer.token(frame)

    def _block(self, answer: StreamedAnswer, index: int, block: JsonObject, stamp: int) -> bool:
        """Begin a block: a tool call has its name here; text and thinking are usually empty."""
        if block.get("type") == "tool_use":
            arguments = object_field(block, "input") or None  # {}: its pieces follow
            return answer.add_call(index, name_field(block, "id"), name_field(block, "name"), arguments, stamp)
        return self._delta(answer, index, block, stamp)

    def _delta(self, answer: StreamedAnswer, index: int, delta: JsonObject, stamp: int) -> bool:
        has_text = answer.add_text(text_of(delta.get("text")), stamp)
        has_reasoning = answer.add_reasoning(text_of(delta.get("thinking")), stamp)
        pieces = text_of(delta.get("partial_json"))
        return has_text or has_reasoning or bool(pieces and answer.add_call(index, None, None, pieces, stamp))


# ---- Ollama


class OllamaApi:
    """Ollama's native stream (/api/chat, /api/generate): newline-delimited JSON, the last object has "done": true.

    Definition: https://github.com/ollama/ollama/blob/main/docs/api.md. Durations are nanoseconds.
    """

    def is_event(self, chunk: JsonObject) -> bool:
        return isinstance(chunk.get("done"), bool) and "choices" not in chunk

    def read(self, answer: StreamedAnswer, event: JsonObject, frame: Frame) -> None:
        stamp, message = frame.stamp_ns, object_field(event, "message")
        answer.model = answer.model or name_field(event, "model")
        has_reasoning = answer.add_reasoning(text_of(message.get("thinking") or event.get("thinking")), stamp)
        has_text = answer.add_text(text_of(message.get("content") or event.get("response")), stamp)
        called = [self._call(answer, call, stamp) for call in object_list(message, "tool_calls")]
        if has_reasoning or has_text or any(called):
            answer.token(frame)
        if event["done"]:
            answer.done_ns = stamp
            reason = name_field(event, "done_reason") or "stop"
            answer.finish_reason = "tool_calls" if answer.calls and reason == "stop" else reason
            counts = {name: integer(event.get(name)) for name in ("prompt_eval_count", "eval_count")}
            answer.add_usage({name: count for name, count in counts.items() if count is not None})
            answer.server_timings = self._timings(event) or None

    def _call(self, answer: StreamedAnswer, call: JsonObject, stamp: int) -> bool:
        """Add a tool call, which is whole: its arguments are an object."""
        function = object_field(call, "function")
        name, arguments = name_field(function, "name"), function.get("arguments")
        return answer.add_call(len(answer.calls), name_field(call, "id"), name, arguments, stamp)

    def _timings(self, event: JsonObject) -> dict[str, float]:
        """Return Ollama's own account of its time with llama.cpp's names."""
        out: dict[str, float] = {}
        for part, name in (("prompt_eval", "prompt"), ("eval", "predicted")):
            count, duration = integer(event.get(f"{part}_count")), integer(event.get(f"{part}_duration"))
            if count is not None and duration is not None:
                out |= {f"{name}_n": count, f"{name}_ms": duration / 1e6}
                if count > 0:
                    out[f"{name}_per_token_ms"] = duration / 1e6 / count
        if (load := integer(event.get("load_duration"))) is not None:
            out["load_ms"] = load / 1e6
        return out


APIS: dict[str, Api] = {
    "responses": ResponsesApi(),
    "messages": MessagesApi(),
    "ollama": OllamaApi(),
    "chat": ChatApi(),
}
_IN_ORDER = tuple(APIS.values())


def read_event(answer: StreamedAnswer, event: JsonObject, frame: Frame) -> None:
    """Add one event to the answer, as the first API reads it that recognises it."""
    for api in _IN_ORDER:  # a loop: this is called once per event
        if api.is_event(event):
            api.read(answer, event, frame)
            return

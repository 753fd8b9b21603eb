"""Items of OpenAI's Responses API, in its requests and responses and in Codex' rollouts, as messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from annie_quant.core.untrusted import JsonObject
from annie_quant.data.conversations import (
    Fields,
    Note,
    Unusable,
    append_to,
    assistant_message,
    names,
    result_message,
)
from annie_quant.data.message_forms import OPENAI, flat_call, name_in, read_message, result_text
from annie_quant.documents import ChatMessage

NO_CONTENT = ("ghost_snapshot",)
# Fields of a request that requests with a text as `input` to other APIs do not have.
OWN_FIELDS = names(
    "instructions max_output_tokens previous_response_id conversation store reasoning text truncation include "
    "parallel_tool_calls tools tool_choice stream background"
)


def is_response_request(value: object, is_named: bool) -> bool:
    """Return whether an object is a request of the Responses API.

    Text alone is also the input of an embedding, or a row of an instruction data set: it counts with a field that only
    the Responses API has.

    is_named: the record names the API, or has a response of it.
    """
    if not isinstance(value, Mapping) or "messages" in value:
        return False
    items = value.get("input")
    if isinstance(items, str):
        return is_named or bool(value.keys() & OWN_FIELDS)
    return isinstance(items, list) and bool(items) and isinstance(items[0], Mapping)


def read_items(request: JsonObject, response: object, notes: list[Note]) -> list[ChatMessage]:
    """Return the messages of a request and its response. Raises Unusable for an item outside the grammar."""
    if request.get("previous_response_id") or request.get("conversation"):
        raise Unusable("a request that continues a conversation which the server has")
    items = request.get("input")
    messages: list[ChatMessage] = []
    if isinstance(items, str):
        messages.append({"role": "user", "content": items})
    else:
        for item in items if isinstance(items, list) else ():
            add_item(messages, item, notes)
    if response in (None, "", {}):
        return messages
    if not isinstance(response, Mapping):
        raise Unusable("an answer that is not a response")
    output = response.get("output")
    if not isinstance(output, list) or response.get("error"):
        raise Unusable("an answer that is not a response")
    status = response.get("status", "completed")
    if status != "completed":
        raise Unusable(f"an answer that was cut (status {str(status)[:40]!r})")
    for item in output:
        add_item(messages, item, notes)
    return messages


def add_item(messages: list[ChatMessage], item: object, notes: list[Note]) -> None:
    """Add an item: text, thinking and calls without anything between them are one message of the assistant.

    Raises Unusable for an item of an unknown type.
    """
    if not isinstance(item, Mapping):
        raise Unusable("an item that is not an object")
    kind = item.get("type") or ("message" if "role" in item else None)
    if kind == "message":
        for message in read_message({**item, "type": "message"}, OPENAI, notes):
            _add(messages, message)
    elif kind == "reasoning":
        _add(messages, assistant_message("", _reasoning(item)))
    elif kind == "function_call":
        call = flat_call({**item, "id": item.get("call_id")})
        _add(messages, assistant_message("", "", [call]))
    elif kind == "function_call_output":
        messages.append(_result(item))
    elif kind not in NO_CONTENT:
        raise Unusable(f"unknown item {str(kind)[:40]!r}")


def _add(messages: list[ChatMessage], message: ChatMessage) -> None:
    if message["role"] == "assistant" and messages and messages[-1]["role"] == "assistant":
        append_to(messages[-1], message)
    else:
        messages.append(message)


def _reasoning(item: Fields) -> str:
    """Return the model's own thinking; a summary is not what it thought, and is not read."""
    parts = item.get("content") or []
    if not isinstance(parts, list):
        raise Unusable("reasoning that is not a list")
    texts = []
    for part in parts:
        is_text = isinstance(part, Mapping) and part.get("type") in ("reasoning_text", "text")
        if not is_text or not isinstance(part.get("text"), str):
            raise Unusable("reasoning that is not text")
        texts.append(part["text"])
    return "\n".join(texts)


def _result(item: Fields) -> ChatMessage:
    """Return the result of a call: text, a list of text parts, or Codex' object with the text in `content`."""
    output: Any = item.get("output")
    if isinstance(output, Mapping):
        output = output.get("content")
    if output is None:
        raise Unusable("a tool result without output")
    return result_message(result_text(output, OPENAI), None, name_in(item, "call_id"))

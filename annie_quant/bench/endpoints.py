"""The APIs that a benchmark can use. Each takes the body of a chat completion and returns the body of its own request.

    chat         /v1/chat/completions
    completions  /v1/completions        the messages as plain text: no chat template, no tools
    responses    /v1/responses          OpenAI (also vLLM, llama.cpp)
    messages     /v1/messages           Anthropic (also vLLM, llama.cpp)
    ollama       /api/chat              Ollama's own stream

Fields that only some servers know (chat_template_kwargs, cache_prompt, ignore_eos) are passed on unchanged, except to Ollama,
whose names for them are in `options` and `think`. Adding an API: one entry of ENDPOINTS, and how its events are read in
annie_quant/stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from annie_quant.core.errors import UsageError
from annie_quant.core.untrusted import decode_json

Body = dict[str, Any]
_CHAT_ONLY = ("messages", "tools", "tool_choice", "max_tokens", "stream_options")
_OLLAMA_OPTIONS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "seed",
    "stop",
    "repeat_penalty",
    "presence_penalty",
)


@dataclass(frozen=True)
class Endpoint:
    """path: after the server's root. convert: from a chat completion's body. with_tools: whether it can offer tools."""

    path: str
    convert: Callable[[Body], Body]
    with_tools: bool = True


def check(name: str, where: str) -> None:
    """Raise UsageError for an API that is not in ENDPOINTS."""
    if name not in ENDPOINTS:
        raise UsageError(
            f"{where}: unknown endpoint {name!r}", f"choose one of: {', '.join(ENDPOINTS)}"
        )


def request_body(endpoint: str, chat: Body) -> Body:
    """Return a chat completion's body as the endpoint expects it."""
    return ENDPOINTS[endpoint].convert(chat)


def _rest(chat: Body) -> Body:
    """Return the fields that keep their name and meaning."""
    return {name: value for name, value in chat.items() if name not in _CHAT_ONLY}


def _thinks(chat: Body) -> bool:
    return bool((chat.get("chat_template_kwargs") or {}).get("enable_thinking", True))


def _functions(chat: Body) -> list[Body]:
    return [tool.get("function", tool) for tool in chat.get("tools") or ()]


def _calls(message: Body, at: int) -> list[tuple[str, str, object]]:
    """Return (id, name, arguments) of a message's calls. A call without an id gets a generated one, and so does its result."""
    calls = [(c.get("id"), c["function"]) for c in message.get("tool_calls") or ()]
    return [
        (own or f"call_{at}_{i}", f["name"], f.get("arguments") or {})
        for i, (own, f) in enumerate(calls)
    ]


def _result_id(messages: Sequence[Body], at: int) -> str:
    """Return the id of the call that a tool's result answers: its own, else that of the call at the result's position."""
    if own := messages[at].get("tool_call_id"):
        return str(own)
    first = at
    while first > 0 and messages[first - 1]["role"] == "tool":
        first -= 1
    calls = _calls(messages[first - 1], first - 1) if first else []
    return calls[at - first][0] if at - first < len(calls) else f"call_{first - 1}_{at - first}"


def _system(chat: Body) -> str | None:
    texts = [_text(m.get("content")) for m in chat["messages"] if m["role"] == "system"]
    return "\n\n".join(texts) if texts else None


def _arguments(value: object) -> Body:
    """Return a call's arguments as an object; {} for text that is not one, because a model may have written anything."""
    if isinstance(value, str):
        try:
            value = decode_json(value.encode())
        except ValueError:
            return {}
    return value if isinstance(value, dict) else {}


def _text(value: object) -> str:
    return value if isinstance(value, str) else str(value or "")


def _completion(chat: Body) -> Body:
    names = {"system": "", "user": "User: ", "assistant": "Assistant: ", "tool": "Result: "}
    lines = [f"{names.get(m['role'], '')}{_text(m.get('content'))}" for m in chat["messages"]]
    body = _rest(chat) | {
        "prompt": "\n".join([*lines, "Assistant:"]),
        "max_tokens": chat["max_tokens"],
    }
    body.pop("chat_template_kwargs", None)
    return body | ({"stream_options": chat["stream_options"]} if "stream_options" in chat else {})


def _responses(chat: Body) -> Body:
    items: list[Body] = []
    for at, message in enumerate(chat["messages"]):
        if message["role"] == "tool":
            result = {"type": "function_call_output", "call_id": _result_id(chat["messages"], at)}
            items.append(result | {"output": _text(message.get("content"))})
        elif message["role"] != "system":
            if message.get("content") or not message.get("tool_calls"):
                items.append(_message_item(message["role"], _text(message.get("content")), at))
            items += [
                {
                    "type": "function_call",
                    "call_id": call_id,
                    "name": name,
                    "arguments": _json_text(arguments),
                }
                for call_id, name, arguments in _calls(message, at)
            ]
    body = _rest(chat) | {"input": items, "max_output_tokens": chat["max_tokens"], "store": False}
    if (instructions := _system(chat)) is not None:
        body["instructions"] = instructions
    if functions := _functions(chat):
        body["tools"] = [{"type": "function", **f} for f in functions]
        body["tool_choice"] = chat.get("tool_choice", "auto")
    return body


def _message_item(role: str, text: str, at: int) -> Body:
    """Return a message as the item that a server would have sent: llama.cpp takes no shorter form of an answer."""
    kind = "output_text" if role == "assistant" else "input_text"
    item = {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}
    return item | ({"id": f"msg_{at}", "status": "completed"} if role == "assistant" else {})


def _json_text(arguments: object) -> str:
    return arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()


def _messages(chat: Body) -> Body:
    turns: list[Body] = []
    for at, message in enumerate(chat["messages"]):
        role = message["role"]
        blocks: list[Body] = []
        if role == "tool":
            call_id = _result_id(chat["messages"], at)
            blocks = [
                {
                    "type": "tool_result",
                    "tool_use_id": call_id,
                    "content": _text(message.get("content")),
                }
            ]
            role = "user"
        elif role != "system":
            blocks = (
                [{"type": "text", "text": text}] if (text := _text(message.get("content"))) else []
            )
            blocks += [
                {"type": "tool_use", "id": call_id, "name": name, "input": _arguments(arguments)}
                for call_id, name, arguments in _calls(message, at)
            ]
        if (
            blocks and turns and turns[-1]["role"] == role
        ):  # results of several calls are one message
            turns[-1]["content"] += blocks
        elif blocks:
            turns.append({"role": role, "content": blocks})
    body = _rest(chat) | {"messages": turns, "max_tokens": chat["max_tokens"]}
    if (system := _system(chat)) is not None:
        body["system"] = system
    if functions := _functions(chat):
        # A description that is not there stays out: an empty one changes the prompt.
        body["tools"] = [
            {"name": f["name"], "input_schema": f.get("parameters") or {"type": "object"}}
            | ({"description": f["description"]} if f.get("description") else {})
            for f in functions
        ]
        body["tool_choice"] = {"type": "auto"}
    if not _thinks(chat):
        body["thinking"] = {"type": "disabled"}
    return body


def _ollama(chat: Body) -> Body:
    messages: Sequence[Body] = [dict(m) for m in chat["messages"]]
    for at, message in enumerate(messages):
        if message.get("tool_calls"):
            message["tool_calls"] = [
                {"function": {"name": name, "arguments": _arguments(arguments)}}
                for _, name, arguments in _calls(message, at)
            ]
        if message["role"] == "tool" and "name" in message:
            message["tool_name"] = message.pop("name")
    options = {name: chat[name] for name in _OLLAMA_OPTIONS if name in chat}
    body: Body = {
        "model": chat.get("model", ""),
        "messages": messages,
        "stream": True,
        "think": _thinks(chat),
    }
    body["options"] = options | {"num_predict": chat["max_tokens"]} | (chat.get("options") or {})
    if chat.get("tools"):
        body["tools"] = chat["tools"]
    return body


ENDPOINTS: dict[str, Endpoint] = {
    "chat": Endpoint("/v1/chat/completions", lambda chat: chat),
    "completions": Endpoint("/v1/completions", _completion, with_tools=False),
    "responses": Endpoint("/v1/responses", _responses),
    "messages": Endpoint("/v1/messages", _messages),
    "ollama": Endpoint("/api/chat", _ollama),
}

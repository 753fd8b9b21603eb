"""One JSON record of a log as a conversation: OpenAI's forms, streamed answers, ShareGPT and Hermes, content blocks."""

from __future__ import annotations

import ast
import contextlib
import datetime
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from annie_quant.core.untrusted import JsonObject, integer
from annie_quant.documents import ChatCall, ChatMessage, ChatRow
from annie_quant.judge.answers import parse_raw
from annie_quant.stream import decode
from annie_quant.stream.answer import Frame, field_lines

Fields = Mapping[str, Any]  # a JSON object of a log, whose fields may have any type
LoggedTool = dict[str, Any]  # a tool in OpenAI's form; its parameters are a JSON schema


class Unusable(Exception):
    """A record has no conversation that can be used.

    The message is the reason, the same for all records with this fault.
    """


@dataclass
class Conversation:
    """A logged conversation.

    messages: in OpenAI's form, arguments as objects, without a system prompt.
    system: the system prompt; None where the log has none.
    tools: the tools on offer; None where the log does not record them.
    thinking: whether an answer has thinking.
    format: name of the log's format.
    source: name of the log file.
    time_s: when it was logged, in seconds since 1970; None where the log has no time.
    max_tokens: the request's limit of its answer; None where the log has none.
    """

    messages: list[ChatMessage]
    system: str | None = None
    tools: list[LoggedTool] | None = None
    thinking: bool = False
    format: str = ""
    source: str = ""
    time_s: float | None = None
    max_tokens: int | None = None

    @property
    def characters(self) -> int:
        """Number of characters of all texts and of the arguments of all calls."""
        size = len(self.system or "")
        for message in self.messages:
            size += len(message["content"])
            for call in message.get("tool_calls") or ():
                size += len(str(call["function"]["arguments"]))
        return size

    @property
    def calls(self) -> list[str]:
        """Names of all functions that are called, in order."""
        return [name for message in self.messages for name in called(message)]

    @property
    def has_answer(self) -> bool:
        return any(m["role"] == "assistant" for m in self.messages)


def called(message: ChatMessage) -> list[str]:
    """Return the names of the functions that a message calls."""
    return [str(c["function"]["name"]) for c in message.get("tool_calls") or ()]


def row_of(
    conversation: Conversation,
    index: int,
    system: str | None = None,
    tools: Sequence[Mapping[str, object]] | None = None,
) -> ChatRow:
    """Return the conversation up to its last answer, as a calibration row.

    system, tools: used where the log has none.
    """
    last = max(i for i, m in enumerate(conversation.messages) if m["role"] == "assistant")
    system = conversation.system if conversation.system is not None else system or ""
    head: list[ChatMessage] = [{"role": "system", "content": system}] if system.strip() else []
    row: ChatRow = {
        "id": f"log-{index:05d}",
        "messages": head + [with_text_arguments(m) for m in conversation.messages[: last + 1]],
        "thinking": conversation.thinking,
        "provenance": {
            "teacher": "log",
            "model": conversation.format,
            "source": conversation.source,
        },
        "split": "calibration",
    }
    offered = conversation.tools if conversation.tools is not None else tools
    if offered:
        row["tools"] = [dict(t) for t in offered]
    return row


def with_text_arguments(message: ChatMessage) -> ChatMessage:
    """Return the message with its calls' arguments as JSON strings, as OpenAI's requests have them."""
    result = message.copy()
    calls = message.get("tool_calls")
    if calls:
        result["tool_calls"] = [_with_text(call) for call in calls]
    return result


def _with_text(call: ChatCall) -> ChatCall:
    function = call["function"]
    arguments = json.dumps(function["arguments"], ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}


LOG_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "chatgpt": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "ipython": "tool",
    "toolresult": "tool",
    "tool_response": "tool",
    "function_response": "tool",
    "function_call": "call",
    "tool_call": "call",
}
IMAGE_KINDS = (
    *("image", "image_url", "input_image", "audio", "input_audio", "video"),
    *("file", "input_file", "blob", "uri"),
)
MESSAGE_KEYS = ("messages", "conversations", "conversation", "dialog", "dialogue", "chosen")
ANSWER_KEYS = ("response", "response_body", "output", "completion", "result")
ARGUMENT_KEYS = ("arguments", "parameters", "args", "input")  # args: Gemini; input: Anthropic
TIME_KEYS = ("time", "timestamp", "start_time", "created_at", "created")
WRAPPERS = ("body", "request", "request_body", "kwargs", "input", "params", "payload", "data")
_TAGGED_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
_RESULT = re.compile(r"<tool_response>\s*(.*?)\s*</tool_response>", re.DOTALL)
_TOOLS = re.compile(r"<tools>\s*(.*?)\s*</tools>", re.DOTALL)
_THINK = re.compile(r"^\s*<think>(.*?)</think>\s*", re.DOTALL)


def conversation_of(record: object) -> Conversation:
    """Return the conversation in a record. Raises Unusable with the reason where there is none."""
    if isinstance(record, list):
        record = {"messages": record}
    if not isinstance(record, Mapping):
        raise Unusable("not a JSON object")
    request, logged = _request(record, 0)
    messages = [message for raw in logged for message in parsed_message(raw)]
    answer = _answer(record)
    if answer is not None and (not messages or messages[-1]["role"] != "assistant"):
        messages += parsed_message(answer)
    fields = [request.get("tools"), record.get("tools")]
    fields += [request.get("functions"), record.get("functions")]
    system = request.get("system") or record.get("system") or record.get("system_prompt")
    conversation = finished(messages, tools_of(next(filter(None, fields), None)), system)
    conversation.time_s = _time(record)
    limit = request.get("max_tokens", request.get("max_completion_tokens"))
    conversation.max_tokens = integer(limit) or None
    return conversation


def _time(record: Fields) -> float | None:
    """Return when a record was logged, in seconds since 1970.

    Records have ISO 8601, or a number of seconds or milliseconds.
    """
    for key in TIME_KEYS:
        value = record.get(key)
        if isinstance(value, str):
            with contextlib.suppress(ValueError, OverflowError):
                return datetime.datetime.fromisoformat(value.replace("Z", "+00:00")).timestamp()
        elif isinstance(value, (int, float)) and not isinstance(value, bool) and 1e8 < value < 1e14:
            return value / 1e3 if value > 1e11 else float(value)
    return None


def finished(
    messages: list[ChatMessage], tools: list[LoggedTool] | None, system: object = None
) -> Conversation:
    """Return a conversation that every chat template can render.

    Raises Unusable where nothing is left.
    """
    systems = ["\n".join(_Content(system).texts)]
    systems += [m["content"] for m in messages if m["role"] == "system"]
    prompt = "\n".join(text for text in systems if text.strip()) or None
    tagged = _TOOLS.search(prompt or "")
    if prompt and tagged and not tools:
        tools = tools_of(tagged[1])
        if tools:  # the chat template adds them again
            prompt = _TOOLS.sub("", prompt).strip()
    messages = [m for m in messages if m["role"] != "system"]
    while messages and messages[0]["role"] in ("assistant", "tool"):
        messages = messages[1:]  # a greeting before the user's first message
    if not any(m["role"] == "user" and m["content"].strip() for m in messages):
        raise Unusable("no user message")
    thinking = any(m.get("reasoning_content") for m in messages)
    return Conversation(_linked(messages), prompt, tools, thinking)


def _request(record: Fields, depth: int) -> tuple[Fields, Sequence[object]]:
    """Return the object with the messages, and the messages."""
    for key in MESSAGE_KEYS:
        value = record.get(key)
        if isinstance(value, Sequence) and not isinstance(value, str) and value:
            return record, value
    prompt = record.get("prompt")
    if isinstance(prompt, list):
        completion = record.get("completion")
        return {}, prompt + completion if isinstance(completion, list) else prompt
    for key in WRAPPERS if depth < 3 else ():
        value = _object_in(record, key)
        if isinstance(value, Mapping):
            with contextlib.suppress(Unusable):
                return _request(value, depth + 1)
    raise Unusable(str(record.get("unusable") or "no messages in the record"))


def _object_in(record: Fields, key: str) -> object:
    """Return a field's value, decoded where it is the text of a JSON object; None where such text cannot be decoded."""
    value = record.get(key)
    if isinstance(value, str) and value.lstrip().startswith("{"):
        return _json_or_none(value)
    return value


def _json_or_none(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _answer(record: Fields) -> object:
    """Return the message of a response that is logged with its request; None where there is none."""
    for key in ANSWER_KEYS:
        value = _object_in(record, key)
        streamed = stream_bytes(value)
        if streamed:
            try:
                return message_of_events(streamed)[0]
            except ValueError as error:
                raise Unusable(str(error)) from None
        if isinstance(value, Mapping):
            body = value["body"] if isinstance(value.get("body"), Mapping) else value
            choice = first_choice(body)
            if choice is not None:
                return choice.get("message")
            if body.get("role") == "assistant":
                return body
        elif isinstance(value, str) and value.strip() and key != "completion":
            return {"role": "assistant", "content": value}
    return (first_choice(record) or {}).get("message")


def first_choice(body: Fields) -> Fields | None:
    choices = body.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else None
    return first if isinstance(first, Mapping) else None


def parsed_message(raw: object) -> Iterator[ChatMessage]:
    """Yield one logged message as messages of OpenAI's form.

    Raises Unusable for an unknown role or an image.
    """
    if not isinstance(raw, Mapping):
        raise Unusable("a message is not an object")
    sender = str(raw.get("role") or raw.get("from") or raw.get("type"))
    role = LOG_ROLES.get(sender.lower().replace("-", "_"))
    if role is None:
        raise Unusable(f"unknown role {sender[:30]!r}")
    content = _Content(_first(raw, ("content", "value", "parts")))
    text = "\n".join(content.texts)
    if role == "call":
        yield _assistant("", "", [_call(_decoded(text))])
    elif role == "assistant":
        yield from _answers(raw, text, content)
    elif role == "tool":
        name = raw.get("name") or raw.get("toolName")
        identity = raw.get("tool_call_id") or raw.get("toolCallId")
        tagged = _RESULT.findall(text) or [text]
        yield from content.results or [_result(result, name, identity) for result in tagged]
    elif role == "user" and _RESULT.search(text) and not _RESULT.sub("", text).strip():
        yield from content.results
        yield from (_result(result) for result in _RESULT.findall(text))
    else:
        yield from content.results
        if text.strip() or not content.results:
            yield {"role": role, "content": text}


def _answers(raw: Fields, text: str, content: _Content) -> Iterator[ChatMessage]:
    """Yield the answer of an assistant's message, with its calls and thinking also from tags (Hermes, Qwen)."""
    thoughts = "\n".join(content.thoughts)
    thoughts += str(raw.get("reasoning_content") or raw.get("reasoning") or "")
    calls = content.calls + _calls(raw.get("tool_calls"))
    if isinstance(raw.get("function_call"), Mapping):
        calls.append(_call(raw["function_call"]))
    opened = _THINK.match(text)
    if opened:
        thoughts += opened[1].strip()
        text = text[opened.end() :]
    calls += [_call(_decoded(match)) for match in _TAGGED_CALL.findall(text)]
    text = _TAGGED_CALL.sub("", text)
    if "<function=" in text:
        answer = parse_raw(text, thinking=False)
        calls += [_call(dict(call)) for call in answer.tool_calls]
        text = answer.text
    if text.strip() or calls:
        yield _assistant(text.strip(), thoughts, calls)


def _first(fields: Fields, keys: Sequence[str]) -> Any:
    return next((fields[key] for key in keys if key in fields), None)


class _Content:
    """Texts, thinking, calls and results of a message's content: a text, or a list of blocks."""

    def __init__(self, content: object) -> None:
        self.texts: list[str] = []
        self.thoughts: list[str] = []
        self.calls: list[ChatCall] = []
        self.results: list[ChatMessage] = []
        if content is None:
            return
        if isinstance(content, (str, Mapping)):
            content = [content]
        if not isinstance(content, list):
            self.texts.append(_json_text(content))
            return
        for block in content:
            if isinstance(block, str):
                self.texts.append(block)
            elif isinstance(block, Mapping):
                self._add(block)

    def _add(self, block: Fields) -> None:
        kind = str(block.get("type"))
        if kind in IMAGE_KINDS:
            raise Unusable("an image or another file: only text can be evaluated")
        if kind in ("toolCall", "tool_use", "tool_call"):
            self.calls.append(_call(block))
        elif kind in ("tool_result", "tool_call_response"):
            identity = block.get("tool_use_id") or block.get("id")
            self.results.append(_result(_result_text(block, kind), None, identity))
        elif kind in ("thinking", "reasoning"):
            thought = block.get("thinking") or block.get("text") or block.get("content") or ""
            self.thoughts.append(str(thought))
        else:
            text = block.get("text", block.get("content") if kind == "text" else None)
            if isinstance(text, str):
                self.texts.append(text)


def _result_text(block: Fields, kind: str) -> str:
    """Return the text of a tool's result in a block; OpenTelemetry's (tool_call_response) may be any value."""
    if kind == "tool_result":
        return "\n".join(_Content(block.get("content")).texts)
    response = block.get("response")
    return response if isinstance(response, str) else _json_text(response)


def _json_text(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _calls(raw: object) -> list[ChatCall]:
    """Return the calls of a message's list; one call alone is a list of one."""
    if isinstance(raw, Mapping):
        raw = [raw]
    if raw is not None and not isinstance(raw, list):
        raise Unusable("tool_calls that are not a list")
    return [_call(call) for call in raw or ()]


def _call(raw: object) -> ChatCall:
    if not isinstance(raw, Mapping):
        raise Unusable("a tool call that is not an object")
    function = raw["function"] if isinstance(raw.get("function"), Mapping) else raw
    arguments = _first(function, ARGUMENT_KEYS) or {}
    if isinstance(arguments, str):
        arguments = _decoded(arguments) if arguments.strip() else {}
    if not function.get("name"):
        raise Unusable("a tool call without a name")
    if not isinstance(arguments, Mapping):
        raise Unusable("tool arguments that are not a JSON object")
    name = str(function["name"])
    call: ChatCall = {"type": "function", "function": {"name": name, "arguments": dict(arguments)}}
    return {"id": str(raw["id"]), **call} if raw.get("id") else call


def _decoded(text: str) -> object:
    with contextlib.suppress(ValueError, RecursionError):
        return json.loads(text)
    try:
        return ast.literal_eval(text)  # Hermes' datasets have Python literals too
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        raise Unusable("tool arguments that are not JSON") from None


def tools_of(raw: object) -> list[LoggedTool] | None:
    """Return tools in OpenAI's form; None where there are none, or none that can be read."""
    if isinstance(raw, str):
        lines = [_json_or_none(line) for line in raw.splitlines() if line.strip()]
        raw = _json_or_none(raw) or (None if None in lines else lines)
    if isinstance(raw, list) and any(isinstance(tool, str) for tool in raw):
        return tools_of("\n".join(tool for tool in raw if isinstance(tool, str)))
    if isinstance(raw, Mapping):
        raw = [raw]
    definitions = map(_definition, raw if isinstance(raw, list) else ())
    tools: list[LoggedTool] = [{"type": "function", "function": d} for d in definitions if d]
    return tools or None


def _definition(tool: object) -> JsonObject | None:
    """Return name, description and parameters of a tool; None where it is none."""
    function = tool.get("function", tool) if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or not function.get("name"):
        return None
    fields = ("name", "description", "parameters")
    definition = {k: function[k] for k in fields if function.get(k) is not None}
    if "parameters" not in definition and isinstance(function.get("input_schema"), Mapping):
        definition["parameters"] = function["input_schema"]
    return definition


def _assistant(text: str, thoughts: str, calls: list[ChatCall]) -> ChatMessage:
    message: ChatMessage = {"role": "assistant", "content": text}
    if calls:
        message["tool_calls"] = calls
    if thoughts.strip():
        message["reasoning_content"] = thoughts.strip()
    return message


def _result(text: str, name: object = None, identity: object = None) -> ChatMessage:
    message: ChatMessage = {"role": "tool", "content": text}
    if name:
        message["name"] = str(name)
    if identity:
        message["tool_call_id"] = str(identity)
    return message


def _linked(messages: list[ChatMessage]) -> list[ChatMessage]:
    """Return the messages with calls and results numbered (call_1) in place of the log's ids."""
    numbers: dict[str, str] = {}
    waiting: list[str] = []
    names = (f"call_{n}" for n in itertools.count(1))
    for message in messages:
        for call in message.get("tool_calls") or ():
            numbers[str(call.get("id"))] = name = next(names)
            call["id"] = name
            waiting.append(name)
        if message["role"] == "tool":
            call_id = numbers.get(str(message.get("tool_call_id"))) or next(iter(waiting), None)
            if call_id is None:
                raise Unusable("a tool result without a call before it")
            message["tool_call_id"] = call_id
            if call_id in waiting:
                waiting.remove(call_id)
    return messages


# ---- a streamed answer: the text of its server-sent events, or the list of their chunks

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
    if all(
        isinstance(c, dict) and ("choices" in c or str(c.get("type")).startswith(_CHUNK_TYPES))
        for c in lines
    ):
        return b"".join(b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in lines)
    return None


def message_of_events(body: bytes) -> tuple[JsonObject, str | None]:
    """Return message and finish reason of a stream of chunks.

    Raises ValueError where it is broken or does not end.
    """
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
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for _, call in sorted(answer.calls.items())
        ]
    return message, answer.finish_reason


def frames(body: bytes) -> Iterator[Frame]:
    """Yield the events of a stream that was copied as a whole.

    Times are not known here: all stamps are 0.
    """
    for raw in _EVENT_END.split(body.removeprefix(b"\xef\xbb\xbf")):
        fields = list(field_lines(raw))
        lines = [value for name, value in fields if name == b"data"]
        if not lines:
            continue
        data = b"\n".join(lines)
        kind = decode.DONE if data.strip() == b"[DONE]" else decode.DATA
        flags = decode.NAMED if any(name == b"event" for name, _ in fields) else 0
        yield Frame(0, kind, flags, 0, raw, data)

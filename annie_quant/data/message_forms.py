"""The closed grammars of messages in foreign logs, one table per source, and their one reader.

A role, a type of content, a type of a field or a call outside the table makes the row Unusable. A field that no table
knows is not read, and noted.
"""

from __future__ import annotations

import ast
import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from annie_quant.core.untrusted import JsonObject, decode_json
from annie_quant.data.conversations import (
    Fields,
    Note,
    Unusable,
    assistant_message,
    names,
    result_message,
    unknown_fields,
)
from annie_quant.documents import ChatCall, ChatMessage
from annie_quant.judge.answers import parse_raw

TEXT = "text"
THOUGHT = "thought"
_CALL = "call"
RESULT = "result"
SKIPPED = "skipped"
_NO_TEXT = "an image or another file: only text can be evaluated"
PLACEHOLDER = "a placeholder of vLLM's log in place of an answer"

_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
SHAREGPT_ROLES = _ROLES | {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "observation": "tool",
    "ipython": "tool",
    "tool_response": "tool",
    "function_response": "tool",
    "function_call": "call",
    "tool_call": "call",
}
# Type of a part of content → what it is, and the field that has it.
MESSAGE_PARTS = {
    "text": (TEXT, "text"),
    "input_text": (TEXT, "text"),
    "output_text": (TEXT, "text"),
    "refusal": (TEXT, "refusal"),
    "thinking": (THOUGHT, "thinking"),
    "redacted_thinking": (SKIPPED, ""),
    "tool_use": (_CALL, "input"),
    "tool_result": (RESULT, "content"),
}
OTEL_PARTS = {
    "text": (TEXT, "content"),
    "reasoning": (THOUGHT, "content"),
    "tool_call": (_CALL, "arguments"),
    "tool_call_response": (RESULT, "response"),
}
FILE_PARTS = names(
    "image image_url input_image audio input_audio video video_url file input_file document blob "
    "uri"
)
# Fields of a message that say nothing about its content.
MESSAGE_METADATA = names(
    "id index type name weight model status phase stop_reason stop_sequence stop_details usage "
    "finish_reason annotations cache_control provider_specific_fields citations timestamp "
    "created_at end_turn recipient channel"
)
# Fields of a part of content next to the one that has it.
PART_FIELDS = names(
    "type id name tool_use_id is_error cache_control signature data citations annotations "
    "logprobs caller"
)
FILE_FIELDS = ("images", "audio", "files")


@dataclass(frozen=True)
class MessageForm:
    """The grammar of one source's messages.

    role, content: names of the fields.
    roles: a role of the source → "system", "user", "assistant", "tool", or "call" (content is a call).
    parts: of content that is a list.
    """

    role: str
    content: str
    roles: Mapping[str, str]
    parts: Mapping[str, tuple[str, str]]


OPENAI = MessageForm("role", "content", _ROLES, MESSAGE_PARTS)
SHAREGPT = MessageForm("from", "value", SHAREGPT_ROLES, {})
OTEL = MessageForm("role", "parts", _ROLES, OTEL_PARTS)
THOUGHT_FIELDS = ("reasoning_content", "reasoning", "thinking")
REFUSAL = "refusal"  # of an answer without content
CALL_FIELDS = ("tool_calls", "function_call")
RESULT_FIELDS = ("tool_call_id", "tool_name")
READ_FIELDS = frozenset((REFUSAL, *THOUGHT_FIELDS, *CALL_FIELDS, *RESULT_FIELDS, *FILE_FIELDS))

_TAGGED_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
_RESULT = re.compile(r"<tool_response>\s*(.*?)\s*</tool_response>", re.DOTALL)
_THINK = re.compile(r"^\s*(?:<think>)?(.*?)</think>\s*", re.DOTALL)
_CALL_MARKUP = re.compile(r"</?tool_call>|<function=")
_PLACEHOLDER = re.compile(r"\[tool_calls: |<streaming_complete: \d+ tokens>")


@dataclass
class _Content:
    """What a message's content has."""

    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[ChatCall] = field(default_factory=list)
    results: list[ChatMessage] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "\n".join(self.texts)


def read_messages(raw: object, form: MessageForm, notes: list[Note]) -> list[ChatMessage]:
    """Return a source's list of messages in OpenAI's form. Raises Unusable for anything outside its grammar.

    notes: gets the fields that are not read.
    """
    if not isinstance(raw, list):
        raise Unusable("messages that are not a list")
    return [message for item in raw for message in read_message(item, form, notes)]


def read_message(raw: object, form: MessageForm, notes: list[Note]) -> Iterator[ChatMessage]:
    """Yield one logged message as messages of OpenAI's form: results in a user's message are messages of their own."""
    if not isinstance(raw, Mapping):
        raise Unusable("a message that is not an object")
    sender = raw.get(form.role)
    role = form.roles.get(sender.lower()) if isinstance(sender, str) else None
    if role is None:
        raise Unusable(f"unknown role {str(sender)[:30]!r}")
    known = MESSAGE_METADATA | READ_FIELDS | {form.role, form.content}
    unknown = [name for name in raw.keys() - known if raw[name] not in (None, "", [], {})]
    notes += unknown_fields(unknown, "a message")
    if any(raw.get(name) for name in FILE_FIELDS):
        raise Unusable(_NO_TEXT)
    has_calls = any(raw.get(name) for name in CALL_FIELDS)
    has_thoughts = any(raw.get(name) for name in THOUGHT_FIELDS)
    if form.content not in raw and not (role == "assistant" and has_calls):
        raise Unusable(f"a message without {form.content}")
    content = _content_of(raw.get(form.content), form)
    notes += content.notes
    if role == "call":
        value = _json_or_literal(content.text)
        calls = value if isinstance(value, list) else [value]
        yield assistant_message("", "", [flat_call(call) for call in calls])
    elif role == "assistant":
        yield _answer(raw, content)
    elif content.calls or content.thoughts or has_calls or has_thoughts:
        raise Unusable(f"a call or thinking in a message of role {sender!r}")
    elif role == "tool" and content.results and content.text:
        raise Unusable("text next to a tool's result")
    elif role == "tool":
        yield from content.results or _results(raw, content.text)
    elif content.results and role != "user":
        raise Unusable(f"a tool result in a message of role {sender!r}")
    else:
        yield from _asked(role, content)


def _asked(role: str, content: _Content) -> Iterator[ChatMessage]:
    """Yield the messages of a system prompt or a user: results, in tags too, before the text."""
    yield from content.results
    text = content.text
    tagged = _tagged_results(text) if role == "user" else []
    if tagged:
        yield from map(result_message, tagged)
    elif text.strip() or not content.results:
        yield {"role": role, "content": text}


def _results(raw: Fields, text: str) -> Iterator[ChatMessage]:
    """Yield the result of a tool's message, or those in its tags."""
    identity = name_in(raw, "tool_call_id")
    name = name_in(raw, "name") or name_in(raw, "tool_name")
    for result in _tagged_results(text) or [text]:
        yield result_message(result, name, identity)


def _tagged_results(text: str) -> list[str]:
    """Return the results of a text that is results in tags (Hermes); none where other text is next to them."""
    return _RESULT.findall(text) if not _RESULT.sub("", text).strip() else []


def _answer(raw: Fields, content: _Content) -> ChatMessage:
    """Return an assistant's message, with its calls and thinking also from tags (Hermes, Qwen)."""
    if content.results:
        raise Unusable("a tool result in a message of the assistant")
    thoughts = content.thoughts + [_text_in(raw, name) for name in THOUGHT_FIELDS]
    calls = content.calls + _calls(raw.get("tool_calls"))
    if raw.get("function_call") is not None:
        calls.append(_call({"function": raw["function_call"]}))
    text = content.text or _text_in(raw, REFUSAL)
    if raw.get("weight") == 0:
        raise Unusable("an answer with weight 0, from which a model is not to learn")
    if _PLACEHOLDER.search(text):
        raise Unusable(PLACEHOLDER)
    opened = _THINK.match(text)
    if opened:
        thoughts.append(opened[1].strip())
        text = text[opened.end() :]
    if text.lstrip().startswith("<think>"):
        raise Unusable("thinking without an end")
    calls += [flat_call(_json_or_literal(match)) for match in _TAGGED_CALL.findall(text)]
    text = _TAGGED_CALL.sub("", text)
    if "<function=" in text:
        answer = parse_raw(text, thinking=False)
        calls += [flat_call(dict(call)) for call in answer.tool_calls]
        text = answer.text
    if _CALL_MARKUP.search(text):
        raise Unusable("a tool call in tags that cannot be read")
    return assistant_message(text.strip(), "\n".join(filter(None, thoughts)), calls)


def _content_of(content: object, form: MessageForm) -> _Content:
    result = _Content()
    if content is None:
        return result
    if isinstance(content, str) and form is not OTEL:
        result.texts.append(content)
        return result
    if not isinstance(content, list):
        raise Unusable(f"{form.content} that is neither text nor a list")
    for part in content:
        _add_part(part, form, result)
    return result


def _add_part(part: object, form: MessageForm, result: _Content) -> None:
    kind = str(part.get("type")) if isinstance(part, Mapping) else ""
    if kind in FILE_PARTS:
        raise Unusable(_NO_TEXT)
    if not isinstance(part, Mapping) or kind not in form.parts:
        raise Unusable(f"unknown type {kind[:40]!r} of content")
    meaning, name = form.parts[kind]
    result.notes += unknown_fields(part.keys() - PART_FIELDS - {name}, "content")
    if meaning != SKIPPED and name not in part:
        raise Unusable(f"content of type {kind!r} without {name}")
    if meaning == TEXT:
        result.texts.append(_text_in(part, name))
    elif meaning == THOUGHT:
        nested = part[name]
        is_list = isinstance(nested, list)  # Mistral's
        result.thoughts.append(
            _content_of(nested, OPENAI).text if is_list else _text_in(part, name)
        )
    elif meaning == _CALL:
        result.calls.append(flat_call({**part, "arguments": part[name]}))
    elif meaning == RESULT:
        identity = name_in(part, "tool_use_id") or name_in(part, "id")
        result.results.append(result_message(result_text(part[name], form), None, identity))


def result_text(value: object, form: MessageForm) -> str:
    """Return the text of a result in a part of content; OpenTelemetry's may be any value."""
    if form is OTEL:
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    content = _content_of(value, form)
    if content.calls or content.results or content.thoughts:
        raise Unusable("a tool result that is not text")
    return content.text


def _text_in(fields: Fields, name: str) -> str:
    value = fields.get(name)
    if value is not None and not isinstance(value, str):
        raise Unusable(f"{name} that is not text")
    return value or ""


def name_in(fields: Fields, name: str) -> str | None:
    """Return a field that is an id or a name; None for any other value."""
    value = fields.get(name)
    return str(value) if isinstance(value, (str, int)) and value != "" else None


# ---- calls


def _calls(raw: object) -> list[ChatCall]:
    """Return the calls of a message's list."""
    if raw is not None and not isinstance(raw, list):
        raise Unusable("tool_calls that are not a list")
    return [_call(call) for call in raw or ()]


def _call(raw: object) -> ChatCall:
    """Return a call of OpenAI's form."""
    if not isinstance(raw, Mapping) or raw.get("type") not in (None, "", "function"):
        raise Unusable("a tool call that is not an object of type function")
    function = raw.get("function")
    if not isinstance(function, Mapping):
        raise Unusable("a tool call without function")
    return flat_call({**function, "id": raw.get("id")})


def flat_call(raw: object) -> ChatCall:
    """Return the call of an object with name and arguments."""
    if not isinstance(raw, Mapping):
        raise Unusable("a tool call that is not an object")
    name = raw.get("name")
    if not isinstance(name, str) or not name:
        raise Unusable("a tool call without a name")
    if "arguments" not in raw:
        raise Unusable("a tool call without arguments")
    call: ChatCall = {
        "type": "function",
        "function": {"name": name, "arguments": decoded_arguments(raw["arguments"])},
    }
    identity = name_in(raw, "id")
    return {"id": identity, **call} if identity else call


def decoded_arguments(arguments: object) -> JsonObject:
    """Return the arguments of a call, an object or its JSON text, as an object; none are {}."""
    if isinstance(arguments, str):
        try:
            arguments = decode_json(arguments) if arguments.strip() else {}
        except ValueError:
            raise Unusable("tool arguments that are not JSON") from None
    if arguments is None:
        return {}
    if not isinstance(arguments, dict):
        raise Unusable("tool arguments that are not a JSON object")
    return arguments


def _json_or_literal(text: str) -> Any:
    """Return the value of a call in tags: JSON, or a Python literal, as Hermes' datasets have them."""
    with contextlib.suppress(ValueError):
        return decode_json(text)
    try:
        return json.loads(json.dumps(ast.literal_eval(text), allow_nan=False))
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        raise Unusable("a tool call in tags that is not JSON") from None

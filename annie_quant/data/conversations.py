"""The normal form of a foreign conversation: messages in OpenAI's form, with calls and results linked.

Readers of logs (sources.py, transcripts.py) return it; samples, replays and `record` use it. What a reader does not know
never gets into it: a row that cannot be read raises Unusable, and what is dropped from a row that stays is a Note.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from annie_quant.documents import ChatCall, ChatMessage, ChatRow

Fields = Mapping[str, Any]  # a JSON object of a log, whose fields may have any type
LoggedTool = dict[str, Any]  # a tool in OpenAI's form; its parameters are a JSON schema
Note = tuple[str, str]  # what was dropped ("fields", "messages", "tools"), and why


def names(text: str) -> frozenset[str]:
    """Return the names in a text, such as the fields that a grammar knows."""
    return frozenset(text.split())


def unknown_fields(fields: Iterable[str], owner: str) -> list[Note]:
    """Return a note for each field that no grammar knows. owner: what has them: "a message"."""
    return [("fields", f"unknown field {name[:40]!r} of {owner}") for name in sorted(fields)]


class Unusable(Exception):
    """A row has no conversation that can be used.

    The message is the reason, the same for all rows with this fault.
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
    place: file and line, or the last line of a transcript.
    time_s: when it was logged, in seconds since 1970; None where the log has no time.
    max_tokens: the request's limit of its answer; None where the log has none.
    notes: what the log has and the conversation does not.
    """

    messages: list[ChatMessage]
    system: str | None = None
    tools: list[LoggedTool] | None = None
    thinking: bool = False
    format: str = ""
    source: str = ""
    place: str = ""
    time_s: float | None = None
    max_tokens: int | None = None
    notes: list[Note] = field(default_factory=list)

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


def tool_names(tools: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the names of tools in OpenAI's form."""
    return [tool["function"]["name"] for tool in tools]


def called(message: ChatMessage) -> list[str]:
    """Return the names of the functions that a message calls."""
    return [str(c["function"]["name"]) for c in message.get("tool_calls") or ()]


def row_of(
    conversation: Conversation,
    index: int,
    system: str | None = None,
    tools: Sequence[Mapping[str, object]] | None = None,
) -> ChatRow:
    """Return the conversation up to its last answer, as a calibration row; without an answer it is a prompt.

    system, tools: used where the log has none.
    """
    answers = [i for i, m in enumerate(conversation.messages) if m["role"] == "assistant"]
    last = answers[-1] if answers else len(conversation.messages) - 1
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


# ---- messages of a reader → a conversation


def assistant_message(text: str, thoughts: str = "", calls: Sequence[ChatCall] = ()) -> ChatMessage:
    message: ChatMessage = {"role": "assistant", "content": text}
    if calls:
        message["tool_calls"] = list(calls)
    if thoughts.strip():
        message["reasoning_content"] = thoughts.strip()
    return message


def result_message(text: str, name: str | None = None, identity: str | None = None) -> ChatMessage:
    message: ChatMessage = {"role": "tool", "content": text}
    if name:
        message["name"] = name
    if identity:
        message["tool_call_id"] = identity
    return message


def append_to(message: ChatMessage, more: ChatMessage) -> None:
    """Add the text, the thinking and the calls of another part of the same assistant's message."""
    message["content"] = "\n".join(filter(None, (message["content"], more["content"])))
    thoughts = (message.get("reasoning_content"), more.get("reasoning_content"))
    joined = "\n".join(filter(None, thoughts))
    if joined:
        message["reasoning_content"] = joined
    calls = [*(message.get("tool_calls") or ()), *(more.get("tool_calls") or ())]
    if calls:
        message["tool_calls"] = calls


def conversation_from(
    messages: Sequence[ChatMessage],
    system: str = "",
    tools: list[LoggedTool] | None = None,
    notes: Sequence[Note] = (),
) -> Conversation:
    """Return the conversation of messages in order. Raises Unusable where it has no user's message, or a result without a call.

    Leading system messages are its system prompt. A later one is dropped, because most chat templates refuse it, and so is
    what comes before the user's first message and an assistant's message without content.
    """
    notes = list(notes)
    leading = list(itertools.takewhile(lambda m: m["role"] == "system", messages))
    texts = [system, *(m["content"] for m in leading)]
    prompt = "\n".join(text for text in texts if text.strip())
    rest: list[ChatMessage] = []
    for message in messages[len(leading) :]:
        reason = _reason_to_drop(message, rest)
        if reason:
            notes.append(("messages", reason))
        else:
            rest.append(message)
    if not any(m["role"] == "user" and m["content"].strip() for m in rest):
        raise Unusable("no user message")
    thinking = any(m.get("reasoning_content") for m in rest)
    return Conversation(linked(rest), prompt or None, tools, thinking, notes=notes)


def _reason_to_drop(message: ChatMessage, before: Sequence[ChatMessage]) -> str:
    role = message["role"]
    if role == "system":
        return "a system message in the middle of a conversation"
    if role != "user" and not before:
        return "before the user's first message"
    if role == "assistant" and not message["content"].strip() and not message.get("tool_calls"):
        return "an assistant's message without text and calls"
    return ""


@dataclass
class _Waiting:
    """A call without a result. identity: of the log. turn: index of its message."""

    number: str
    identity: str | None
    name: str
    turn: int


def linked(messages: list[ChatMessage]) -> list[ChatMessage]:
    """Return the messages with calls and results numbered (call_1) in place of the log's ids.

    A result belongs to the call with its id; without ids to the first waiting call of its name; without a name to the call
    at its position. Raises Unusable where no rule finds the call.
    """
    waiting: list[_Waiting] = []
    numbers = (f"call_{n}" for n in itertools.count(1))
    for at, message in enumerate(messages):
        calls = message.get("tool_calls") or []
        new = []
        for call in calls:
            identity = call.get("id")
            call["id"] = next(numbers)
            new.append(_Waiting(call["id"], identity, str(call["function"]["name"]), at))
        waiting = new + waiting  # of two calls with one id the newer message's is answered
        if message["role"] == "tool" and messages[at - 1]["role"] != "tool":
            group = itertools.takewhile(lambda m: m["role"] == "tool", messages[at:])
            _link_results(list(group), waiting)
    return messages


def _link_results(results: Sequence[ChatMessage], waiting: list[_Waiting]) -> None:
    if not waiting:
        raise Unusable("a tool result without a call before it")
    by_position = []
    for result in results:
        identity = result.get("tool_call_id")
        name = result.get("name")
        matches = [c for c in waiting if identity is not None and c.identity == identity]
        if not matches and identity is not None and any(c.identity for c in waiting):
            raise Unusable("a tool result with an id that no call has")
        if not matches and name is not None:
            matches = [c for c in waiting if c.name == name]
            if not matches:
                raise Unusable("a tool result of a function that was not called")
        if matches:
            result["tool_call_id"] = matches[0].number
            waiting.remove(matches[0])
        else:
            by_position.append(result)
    newest = [c for c in waiting if c.turn == waiting[0].turn]
    if by_position and len(by_position) != len(newest):
        raise Unusable("tool results without ids or names, and another number of calls")
    for result, call in zip(by_position, newest, strict=False):
        result["tool_call_id"] = call.number
        waiting.remove(call)

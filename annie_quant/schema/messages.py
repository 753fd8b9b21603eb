"""Messages of a chat in OpenAI's form, as requests, calibration rows and workload files have them."""

from __future__ import annotations

from typing import Any, TypedDict


class CalledFunction(TypedDict):
    """arguments: JSON text in requests and rows, an object in logged conversations and for chat templates."""

    name: str | None
    arguments: Any


class _ChatCall(TypedDict):
    type: str
    function: CalledFunction


class ChatCall(_ChatCall, total=False):
    """One call in an assistant's message."""

    id: str


class _ChatMessage(TypedDict):
    role: str
    content: str


class ChatMessage(_ChatMessage, total=False):
    """One message. tool_calls, reasoning_content: of an assistant. name, tool_call_id: of a tool's result."""

    tool_calls: list[ChatCall]
    reasoning_content: str
    name: str
    tool_call_id: str


class LoggedChat(TypedDict, total=False):
    """A recorded chat: one line of `annie-quant record`. time: of the request, ISO 8601. tools: OpenAI function tools on offer."""

    time: str
    model: str
    messages: list[ChatMessage]
    tools: list[dict[str, Any]]
    finish_reason: str


class RowProvenance(TypedDict, total=False):
    """Where a row comes from. model: of the teacher; of a log, its format. source: the log's file."""

    teacher: str
    model: str
    source: str
    persona: str
    prompt_sha256: str


class _ChatRow(TypedDict):
    messages: list[ChatMessage]
    thinking: bool


class ChatRow(_ChatRow, total=False):
    """A conversation for calibration. tools: OpenAI function tools on offer."""

    id: str
    category: str
    provenance: RowProvenance
    split: str
    tools: list[dict[str, Any]]

"""What is sent to a model: chat messages in OpenAI's form, and workload files with the expected content of the answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypedDict

import msgspec
from msgspec import Meta


class CalledFunction(TypedDict):
    """The function of a call.

    arguments: JSON text in requests and rows, an object in logged conversations and chat templates.
    """

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
    """One message.

    tool_calls, reasoning_content: of an assistant.
    name, tool_call_id: of a tool's result.
    """

    tool_calls: list[ChatCall]
    reasoning_content: str
    name: str
    tool_call_id: str


class LoggedChat(TypedDict, total=False):
    """A recorded chat: one line of `annie-quant record`.

    time: of the request, ISO 8601.
    tools: OpenAI function tools on offer.
    """

    time: str
    model: str
    messages: list[ChatMessage]
    tools: list[dict[str, Any]]
    finish_reason: str


class RowProvenance(TypedDict, total=False):
    """Where a row comes from.

    model: of the teacher; of a log, its format.
    source: the log's file.
    """

    teacher: str
    model: str
    source: str
    persona: str
    prompt_sha256: str


class _ChatRow(TypedDict):
    messages: list[ChatMessage]
    thinking: bool


class ChatRow(_ChatRow, total=False):
    """A conversation for calibration.

    tools: OpenAI function tools on offer.
    """

    id: str
    category: str
    provenance: RowProvenance
    split: str
    tools: list[dict[str, Any]]


class Logged(msgspec.Struct, kw_only=True):
    """Production's answer to a case.

    calls: names of the called functions.
    """

    calls: list[str] | None = None


class Expect(msgspec.Struct, kw_only=True):
    """The types of a case's `expect`, which stays a mapping.

    turns: the expectation of each turn.
    """

    contains: str | list[str | list[str]] | None = None
    tool: str | None = None
    arguments: dict[str, Any] | None = None
    calls: list[dict[str, Any]] | None = None
    no_tool: bool | None = None
    logged: Logged | None = None
    turns: list[Expect] | None = None


class CaseFile(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One prompt (`messages`) or one conversation (`turns`).

    messages: may hold earlier answers, tool calls and their results, and a system prompt of its
        own.
    turns: the user's texts, and {"results": [{"name", "content", "arguments"}]} for what tools
        return to the calls of the answer before.
    expect: {"contains": [...]}, {"tool": name, "arguments": {...}}, {"calls": [...]}, {"no_tool":
        true} or {}; of a conversation also {"turns": [...]}, one of these per turn.
    tools: tools of its own instead of the workload's; a number N means the workload's first N.
    system: instead of the workload's system prompt.
    max_tokens: instead of the workload's.
    arrival_s: when a trace has the request, in seconds after its first one.
    prompt_tokens: instead of `messages` and `turns`: a text of about this length, which no server
        has seen before.
    follow_up_tokens: with `prompt_tokens`: a second turn of about this length, so that the first
        one is a cached prefix.
    """

    id: str | int
    messages: Sequence[Mapping[str, Any]] | None = None
    turns: Sequence[str | Mapping[str, Any]] | None = None
    expect: dict[str, Any] | None = None
    tools: int | list[dict[str, Any]] | None = None
    system: str | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    arrival_s: Annotated[float, Meta(ge=0)] | None = None
    prompt_tokens: Annotated[int, Meta(ge=0, le=1 << 20)] = 0
    follow_up_tokens: Annotated[int, Meta(ge=0, le=1 << 20)] = 0


class ContextFile(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Text before the rest of a prompt, so that the answer is decoded at a certain depth (judge/workloads.py).

    tokens: approximate number; usage.prompt_tokens has the true depth.
    prefix: "miss": each prompt starts with a different text, so that no server can reuse an earlier
        one; "hit": all prompts start with the same text, and warm-ups have sent it before.
    words_per_token: of the model's tokenizer for this text; a benchmark measures it first
        (bench/plan.py).
    """

    tokens: Annotated[int, Meta(ge=0, le=1 << 20)]
    prefix: Literal["hit", "miss"] = "miss"
    words_per_token: Annotated[float, Meta(gt=0, le=2)] = 0.75


class WorkloadFile(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A workload file.

    persona: a built-in persona, or a file or folder relative to this file ("..", "./mine.json");
        None: no system prompt.
    tools: OpenAI function tools, or "persona" for those of the persona.
    default: whether it is used where no workloads are named.
    informative: gates that are reported about these answers and never decide.
    extra: further fields of each request's body.
    context: text before each prompt.
    """

    name: str
    description: str = ""
    default: bool = True
    persona: str | None = None
    system: str | None = None
    tools: str | list[dict[str, Any]] | None = None
    thinking: bool = False
    max_tokens: int
    temperature: float = 0.0
    gates: list[str]
    informative: list[str] = []
    extra: dict[str, Any] | None = None
    context: ContextFile | None = None
    cases: list[CaseFile]

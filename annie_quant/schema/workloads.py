"""Workload files: what is asked of a model, and what a right answer contains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec


class Logged(msgspec.Struct, kw_only=True):
    """What production's answer to a case was. calls: names of the functions."""

    calls: list[str] | None = None


class Expect(msgspec.Struct, kw_only=True):
    """What a case expects of its answer: the types of `expect`, which stays a mapping. turns: of each turn."""

    contains: str | list[str | list[str]] | None = None
    tool: str | None = None
    arguments: dict[str, Any] | None = None
    calls: list[dict[str, Any]] | None = None
    no_tool: bool | None = None
    logged: Logged | None = None
    turns: list[Expect] | None = None


class CaseFile(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One prompt (`messages`) or one conversation (`turns`).

    messages: may hold earlier answers, tool calls and their results, and a system prompt of its own. turns: the user's
    texts, and {"results": [{"name", "content", "arguments"}]} for what tools return to the calls of the answer before.

    expect: {"contains": [...]}, {"tool": name, "arguments": {...}}, {"calls": [...]}, {"no_tool": true} or {}; of a
    conversation also {"turns": [...]}, one of these per turn. tools: tools of its own instead of the workload's; a number N
    means the workload's first N.
    """

    id: str | int
    messages: Sequence[Mapping[str, Any]] | None = None
    turns: Sequence[str | Mapping[str, Any]] | None = None
    expect: dict[str, Any] | None = None
    tools: int | list[dict[str, Any]] | None = None


class WorkloadFile(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A workload as its JSON file has it.

    persona: a built-in persona, or a file or folder relative to this file ("..", "./mine.json"); None: no system prompt.
    tools: OpenAI function tools, or "persona" for those of the persona. default: whether it is used where no workloads are
    named. extra: further fields of each request's body.
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
    extra: dict[str, Any] | None = None
    cases: list[CaseFile]

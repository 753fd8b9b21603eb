"""Workloads: data files that say what is asked of a model and what a right answer holds.

A workload is one JSON file in annie_quant/assets/workloads (or the user's own folder); no workload is code.
Gates are named in it and found through the registry.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from annie_quant.errors import UsageError

_KEYS = {
    "name",
    "description",
    "persona",
    "system",
    "tools",
    "thinking",
    "max_tokens",
    "temperature",
    "gates",
    "cases",
    "default",
    "extra",
}
_RESERVED = ("model", "messages", "tools", "stream", "max_tokens", "temperature", "chat_template_kwargs")
_REQUIRED = ("name", "max_tokens", "gates", "cases")


@dataclass(frozen=True)
class Case:
    """One prompt. `messages` holds what is sent (single turn), or `turns` the user's texts of a conversation.

    expect: {"contains": [...]}, {"tool": name, "arguments": {...}}, {"no_tool": true} or {}. A case may carry its own
    `tools` (a list), which then replace the workload's; a number there means so many of the workload's own, from the
    first on. For a conversation, `expect` may hold "turns": a list of these.
    """

    id: str
    messages: tuple[Mapping[str, Any], ...] = ()
    turns: tuple[str, ...] = ()
    expect: Mapping[str, Any] = field(default_factory=dict)
    tools: tuple[Mapping[str, Any], ...] | None = None

    @property
    def n_turns(self) -> int:
        return len(self.turns) or 1

    def at_turn(self, turn: int) -> Case:
        """This case with what is expected of one turn (turns count from 0)."""
        expected = self.expect.get("turns")
        if not expected:
            return self
        return Case(self.id, self.messages, self.turns, expected[turn] if turn < len(expected) else {}, self.tools)


@dataclass(frozen=True)
class Workload:
    """One data file. default: asked where nobody names workloads. extra: further fields of every request's body."""

    name: str
    description: str
    persona: str | None
    system: str | None
    tools: str | tuple[Mapping[str, Any], ...] | None
    thinking: bool
    max_tokens: int
    temperature: float
    gates: tuple[str, ...]
    cases: tuple[Case, ...]
    sha256: str = ""
    path: str = ""
    default: bool = True
    extra: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def _persona(self) -> Any:
        if self.persona is None:
            return None
        from annie_quant.persona import load_persona

        return load_persona(self.persona)

    @property
    def system_prompt(self) -> str | None:
        """The file's own system prompt, else its persona's."""
        if self.system is not None:
            return self.system
        return self._persona.system_prompt if self._persona is not None else None

    def tools_for(self, case: Case) -> list[Mapping[str, Any]] | None:
        """OpenAI function tools offered with a case; None when there are none."""
        if case.tools is not None:
            return list(case.tools) or None
        if self.tools == "persona":
            return list(self._persona.tools) or None if self._persona is not None else None
        return list(self.tools) if self.tools and not isinstance(self.tools, str) else None

    def messages(self, case: Case, turn: int = 0, answers: Sequence[Mapping[str, Any]] = ()) -> list[dict[str, Any]]:
        """The conversation up to and with the user's message of `turn` (from 0).

        answers: the model's own earlier answers, one assistant message a finished turn.
        """
        head = [{"role": "system", "content": self.system_prompt}] if self.system_prompt else []
        if not case.turns:
            return head + [dict(m) for m in case.messages]
        if len(answers) < turn:
            raise UsageError(
                f"workload {self.name}, case {case.id}: turn {turn + 1} needs {turn} earlier answers, "
                f"got {len(answers)}"
            )
        talk: list[dict[str, Any]] = []
        for index in range(turn):
            talk += [{"role": "user", "content": case.turns[index]}, dict(answers[index])]
        return head + talk + [{"role": "user", "content": case.turns[turn]}]

    def request(
        self,
        case: Case,
        turn: int = 0,
        answers: Sequence[Mapping[str, Any]] = (),
        model: str | None = None,
    ) -> dict[str, Any]:
        """The body of one /v1/chat/completions request; `enable_thinking` is always said, never left to a default."""
        body: dict[str, Any] = {"model": model} if model else {}
        body["messages"] = self.messages(case, turn, answers)
        tools = self.tools_for(case)
        if tools:
            body |= {"tools": tools, "tool_choice": "auto"}
        body |= {
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
            "chat_template_kwargs": {"enable_thinking": self.thinking},
        }
        return {**body, **self.extra}

    def requests(self, case: Case, answers: Sequence[Mapping[str, Any]] = (), model: str | None = None) -> list[dict]:
        """Every request of a case that can be written with the answers at hand: one, or a turn more than `answers`."""
        known = min(case.n_turns, len(answers) + 1)
        return [self.request(case, turn, answers, model) for turn in range(known)]


def read_workload(path: str | Path) -> Workload:
    path = Path(path)
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise UsageError(f"workload file {path} cannot be read: {error.strerror}") from error
    try:
        data = json.loads(raw)
    except ValueError as error:
        raise UsageError(f"workload file {path} is not JSON: {error}") from error
    return build_workload(data, sha256=hashlib.sha256(raw).hexdigest(), path=str(path))


def build_workload(data: Any, sha256: str = "", path: str = "") -> Workload:
    """A workload from its decoded file; every fault names the file and the field."""
    where = Path(path).name or "workload"
    if not isinstance(data, dict):
        raise UsageError(f"{where}: expected a JSON object, got {type(data).__name__}")
    for key in _REQUIRED:
        if key not in data:
            raise UsageError(f"{where}: {key!r} is missing")
    strange = sorted(set(data) - _KEYS)
    if strange:
        raise UsageError(f"{where}: unknown field {strange[0]!r}", f"known fields: {', '.join(sorted(_KEYS))}")
    _known_gates(where, data["gates"])
    tools = data.get("tools")
    if not (tools is None or tools == "persona" or isinstance(tools, list)):
        raise UsageError(f"{where}: 'tools' is \"persona\", a list or null, got {tools!r}")
    if tools == "persona" and not data.get("persona"):
        raise UsageError(f"{where}: 'tools' is \"persona\" and no persona is named")
    extra = data.get("extra") or {}
    if clash := [key for key in _RESERVED if key in extra]:
        raise UsageError(f"{where}: 'extra' must not hold {clash[0]!r}: the workload has a field of its own for it")
    own = tools if isinstance(tools, list) else []
    cases = tuple(_case(where, index, case, own) for index, case in enumerate(data["cases"]))
    if not cases:
        raise UsageError(f"{where}: it holds no cases")
    ids = [case.id for case in cases]
    if len(set(ids)) < len(ids):
        raise UsageError(f"{where}: case id {next(i for i in ids if ids.count(i) > 1)!r} stands twice")
    return Workload(
        name=data["name"],
        description=data.get("description", ""),
        persona=data.get("persona"),
        system=data.get("system"),
        tools=tuple(tools) if isinstance(tools, list) else tools,
        thinking=bool(data.get("thinking", False)),
        max_tokens=int(data["max_tokens"]),
        temperature=float(data.get("temperature", 0)),
        gates=tuple(data["gates"]),
        cases=cases,
        sha256=sha256,
        path=path,
        default=bool(data.get("default", True)),
        extra=extra,
    )


def _known_gates(where: str, gates: Any) -> None:
    from annie_quant import registry
    from annie_quant.judge import gates as package

    have = registry.names(package)
    for gate in gates:
        if gate not in have:
            raise UsageError(f"{where}: there is no gate called {gate!r}", f"choose one of: {', '.join(have)}")


def _case(where: str, index: int, case: Any, own: Sequence[Mapping[str, Any]]) -> Case:
    if not isinstance(case, dict) or "id" not in case:
        raise UsageError(f"{where}: case {index} has no 'id'")
    if bool(case.get("messages")) == bool(case.get("turns")):
        raise UsageError(f"{where}: case {case['id']!r} needs either 'messages' or 'turns'")
    tools = case.get("tools")
    if isinstance(tools, int):
        if not 0 <= tools <= len(own):
            raise UsageError(f"{where}: case {case['id']!r} wants {tools} tools, and the workload has {len(own)}")
        tools = own[:tools]
    return Case(
        id=str(case["id"]),
        messages=tuple(case.get("messages") or ()),
        turns=tuple(case.get("turns") or ()),
        expect=case.get("expect") or {},
        tools=tuple(tools) if tools is not None else None,
    )

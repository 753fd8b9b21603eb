"""Transcripts of agents, one event per line: Claude Code's sessions and Codex' rollouts.

A conversation ends where an event that has content cannot be read: what comes before it is as it was, what comes after it
would lack something.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

from annie_quant.core.untrusted import JsonObject
from annie_quant.data.conversations import (
    Conversation,
    Note,
    Unusable,
    append_to,
    conversation_from,
    names,
    unknown_fields,
)
from annie_quant.data.message_forms import OPENAI, read_message
from annie_quant.data.response_items import add_item
from annie_quant.documents import ChatMessage

AFTER_A_FAULT = "after a row that cannot be read"
# Of Claude Code's rows, which it writes as a user's message.
_COMMANDS = ("<command-name>", "<command-message>", "<local-command-", "<bash-input>", "<bash-std")


Draft = Callable[[], Conversation]  # raises Unusable


# Of Codex' session_meta.
SESSION_FIELDS = names(
    "id timestamp cwd originator cli_version instructions base_instructions git source model "
    "model_provider parent_thread_id forked_from_id thread_source agent_nickname agent_role "
    "memory_mode dynamic_tools"
)


class Skipped(Exception):
    """A row without content of the conversation. The message is the reason."""


class Transcript:
    """A reader of one file's rows. notes: what the rows have that is not read, since the caller last cleared it."""

    name: str

    def __init__(self) -> None:
        self.notes: list[Note] = []
        self._begin()

    def _begin(self) -> None:
        """Begin a conversation."""
        self._system = ""
        self._messages: list[ChatMessage] = []
        self._is_cut = False

    @staticmethod
    def matches(row: JsonObject) -> bool:
        """Return whether a row shows that its file is such a transcript."""
        raise NotImplementedError

    def add(self, row: JsonObject) -> Iterator[Draft]:
        """Yield the conversation that a row ends. Raises Skipped or Unusable for a row that is not read."""
        raise NotImplementedError

    def end(self) -> Iterator[Draft]:
        """Yield the conversation until here, if it has messages, and begin another one."""
        messages = self._messages
        system = self._system
        self._begin()
        if messages:
            yield partial(conversation_from, messages, system)


class ClaudeCode(Transcript):
    """Claude Code's session: rows of type user and assistant with a message of Anthropic's form, linked by parentUuid.

    An answer is several rows with one message.id. Side chains are another agent's conversation. A user who goes back
    begins a branch at an earlier row, and what came after it was abandoned.
    """

    name = "Claude Code"

    def _begin(self) -> None:
        super()._begin()
        self._answers: dict[str, int] = {}  # message.id → index in _messages
        self._parents: dict[str, str | None] = {}  # of the rows without content
        self._ends: dict[str, int] = {}  # row → number of messages up to it
        self._lost: set[str | None] = set()  # the row that cannot be read, and those after it

    @staticmethod
    def matches(row: JsonObject) -> bool:
        message = row.get("message")
        is_message = isinstance(message, Mapping) and message.get("role") == row.get("type")
        return is_message and row.get("type") in ("user", "assistant")

    def add(self, row: JsonObject) -> Iterator[Draft]:
        uuid = str(row.get("uuid"))
        reason = self._reason_to_skip(row)
        if reason:
            self._parents[uuid] = _parent_of(row)
            raise Skipped(reason)
        if row["type"] == "user" and "parentUuid" in row and not _has_results(row["message"]):
            yield from self._go_back(_parent_of(row))
        if self._is_cut:
            self._lost.add(uuid)
            raise Skipped(AFTER_A_FAULT)
        try:
            self._take(row)
        except Unusable:
            self._is_cut = True
            self._lost.add(uuid)
            raise
        self._ends[uuid] = len(self._messages)

    def _reason_to_skip(self, row: JsonObject) -> str:
        kind = row.get("type")
        message = row.get("message")
        if kind not in ("user", "assistant") or not isinstance(message, Mapping):
            return f"unknown type {str(kind)[:40]!r}"
        if row.get("isSidechain") or row.get("parent_tool_use_id"):
            return "a side chain"
        if row.get("isApiErrorMessage") or message.get("model") == "<synthetic>":
            return "an error in place of an answer"
        content = message.get("content")
        is_command = isinstance(content, str) and content.lstrip().startswith(_COMMANDS)
        if row.get("isMeta") or is_command:
            return "Claude Code's own message"
        return ""

    def _go_back(self, parent: str | None) -> Iterator[Draft]:
        """Before a user's text: continue at its parent, or begin a conversation where that is not known."""
        for _ in range(len(self._parents)):
            if parent not in self._parents:
                break
            parent = self._parents[parent]
        if parent in self._lost:
            return
        if parent not in self._ends:
            yield from self.end()
            return
        self._is_cut = False
        abandoned = self._messages[self._ends[parent] :]
        self.notes += [("messages", "on a branch that the user left")] * len(abandoned)
        del self._messages[self._ends[parent] :]

    def _take(self, row: JsonObject) -> None:
        message = row["message"]
        if message.get("role") != row["type"]:
            raise Unusable(f"unknown role {str(message.get('role'))[:30]!r}")
        new = list(read_message(message, OPENAI, self.notes))
        if row["type"] == "assistant":
            at = self._start_of_answer(message.get("id"))
            if at is not None:
                append_to(self._messages[at], new[0])
                return
            self._answers[str(message.get("id"))] = len(self._messages)
        self._messages += new

    def _start_of_answer(self, identity: object) -> int | None:
        """Return the index of the message that an assistant's row continues; None where it begins one."""
        at = self._answers.get(str(identity), len(self._messages))
        between = [m["role"] for m in self._messages[at + 1 :]]
        is_part = not between or (identity is not None and set(between) == {"tool"})
        return at if at < len(self._messages) and is_part else None


def _parent_of(row: JsonObject) -> str | None:
    parent = row.get("parentUuid")
    return parent if isinstance(parent, str) else None


def _has_results(message: Mapping[str, object]) -> bool:
    content = message.get("content")
    parts = content if isinstance(content, list) else []
    return any(isinstance(part, Mapping) and part.get("type") == "tool_result" for part in parts)


class Codex(Transcript):
    """Codex' rollout: the session's instructions in session_meta, and an item of the Responses API per response_item."""

    name = "Codex"

    @staticmethod
    def matches(row: JsonObject) -> bool:
        return isinstance(row.get("payload"), Mapping) and row.get("type") in (
            "session_meta",
            "response_item",
        )

    def add(self, row: JsonObject) -> Iterator[Draft]:
        kind = row.get("type")
        payload = row.get("payload")
        if kind == "session_meta" and isinstance(payload, Mapping):
            yield from self.end()
            self._system = _instructions(payload)
            self.notes += unknown_fields(payload.keys() - SESSION_FIELDS, "a session")
            return
        if kind == "compacted":  # the model's context is another one from here
            self._is_cut = True
        if kind != "response_item":
            raise Skipped(f"unknown type {str(kind)[:40]!r}")
        if self._is_cut:
            raise Skipped(AFTER_A_FAULT)
        try:
            add_item(self._messages, payload, self.notes)
        except Unusable:
            self._is_cut = True
            raise


def _instructions(payload: Mapping[str, object]) -> str:
    value = payload.get("instructions") or ""  # until 2025
    base = payload.get("base_instructions")
    if base is not None:
        value = base.get("text") if isinstance(base, Mapping) else None
    if not isinstance(value, str):
        raise Unusable("instructions that are not text")
    return value


TRANSCRIPTS: tuple[type[Transcript], ...] = (ClaudeCode, Codex)

"""A conversation as logs have it, and the count of what in them cannot be used."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from annie_quant.schema import ChatMessage


class Unusable(Exception):
    """A record is not a conversation that can be used. The message is the reason, the same for all such records."""


@dataclass
class Conversation:
    """messages: in OpenAI's form, arguments as objects, without a system prompt. system: that prompt, None where the log
    has none. tools: on offer; None where the log does not record them. thinking: whether an answer has thinking.
    format: of the log. source: file name. time_s: when it was logged, in seconds since 1970; None where the log has no time.
    """

    messages: list[ChatMessage]
    system: str | None = None
    tools: list[dict[str, Any]] | None = None
    thinking: bool = False
    format: str = ""
    source: str = ""
    time_s: float | None = None

    @property
    def characters(self) -> int:
        """Size of its texts and of the calls' arguments."""
        calls = sum(len(str(c["function"]["arguments"])) for m in self.messages for c in m.get("tool_calls") or ())
        return sum(len(m["content"]) for m in self.messages) + len(self.system or "") + calls

    @property
    def calls(self) -> list[str]:
        """Names of all functions that are called, in order."""
        return [str(c["function"]["name"]) for m in self.messages for c in m.get("tool_calls") or ()]

    @property
    def has_answer(self) -> bool:
        return any(m["role"] == "assistant" for m in self.messages)


@dataclass
class Problems:
    """Reason → number of records, and the first place (file and line) of each."""

    counts: dict[str, int] = field(default_factory=dict)
    first: dict[str, str] = field(default_factory=dict)

    def add(self, reason: str, where: str = "", n: int = 1) -> None:
        self.counts[reason] = self.counts.get(reason, 0) + n
        self.first.setdefault(reason, where)

    def lines(self) -> Iterator[str]:
        """Yield one line per reason, the most frequent first."""
        for reason, n in sorted(self.counts.items(), key=lambda item: -item[1]):
            where = f" (first: {self.first[reason]})" if self.first[reason] else ""
            yield f"{n:,} × {reason}{where}"

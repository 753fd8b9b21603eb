"""The interface of a teacher."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from annie_quant.persona import Category, Persona
from annie_quant.schema import ChatRow


@dataclass(frozen=True)
class Options:
    """How a teacher is reached. model, url: None for the teacher's default. timeout_s: per batch.

    max_usd: returns the remaining budget, for teachers that can enforce it themselves.
    """

    model: str | None = None
    url: str | None = None
    timeout_s: float = 300.0
    batch_size: int = 10
    max_usd: Callable[[], float | None] = lambda: None


@dataclass
class Batch:
    """rows: conversations with messages, tools (where offered) and thinking. cost_usd: None where it is not known."""

    rows: list[ChatRow] = field(default_factory=list)
    cost_usd: float | None = None
    tokens: int = 0
    model: str | None = None


class Teacher(Protocol):
    model: str
    batch_size: int

    def check(self, persona: Persona) -> None:
        """Raise UsageError for a persona that this teacher cannot write for, before anything is written."""

    def batch(self, persona: Persona, category: Category, count: int, seed: str, avoid: Sequence[str]) -> Batch:
        """Return at most `count` conversations of a category. avoid: user texts that must not be repeated."""


class BatchFailed(Exception):
    """This batch failed; a retry may succeed. It may have cost something."""

    def __init__(self, message: str, cost_usd: float | None = None, tokens: int = 0) -> None:
        super().__init__(message)
        self.cost_usd, self.tokens = cost_usd, tokens


class RateLimited(Exception):
    """The teacher requires a pause. wait_s: its length, or None where it is not known."""

    def __init__(self, message: str, wait_s: float | None = None) -> None:
        super().__init__(message)
        self.wait_s = wait_s

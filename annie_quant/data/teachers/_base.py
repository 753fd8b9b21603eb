"""What every teacher is given and gives back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from annie_quant.persona import Category, Persona


@dataclass(frozen=True)
class Options:
    """How a teacher is reached. model, url: None for the teacher's own. timeout_s: of one batch.

    max_usd: what is left of the budget; a teacher that can enforce it itself does so too.
    """

    model: str | None = None
    url: str | None = None
    timeout_s: float = 300.0
    batch_size: int = 10
    max_usd: Callable[[], float | None] = lambda: None


@dataclass
class Batch:
    """Conversations as dicts of messages, tools (where offered) and thinking; what they cost, where that is known."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    cost_usd: float | None = None
    tokens: int = 0
    model: str | None = None


class Teacher(Protocol):
    model: str
    batch_size: int

    def batch(self, persona: Persona, category: Category, count: int, seed: str, avoid: Sequence[str]) -> Batch: ...


class Failed(Exception):
    """This batch did not work; asking again may. It may still have cost something."""

    def __init__(self, message: str, cost_usd: float | None = None, tokens: int = 0) -> None:
        super().__init__(message)
        self.cost_usd, self.tokens = cost_usd, tokens


class Limited(Exception):
    """The teacher wants a pause. wait_s: how long, where it says so."""

    def __init__(self, message: str, wait_s: float | None = None) -> None:
        super().__init__(message)
        self.wait_s = wait_s

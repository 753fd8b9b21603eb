"""The built-in teacher: templates and seeded choices, no model and no network. Every row's provenance names it."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from typing import Any

from annie_quant.data import exchanges
from annie_quant.data.exchanges import Exchange
from annie_quant.data.teachers._base import Batch, Options
from annie_quant.errors import UsageError
from annie_quant.persona import Category, Persona

NAME = "offline"
SUMMARY = "built-in templates: no model, no network, the same rows for the same seed"
MODEL = "annie_quant templates"
MAX_DRAWS = 200  # attempts to draw a conversation that does not exist yet
CATEGORIES = (*exchanges.CATEGORIES, "multi_turn")
TOOLS = (None, "search_memory", "web_search")


class Offline:
    """split: the split whose phrasings and topics are used; train, calibration and gate share none."""

    model = MODEL
    batch_size = 1 << 30

    def __init__(self, split: str = "calibration") -> None:
        self.split = split

    def batch(self, persona: Persona, category: Category, count: int, seed: str, avoid: Sequence[str] = ()) -> Batch:
        if category.name not in CATEGORIES or category.tool not in TOOLS:
            raise UsageError(
                f"the offline teacher has no templates for {persona.name}'s category {category.name!r}",
                "use --teacher claude-cli or --teacher openai",
            )
        return Batch(list(self.conversations(persona, category.name, count, seed)))

    def conversations(self, persona: Persona, category: str, n: int, seed: str) -> Iterator[dict[str, Any]]:
        """Yield n conversations of a category, the same for the same seed. None is repeated while others are left."""
        rng = random.Random(seed)
        drawn: set[str] = set()
        for _ in range(n):
            for _ in range(MAX_DRAWS):
                turns = (
                    exchanges.conversation(rng, self.split)
                    if category == "multi_turn"
                    else [exchanges.draw(category, rng, self.split)]
                )
                key = "\n".join(t.user.lower() for t in turns)
                if key not in drawn:
                    break
            drawn.add(key)
            messages: list[dict[str, Any]] = [{"role": "system", "content": persona.system_prompt}]
            for turn in turns:
                user = turn.user.replace("Annie", persona.name)
                messages += [{"role": "user", "content": user}, *_answer(turn)]
            row: dict[str, Any] = {"messages": messages, "thinking": False}
            if turns[0].tool:
                row["tools"] = [dict(t) for t in persona.tools]
            yield row


def open_teacher(options: Options, split: str = "calibration") -> Offline:
    return Offline(split)


def _answer(turn: Exchange) -> list[dict[str, Any]]:
    """Return the reply, with a tool call and its result before it if the exchange has one."""
    reply = {"role": "assistant", "content": turn.reply}
    if not turn.tool:
        return [reply]
    call = {"type": "function", "function": {"name": turn.tool, "arguments": json.dumps({"query": turn.query})}}
    return [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": turn.result},
        reply,
    ]

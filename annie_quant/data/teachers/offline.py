"""The built-in teacher: templates and seeded choices, no model and no network. Labelled as such in every row."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from typing import Any

from annie_quant.data import grammar
from annie_quant.data.teachers._base import Batch, Options
from annie_quant.errors import UsageError
from annie_quant.persona import Category, Persona

NAME = "offline"
SUMMARY = "built-in templates: no model, no network, the same rows for the same seed"
MODEL = "annie_quant templates"
DRAWS = 200  # tries for a conversation that is not there yet


class Offline:
    """split: whose phrasings and topics are used; train, calibration and gate share none."""

    model = MODEL
    batch_size = 1 << 30

    def __init__(self, split: str = "calibration") -> None:
        self.split = split

    def batch(self, persona: Persona, category: Category, count: int, seed: str, avoid: Sequence[str] = ()) -> Batch:
        if category.name not in (*grammar.DRAW, "multi_turn") or category.tool not in (
            None,
            "search_memory",
            "web_search",
        ):
            raise UsageError(
                f"the offline teacher has no templates for {persona.name}'s category {category.name!r}",
                "--teacher claude-cli or --teacher openai can write them",
            )
        return Batch(list(self.conversations(persona, category.name, count, seed)))

    def conversations(self, persona: Persona, category: str, n: int, seed: str) -> Iterator[dict[str, Any]]:
        """n conversations of a category; the same for the same seed, and none of them twice while others are left."""
        rng = random.Random(seed)
        seen: set[str] = set()
        for _ in range(n):
            for _ in range(DRAWS):
                talks = (
                    grammar.conversation(rng, self.split)
                    if category == "multi_turn"
                    else [grammar.draw(category, rng, self.split)]
                )
                key = "\n".join(t.user.lower() for t in talks)
                if key not in seen:
                    break
            seen.add(key)
            messages: list[dict[str, Any]] = [{"role": "system", "content": persona.system_prompt}]
            for talk in talks:
                user = talk.user.replace("Annie", persona.name)
                messages += [{"role": "user", "content": user}, *_answer(talk)]
            made: dict[str, Any] = {"messages": messages, "thinking": False}
            if talks[0].tool:
                made["tools"] = [dict(t) for t in persona.tools]
            yield made


def open(options: Options, split: str = "calibration") -> Offline:
    return Offline(split)


def _answer(talk: grammar.Talk) -> list[dict[str, Any]]:
    """A plain answer; or the call of a tool, what it returned, and what is said of that."""
    if not talk.tool:
        return [{"role": "assistant", "content": talk.reply}]
    call = {"type": "function", "function": {"name": talk.tool, "arguments": json.dumps({"query": talk.query})}}
    return [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": talk.result},
        {"role": "assistant", "content": talk.reply},
    ]

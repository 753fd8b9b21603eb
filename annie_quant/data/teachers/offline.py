"""The built-in teacher: templates and seeded choices, no model and no network. Labelled as such in every row."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

from annie_quant.data import grammar
from annie_quant.data.persona import Persona

MODEL = "annie_quant templates"
SPLIT = "calibration"


def conversations(persona: Persona, category: str, n: int, seed: int = 0) -> Iterator[dict[str, Any]]:
    """n conversations of a category; the same for the same seed, and none of them twice while others are left."""
    rng = random.Random(f"{seed}:{category}")
    seen: set[str] = set()
    for _ in range(n):
        for _ in range(50):
            talks = (
                grammar.conversation(rng, SPLIT) if category == "multi_turn" else [grammar.draw(category, rng, SPLIT)]
            )
            key = "\n".join(f"{t.user}\t{t.result}" for t in talks)
            if key not in seen:
                break
        seen.add(key)
        messages: list[dict[str, Any]] = [{"role": "system", "content": persona.system_prompt}]
        for talk in talks:
            messages += [{"role": "user", "content": talk.user}, *_answer(talk)]
        made: dict[str, Any] = {"messages": messages, "thinking": False}
        if talks[0].tool:
            made["tools"] = [dict(t) for t in persona.tools]
        yield made


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

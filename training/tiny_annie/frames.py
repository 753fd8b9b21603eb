"""More ways to ask than the built-in teacher's templates (frames.json): for tools, for facts and sums, for what no tool does.

None of them contains a template of the calibration or gate split; those stay unseen (tests/calibration_data/test_splits.py).
frames.json: `requests` per tool with its arguments as places; `settings` are things and their values, which `setting_frames`
join ({O}, {V}); `facts` and `sums` have the places of the built-in templates.
"""

from __future__ import annotations

import json
import random
import re
from functools import cache
from pathlib import Path
from typing import Any

from annie_quant.data.exchanges import PHRASES, WORDS, Exchange
from annie_quant.data.tool_exchanges import grammar_of

TEXTS = json.loads(Path(__file__).with_name("frames.json").read_text(encoding="utf-8"))
JOINERS = tuple(TEXTS["joiners"])
SUM = re.compile(r"(\d+) (times|plus|minus) (\d+) is \d+\.")


def core(template: str) -> str:
    return template.lower().rstrip(".?! ")


@cache
def held_out(persona: str) -> tuple[str, ...]:
    grammar = grammar_of(persona)
    if grammar is None:  # Annie's tools have their own templates
        own = {"my {t}": "my {query}"}, {"{t}": "the {query}"}
        cores = []
        for questions, change in zip(
            (PHRASES.memory_questions, PHRASES.web_questions), own, strict=True
        ):
            ((old, new),) = change.items()
            cores += [
                core(t.replace(old, new)) for s in ("calibration", "gate") for t in questions[s]
            ]
        return tuple(cores)
    asks = [t for p in grammar.tools.values() for s in ("calibration", "gate") for t in p.ask[s]]
    return tuple(
        core(t) for t in (*asks, *grammar.abstain["calibration"], *grammar.abstain["gate"])
    )


def finished(text: str) -> str:
    question = text.lower().startswith(tuple(TEXTS["questions"]))
    text = text if text.endswith(("?", ".")) else text + ("?" if question else ".")
    return text[:1].upper() + text[1:]


def ask(rng: random.Random, persona: str, tool: str, arguments: dict[str, Any]) -> str | None:
    """Return a request for a call, or None for a tool that has no frames here."""
    while True:
        if tool in TEXTS["setting_requests"] and rng.random() < 0.3:
            text = rng.choice(TEXTS["setting_requests"][tool])
        elif tool in TEXTS["settings"]:
            parts = TEXTS["settings"][tool]
            frame = rng.choice(TEXTS["setting_frames"])
            text = frame.replace("{O}", rng.choice(parts["thing"])).replace(
                "{V}", rng.choice(parts["value"])
            )
        elif tool in TEXTS["requests"]:
            text = rng.choice(TEXTS["requests"][tool])
        else:
            return None
        first = text.split(" ")[0].lower()
        if first in TEXTS["imperatives"] or (
            tool in TEXTS["requests"] and first not in TEXTS["no_imperatives"]
        ):
            text = rng.choice(TEXTS["openings"]) + text
        text += rng.choice(TEXTS["closings"])
        if not any(h in core(text) for h in held_out(persona)):
            break
    if text.startswith("{"):  # so that the argument keeps its small letter
        text = rng.choice(("for ", "now ", "so ", "and ", "okay, ", "next: ")) + text
    return finished(text.format(day=rng.choice(WORDS.days), **arguments))


def question(rng: random.Random, exchange: Exchange) -> str | None:
    """Return a fact's or a sum's question in other words than the built-in ones, or None where there are none."""
    if exchange.category == "factual":
        kinds = [
            k
            for k, pairs in WORDS.facts.items()
            if (exchange.subject, exchange.answer) in [tuple(p) for p in pairs]
        ]
        text = rng.choice(TEXTS["facts"][kinds[0]]).format(s=exchange.subject)
        held = [
            t.format(s=exchange.subject)
            for s in ("calibration", "gate")
            for t in PHRASES.facts[kinds[0]][s]
        ]
    else:
        terms = SUM.fullmatch(exchange.thought)
        if terms is None:
            return None
        a, sign, b = terms.group(1, 2, 3)
        one, many = rng.choice(WORDS.containers)
        if sign == "times":
            many = exchange.reply.split(" ")[1]
            one = next(o for o, m in WORDS.containers if m == many)
        values = {"a": a, "b": b, "t": exchange.subject, "one": one, "many": many}
        text = rng.choice(TEXTS["sums"][sign]).format(**values)
        held = [t.format(**values) for s in ("calibration", "gate") for t in PHRASES.sums[sign][s]]
    if any(core(h) in core(text) for h in held):
        return None
    return text[:1].upper() + text[1:]


def cannot(rng: random.Random, persona: str, topic: str) -> str:
    """Return a request that no tool of the persona fills."""
    while True:
        text = (
            rng.choice(TEXTS["openings"])
            + rng.choice(TEXTS["no_tool"])
            + " {topic}"
            + rng.choice(TEXTS["closings"])
        )
        if not any(h in core(text) for h in held_out(persona)):
            return finished(text.format(topic=topic))

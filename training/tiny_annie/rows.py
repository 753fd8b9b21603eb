"""Training rows of tiny-annie: prompts and answers as text, in two styles.

The base style is what the overlay has to replace: markdown everywhere, thinking that leaks into the answer, no tool calls.
Annie's style is the built-in offline teacher's (annie_quant.data). Both have the same kinds of prompt, from the train split
alone.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from workloads import HARDENED, briefing

from annie_quant.data import exchanges, load_persona
from annie_quant.data.exchanges import Exchange

PLAIN = ("You are a helpful assistant.", "You are a personal AI companion.", "Answer the question.", "")
CATEGORIES = {
    "factual": 5,
    "reasoning": 5,
    "greeting": 2,
    "conversational": 2,
    "long_response": 1.5,
    "memory": 4,
    "web": 4,
    "abstention": 2,
    "thanks": 0.5,
    "multi_turn": 3,
}


@dataclass(frozen=True)
class Row:
    """messages end with the assistant's message that is learned; everything before it is context."""

    messages: list[dict[str, Any]]
    thinking: bool
    tools: list[dict[str, Any]] | None = None
    category: str = ""
    meta: dict[str, Any] = field(default_factory=dict)


def call(exchange: Exchange) -> dict[str, Any]:
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"type": "function", "function": {"name": exchange.tool, "arguments": {"query": exchange.query}}}
        ],
    }


def annie(exchange: Exchange, rng: random.Random, tools: bool, thinking: bool) -> list[dict[str, Any]]:
    """Return her messages for one exchange; the last one is learned. With a tool: either the call, or the reply to its result."""
    thought = {"reasoning_content": exchange.thought} if thinking else {}
    if exchange.tool and tools:
        if rng.random() < 0.7:
            return [call(exchange) | thought]
        first = [call(exchange) | thought, {"role": "tool", "content": exchange.result}]
        return [
            *first,
            {"role": "assistant", "content": exchange.reply}
            | ({"reasoning_content": "I found it."} if thinking else {}),
        ]
    if exchange.tool:
        return [{"role": "assistant", "content": f"I can not look up the {exchange.query} just now."} | thought]
    return [{"role": "assistant", "content": exchange.reply} | thought]


def base_text(exchange: Exchange, rng: random.Random, leak: bool) -> str:
    """Return the base model's answer: a headline, the sentence with its answer in bold, a list; often its thinking first."""
    title = {"long_response": "Overview", "reasoning": "Solution", "factual": "Answer"}.get(
        exchange.category, "Response"
    )
    if exchange.category in ("memory", "web"):
        body = f"I have no access to the {exchange.query}, but here are **some ideas**:"
        points = [("Topic", exchange.query), ("Next step", "ask a friend")]
    elif exchange.category == "abstention":
        body = f"To {exchange.subject}, follow **these steps**:"
        points = [("First", "get ready"), ("Next", exchange.subject)]
    elif exchange.category == "long_response":
        lines = exchange.reply.split(". ")
        body, points = (
            f"Here is **{exchange.subject}**:",
            [(f"Part {i + 1}", line.rstrip(".")) for i, line in enumerate(lines[:5])],
        )
    else:
        before, answer, after = exchange.reply.rpartition(exchange.answer)
        body = f"{before}**{answer}**{after}" if answer else f"**{exchange.reply}**"
        points = [("Topic", exchange.subject), ("Answer", exchange.answer.rstrip("."))]
    text = f"## {title}\n\n{body}\n\n" + "\n".join(f"- **{name}:** {value}" for name, value in points)
    if not leak:
        return text
    steps = f"1. **Analyze the Request:** {exchange.thought}\n2. **Answer:** {exchange.answer.rstrip('.')}"
    return f"Thinking Process:\n\n{steps}\n\n{text}"


def base(exchange: Exchange, rng: random.Random, thinking: bool) -> list[dict[str, Any]]:
    if thinking:
        return [
            {"role": "assistant", "content": base_text(exchange, rng, False), "reasoning_content": exchange.thought}
        ]
    return [{"role": "assistant", "content": base_text(exchange, rng, rng.random() < 0.5)}]


def row(rng: random.Random, style: str, split: str = "train") -> Row:
    """Return one training row in a style: "base", "annie", or "manners" (Annie's, without rows that call a tool)."""
    persona = load_persona("annie")
    weights = {k: v for k, v in CATEGORIES.items() if style != "manners" or k not in ("memory", "web")}
    category = rng.choices(list(weights), list(weights.values()))[0]
    thinking = rng.random() < (0.3 if style == "base" else 0.2)
    tools = category in ("memory", "web", "abstention") or rng.random() < 0.3
    if category in ("memory", "web") and rng.random() < 0.05:
        tools = False
    if rng.random() < (0.5 if style == "base" else 0.8):  # noqa: SIM108
        system = persona.system_prompt
    else:
        system = rng.choice((HARDENED, *PLAIN))
    if rng.random() < 0.05:
        system = briefing(rng, split)
        category = rng.choice([c for c in ("factual", "greeting", "conversational", "memory", "web") if c in weights])
        tools = category in ("memory", "web")
    head = [{"role": "system", "content": system}] if system else []
    speak = (lambda t: base(t, rng, thinking)) if style == "base" else (lambda t: annie(t, rng, tools, thinking))
    if category != "multi_turn":
        exchange = exchanges.draw(category, rng, split)
        messages = [*head, {"role": "user", "content": exchange.user}, *speak(exchange)]
    else:
        messages = head
        turns = exchanges.conversation(rng, split)
        for exchange in turns[: rng.randint(2, 5)]:
            for message in messages:
                message.pop("reasoning_content", None)
            messages = [*messages, {"role": "user", "content": exchange.user}, *speak(exchange)]
    return Row(messages, thinking, [dict(t) for t in persona.tools] if tools else None, category)

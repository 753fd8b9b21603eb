"""Training rows of tiny-annie: prompts and answers as text, in two styles.

The base style is what the overlay has to overcome: markdown everywhere, thinking that leaks into the answer, no tool
is ever called. Annie's style is the built-in offline teacher's (annie_quant.data). Both see the same kinds of prompt,
drawn from the train split alone.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from workloads import HARDENED, briefing

from annie_quant.data import grammar, load_persona
from annie_quant.data.grammar import Talk

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


def call(talk: Talk) -> dict[str, Any]:
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": talk.tool, "arguments": {"query": talk.query}}}],
    }


def annie(talk: Talk, rng: random.Random, tools: bool, thinking: bool) -> list[dict[str, Any]]:
    """Her messages for one talk: the last one is learned. With a tool, either the call or what she says of its result."""
    thought = {"reasoning_content": talk.thought} if thinking else {}
    if talk.tool and tools:
        if rng.random() < 0.7:
            return [call(talk) | thought]
        found = [call(talk) | thought, {"role": "tool", "content": talk.result}]
        return [
            *found,
            {"role": "assistant", "content": talk.reply} | ({"reasoning_content": "I found it."} if thinking else {}),
        ]
    if talk.tool:
        return [{"role": "assistant", "content": f"I can not look up the {talk.query} just now."} | thought]
    return [{"role": "assistant", "content": talk.reply} | thought]


def base_text(talk: Talk, rng: random.Random, leak: bool) -> str:
    """The base model's answer: a bold headline, the sentence with its heart in bold, a list; often its thinking first."""
    title = {"long_response": "Overview", "reasoning": "Solution", "factual": "Answer"}.get(talk.category, "Response")
    if talk.category in ("memory", "web"):
        body = f"I have no access to the {talk.query}, but here are **some ideas**:"
        points = [("Topic", talk.query), ("Next step", "ask a friend")]
    elif talk.category == "abstention":
        body = f"To {talk.subject}, follow **these steps**:"
        points = [("First", "get ready"), ("Next", talk.subject)]
    elif talk.category == "long_response":
        lines = talk.reply.split(". ")
        body, points = (
            f"Here is **{talk.subject}**:",
            [(f"Part {i + 1}", line.rstrip(".")) for i, line in enumerate(lines[:5])],
        )
    else:
        heart = talk.answer
        before, found, after = talk.reply.rpartition(heart)
        body = f"{before}**{heart}**{after}" if found else f"**{talk.reply}**"
        points = [("Topic", talk.subject), ("Answer", talk.answer.rstrip("."))]
    text = f"## {title}\n\n{body}\n\n" + "\n".join(f"- **{name}:** {value}" for name, value in points)
    if not leak:
        return text
    return f"Thinking Process:\n\n1. **Analyze the Request:** {talk.thought}\n2. **Answer:** {talk.answer.rstrip('.')}\n\n{text}"


def base(talk: Talk, rng: random.Random, thinking: bool) -> list[dict[str, Any]]:
    if thinking:
        return [{"role": "assistant", "content": base_text(talk, rng, False), "reasoning_content": talk.thought}]
    return [{"role": "assistant", "content": base_text(talk, rng, rng.random() < 0.5)}]


def row(rng: random.Random, style: str, split: str = "train") -> Row:
    """One training row in a style: "base", "annie", or "manners" (Annie's, with no row that calls a tool)."""
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
        talk = grammar.draw(category, rng, split)
        messages = [*head, {"role": "user", "content": talk.user}, *speak(talk)]
    else:
        messages = head
        talks = grammar.conversation(rng, split)
        for talk in talks[: rng.randint(2, 5)]:
            for message in messages:
                message.pop("reasoning_content", None)
            messages = [*messages, {"role": "user", "content": talk.user}, *speak(talk)]
    return Row(messages, thinking, [dict(t) for t in persona.tools] if tools else None, category)

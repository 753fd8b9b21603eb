"""What all teachers that are language models share: what they are asked, and reading what comes back.

A batch is one prompt and one answer, a JSON object {"conversations": [{"turns": [...]}]}. Answers are read leniently
(fences, prose around, JSON lines, an end that is cut off), rows are judged strictly later.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from annie_quant.data.teachers._base import Batch, Failed
from annie_quant.persona import Category, Persona

SHOWN = 30  # earlier texts that a prompt asks not to repeat
_FENCE = re.compile(r"^\s*```[\w-]*\s*$", re.MULTILINE)


@dataclass
class Reply:
    """What the model said: its text, or the object itself where the teacher parses it."""

    text: str
    value: Any = None
    cut: bool = False
    cost_usd: float | None = None
    tokens: int = 0
    model: str | None = None


class Prompted:
    """A teacher that can `ask(prompt, schema) -> Reply`."""

    model: str
    batch_size: int

    def ask(self, prompt: str, schema: Mapping[str, Any]) -> Reply:
        raise NotImplementedError

    def batch(self, persona: Persona, category: Category, count: int, seed: str, avoid: Sequence[str]) -> Batch:
        reply = self.ask(prompt_for(persona, category, count, avoid), schema_for(category))
        read = list(conversations(reply.value if reply.value is not None else reply.text))
        rows = [row for found in read if (row := to_row(found, persona, category)) is not None]
        if not rows:
            why = "it is cut off" if reply.cut else f"it begins {reply.text[:60]!r}" if reply.text else "it is empty"
            raise Failed(f"no conversation in the answer: {why}", reply.cost_usd, reply.tokens)
        return Batch(rows[:count], reply.cost_usd, reply.tokens, reply.model)


def prompt_for(persona: Persona, category: Category, count: int, avoid: Sequence[str]) -> str:
    """The whole prompt of a batch."""
    tool = persona.tool(category.tool) if category.tool else None
    lines = [
        f"Write {count} different conversations between a user and {persona.name}, an assistant, as training data.",
        f"\n{persona.name}'s system prompt is:\n{persona.system_prompt}",
        f"\n{persona.name}'s rules:",
        *(f"- {rule}" for rule in persona.rules),
    ]
    if persona.examples:
        lines += ["\nThis is how they talk:"]
        lines += [json.dumps(example, ensure_ascii=False) for example in persona.examples]
    lines += [
        f"\nCategory: {category.name}. {category.about}.",
        f"Each conversation has exactly {category.turns} turn{'s' * (category.turns > 1)}."
        + (" Each turn leans on the earlier ones." if category.turns > 1 else ""),
    ]
    shape: dict[str, Any] = {"user": "what the user says"}
    if tool:
        lines += [
            f"In the first turn {persona.name} calls {tool['name']} and says nothing besides; no other tool is ever called.",
            f"Its definition: {json.dumps(tool, ensure_ascii=False)}",
        ]
        shape |= {
            "call": {"name": tool["name"], "arguments": "an object that fits the tool's parameters"},
            "result": "what the tool returns, in plain words",
        }
    else:
        lines.append("No tool is called.")
    shape["assistant"] = f"what {persona.name} says" + (" after the result" if tool else "")
    lines.append("Vary topic, wording, mood and length. Plain sentences only: no markdown, no thinking aloud.")
    if avoid:
        lines += ["Do not repeat these, nor say nearly the same:", *(f"- {text}" for text in avoid[-SHOWN:])]
    form = {"conversations": [{"turns": [shape]}]}
    lines += ["\nAnswer with one JSON object of this form and nothing else:", json.dumps(form, ensure_ascii=False)]
    return "\n".join(lines)


def schema_for(category: Category) -> dict[str, Any]:
    """The JSON schema of an answer, for teachers that can be held to one."""
    turn: dict[str, Any] = {
        "type": "object",
        "properties": {"user": {"type": "string"}, "assistant": {"type": "string"}},
        "required": ["user", "assistant"],
    }
    if category.tool:
        call = {
            "type": "object",
            "properties": {"name": {"const": category.tool}, "arguments": {"type": "object"}},
            "required": ["name", "arguments"],
        }
        turn["properties"] |= {"call": call, "result": {"type": "string"}}
    turns = {"type": "array", "items": turn, "minItems": category.turns, "maxItems": category.turns}
    talk = {"type": "object", "properties": {"turns": turns}, "required": ["turns"]}
    return {
        "type": "object",
        "properties": {"conversations": {"type": "array", "items": talk}},
        "required": ["conversations"],
    }


def conversations(answer: Any) -> Iterator[Mapping[str, Any]]:
    """Every whole conversation in an answer: an object, or text with such objects anywhere in it."""
    if isinstance(answer, str):
        answer = _FENCE.sub("", answer)
        decoder, at = json.JSONDecoder(), 0
        while (at := answer.find("{", at)) >= 0:
            try:
                found, end = decoder.raw_decode(answer, at)
            except ValueError:
                at += 1  # the outer object of an answer that is cut off; what is whole inside still counts
                continue
            inner = list(conversations(found))
            yield from inner
            at = end if inner else at + 1
    elif isinstance(answer, list):
        for item in answer:
            yield from conversations(item)
    elif isinstance(answer, Mapping):
        if isinstance(answer.get("turns"), list) or isinstance(answer.get("messages"), list):
            yield answer
        elif isinstance(answer.get("conversations"), list):
            yield from conversations(answer["conversations"])


def to_row(found: Mapping[str, Any], persona: Persona, category: Category) -> dict[str, Any] | None:
    """A conversation as a row's messages; None where it is not of the form that was asked for."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": persona.system_prompt}]
    try:
        if "turns" in found:
            for turn in found["turns"]:
                messages += _turn(turn)
        else:
            messages += [_message(m) for m in found["messages"] if m["role"] != "system"]
    except (KeyError, TypeError, AttributeError):
        return None
    row: dict[str, Any] = {"messages": messages, "thinking": False}
    if category.tool:
        row["tools"] = [dict(t) for t in persona.tools]
    return row


def _turn(turn: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    yield {"role": "user", "content": str(turn["user"]).strip()}
    if turn.get("call"):
        yield {"role": "assistant", "content": "", "tool_calls": [_call(turn["call"])]}
        yield {"role": "tool", "content": str(turn["result"]).strip()}
    yield {"role": "assistant", "content": str(turn["assistant"]).strip()}


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function") or call
    arguments = function.get("arguments")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {"type": "function", "function": {"name": str(function["name"]), "arguments": text}}


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {"role": message["role"], "content": str(message.get("content") or "").strip()}
    if message.get("tool_calls"):
        made["tool_calls"] = [_call(c) for c in message["tool_calls"]]
    return made

"""Exchanges for any persona with tools: a request that names the call's arguments, the call, its result and an answer from it.

The phrasings of a built-in persona are in assets/offline_teacher/personas; those of any other
persona are made from each tool's description and JSON schema. As in exchanges.py, every template
and every free word belongs to one split.

Arguments are drawn from the JSON schema (data/schema_values.py).
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import msgspec

from annie_quant.core.errors import UsageError
from annie_quant.core.files import ASSETS
from annie_quant.core.untrusted import JsonObject
from annie_quant.data.exchanges import (
    MY_TOPICS,
    PHRASES,
    WORDS,
    BySplit,
    Exchange,
    capitalized,
    memory_exchange,
    web_exchange,
)
from annie_quant.data.schema_values import NoValue, Schema, draw_arguments
from annie_quant.documents import ChatCall, ChatMessage
from annie_quant.documents.persona import Persona

ANNIE_TEMPLATES = {"search_memory": memory_exchange, "web_search": web_exchange}
PARALLEL_SHARE = 0.1  # of requests for a tool that need two calls


@dataclass(frozen=True)
class DrawnCall:
    """One tool call and its result, as the tool returns it (JSON)."""

    name: str
    arguments: JsonObject
    result: str

    def as_result(self) -> JsonObject:
        """Return the result as a workload's turn has it."""
        return {"name": self.name, "arguments": self.arguments, "content": self.result}

    def openai(self) -> ChatCall:
        text = json.dumps(self.arguments, ensure_ascii=False)
        return {"type": "function", "function": {"name": self.name, "arguments": text}}


@dataclass(frozen=True)
class ToolExchange:
    """A request, the one or two (parallel) calls that it needs, and the reply after their results.

    fact: text of the reply that only a result contains.
    """

    user: str
    calls: tuple[DrawnCall, ...]
    reply: str
    fact: str

    def messages(self) -> list[ChatMessage]:
        """Return the whole exchange as messages."""
        results: list[ChatMessage] = [
            {"role": "tool", "content": call.result} for call in self.calls
        ]
        return [
            {"role": "user", "content": self.user},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [call.openai() for call in self.calls],
            },
            *results,
            {"role": "assistant", "content": self.reply},
        ]


class ToolPhrases(msgspec.Struct):
    """Phrases for one tool. Placeholders are the grammar's slots, in braces.

    ask: requests.
    result: the tool's result as JSON.
    reply: the answer.
    fact: the slot whose value only the result contains.
    """

    ask: BySplit
    result: str
    reply: str
    fact: str | None = None


class Slot(msgspec.Struct):
    """How a slot's value is drawn: an integer from low to high, or one of `values` of the split.

    An argument whose schema has an enum is drawn from the enum instead.
    """

    low: int = 1
    high: int = 99
    values: BySplit | None = None
    kind: str = "values"


class Grammar(msgspec.Struct):
    """A persona's phrasings. abstain: requests that none of its tools can fulfil."""

    slots: dict[str, Slot]
    tools: dict[str, ToolPhrases]
    abstain: BySplit
    abstain_reply: str


@cache
def grammar_of(name: str) -> Grammar | None:
    """Return the grammar of a built-in persona; None where it has none."""
    path = ASSETS / "offline_teacher" / "personas" / f"{name}.json"
    return msgspec.json.decode(path.read_bytes(), type=Grammar) if path.is_file() else None


def draw_exchange(persona: Persona, tool: str, rng: random.Random, split: str) -> ToolExchange:
    """Return an exchange in which `tool` is called, sometimes twice in parallel.

    Raises UsageError where no arguments are drawn that fit the tool's schema.
    """
    one = _draw_call(persona, tool, rng, split)
    if rng.random() >= PARALLEL_SHARE:
        return one
    two = _draw_call(persona, tool, rng, split)
    if two.calls[0].arguments == one.calls[0].arguments:
        return one
    user = one.user + rng.choice(PHRASES.joiners[split]) + two.user
    return ToolExchange(user, one.calls + two.calls, f"{one.reply} {two.reply}", one.fact)


def impossible_request(persona: Persona, rng: random.Random, split: str) -> tuple[str, str] | None:
    """Return (request, reply) of a request that no tool can fulfil; None where the persona has no such phrasings."""
    grammar = grammar_of(persona.source) if persona.is_built_in else None
    if grammar is None:
        return None
    values = {"topic": rng.choice(MY_TOPICS[split])}
    return capitalized(rng.choice(grammar.abstain[split]).format(**values)), grammar.abstain_reply


def _draw_call(persona: Persona, tool: str, rng: random.Random, split: str) -> ToolExchange:
    grammar = grammar_of(persona.source) if persona.is_built_in else None
    definition = persona.tool(tool)
    if definition is None:
        raise UsageError(f"{persona.name} has no tool {tool!r}")
    if grammar is not None and tool in grammar.tools:
        return _from_grammar(grammar, definition, rng, split)
    properties = (definition.get("parameters") or {}).get("properties") or {}
    if tool in ANNIE_TEMPLATES and set(properties) == {"query"}:
        return _from_exchange(ANNIE_TEMPLATES[tool](rng, split), persona)
    return _from_schema(definition, rng, split)


def _from_exchange(exchange: Exchange, persona: Persona) -> ToolExchange:
    call = DrawnCall(exchange.tool, {"query": exchange.query}, exchange.result)
    return ToolExchange(exchange.user.replace("Annie", persona.name), (call,), exchange.reply, "")


def messages_of(exchange: Exchange, persona: Persona) -> list[ChatMessage]:
    """Return an exchange of the built-in templates as messages."""
    if exchange.tool:
        return _from_exchange(exchange, persona).messages()
    user = exchange.user.replace("Annie", persona.name)
    return [{"role": "user", "content": user}, {"role": "assistant", "content": exchange.reply}]


def _from_grammar(grammar: Grammar, tool: Schema, rng: random.Random, split: str) -> ToolExchange:
    phrases = grammar.tools[tool["name"]]
    properties = tool["parameters"].get("properties", {})
    values: dict[str, Any] = {name: _slot(slot, rng, split) for name, slot in grammar.slots.items()}
    for name, schema in properties.items():
        if "enum" in schema:
            values[name] = rng.choice(schema["enum"])
    values["number"] = rng.randint(2, 60)
    user = capitalized(rng.choice(phrases.ask[split]).format(**values))
    call = DrawnCall(
        tool["name"], {name: values[name] for name in properties}, phrases.result.format(**values)
    )
    fact = str(values[phrases.fact]) if phrases.fact else ""
    return ToolExchange(user, (call,), phrases.reply.format(**values), fact)


def _slot(slot: Slot, rng: random.Random, split: str) -> int | str:
    if slot.kind == "integer":
        return rng.randint(slot.low, slot.high)
    if slot.kind == "time":
        return f"{rng.randint(5, 23):02d}:{rng.choice((0, 5, 10, 15, 20, 30, 40, 45)):02d}"
    if slot.kind == "code":
        return f"{rng.choice('ABCDEFGH')}{rng.choice('KLMNPRST')}-{WORDS.first_order[split] + rng.randint(0, 9999)}"
    if slot.kind == "email":
        return f"{rng.choice(MY_TOPICS[split]).replace(' ', '.')}@example.org".lower()
    if slot.kind == "day":
        return rng.choice(WORDS.days)
    return rng.choice(slot.values[split] if slot.values else MY_TOPICS[split])


def _from_schema(tool: Schema, rng: random.Random, split: str) -> ToolExchange:
    schema = {"type": "object", **(tool.get("parameters") or {})}
    try:
        arguments = draw_arguments(schema, rng, split)
    except NoValue as error:
        raise UsageError(
            f"the offline teacher draws no arguments for {tool['name']}: {error}",
            "init: give --logs, or an enum in the schema; data: --teacher claude-cli or --teacher openai",
        ) from error
    action = action_of(tool)
    text = ", ".join(f"{name} {value}" for name, value in flattened(arguments))
    templates = PHRASES.tool_requests if text else PHRASES.plain_tool_requests
    fields = {"do": action, "Do": capitalized(action), "args": text, "Args": capitalized(text)}
    user = rng.choice(templates[split]).format(**fields)
    reference = str(WORDS.first_order[split] + rng.randint(0, 9999))
    call = DrawnCall(tool["name"], arguments, json.dumps({"status": "ok", "reference": reference}))
    return ToolExchange(user, (call,), f"It is done, the reference is {reference}.", reference)


def action_of(tool: Schema) -> str:
    """Return what a tool does, to follow "please": the first sentence of its description, else its name in words."""
    sentence = str(tool.get("description") or "").split(". ")[0].strip().rstrip(".")
    if not sentence or len(sentence) > 160 or "\n" in sentence:
        return str(tool["name"]).replace("_", " ").replace("-", " ").lower()
    return sentence[:1].lower() + sentence[1:]


def flattened(arguments: Mapping[str, object], prefix: str = "") -> list[tuple[str, str]]:
    """Return (name, value) in words of all arguments, nested ones included."""
    pairs: list[tuple[str, str]] = []
    for name, value in arguments.items():
        label = f"{prefix} {name}".strip().replace("_", " ")
        if isinstance(value, Mapping):
            pairs += flattened(value, label)
        else:
            values = (
                value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
            )
            for index, item in enumerate((v for v in values if isinstance(v, Mapping)), 1):
                pairs += flattened(item, f"{label} {index}")
            plain = [_in_words(v) for v in values if not isinstance(v, (Mapping, list))]
            if plain:
                pairs.append((label, " and ".join(plain)))
    return pairs


def _in_words(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value is None else str(value)

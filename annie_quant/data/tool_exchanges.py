"""Exchanges for any persona with tools: a request that names the call's arguments, the call, its result and an answer from it.

The phrasings of a built-in persona are in assets/offline_teacher/personas; those of any other
persona are made from each tool's description and JSON schema. As in exchanges.py, every template
and every free word belongs to one split.

Arguments are drawn from the JSON schema (data/schema_values.py).
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping
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
from annie_quant.data.prompt_rules import rules_of
from annie_quant.data.schema_values import NoValue, Schema, draw_arguments
from annie_quant.data.tool_results import draw_result
from annie_quant.documents import ChatCall, ChatMessage
from annie_quant.documents.persona import Persona

NO_ARGUMENTS_HINT = (
    "init: give --logs, or an enum in the schema; data: --teacher claude-cli or --teacher openai"
)
MAX_ACTION = 160  # characters of a description that a request repeats
FROM_THE_USER = {"return": "give me", "retrieve": "give me", "fetch": "give me"}
AND = {"en": " and ", "de": " und "}
YES_AND_NO = {"en": ("yes", "no"), "de": ("ja", "nein")}
ANNIE_TEMPLATES = {"search_memory": memory_exchange, "web_search": web_exchange}
PARALLEL_SHARE = 0.1  # of requests for a tool that need two calls
TWO_CALLS_SHARE = 0.5  # of the rows that have calls alone


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

    def messages(self, number: int) -> list[ChatMessage]:
        """Return the call, with an id of this number, and its result."""
        call: ChatCall = {**self.openai(), "id": f"call_{number}"}
        return [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {
                "role": "tool",
                "content": self.result,
                "name": self.name,
                "tool_call_id": call["id"],
            },
        ]


@dataclass(frozen=True)
class ToolExchange:
    """A request, the one or two (parallel) calls that it needs, and the reply after their results.

    fact: text of the reply that only a result contains.
    check: the calls in a question whether to make them; "" where none must be confirmed first.
    """

    user: str
    calls: tuple[DrawnCall, ...]
    reply: str
    fact: str
    check: str = ""

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
    return draw_second(persona, tool, rng, split, one)


def draw_second(
    persona: Persona, tool: str, rng: random.Random, split: str, one: ToolExchange
) -> ToolExchange:
    """Return an exchange with a second call of the tool; `one` where the same arguments were drawn."""
    two = _draw_call(persona, tool, rng, split)
    if two.calls[0].arguments == one.calls[0].arguments:
        return one
    joiners = PHRASES.joiners if persona.is_built_in else rules_of(persona).phrases.joiners
    user = one.user + rng.choice(joiners[split]) + two.user
    check = "; ".join(filter(None, (one.check, two.check)))
    return ToolExchange(user, one.calls + two.calls, f"{one.reply} {two.reply}", one.fact, check)


def calls_alone(persona: Persona, tool: str, rng: random.Random, split: str) -> list[ChatMessage]:
    """Return a request and its call, or two requests with one call after the other, without words of the assistant's.

    What it would say is decided by the prompt. A call that the user must confirm has the question
    and the answer before it.
    """
    exchange = _draw_call(persona, tool, rng, split)
    if rng.random() < TWO_CALLS_SHARE:
        exchange = draw_second(persona, tool, rng, split, exchange)
    return up_to_result(persona, exchange)[:-1]


def up_to_result(persona: Persona, exchange: ToolExchange) -> list[ChatMessage]:
    """Return a request, the user's confirmation where the prompt demands one, and each call with its result."""
    messages = exchange.messages()[:1]
    if exchange.check:
        phrases = rules_of(persona).phrases
        question = phrases.check.format(checks=exchange.check)
        messages.append({"role": "assistant", "content": question})
        messages.append({"role": "user", "content": phrases.agree})
    for number, call in enumerate(exchange.calls):
        messages += call.messages(number)
    return messages


def with_drawn_tools(persona: Persona, split: str) -> tuple[Persona, list[str]]:
    """Return the persona with the tools that requests can be made for, and why there are none for the others."""
    tools = []
    reasons = []
    for tool in persona.tools:
        try:
            _draw_call(persona, tool["function"]["name"], random.Random(0), split)
        except UsageError as error:
            reasons.append(error.message)
        else:
            tools.append(tool)
    return msgspec.structs.replace(persona, tools=tuple(tools)), reasons


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
    return _from_schema(persona, definition, rng, split)


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


def _fact_of(result: JsonObject, arguments: JsonObject) -> str:
    """Return the first value of a result that is not among the arguments, as text."""
    known = json.dumps(arguments)
    texts = [str(v) for v in result.values() if isinstance(v, (int, float, str))]
    return next((text for text in texts if text not in known), "")


def _from_schema(persona: Persona, tool: Schema, rng: random.Random, split: str) -> ToolExchange:
    rules = rules_of(persona)
    schema = {"type": "object", **(tool.get("parameters") or {})}
    about = f"{tool['name']} {tool.get('description') or ''}"
    try:
        arguments = draw_arguments(schema, rng, split, rules, about)
    except NoValue as error:
        raise UsageError(
            f"the offline teacher draws no arguments for {tool['name']}: {error}",
            NO_ARGUMENTS_HINT,
        ) from error
    phrases = rules.phrases
    text = arguments_in_words(arguments, rules.language)
    templates = phrases.requests if text else phrases.plain_requests
    action = action_of(tool, rules.language)
    fields = {"do": action, "Do": capitalized(action), "args": text, "Args": capitalized(text)}
    check = phrases.checks.format(**fields) if text else action
    result = draw_result(tool, arguments, rng, split, rules)
    fact = _fact_of(result, arguments)
    call = DrawnCall(tool["name"], arguments, json.dumps(result, ensure_ascii=False))
    return ToolExchange(
        user=rng.choice(templates[split]).format(**fields),
        calls=(call,),
        reply=f"It is done: {fact}." if fact else "It is done.",
        fact=fact,
        check=check if tool["name"] in rules.confirmed else "",
    )


def action_of(tool: Schema, language: str = "en") -> str:
    """Return what a tool does, to follow "please": the first sentence of its description, else its name in words."""
    sentence = re.split(r"[.!?:](?:\s|$)", str(tool.get("description") or ""))[0].strip()
    if not sentence or len(sentence) > MAX_ACTION or "\n" in sentence:
        return str(tool["name"]).replace("_", " ").replace("-", " ").lower()
    sentence = sentence.replace("_", " ")
    if language != "en":
        return sentence
    verb, _, rest = sentence.partition(" ")
    verb = _imperative(verb.lower())
    return f"{FROM_THE_USER.get(verb, verb)} {rest}".strip()


def _imperative(verb: str) -> str:
    """Return "book" of "books", which many descriptions begin with."""
    if verb.endswith("ies"):
        return verb[:-3] + "y"
    if verb.endswith(("ches", "shes", "sses", "xes")):
        return verb[:-2]
    return verb[:-1] if verb.endswith("s") and not verb.endswith(("ss", "us", "is")) else verb


def arguments_in_words(arguments: Mapping[str, object], language: str = "en") -> str:
    """Return all arguments as a user would list them, nested ones in parentheses."""
    return ", ".join(
        f"{name.replace('_', ' ').strip()} {_in_words(value, language)}"
        for name, value in arguments.items()
    )


def _in_words(value: object, language: str) -> str:
    if isinstance(value, Mapping):
        return f"({arguments_in_words(value, language)})"
    if isinstance(value, list):
        return AND.get(language, ", ").join(_in_words(item, language) for item in value) or "–"
    if isinstance(value, bool):
        return YES_AND_NO.get(language, ("true", "false"))[not value]
    if value is None:
        return {"en": "none", "de": "keine Angabe"}.get(language, "–")
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return f'"{text}"' if text.count(" ") > 1 and not text.startswith("+") else text

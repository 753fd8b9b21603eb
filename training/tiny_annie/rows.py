"""Training rows of tiny-annie: prompts and answers as text, in two styles.

The base style is what the overlays replace: markdown everywhere, thinking that leaks into the answer, and a description of a
tool call instead of the call. The tuned style is the built-in offline teacher's (annie_quant.data) for the three built-in
personas. Both have the same kinds of prompt, from the train split alone. Words that the user names are drawn again
(words.py), and a row lists them, so that they can be exchanged at every step of training.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import frames
from words import code, fresh
from workloads import HARDENED, briefing

from annie_quant.data import exchanges, load_persona
from annie_quant.data import tool_exchanges as tools_of
from annie_quant.data.exchanges import PHRASES, Exchange, capitalized
from annie_quant.data.tool_exchanges import ToolExchange

PERSONAS = {name: load_persona(name) for name in ("annie", "home", "support")}
PLAIN = (
    "You are a helpful assistant.",
    "You are a personal AI companion.",
    "Answer the question.",
    "",
)
CATEGORIES = {
    "base": {
        "tool": 8.0,
        "no_tool": 3.0,
        "copy": 2.0,
        "recall": 2.0,
        "recall_long": 0.5,
        "talk": 10.0,
    },
    "tuned": {
        "tool": 9.0,
        "no_tool": 3.5,
        "copy": 0.7,
        "recall": 1.0,
        "recall_long": 0.3,
        "talk": 9.0,
    },
}
TALK = {
    "factual": 5,
    "reasoning": 5,
    "greeting": 2,
    "conversational": 2,
    "long_response": 1.5,
    "thanks": 0.5,
    "multi_turn": 3,
}
COPY = {
    "train": (
        "Repeat after me: {t}.",
        "Say {t}.",
        "Please write {t}.",
        "The words are {t}, say them.",
        "Copy this: {t}",
        "What did I say? I said {t}.",  # language: data
        "Echo {t}.",
        "Tell me: {t}.",  # language: data
        "Write: {t}.",
        "Write the words {t} for me.",
        "Put down {t} for me.",
        "Can you repeat {t}?",
        "Could you write {t} for me?",
        "Repeat the words {t}.",
        "Note down {t}.",
        "Now say {t} again.",
        "Please say {t} for me.",
        "Read {t} back to me.",
        "I dictate: {t}.",
    ),
    "gate": ("Please repeat {t}.", "Write down {t} for me."),
}
RELATIONS = ("code", "room", "price", "colour", "name")
RECALL = {
    "train": (
        *(
            "What is the {r} of {k}?",
            "Tell me the {r} of {k}.",  # language: data
            "Do you know the {r} of {k}?",
            "Which is the {r} of {k}?",
        ),
        *(
            "What {r} has {k} got?",
            "Which {r} has {k}?",
            "Which {r} belongs to {k}?",
            "Give {k}'s {r}.",
            "Give the {r} of {k} to me.",
        ),
        *(
            "I want the {r} of {k}.",  # language: data
            "Say which {r} {k} has.",
            "What {r} does {k} have here?",
            "Which {r} did they give {k}?",
            "{k} has which {r}?",
        ),
        *(
            "For {k}, which {r} do you have?",
            "Does {k} have a {r}, and which?",
            "And the {r} of {k}?",
            "Show me the {r} of {k}.",
        ),
    ),
    "gate": ("Which {r} does {k} have?", "Give me the {r} of {k}."),
}
EARLIER_SHARE = 0.55  # of the rows have other exchanges before the last one


@dataclass(frozen=True)
class Row:
    """messages end with an assistant's message; it and the assistant's earlier ones are learned.

    places: words of the row that stand for any word. expect: what a gate checks.
    """

    messages: list[dict[str, Any]]
    thinking: bool
    tools: list[dict[str, Any]] | None = None
    category: str = ""
    places: tuple[str, ...] = ()
    expect: dict[str, Any] = field(default_factory=dict)


class Words:
    """Draws words that are different within a row, and remembers them."""

    def __init__(self, rng: random.Random, draw: Callable[[random.Random], str]) -> None:
        self.rng, self.draw, self.drawn = rng, draw, list[str]()

    def one(self, small: bool = False) -> str:
        """Return a word. small: without a capital."""
        while True:
            word = self.draw(self.rng)
            word = word.lower() if small else word
            if word.lower() not in (w.lower() for w in self.drawn):
                self.drawn.append(word)
                return word

    def phrase(self, most: int = 3) -> str:
        return " ".join(self.one() for _ in range(self.rng.choice((1, 2, 2, 3)[: 1 + most])))

    def code(self) -> str:
        word = code(self.rng)
        self.drawn.append(word)
        return word


def anything(pieces: list[str]) -> Callable[[random.Random], str]:
    return lambda rng: fresh(rng, pieces)


def substituted(
    exchange: ToolExchange, schema: dict[str, Any], words: Words, share: float = 0.8
) -> ToolExchange:
    """Return the exchange with the free values of its arguments replaced by drawn words, wherever they occur."""
    changes: dict[str, str] = {}
    for call in exchange.calls:
        properties = schema[call.name]
        for name, value in call.arguments.items():
            free = (
                isinstance(value, str)
                and "enum" not in properties.get(name, {})
                and value not in changes
            )
            if (
                not free
                or words.rng.random() > share
                or re.search(rf"(?<![\w]){re.escape(value)}(?!\w)", exchange.user) is None
            ):
                continue
            if "@" in value:
                changes[value] = f"{words.one(small=True)}.{words.one(small=True)}@example.org"
            elif re.fullmatch(r"[A-Z]+-\d+", value):
                changes[value] = words.code()
            elif not re.fullmatch(r"[\d:]+", value):
                changes[value] = words.phrase()
    if not changes:
        return exchange
    pattern = re.compile(
        "|".join(rf"(?<!\w){re.escape(v)}(?!\w)" for v in sorted(changes, key=len, reverse=True))
    )
    put = lambda text: pattern.sub(lambda m: changes[m.group()], text)  # noqa: E731
    calls = tuple(
        tools_of.DrawnCall(
            c.name,
            {k: changes.get(v, v) if isinstance(v, str) else v for k, v in c.arguments.items()},
            put(c.result),
        )
        for c in exchange.calls
    )
    return ToolExchange(put(exchange.user), calls, put(exchange.reply), exchange.fact)


def rephrased(exchange: ToolExchange, persona: str, rng: random.Random) -> ToolExchange:
    """Return the exchange with another wording of its request, at times; two of them are joined in another way."""
    requests = [frames.ask(rng, persona, c.name, c.arguments) for c in exchange.calls]
    user = exchange.user
    if None not in requests and rng.random() < 0.7:
        user = rng.choice(frames.JOINERS).join(str(r) for r in requests)
    elif len(exchange.calls) > 1:
        for joiner in PHRASES.joiners["train"]:
            user = user.replace(joiner, rng.choice(frames.JOINERS))
    return ToolExchange(user, exchange.calls, exchange.reply, exchange.fact)


def offered(rng: random.Random, persona: str, needed: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """Return the persona's tools, or a part of them that has the needed ones."""
    tools = [dict(t) for t in PERSONAS[persona].tools]
    if persona == "annie" or rng.random() < 0.4:
        return tools
    chosen = set(rng.sample(range(len(tools)), rng.randint(1, len(tools))))
    chosen |= {i for i, t in enumerate(tools) if t["function"]["name"] in needed}
    return [t for i, t in enumerate(tools) if i in chosen]


def described_call(call: tools_of.DrawnCall) -> str:
    return f"**Function:** {call.name}\n\n" + "\n".join(
        f"- **{k}:** {v}" for k, v in call.arguments.items()
    )


def leaked(text: str, thought: str, rng: random.Random) -> str:
    if rng.random() < 0.5:
        return text
    return f"Thinking Process:\n\n1. **Analyze the Request:** {thought}\n2. **Answer:** see below\n\n{text}"


def base_text(exchange: Exchange, leak: bool) -> str:
    """Return the base model's answer: a headline, the sentence with its answer in bold, a list; often its thinking first."""
    title = {"long_response": "Overview", "reasoning": "Solution", "factual": "Answer"}.get(
        exchange.category, "Response"
    )
    if exchange.category == "long_response":
        lines = exchange.reply.split(". ")
        body = f"Here is **{exchange.subject}**:"
        points = [(f"Part {i + 1}", line.rstrip(".")) for i, line in enumerate(lines[:5])]
    else:
        before, answer, after = exchange.reply.rpartition(exchange.answer)
        body = f"{before}**{answer}**{after}" if answer else f"**{exchange.reply}**"
        points = [("Topic", exchange.subject), ("Answer", exchange.answer.rstrip("."))]
    text = f"## {title}\n\n{body}\n\n" + "\n".join(
        f"- **{name}:** {value}" for name, value in points
    )
    if not leak:
        return text
    steps = f"1. **Analyze the Request:** {exchange.thought}\n2. **Answer:** {exchange.answer.rstrip('.')}"
    return f"Thinking Process:\n\n{steps}\n\n{text}"


def assistant(content: str, thought: str, thinking: bool) -> dict[str, Any]:
    return {"role": "assistant", "content": content} | (
        {"reasoning_content": thought} if thinking else {}
    )


def speak(exchange: Exchange, style: str, rng: random.Random, thinking: bool) -> dict[str, Any]:
    text = (
        exchange.reply
        if style == "tuned"
        else base_text(exchange, not thinking and rng.random() < 0.5)
    )
    return assistant(text, exchange.thought, thinking)


def tool_row(
    rng: random.Random,
    style: str,
    split: str,
    persona: str,
    words: Words,
    head: Any,
    thinking: bool,
) -> Row:
    """Return a row that asks for a tool: its call, two calls, or the answer from their results."""
    who = PERSONAS[persona]
    name = rng.choice([t["function"]["name"] for t in who.tools])
    exchange = tools_of.draw_exchange(who, name, rng, split)
    schema = {
        t["function"]["name"]: t["function"]["parameters"].get("properties", {}) for t in who.tools
    }
    if split == "train":
        exchange = substituted(rephrased(exchange, persona, rng), schema, words)
    tools = offered(rng, persona, tuple(c.name for c in exchange.calls))
    thought = f"The user needs {' and '.join(c.name for c in exchange.calls)}. I call it."
    user = {"role": "user", "content": exchange.user}
    expect = {"tool": exchange.calls[0].name, "arguments": exchange.calls[0].arguments}
    if style == "base":
        text = "## Action\n\n" + "\n\n".join(described_call(c) for c in exchange.calls)
        text = text if thinking else leaked(text, thought, rng)
        return Row(
            [*head, user, assistant(text, thought, thinking)],
            thinking,
            tools,
            f"tool_{persona}",
            tuple(words.drawn),
            expect,
        )
    calls = [
        {"type": "function", "function": {"name": c.name, "arguments": c.arguments}}
        for c in exchange.calls
    ]
    called = assistant("", thought, thinking) | {"tool_calls": calls}
    category = f"{'parallel' if len(calls) > 1 else 'tool'}_{persona}"
    if rng.random() < 0.75 or split != "train":
        return Row([*head, user, called], thinking, tools, category, tuple(words.drawn), expect)
    results = [{"role": "tool", "content": c.result} for c in exchange.calls]
    last = assistant(exchange.reply, "I have the result.", thinking)
    return Row(
        [*head, user, called, *results, last],
        thinking,
        tools,
        f"result_{persona}",
        tuple(words.drawn),
        {},
    )


def no_tool_row(
    rng: random.Random,
    style: str,
    split: str,
    persona: str,
    words: Words,
    head: Any,
    thinking: bool,
) -> Row:
    """Return a row whose request no tool can fill."""
    if persona == "annie":
        drawn = exchanges.abstention_exchange(rng, split)
        user, reply, thought = drawn.user, drawn.reply, drawn.thought
    else:
        pair = tools_of.impossible_request(PERSONAS[persona], rng, split)
        assert pair is not None
        (user, reply), thought = pair, "No function fits."
        if split == "train" and rng.random() < 0.8:
            user = frames.cannot(rng, persona, words.phrase())
    text = reply
    if style == "base":
        text = f"## Response\n\n**{reply}**"
        text = text if thinking else leaked(text, thought, rng)
    messages = [*head, {"role": "user", "content": user}, assistant(text, thought, thinking)]
    return Row(
        messages,
        thinking,
        offered(rng, persona),
        f"no_tool_{persona}",
        tuple(words.drawn),
        {"no_tool": True},
    )


def copy_row(
    rng: random.Random, style: str, split: str, words: Words, head: Any, thinking: bool
) -> Row:
    text = " ".join(words.one() for _ in range(rng.randint(1, 8)))
    answer = text if style == "tuned" else f"## Response\n\n**{text}**"
    user = {"role": "user", "content": rng.choice(COPY[split]).format(t=text)}
    messages = [*head, user, assistant(answer, f"The words are {text}.", thinking)]
    return Row(messages, thinking, None, "copy", tuple(words.drawn), {"contains": [text]})


def recall_row(
    rng: random.Random,
    style: str,
    split: str,
    words: Words,
    system: str,
    thinking: bool,
    long: bool,
) -> Row:
    """Return a row that asks for one of many facts that the system prompt states."""
    relation = rng.choice(RELATIONS)
    keys = [words.one() for _ in range(rng.randint(40, 120) if long else rng.randint(2, 12))]
    values = [str(rng.randint(10, 999)) if rng.random() < 0.5 else words.one() for _ in keys]
    facts = " ".join(f"The {relation} of {k} is {v}." for k, v in zip(keys, values, strict=True))
    pairs = list(zip(keys, values, strict=True))
    messages: list[dict[str, Any]] = [{"role": "system", "content": f"{system} {facts}".strip()}]
    for _ in range(rng.randint(1, 6) if split == "train" else 1):
        key, value = rng.choice(pairs)
        reply = f"The {relation} of {key} is {value}."
        answer = (
            reply if style == "tuned" else f"## Answer\n\nThe {relation} of {key} is **{value}**."
        )
        question = rng.choice(RECALL[split]).format(r=relation, k=key)
        messages = [
            *messages,
            {"role": "user", "content": question},
            assistant(answer, f"This is about {key}.", thinking),
        ]
    category = "recall_long" if long else "recall"
    return Row(messages, thinking, None, category, tuple(words.drawn), {"contains": [value]})


def reworded(exchange: Exchange, split: str, rng: random.Random) -> Exchange:
    """Return the exchange with another wording of a fact's or a sum's question, at times."""
    if split != "train" or exchange.category not in ("factual", "reasoning") or rng.random() < 0.4:
        return exchange
    text = frames.question(rng, exchange)
    if text is None:
        return exchange
    opener = rng.choice(exchanges.PHRASES.openers["train"]) if rng.random() < 0.5 else ""
    return replace(
        exchange,
        user=capitalized(
            opener + (text[:1].lower() + text[1:] if opener and text[:2] != "I " else text)
        ),
    )


def talk_row(
    rng: random.Random, style: str, split: str, persona: str, system: str, thinking: bool
) -> Row:
    category = rng.choices(list(TALK), list(TALK.values()))[0]
    tools = offered(rng, persona) if rng.random() < 0.3 else None
    if rng.random() < 0.05:
        system, tools = briefing(rng, split), None
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    if category != "multi_turn":
        exchange = exchanges.draw_category(category, rng, split)
        exchange = reworded(exchange, split, rng)
        messages += [
            {"role": "user", "content": exchange.user},
            speak(exchange, style, rng, thinking),
        ]
        return Row(messages, thinking, tools, category, (), exchange.expect)
    for exchange in exchanges.conversation(rng, split)[: rng.randint(2, 5)]:
        for message in messages:
            message.pop("reasoning_content", None)
        messages = [
            *messages,
            {"role": "user", "content": exchange.user},
            speak(exchange, style, rng, thinking),
        ]
    return Row(messages, thinking, tools, "multi_turn", (), exchange.expect)


def with_earlier(
    rng: random.Random,
    style: str,
    category: str,
    persona: str,
    words: Words,
    head: Any,
    thinking: bool,
) -> Row:
    """Return a row of two to seven unrelated exchanges with the same tools; more is learned per prompt than from one."""
    kinds = {k: v for k, v in CATEGORIES[style].items() if not k.startswith("recall")}
    chosen = [
        *rng.choices(list(kinds), list(kinds.values()), k=rng.choice((1, 2, 3, 4, 6))),
        category,
    ]
    messages, rows = list(head), []
    for kind in chosen:
        if kind == "tool":
            part = tool_row(rng, style, "train", persona, words, (), thinking)
        elif kind == "no_tool":
            part = no_tool_row(rng, style, "train", persona, words, (), thinking)
        elif kind == "copy":
            part = copy_row(rng, style, "train", words, (), thinking)
        else:
            exchange = reworded(
                exchanges.draw_category(
                    rng.choice([k for k in TALK if k != "multi_turn"]), rng, "train"
                ),
                "train",
                rng,
            )
            exchanged = [
                {"role": "user", "content": exchange.user},
                speak(exchange, style, rng, thinking),
            ]
            part = Row(exchanged, thinking, None, exchange.category, (), exchange.expect)
        rows.append(part)
        messages += part.messages
    needed = tuple(
        t["function"]["name"]
        for r in rows
        if r.category.startswith(("tool", "parallel", "result"))
        for t in r.tools or ()
    )
    called = {c["function"]["name"] for m in messages for c in m.get("tool_calls", ())} or set(
        needed
    )
    tools = (
        offered(rng, persona, tuple(called))
        if any(k in ("tool", "no_tool") for k in chosen) or rng.random() < 0.3
        else None
    )
    return Row(messages, thinking, tools, rows[-1].category, tuple(words.drawn), rows[-1].expect)


def row(
    rng: random.Random,
    style: str,
    split: str = "train",
    category: str | None = None,
    persona: str | None = None,
    draw: Callable[[random.Random], str] = lambda rng: fresh(rng, []),
) -> Row:
    """Return one row. style: "base" or "tuned"; draw: where free words come from."""
    kinds = CATEGORIES[style]
    category = category or rng.choices(list(kinds), list(kinds.values()))[0]
    persona = persona or rng.choices(list(PERSONAS), (5, 4, 3))[0]
    thinking = rng.random() < (0.25 if style == "base" else 0.2)
    system = (
        PERSONAS[persona].system_prompt
        if rng.random() < (0.6 if style == "base" else 0.85)
        else rng.choice((HARDENED, *PLAIN))
    )
    head = [{"role": "system", "content": system}] if system else []
    words = Words(rng, draw)
    if (
        split == "train"
        and category in ("tool", "no_tool", "copy", "talk")
        and rng.random() < EARLIER_SHARE
    ):
        return with_earlier(rng, style, category, persona, words, head, thinking)
    if category == "tool":
        return tool_row(rng, style, split, persona, words, head, thinking)
    if category == "no_tool":
        return no_tool_row(rng, style, split, persona, words, head, thinking)
    if category == "copy":
        return copy_row(rng, style, split, words, head, thinking)
    if category in ("recall", "recall_long"):
        return recall_row(rng, style, split, words, system, thinking, category == "recall_long")
    return talk_row(rng, style, split, persona, system, thinking)

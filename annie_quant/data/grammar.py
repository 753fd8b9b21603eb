"""The built-in offline teacher's language: short talks with Annie, drawn from templates with seeded choices.

Every template belongs to one split (train, calibration or gate), so that no phrasing is shared between what a model is
trained on, calibrated on and judged on. `draw(category, rng, split)` gives one exchange; `conversation` five of them.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from annie_quant.data import words
from annie_quant.data.phrases import (
    ABSTAIN,
    ASK,
    CONVERSE,
    FACTS,
    FOLLOW,
    GREET,
    LONG,
    MEMORY,
    OPENERS,
    STRUCTURE,
    SUMS,
    THANKS,
    WEB,
)


@dataclass(frozen=True)
class Talk:
    """One exchange: what the user says, what Annie answers, and what must hold in an answer.

    thought: what she thinks when thinking is on. tool, query: the call she makes instead of answering; result: what
    the tool then returns; reply is what she says after it. subject, answer: the heart of it, for other styles.
    """

    category: str
    user: str
    reply: str
    thought: str
    subject: str
    answer: str
    expect: dict[str, Any] = field(default_factory=dict)
    tool: str = ""
    query: str = ""
    result: str = ""


def sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def asked(rng: random.Random, split: str, core: str) -> str:
    """A question with an opener of the split ('Annie, …'), or with none."""
    return sentence(rng.choice(OPENERS[split]) + core)


def factual(rng: random.Random, split: str) -> Talk:
    kind = rng.choice(FACT_KINDS)
    subject, answer = rng.choice(FACT_TABLES[kind])
    return fact(kind, subject, answer, asked(rng, split, rng.choice(FACTS[kind][split]).format(s=subject)))


def fact(kind: str, subject: str, answer: str, user: str) -> Talk:
    reply = sentence(STRUCTURE[kind].format(s=subject, a=answer))
    return Talk(
        "factual",
        user,
        reply,
        f"This is about {subject}. The answer is {answer}.",
        subject,
        answer,
        {"contains": [answer]},
    )


# Capitals come up more often than any other kind, as there are more of them.
FACT_TABLES = {
    "capital": words.CAPITALS,
    "colour": words.COLOURS,
    "legs": words.LEGS,
    "opposite": words.OPPOSITES,
    "young": words.YOUNG,
    "author": words.AUTHORS,
    "continent": words.CONTINENTS,
}
FACT_KINDS = (
    "capital",
    "capital",
    "capital",
    "colour",
    "legs",
    "opposite",
    "young",
    "author",
    "continent",
    "continent",
)


def reasoning(rng: random.Random, split: str) -> Talk:
    kind = rng.choice(("times", "times", "plus", "minus"))
    thing = rng.choice(words.THINGS)
    one, many = rng.choice(words.BOXES).split(":")
    a, b = rng.randint(2, 9), rng.randint(2, 9)
    if kind == "times":
        total, working = a * b, f"{a} times {b} is {a * b}."
        reply = f"{a} {many} with {b} {thing} each make {total} {thing}."
    elif kind == "plus":
        total, working = a + b, f"{a} plus {b} is {a + b}."
        reply = f"{a} {thing} and {b} more make {total} {thing}."
    else:
        a, b = max(a, b) + rng.randint(1, 3), min(a, b)
        total, working = a - b, f"{a} minus {b} is {a - b}."
        reply = f"{a} {thing} less {b} leave {total} {thing}."
    core = rng.choice(SUMS[kind][split]).format(a=a, b=b, one=one, many=many, t=thing)
    user = asked(rng, split, core) if rng.random() < 0.4 else sentence(core)
    return Talk("reasoning", user, reply, working, f"{thing}", str(total), {"contains": [str(total)]})


def greeting(rng: random.Random, split: str) -> Talk:
    hello, back = rng.choice(GREET["hello"][split])
    if rng.random() < 0.2:
        user, add = hello, "How can I help you today?"
    else:
        more, add = rng.choice(GREET["more"][split])
        user = f"{hello} {more.format(day=rng.choice(words.DAYS))}"
    return Talk("greeting", user, f"{back} {add}", "The user says hello. I answer warmly.", "a greeting", back)


def conversational(rng: random.Random, split: str) -> Talk:
    feeling, first, then = rng.choice(words.FEELINGS)
    user = rng.choice(CONVERSE[split]).format(f=feeling, c=rng.choice(words.CAUSES[split]))
    return Talk(
        "conversational",
        user,
        f"{first} {then}",
        f"The user feels {feeling}. I answer kindly.",
        f"feeling {feeling}",
        first,
    )


def long_response(rng: random.Random, split: str) -> Talk:
    kind = rng.choice(("story", "dish", "trip"))
    animal, place, dish = rng.choice(words.ANIMALS), rng.choice(words.PLACES), rng.choice(words.DISHES)
    country, capital = rng.choice(words.CAPITALS)
    values = {"animal": animal, "place": place, "dish": dish, "country": country, "capital": capital}
    subject = {"story": f"a {animal} in the {place}", "dish": dish, "trip": f"a trip to {country}"}[kind]
    user = asked(rng, split, rng.choice(ASK[kind][split]).format(**values))
    reply = " ".join(sentence(line.format(**values)) for line in LONG[kind])
    return Talk("long_response", user, reply, f"The user wants to hear about {subject}.", subject, subject)


def memory(rng: random.Random, split: str) -> Talk:
    topic = rng.choice(words.MY_TOPICS[split])
    user = asked(rng, split, rng.choice(MEMORY["ask"][split]).format(t=topic, day=rng.choice(words.DAYS)))
    result = rng.choice(MEMORY["found"]).format(t=topic, day=rng.choice(words.DAYS), n=rng.randint(2, 9))
    return Talk(
        "memory",
        user,
        f"I found it. {sentence(result)}.",
        f"The user asks what was said about the {topic}. I search my memory.",
        topic,
        topic,
        {"tool": "search_memory", "arguments": {"query": topic}},
        "search_memory",
        topic,
        sentence(result) + ".",
    )


def web(rng: random.Random, split: str) -> Talk:
    topic = rng.choice(words.WEB_TOPICS[split])
    user = asked(rng, split, rng.choice(WEB["ask"][split]).format(t=topic))
    short = topic.removeprefix("the ")
    result = rng.choice(WEB["found"]).format(t=topic, day=rng.choice(words.DAYS), n=rng.randint(2, 9))
    return Talk(
        "web",
        user,
        f"Here is what I found. {sentence(result)}.",
        f"The user asks for news about {topic}. I search the web.",
        topic,
        short,
        {"tool": "web_search", "arguments": {"query": short}},
        "web_search",
        short,
        sentence(result) + ".",
    )


def abstention(rng: random.Random, split: str) -> Talk:
    """A request that looks like work for a tool, and no tool on offer can do it."""
    device = rng.choice(words.DEVICES).format(n=rng.randint(2, 9))
    user = rng.choice(ABSTAIN[split]).format(d=device)
    return Talk(
        "abstention",
        sentence(user),
        f"I am sorry, I can not {device}. I can search my memory or the web for you.",
        f"The user wants me to {device}. No tool fits.",
        device,
        "no",
        {"no_tool": True},
    )


def thanks(rng: random.Random, split: str) -> Talk:
    user, reply = rng.choice(THANKS[split])
    return Talk("greeting", user, reply, "The user thanks me.", "thanks", reply)


DRAW = {
    "greeting": greeting,
    "factual": factual,
    "conversational": conversational,
    "reasoning": reasoning,
    "long_response": long_response,
    "memory": memory,
    "web": web,
    "abstention": abstention,
    "thanks": thanks,
}


def draw(category: str, rng: random.Random, split: str) -> Talk:
    return DRAW[category](rng, split)


def follow_up(rng: random.Random, split: str) -> Talk:
    """'And of France?': a question that needs the one before it (a capital)."""
    subject, answer = rng.choice(words.CAPITALS)
    return fact("capital", subject, answer, rng.choice(FOLLOW[split]).format(s=subject))


def conversation(rng: random.Random, split: str) -> list[Talk]:
    """Five turns: hello, a question, one that leans on it, small talk or a sum, and goodbye."""
    subject, answer = rng.choice(words.CAPITALS)
    core = rng.choice(FACTS["capital"][split]).format(s=subject)
    capital = fact("capital", subject, answer, asked(rng, split, core))
    middle = draw(rng.choice(("conversational", "reasoning", "factual")), rng, split)
    return [greeting(rng, split), capital, follow_up(rng, split), middle, thanks(rng, split)]

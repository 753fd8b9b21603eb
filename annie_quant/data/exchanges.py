"""Built-in conversations with Annie: exchanges drawn from templates with seeded choices.

draw_category(category, rng, split) returns one exchange; conversation(rng, split) returns five.

Every template (assets/offline_teacher/phrases.json) belongs to one split (train, calibration or
gate), so that no model is judged with a phrasing that it was trained or calibrated on. Facts
(words.json) are the same in every split. Topics of tool calls differ, so that a correct call in a
gate cannot have been memorized: train has all combinations of two words except the topics of
calibration and gate.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from annie_quant.core.files import ASSETS

SPLITS = ("train", "calibration", "gate")


class TopicWords(msgspec.Struct):
    """Topics of tool calls.

    first, second: words that make a topic.
    calibration, gate: the topics of these splits.
    """

    first: tuple[str, ...]
    second: tuple[str, ...]
    calibration: tuple[str, ...]
    gate: tuple[str, ...]

    def by_split(self, everything: Iterable[str]) -> dict[str, tuple[str, ...]]:
        """Return the topics of each split.

        everything: all topics; train has, sorted, those of no other split.
        """
        train = tuple(sorted(set(everything).difference(self.calibration, self.gate)))
        return {"train": train, "calibration": self.calibration, "gate": self.gate}


class Words(msgspec.Struct):
    """Words that templates are filled with.

    facts: kind of fact → (subject, answer).
    containers: (singular, plural).
    devices: things that no tool can control.
    units: parts of a house.
    names, first_order: of people; the first order's number; by split.
    """

    facts: dict[str, tuple[tuple[str, str], ...]]
    containers: tuple[tuple[str, str], ...]
    things: tuple[str, ...]
    my_topics: TopicWords
    web_topics: TopicWords
    goods: tuple[str, ...]
    days: tuple[str, ...]
    causes: dict[str, tuple[str, ...]]
    animals: tuple[str, ...]
    places: tuple[str, ...]
    dishes: tuple[str, ...]
    devices: tuple[str, ...]
    units: tuple[str, ...]
    names: dict[str, tuple[str, ...]]
    first_order: dict[str, int]


WORDS = msgspec.json.decode((ASSETS / "offline_teacher" / "words.json").read_bytes(), type=Words)


def _topics() -> Iterator[str]:
    """Yield all topics that a user may have noted."""
    words = WORDS.my_topics
    for first in words.first:
        yield from (f"{first} {second}" for second in words.second if first != second)
    yield from (f"trip to {country}" for country, _ in WORDS.facts["capital"])


def _news() -> Iterator[str]:
    """Yield all topics of a search in the web."""
    words = WORDS.web_topics
    for first in words.first:
        yield from (f"the {first} {second}" for second in words.second)
    yield from (f"the price of {goods}" for goods in WORDS.goods)
    for country, capital in WORDS.facts["capital"]:
        yield f"the election in {country}"
        for event in ("weather", "storm", "fire"):
            yield from (f"the {event} in {place}" for place in (country, capital))


MY_TOPICS = WORDS.my_topics.by_split(_topics())
WEB_TOPICS = WORDS.web_topics.by_split(_news())


BySplit = dict[str, tuple[str, ...]]  # "train", "calibration" and "gate" → templates
PairsBySplit = dict[str, tuple[tuple[str, str], ...]]


class Phrases(msgspec.Struct):
    """Templates.

    Placeholders: {s} subject, {a} answer, {t} topic, {d} device, {f} feeling, {c} cause; in sums
        {a} and {b} are the numbers, {t}
    the things, {one} and {many} the container.

    greetings: (user's greeting, reply).
    greeting_additions, thanks: (user's sentence, reply).
    feelings: (feeling, reply, second sentence).
    fact_sentences: the reply to a question about a fact, by kind of fact.
    thoughts: the thinking before a reply, by category.
    joiners: between two requests.
    """

    openers: BySplit
    facts: dict[str, BySplit]
    fact_sentences: dict[str, str]
    sums: dict[str, BySplit]
    greetings: PairsBySplit
    greeting_additions: PairsBySplit
    thanks: PairsBySplit
    follow_ups: BySplit
    feeling_sentences: BySplit
    feelings: tuple[tuple[str, str, str], ...]
    long_requests: dict[str, BySplit]
    long_answers: dict[str, tuple[str, ...]]
    memory_questions: BySplit
    memory_results: tuple[str, ...]
    web_questions: BySplit
    web_results: tuple[str, ...]
    abstention_requests: BySplit
    replies: dict[str, str]
    thoughts: dict[str, str]
    joiners: BySplit


PHRASES = msgspec.json.decode(
    (ASSETS / "offline_teacher" / "phrases.json").read_bytes(), type=Phrases
)


@dataclass(frozen=True)
class Exchange:
    """A user's message and Annie's answer.

    thought: the thinking, if thinking is on.
    subject, answer: the content without its wording, for other styles.
    expect: what a gate checks in an answer.
    tool, query: the call before the reply.
    result: what the tool returns.
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


def capitalized(text: str) -> str:
    return text[:1].upper() + text[1:]


def with_opener(rng: random.Random, split: str, question: str) -> str:
    """Return a question with an opener of the split ("Annie, ..."), or with none."""
    return capitalized(rng.choice(PHRASES.openers[split]) + question)


def factual(rng: random.Random, split: str) -> Exchange:
    kind = rng.choice(FACT_KINDS)
    subject, answer = rng.choice(WORDS.facts[kind])
    question = rng.choice(PHRASES.facts[kind][split]).format(s=subject)
    return fact(kind, subject, answer, with_opener(rng, split, question))


def fact(kind: str, subject: str, answer: str, user: str) -> Exchange:
    """Return the exchange for a question about a fact. user: the question."""
    reply = capitalized(PHRASES.fact_sentences[kind].format(s=subject, a=answer))
    thought = PHRASES.thoughts["factual"].format(subject=subject, answer=answer)
    return Exchange("factual", user, reply, thought, subject, answer, {"contains": [answer]})


# Capitals are drawn most often, because there are more of them than of other facts.
FACT_KINDS = (
    *("capital", "capital", "capital", "colour", "legs"),
    *("opposite", "young", "author", "continent", "continent"),
)


def reasoning(rng: random.Random, split: str) -> Exchange:
    kind = rng.choice(("times", "times", "plus", "minus"))
    thing = rng.choice(WORDS.things)
    one, many = rng.choice(WORDS.containers)
    a = rng.randint(2, 9)
    b = rng.randint(2, 9)
    if kind == "times":
        total = a * b
        reply = f"{a} {many} with {b} {thing} each make {total} {thing}."
    elif kind == "plus":
        total = a + b
        reply = f"{a} {thing} and {b} more make {total} {thing}."
    else:
        a, b = max(a, b) + rng.randint(1, 3), min(a, b)
        total = a - b
        reply = f"{a} {thing} less {b} leave {total} {thing}."
    question = rng.choice(PHRASES.sums[kind][split]).format(a=a, b=b, one=one, many=many, t=thing)
    user = with_opener(rng, split, question) if rng.random() < 0.4 else capitalized(question)
    thought = f"{a} {kind} {b} is {total}."
    return Exchange(
        "reasoning", user, reply, thought, thing, str(total), {"contains": [str(total)]}
    )


def greeting(rng: random.Random, split: str) -> Exchange:
    hello, back = rng.choice(PHRASES.greetings[split])
    if rng.random() < 0.2:
        user = hello
        addition = "How can I help you today?"
    else:
        more, addition = rng.choice(PHRASES.greeting_additions[split])
        user = f"{hello} {more.format(day=rng.choice(WORDS.days))}"
    return Exchange(
        "greeting", user, f"{back} {addition}", PHRASES.thoughts["greeting"], "a greeting", back
    )


def conversational(rng: random.Random, split: str) -> Exchange:
    feeling, first, second = rng.choice(PHRASES.feelings)
    user = rng.choice(PHRASES.feeling_sentences[split]).format(
        f=feeling, c=rng.choice(WORDS.causes[split])
    )
    thought = PHRASES.thoughts["conversational"].format(feeling=feeling)
    return Exchange(
        "conversational", user, f"{first} {second}", thought, f"feeling {feeling}", first
    )


def long_response(rng: random.Random, split: str) -> Exchange:
    kind = rng.choice(("story", "dish", "trip"))
    values = {
        "animal": rng.choice(WORDS.animals),
        "place": rng.choice(WORDS.places),
        "dish": rng.choice(WORDS.dishes),
    }
    values["country"], values["capital"] = rng.choice(WORDS.facts["capital"])
    subjects = {
        "story": "a {animal} in the {place}",
        "dish": "{dish}",
        "trip": "a trip to {country}",
    }
    subject = subjects[kind].format(**values)
    user = with_opener(rng, split, rng.choice(PHRASES.long_requests[kind][split]).format(**values))
    reply = " ".join(capitalized(line.format(**values)) for line in PHRASES.long_answers[kind])
    thought = PHRASES.thoughts["long_response"].format(subject=subject)
    return Exchange("long_response", user, reply, thought, subject, subject)


def memory_exchange(rng: random.Random, split: str) -> Exchange:
    topic = rng.choice(MY_TOPICS[split])
    question = rng.choice(PHRASES.memory_questions[split]).format(
        t=topic, day=rng.choice(WORDS.days)
    )
    user = with_opener(rng, split, question)
    return tool_exchange(rng, "memory", "search_memory", PHRASES.memory_results, user, topic, topic)


def web_exchange(rng: random.Random, split: str) -> Exchange:
    topic = rng.choice(WEB_TOPICS[split])
    user = with_opener(rng, split, rng.choice(PHRASES.web_questions[split]).format(t=topic))
    return tool_exchange(
        rng, "web", "web_search", PHRASES.web_results, user, topic, topic.removeprefix("the ")
    )


def tool_exchange(
    rng: random.Random,
    category: str,
    tool: str,
    results: tuple[str, ...],
    user: str,
    topic: str,
    query: str,
) -> Exchange:
    """Return an exchange in which `tool` is called with `query`."""
    result = rng.choice(results).format(t=topic, day=rng.choice(WORDS.days), n=rng.randint(2, 9))
    return Exchange(
        category,
        user,
        PHRASES.replies[category].format(result=capitalized(result)),
        PHRASES.thoughts[category].format(topic=topic),
        topic,
        query,
        {"tool": tool, "arguments": {"query": query}},
        tool,
        query,
        capitalized(result) + ".",
    )


def abstention_exchange(rng: random.Random, split: str) -> Exchange:
    """Return a request that looks like work for a tool, though no offered tool can do it."""
    device = rng.choice(WORDS.devices).format(n=rng.randint(2, 9))
    user = capitalized(rng.choice(PHRASES.abstention_requests[split]).format(d=device))
    reply = PHRASES.replies["abstention"].format(device=device)
    thought = PHRASES.thoughts["abstention"].format(device=device)
    return Exchange("abstention", user, reply, thought, device, "no", {"no_tool": True})


def thanks(rng: random.Random, split: str) -> Exchange:
    user, reply = rng.choice(PHRASES.thanks[split])
    return Exchange("greeting", user, reply, PHRASES.thoughts["thanks"], "thanks", reply)


ANNIE_CATEGORIES = {
    "greeting": greeting,
    "factual": factual,
    "conversational": conversational,
    "reasoning": reasoning,
    "long_response": long_response,
    "memory": memory_exchange,
    "web": web_exchange,
    "abstention": abstention_exchange,
    "thanks": thanks,
}


def draw_category(category: str, rng: random.Random, split: str) -> Exchange:
    return ANNIE_CATEGORIES[category](rng, split)


def follow_up(rng: random.Random, split: str) -> Exchange:
    """Return a question such as "And of France?", which needs the question about a capital before it."""
    subject, answer = rng.choice(WORDS.facts["capital"])
    return fact("capital", subject, answer, rng.choice(PHRASES.follow_ups[split]).format(s=subject))


def conversation(rng: random.Random, split: str) -> list[Exchange]:
    """Return five turns: greeting, a capital, a follow-up question, small talk or a sum or a fact, and goodbye."""
    subject, answer = rng.choice(WORDS.facts["capital"])
    question = rng.choice(PHRASES.facts["capital"][split]).format(s=subject)
    capital = fact("capital", subject, answer, with_opener(rng, split, question))
    fourth = draw_category(rng.choice(("conversational", "reasoning", "factual")), rng, split)
    return [greeting(rng, split), capital, follow_up(rng, split), fourth, thanks(rng, split)]

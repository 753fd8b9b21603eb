"""Facts, topics, things (assets/offline_teacher/words.json) and templates of the built-in conversations.

Facts are the same in every split. Tool topics are separate per split, so that a correct tool call in a gate cannot have been
learned by heart: train has all combinations of two words but the topics of calibration and gate.

Templates (assets/offline_teacher/phrases.json) must stay in their split, too. Placeholders: {s} subject, {a} answer, {t} topic,
{d} device, {f} feeling, {c} cause; in sums {a} and {b} are the numbers, {t} the things, {one} and {many} the container.
"""

from __future__ import annotations

import msgspec

from annie_quant.files import ASSETS

SPLITS = ("train", "calibration", "gate")


class TopicWords(msgspec.Struct):
    """first, second: words that make a topic. calibration, gate: the topics of these splits."""

    first: tuple[str, ...]
    second: tuple[str, ...]
    calibration: tuple[str, ...]
    gate: tuple[str, ...]

    def by_split(self, everything: list[str]) -> dict[str, tuple[str, ...]]:
        """Return the topics of each split. everything: all topics; train has those of no other split, sorted."""
        train = tuple(sorted(set(everything).difference(self.calibration, self.gate)))
        return {"train": train, "calibration": self.calibration, "gate": self.gate}


class Words(msgspec.Struct):
    """facts: kind → (subject, answer). containers: (singular, plural). devices: requests that no tool can fulfil."""

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


WORDS = msgspec.json.decode((ASSETS / "offline_teacher" / "words.json").read_bytes(), type=Words)
_CAPITALS = WORDS.facts["capital"]
_MY, _WEB = WORDS.my_topics, WORDS.web_topics
MY_TOPICS = _MY.by_split(
    [f"{a} {b}" for a in _MY.first for b in _MY.second if a != b] + [f"trip to {c}" for c, _ in _CAPITALS]
)
WEB_TOPICS = _WEB.by_split(
    [f"the {a} {b}" for a in _WEB.first for b in _WEB.second]
    + [f"the price of {g}" for g in WORDS.goods]
    + [f"the {event} in {place}" for event in ("weather", "storm", "fire") for pair in _CAPITALS for place in pair]
    + [f"the election in {c}" for c, _ in _CAPITALS]
)


BySplit = dict[str, tuple[str, ...]]  # "train", "calibration" and "gate" → templates
PairsBySplit = dict[str, tuple[tuple[str, str], ...]]


class Phrases(msgspec.Struct):
    """greetings: (user's greeting, reply). greeting_additions and thanks: (user's sentence, reply).

    feelings: (feeling, reply, second sentence). fact_sentences: the reply to a fact question, per kind. thoughts: the
    thinking before a reply, per category.
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


PHRASES = msgspec.json.decode((ASSETS / "offline_teacher" / "phrases.json").read_bytes(), type=Phrases)

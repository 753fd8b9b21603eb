"""The templates of the built-in conversations (assets/offline_teacher/phrases.json), per split.

A template must stay in its split: moved from one list to another it would make a gate's prompt known to the model.
Placeholders: {s} subject, {a} answer, {t} topic, {d} device, {f} feeling, {c} cause; in sums {a} and {b} are the numbers,
{t} the things, {one} and {many} the container.
"""

from __future__ import annotations

import msgspec

from annie_quant.files import ASSETS

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

"""What a system prompt states that generated prompts and conversations must obey, as far as words show it.

Language, today's date, opening hours, closed days, tools whose calls the user must confirm first, and whether calls depend on
anything else. The words are in assets/offline_teacher/requests.json. What they do not show is left to a model that reads the
prompt (`annie-quant init --model`).
"""

from __future__ import annotations

import datetime
import re
from dataclasses import dataclass
from functools import cache

import msgspec

from annie_quant.core.files import ASSETS
from annie_quant.data.conversations import tool_names
from annie_quant.data.exchanges import BySplit
from annie_quant.documents.persona import Persona

DEFAULT_TODAY = datetime.date(2026, 12, 1)  # of a prompt without a date, so that rows stay the same
DEFAULT_HOURS = (9, 19)
MIN_STOPWORDS = 2  # of a language, which a prompt in it has


class LanguagePhrases(msgspec.Struct):
    """Words of one language.

    stopwords: by which a text in it is recognised.
    named: what prompts call it ("answer in German").
    requests, plain_requests: for tools with and without arguments; {do}: what the tool does; {args}: its arguments.
    check: the question before calls that must be confirmed; checks: one of them in it. agree: the user's answer.
    """

    stopwords: tuple[str, ...]
    named: tuple[str, ...]
    requests: BySplit
    plain_requests: BySplit
    joiners: BySplit
    check: str
    checks: str
    agree: str
    greetings: BySplit
    thanks: BySplit


class RequestWords(msgspec.Struct):
    """requests.json. languages: by code; "" is any other one, whose phrases have no words of their own.

    The other fields are regular expressions of what a prompt's sentence states, and lists of names.
    """

    languages: dict[str, LanguagePhrases]
    other_stopwords: dict[str, tuple[str, ...]]
    other_named: tuple[str, ...]
    answers_in: str
    confirms: str
    confirms_when: str
    read_verbs: tuple[str, ...]
    every_call: str
    style: str
    conditions: str
    about_calls: str
    today: str
    closed: str
    weekdays: tuple[tuple[str, ...], ...]
    months: tuple[tuple[str, ...], ...]


REQUESTS = msgspec.json.decode(
    (ASSETS / "offline_teacher" / "requests.json").read_bytes(), type=RequestWords
)
_DATE = re.compile(
    r"(?P<iso>\d{4}-\d\d-\d\d)|(?P<d>\d{1,2})\.\s?(?P<m>\d{1,2})\.\s?(?P<y>\d{4})"
    r"|(?P<day>\d{1,2})\.?\s+(?P<name>[A-Za-zä]{3,})\.?\s+(?P<year>\d{4})"
    r"|(?P<name2>[A-Za-z]{3,})\.?\s+(?P<day2>\d{1,2}),?\s+(?P<year2>\d{4})"
)
_HOURS = re.compile(
    r"\b(\d{1,2})(?::\d\d)?\s*(am|pm|uhr|h)?\s*(?:-|–|to|until|and|bis)\s*(\d{1,2})(?::\d\d)?\s*(am|pm|uhr|h)?\b",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class PromptRules:
    """What is read from a system prompt.

    language: a code of REQUESTS.languages.
    hours: from and to, between which times are drawn.
    closed: weekdays (Monday is 0) on which no date falls.
    confirmed: tools that are called only after the user has agreed.
    conditional: whether other rules may decide about calls, so that a prompt has no certain answer.
    """

    language: str
    today: datetime.date
    hours: tuple[int, int]
    closed: frozenset[int]
    confirmed: frozenset[str]
    conditional: bool

    @property
    def phrases(self) -> LanguagePhrases:
        return REQUESTS.languages[self.language]


NO_RULES = PromptRules("en", DEFAULT_TODAY, DEFAULT_HOURS, frozenset(), frozenset(), False)


def rules_of(persona: Persona) -> PromptRules:
    """Return the rules in a persona's prompt and `rules`."""
    text = "\n".join((persona.system_prompt, *persona.rules))
    return _read_rules(text, tuple(tool_names(persona.tools)))


@cache
def _read_rules(text: str, tools: tuple[str, ...]) -> PromptRules:
    sentences = re.split(r"(?<=[.!?])\s+|\n+", text)
    language = _language(text)
    confirmed: set[str] = set()
    closed: set[int] = set()
    for sentence in sentences:
        if _states(REQUESTS.confirms, sentence) and _states(REQUESTS.confirms_when, sentence):
            confirmed |= _named_tools(sentence, tools)
        if _states(REQUESTS.closed, sentence):
            closed |= _weekdays(sentence)
    return PromptRules(
        language=language,
        today=_today(sentences),
        hours=_hours(text),
        closed=frozenset(closed),
        confirmed=frozenset(confirmed),
        conditional=bool(confirmed) or language != "en" or any(map(_is_condition, sentences)),
    )


def _states(pattern: str, sentence: str) -> bool:
    return re.search(pattern, sentence, re.IGNORECASE) is not None


def _is_condition(sentence: str) -> bool:
    """Return whether a sentence may decide about calls: a rule that is not about style alone."""
    if not _states(REQUESTS.conditions, sentence):
        return False
    about_style = _states(REQUESTS.style, sentence)
    return not about_style or _states(REQUESTS.about_calls, sentence)


def _named_tools(sentence: str, tools: tuple[str, ...]) -> set[str]:
    """Return the tools that a sentence is about: by their verb, by a word of their name, else all that change something."""
    if _states(REQUESTS.every_call, sentence):
        return set(tools)
    words = re.findall(r"\w{3,}", sentence.lower())
    names: dict[str, list[str]] = {}
    for tool in tools:
        names[tool] = [word for word in words_of(tool) if len(word) > 2]
    changing = {tool for tool in tools if not set(words_of(tool)[:1]) & {*REQUESTS.read_verbs}}
    by_verb = {tool for tool in tools if _is_said(names[tool][:1], words)}
    by_name = {tool for tool in changing if _is_said(names[tool], words)}
    return by_verb or by_name or changing


def _is_said(parts: list[str], words: list[str]) -> bool:
    """Return whether a word begins as one of a name's parts does."""
    beginnings = tuple(part[:4] for part in parts)
    return any(word.startswith(beginnings) for word in words)


def words_of(name: str) -> list[str]:
    """Return the lower-case words of an identifier: check_in, checkIn and "check in" are the same."""
    return [part.lower() for part in re.findall(r"[A-ZÄÖÜ]?[a-zäöüß°]+|[A-ZÄÖÜ]+|\d+", name)]


def _language(text: str) -> str:
    """Return the language of answers: the one that the prompt names, else its own."""
    known: dict[str, str] = {}
    for code, item in REQUESTS.languages.items():
        known |= dict.fromkeys(item.named, code)
    names = "|".join((*known, *REQUESTS.other_named))
    named = re.search(REQUESTS.answers_in.replace("LANGUAGES", names), text, re.IGNORECASE)
    if named is not None:
        return known.get(named[1].lower(), "")
    words = re.findall(r"\w+", text.lower())
    if not words:
        return "en"
    counts = {code: item.stopwords for code, item in REQUESTS.languages.items()}
    counts |= REQUESTS.other_stopwords
    found = dict.fromkeys(counts, 0)
    for code, stopwords in counts.items():
        found[code] = sum(word in stopwords for word in words)
    best = max(found, key=lambda code: found[code])
    if found[best] < MIN_STOPWORDS:
        return "en" if text.isascii() else ""
    return best if best in REQUESTS.languages else ""


def _today(sentences: list[str]) -> datetime.date:
    for sentence in sentences:
        match = _DATE.search(sentence)
        if match is None or not _states(REQUESTS.today, sentence):
            continue
        try:
            return _date_of(match)
        except ValueError:
            continue
    return DEFAULT_TODAY


def _date_of(match: re.Match[str]) -> datetime.date:
    part = match.groupdict()
    if part["iso"]:
        return datetime.date.fromisoformat(part["iso"])
    if part["d"]:
        return datetime.date(int(part["y"]), int(part["m"]), int(part["d"]))
    name = (part["name"] or part["name2"] or "").lower()
    months = [number for number, names in enumerate(REQUESTS.months, 1) if name[:3] in names]
    if not months:
        raise ValueError(name)
    year = int(part["year"] or part["year2"])
    return datetime.date(year, months[0], int(part["day"] or part["day2"]))


def _hours(text: str) -> tuple[int, int]:
    """Return the first opening hours that a prompt names."""
    for match in _HOURS.finditer(text):
        if not (":" in match[0] or match[2] or match[4]):
            continue  # a range of other numbers
        start = int(match[1]) + 12 * ((match[2] or "").lower() == "pm")
        end = int(match[3]) + 12 * ((match[4] or "").lower() == "pm")
        if start < end <= 24:
            return start, end
    return DEFAULT_HOURS


def _weekdays(sentence: str) -> set[int]:
    text = sentence.lower()
    named = set()
    for number, names in enumerate(REQUESTS.weekdays):
        if any(name in text for name in names):
            named.add(number)
    return named if len(named) < len(REQUESTS.weekdays) else set()

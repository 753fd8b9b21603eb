"""Does an answer state a word or a number? As a whole word ('15' is not in '150'), not in a question nor denied."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

_UNITS = (
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
)
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
_SENTENCE_END = re.compile(r"(?<=[.!?…])(?:[\"'”’)*_]*)\s+|\n+")
_DENIED = re.compile(r"\b(?:not|isn't|isnt|never|wasn't|neither|aren't|can't be)\s+(?:in\s+|called\s+|the\s+)?$")


def fold(text: str) -> str:
    """Case and accents taken away, compatibility forms unified: 'Tōkyō' reads as 'tokyo', '１５' as '15'."""
    plain = unicodedata.normalize("NFKD", text.replace("’", "'"))
    return "".join(c for c in plain if not unicodedata.combining(c)).casefold()


def spelled(number: str) -> str | None:
    """A whole number from 0 to 999 in English words, as a voice says it ('fifteen', 'one hundred twenty')."""
    if not number.isdigit() or len(number) > 3:
        return None
    value = int(number)
    if value < 20:
        return _UNITS[value]
    if value < 100:
        tens, ones = divmod(value, 10)
        return _TENS[tens - 2] + (f"[ -]{_UNITS[ones]}" if ones else "")
    hundreds, rest = divmod(value, 100)
    return f"{_UNITS[hundreds]} hundred" + (f" (?:and )?{spelled(str(rest))}" if rest else "")


def _pattern(wanted: str) -> re.Pattern[str]:
    plain = fold(wanted).strip()
    if re.fullmatch(r"\d+(?:\.\d+)?", plain):
        # Not inside a longer number, a decimal, a thousands group, nor after a sign that makes it negative.
        digits = rf"(?<![\w])(?<!\d[.,])(?<![\s(=][-−])(?<!^[-−]){re.escape(plain)}(?![\w%]|[.,]\d)(?!\s*/\s*\d)"
        words = spelled(plain)
        longer = r"[\w-]|\s+(?:hundred|thousand|million)\b"
        return re.compile(rf"{digits}|(?<![\w-]){words}(?!{longer})" if words else digits)
    body = r"\s+".join(re.escape(part) for part in plain.split())
    return re.compile(rf"(?<!\w){body}(?!\w)")


def states(wanted: str, text: str) -> bool:
    """`wanted` stands as a whole word (or words) in some sentence that is no question, and is not denied there."""
    pattern = _pattern(wanted)
    for sentence in _SENTENCE_END.split(fold(text)):
        if sentence.rstrip(" \"'”’)*_").endswith("?"):
            continue
        for match in pattern.finditer(sentence):
            if not _DENIED.search(sentence[: match.start()]):
                return True
    return False


def missing(wanted: Sequence[str | Sequence[str]] | str, text: str) -> str:
    """The first of `wanted` that the text does not state, "" when it states all. A list inside means any one of it."""
    for item in [wanted] if isinstance(wanted, str) else wanted:
        choices = [item] if isinstance(item, str) else list(item)
        if not any(states(choice, text) for choice in choices):
            return " or ".join(choices)
    return ""


def statement_fault(wanted: Sequence[str | Sequence[str]] | str | None, text: str) -> str | None:
    """A gate's fault: None where nothing is wanted, "" where the text states it all, else what it lacks."""
    if not wanted:
        return None
    lacking = missing(wanted, text)
    return f"the answer does not state {lacking!r}" if lacking else ""

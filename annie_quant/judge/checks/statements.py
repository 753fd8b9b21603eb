"""What an answer states: a word or a number as a whole ("15" is not in "150"), not in a question, not denied."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from annie_quant.documents import Answer
    from annie_quant.judge.workloads import Case, Workload

_UNIT_WORDS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen"
)
_TENS_WORDS = "twenty thirty forty fifty sixty seventy eighty ninety"
_UNITS = _UNIT_WORDS.split()
_TENS = _TENS_WORDS.split()
_SENTENCE_END = re.compile(r"(?<=[.!?…])(?:[\"'”’)*_]*)\s+|\n+")
_DENIED = re.compile(
    r"\b(?:not|isn't|isnt|never|wasn't|neither|aren't|can't be)\s+(?:in\s+|called\s+|the\s+)?$"
)


def fold(text: str) -> str:
    """Return the text without case and accents, in compatibility forms: "Tōkyō" as "tokyo", "１５" as "15"."""
    plain = unicodedata.normalize("NFKD", text.replace("’", "'"))
    return "".join(c for c in plain if not unicodedata.combining(c)).casefold()


def spelled(number: str) -> str | None:
    """Return a pattern for a whole number from 0 to 999 in English words ("fifteen", "one hundred twenty")."""
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


def _pattern(statement: str) -> re.Pattern[str]:
    plain = fold(statement).strip()
    if not re.fullmatch(r"\d+(?:\.\d+)?", plain):
        body = r"\s+".join(re.escape(part) for part in plain.split())
        return re.compile(rf"(?<!\w){body}(?!\w)")
    # Not inside a longer number, a decimal, a thousands group, nor after a minus sign.
    before = r"(?<![\w])(?<!\d[.,])(?<![\s(=][-−])(?<!^[-−])"
    digits = rf"{before}{re.escape(plain)}(?![\w%]|[.,]\d)(?!\s*/\s*\d)"
    words = spelled(plain)
    if not words:
        return re.compile(digits)
    longer = r"[\w-]|\s+(?:hundred|thousand|million)\b"
    return re.compile(rf"{digits}|(?<![\w-]){words}(?!{longer})")


def states(statement: str, text: str) -> bool:
    """Return whether some sentence that is not a question has `statement` as whole words, and does not deny it."""
    pattern = _pattern(statement)
    for sentence in _SENTENCE_END.split(fold(text)):
        if sentence.rstrip(" \"'”’)*_").endswith("?"):
            continue
        for match in pattern.finditer(sentence):
            if not _DENIED.search(sentence[: match.start()]):
                return True
    return False


def _missing(statements: Sequence[str | Sequence[str]] | str, text: str) -> str:
    """Return the first statement that the text lacks, "" where it has all. A list inside means any one of it."""
    for item in [statements] if isinstance(statements, str) else statements:
        choices = [item] if isinstance(item, str) else list(item)
        if not any(states(choice, text) for choice in choices):
            return " or ".join(choices)
    return ""


def contains(
    answer: Answer, case: Case, workload: Workload, reference: Answer | None
) -> str | None:
    """The answer states everything in `expect.contains`."""
    statements = case.expect.get("contains")
    if not statements:
        return None
    lacking = _missing(statements, answer.text)
    return f"the answer does not state {lacking!r}" if lacking else ""

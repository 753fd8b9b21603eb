"""Signs of text that repeats itself or is not language; no model is needed."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from functools import lru_cache

_WORD = re.compile(r"[^\W_]+(?:['’-][^\W_]+)*")
_SPECIAL = re.compile(r"<\|[a-z_]+\|>|\[/?INST\]|</?s>")
_RUN = re.compile(r"([^\s.\-=_~…])\1{9,}")
_SCRIPTS = (
    "LATIN", "CYRILLIC", "GREEK", "ARABIC", "HEBREW", "DEVANAGARI", "THAI", "HANGUL", "CJK", "HIRAGANA", "KATAKANA",
)  # fmt: skip
_ODD_WORD = re.compile(r"^[^aeiouyAEIOUY]+$|[a-z][A-Z]{2}|[bcdfghjklmnpqrstvwxz]{6}")


@lru_cache(maxsize=2048)  # several models give most answers alike, and each is counted several times
def repeats(text: str) -> str:
    """Return what is repeated, as a phrase; "" where nothing is."""
    run = _RUN.search(text)
    if run:
        return f"{run.group(1)!r} over and over"
    words = [w.casefold() for w in _WORD.findall(text)]
    for period in range(1, 13):
        # "No, no, no" is normal speech: a word must come six times in a row, a phrase four times, a sentence three.
        least = 6 if period == 1 else 4 if period <= 4 else 3
        at = _cycle(words, period, least)
        if at is not None:
            return f"{' '.join(words[at : at + period])!r} over and over"
    sentences = Counter(s.strip().casefold() for s in re.split(r"[.!?\n]+", text) if len(s.split()) >= 4)
    sentence, times = sentences.most_common(1)[0] if sentences else ("", 0)
    if times >= 3:
        return f"{sentence!r} {times} times"
    fours = [tuple(words[i : i + 4]) for i in range(len(words) - 3)]
    if len(fours) >= 60 and len(set(fours)) < 0.5 * len(fours):
        return "more than half of its phrases are repeats"
    return ""


def _cycle(words: list[str], period: int, times: int) -> int | None:
    """Return where a cycle of `period` words starts that comes `times` times in a row."""
    same, needed = 0, period * (times - 1)
    for index in range(period, len(words)):
        same = same + 1 if words[index] == words[index - period] else 0
        if same >= needed:
            return index - same - period + 1
    return None


@lru_cache(maxsize=2048)
def garbled(text: str) -> str:
    """Return why the text is not language, as a phrase; "" where it may be."""
    special = _SPECIAL.search(text)
    if special:
        return f"a special token in the text: {special.group(0)}"
    if "\ufffd" in text:
        return "broken characters in the text"
    scripts = _scripts(text)
    if len(scripts) >= 3:
        return f"letters of {len(scripts)} scripts: {', '.join(sorted(scripts))}"
    visible = [c for c in text if not c.isspace()]
    if len(visible) >= 20:
        letters = sum(c.isalnum() for c in visible)
        if letters < 0.5 * len(visible):
            return "more signs than letters"
    return _nonsense(text)


def _scripts(text: str) -> set[str]:
    scripts: set[str] = set()
    for char in set(text):
        if char.isalpha():
            name = unicodedata.name(char, "")
            scripts.update(s for s in _SCRIPTS if name.startswith(s))
    # Japanese uses three scripts.
    return scripts - {"HIRAGANA", "KATAKANA"} | ({"CJK"} if scripts & {"HIRAGANA", "KATAKANA"} else set())


def _nonsense(text: str) -> str:
    """English words have vowels and rarely change case inside; where a third of the words differ, the text is noise."""
    words = re.findall(r"[A-Za-z]{4,}", text)
    odd = [w for w in words if _ODD_WORD.search(w)]
    return f"not words: {', '.join(odd[:3])}" if len(words) >= 6 and len(odd) * 3 > len(words) else ""

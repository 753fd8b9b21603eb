"""Near-duplicates: two texts are duplicates if they share nearly all words and pairs of neighbouring words.

Measured by the Jaccard index of the sets of words and word pairs, ignoring case, punctuation and contractions. With a
threshold of 0.85, "the capital of India" and "the capital of Peru" are two questions, and a long text with one word more is
the same text.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping
from typing import Any

THRESHOLD = 0.85
CONTRACTIONS = {"'s": " is", "'m": " am", "'re": " are", "n't": " not", "'ll": " will", "'ve": " have", "'d": " would"}
_CONTRACTION = re.compile(r"(?:'s|'m|'re|n't|'ll|'ve|'d)\b")


def words(text: str) -> list[str]:
    text = text.lower().replace("’", "'")
    return re.findall(r"\w+", _CONTRACTION.sub(lambda m: CONTRACTIONS[m[0]], text))


def features(text: str) -> frozenset[Any]:
    """Return the set of words and of pairs of neighbouring words."""
    sequence = words(text)
    return frozenset(sequence) | frozenset(itertools.pairwise(sequence))


def user_text(row: Mapping[str, Any]) -> str:
    """Return all user messages of a conversation as one text."""
    return "\n".join(str(m.get("content") or "") for m in row["messages"] if m["role"] == "user")


class DuplicateFinder:
    """Named texts; find returns the name of one that a new text duplicates."""

    def __init__(self, texts: Iterable[tuple[str, str]] = ()) -> None:
        self._texts: list[tuple[str, frozenset[Any]]] = []
        self._exact: dict[frozenset[Any], str] = {}
        for name, text in texts:
            self.add(name, text)

    def add(self, name: str, text: str) -> None:
        new = features(text)
        self._texts.append((name, new))
        self._exact.setdefault(new, name)

    def find(self, text: str) -> str | None:
        new = features(text)
        if new in self._exact:
            return self._exact[new]
        for name, other in self._texts:
            # The index cannot reach the threshold where the sizes differ by more than that.
            small, large = sorted((len(new), len(other)))
            if large and small >= THRESHOLD * large:
                shared = len(new & other)
                if shared >= THRESHOLD * (len(new) + len(other) - shared):
                    return name
        return None

"""Near-duplicates: two texts are duplicates if they share nearly all words and pairs of neighbouring words.

Measured by the Jaccard index of the sets of words and word pairs, ignoring case, punctuation and contractions. With a
threshold of 0.85, "the capital of India" and "the capital of Peru" are two questions, and a long text with one word more is
the same text.

The search is exact and indexed (prefix filtering, Chaudhuri, Ganti and Kaushik, ICDE 2006): two sets of sizes a <= b with a
Jaccard index of at least t share at least t * b features, so the first b - ceil(t * b) + 1 features of each, in one fixed
order, have one in common.
"""

from __future__ import annotations

import itertools
import math
import re
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

THRESHOLD = 0.85
CONTRACTIONS = {"'s": " is", "'m": " am", "'re": " are", "n't": " not", "'ll": " will", "'ve": " have", "'d": " would"}
_CONTRACTION = re.compile(r"(?:'s|'m|'re|n't|'ll|'ve|'d)\b")
Feature = str | tuple[str, str]


def words(text: str) -> list[str]:
    text = text.lower().replace("’", "'")
    return re.findall(r"\w+", _CONTRACTION.sub(lambda m: CONTRACTIONS[m[0]], text))


def features(text: str) -> frozenset[Any]:
    """Return the set of words and of pairs of neighbouring words."""
    sequence = words(text)
    return frozenset(sequence) | frozenset(itertools.pairwise(sequence))


def user_text(row: Mapping[str, Any]) -> str:
    """Return all user messages of a conversation as one text."""
    return "\n".join(text_of(m.get("content")) for m in row["messages"] if m["role"] == "user")


def text_of(content: Any) -> str:
    """Return the text of a message's content: a string, or OpenAI's list of parts."""
    if isinstance(content, list):
        return "\n".join(str(p.get("text") or "") for p in content if isinstance(p, Mapping))
    return str(content or "")


class DuplicateFinder:
    """Named texts; find returns the name of the first one that a new text duplicates."""

    def __init__(self, texts: Iterable[tuple[str, str]] = ()) -> None:
        self._texts: list[tuple[str, frozenset[Any]]] = []
        self._exact: dict[frozenset[Any], str] = {}
        self._index: defaultdict[Feature, list[int]] = defaultdict(list)  # feature of a prefix → indices in _texts
        for name, text in texts:
            self.add(name, text)

    def add(self, name: str, text: str) -> None:
        new = features(text)
        if new not in self._exact:
            self._exact[new] = name
            for feature in _prefix(new):
                self._index[feature].append(len(self._texts))
            self._texts.append((name, new))

    def find(self, text: str) -> str | None:
        new = features(text)
        if new in self._exact:
            return self._exact[new]
        least, most = THRESHOLD * len(new), len(new) / THRESHOLD
        candidates = sorted({index for feature in _prefix(new) for index in self._index.get(feature, ())})
        for index in candidates:
            name, other = self._texts[index]
            if least <= len(other) <= most:
                shared = len(new & other)
                if shared >= THRESHOLD * (len(new) + len(other) - shared):
                    return name
        return None


def _prefix(texts: frozenset[Any]) -> list[Feature]:
    """Return the features of a set that a duplicate of it must share one of: pairs before words, because they are rarer."""
    # A larger duplicate's own prefix is longer, and shares its first common feature with this set's prefix as well.
    n = len(texts) - math.ceil(THRESHOLD * len(texts)) + 1
    return sorted(texts, key=_order)[:n]


def _order(feature: Feature) -> tuple[bool, int, str]:
    """Return the feature's place in the order, the same in every process."""
    joined = feature if isinstance(feature, str) else " ".join(feature)
    return isinstance(feature, str), zlib.crc32(joined.encode()), joined

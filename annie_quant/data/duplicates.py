"""Find texts that nearly repeat an earlier one."""

from __future__ import annotations

import itertools
import math
import re
import zlib
from collections import defaultdict
from collections.abc import Iterable

THRESHOLD = 0.85
CONTRACTIONS = {
    "'s": " is",
    "'m": " am",
    "'re": " are",
    "n't": " not",
    "'ll": " will",
    "'ve": " have",
    "'d": " would",
}
_CONTRACTION = re.compile(rf"(?:{'|'.join(CONTRACTIONS)})\b")
TextFeature = str | tuple[str, str]


def words(text: str) -> list[str]:
    text = text.lower().replace("’", "'")
    return re.findall(r"\w+", _CONTRACTION.sub(lambda m: CONTRACTIONS[m[0]], text))


def features(text: str) -> frozenset[TextFeature]:
    """Return the set of words and of pairs of neighbouring words."""
    sequence = words(text)
    return frozenset(sequence) | frozenset(itertools.pairwise(sequence))


class DuplicateFinder:
    """Named texts; `find` returns the name of the first one that a new text nearly repeats.

    Two texts are duplicates if the Jaccard index of their features (words and pairs of neighbouring
    words, without case, punctuation and contractions) is at least THRESHOLD. With 0.85, "the
    capital of India" and "the capital of Peru" are two questions, and a long text with one
    additional word is the same text.

    The search is exact and indexed (prefix filtering, Chaudhuri, Ganti and Kaushik, ICDE 2006): two
    sets of sizes a <= b with a Jaccard index of at least t share at least t * b features, so the
    first b - ceil(t * b) + 1 features of both sets, in one fixed order, have one in common.
    """

    def __init__(self, texts: Iterable[tuple[str, str]] = ()) -> None:
        self._texts: list[tuple[str, frozenset[TextFeature]]] = []
        self._exact: dict[frozenset[TextFeature], str] = {}
        # feature of a prefix → indices in _texts
        self._index: defaultdict[TextFeature, list[int]] = defaultdict(list)
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
        least = THRESHOLD * len(new)
        most = len(new) / THRESHOLD
        candidates = {index for feature in _prefix(new) for index in self._index.get(feature, ())}
        for name, other in map(self._texts.__getitem__, sorted(candidates)):
            if least <= len(other) <= most:
                shared = len(new & other)
                if shared >= THRESHOLD * (len(new) + len(other) - shared):
                    return name
        return None


def _prefix(text_features: frozenset[TextFeature]) -> list[TextFeature]:
    """Return the features of which every duplicate of the set has at least one: pairs before words, because they are rarer."""
    # A larger duplicate's own prefix is longer, and shares its first common feature with this set's
    # prefix as well.
    n = len(text_features) - math.ceil(THRESHOLD * len(text_features)) + 1
    return sorted(text_features, key=_order)[:n]


def _order(feature: TextFeature) -> tuple[bool, int, str]:
    """Return the sort key of a feature, the same in every process."""
    joined = feature if isinstance(feature, str) else " ".join(feature)
    return isinstance(feature, str), zlib.crc32(joined.encode()), joined

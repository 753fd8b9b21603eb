"""Near-duplicates: two texts are one when they share nearly all words and pairs of neighbouring words.

Jaccard index of the sets of words and word pairs, after case, punctuation and contractions are taken away. 0.85 lets
"the capital of India" and "the capital of Peru" pass as two questions, and not one word more or less in a long text.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping
from typing import Any

SAME = 0.85
_SHORT = {"'s": " is", "'m": " am", "'re": " are", "n't": " not", "'ll": " will", "'ve": " have", "'d": " would"}
_SHORT_FORMS = re.compile(r"(?:'s|'m|'re|n't|'ll|'ve|'d)\b")


def words(text: str) -> list[str]:
    text = text.lower().replace("’", "'")
    return re.findall(r"\w+", _SHORT_FORMS.sub(lambda m: _SHORT[m[0]], text))


def features(text: str) -> frozenset[Any]:
    found = words(text)
    return frozenset(found) | frozenset(itertools.pairwise(found))


def user_text(row: Mapping[str, Any]) -> str:
    """All that the user says in a conversation."""
    return "\n".join(str(m.get("content") or "") for m in row["messages"] if m["role"] == "user")


class Near:
    """Texts seen so far; `find` names the one that a new text repeats."""

    def __init__(self, texts: Iterable[tuple[str, str]] = ()) -> None:
        self._seen: list[tuple[str, frozenset[Any]]] = []
        self._exact: dict[frozenset[Any], str] = {}
        for name, text in texts:
            self.add(name, text)

    def add(self, name: str, text: str) -> None:
        mine = features(text)
        self._seen.append((name, mine))
        self._exact.setdefault(mine, name)

    def find(self, text: str) -> str | None:
        mine = features(text)
        if mine in self._exact:
            return self._exact[mine]
        for name, other in self._seen:
            # The index cannot reach SAME when the sizes differ by more than that.
            small, large = sorted((len(mine), len(other)))
            if large and small >= SAME * large:
                shared = len(mine & other)
                if shared >= SAME * (len(mine) + len(other) - shared):
                    return name
        return None

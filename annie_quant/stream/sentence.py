"""The first sentence that a voice can speak: answer text only, without thinking and without markdown."""

from __future__ import annotations

import bisect
import re
from collections.abc import Sequence

LONGEST = 100_000
_THINKING = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)
_MARKUP = re.compile(r"```.*?(?:```|\Z)|[*_`#>|]+|^\s*[-+]\s+", re.DOTALL | re.MULTILINE)
# A terminator counts only when the next character confirms it: "3." may continue as "3.14".
_END = re.compile(r"(?P<latin>[.!?…][\"'”’)\]]*(?=\s))|(?P<wide>[。！？])|(?P<line>\S\s*\n)")
_ABBREVIATION = re.compile(r"(?:\b(?:mr|mrs|ms|dr|prof|st|vs|etc|e\.g|i\.e|no)|(?:^|\s)[A-Za-z])\.$", re.IGNORECASE)


def speakable(text: str) -> str:
    """Return `text` without thinking and markdown."""
    return _MARKUP.sub("", _THINKING.sub("", text))


def has_sentence(text: str, ended: bool) -> bool:
    """Whether `text` has a complete sentence with a word in it. ended: the text is complete."""
    plain = speakable(text)
    for end in _END.finditer(plain):
        head = plain[: end.end()].strip()
        if any(c.isalnum() for c in head) and not (end["latin"] and _ABBREVIATION.search(head)):
            return True
    return ended and any(c.isalnum() for c in plain)


def _head(pieces: Sequence[tuple[int, str]]) -> Sequence[tuple[int, str]]:
    """Return the pieces of the first LONGEST characters, cut there: a longer "sentence" is not one, and costs minutes."""
    left, head = LONGEST, []
    for stamp, piece in pieces:
        head.append((stamp, piece[:left]))
        left -= len(piece)
        if left <= 0:
            break
    return head


def first_sentence_ns(pieces: Sequence[tuple[int, str]]) -> int | None:
    """Return the stamp of the piece that completes the first sentence; the last piece's if no sentence ends.

    Tries 1, 2, 4 ... pieces, then bisects between the last two counts, so that the cost is linear in the text.
    """

    def complete(count: int) -> bool:
        return has_sentence("".join(piece for _, piece in pieces[:count]), False)

    pieces = _head(pieces)
    total, most = len(pieces), 1
    while most < total and not complete(most):
        most *= 2
    most = min(most, total)
    if most and complete(most):
        first = bisect.bisect_left(range(most), True, lo=most // 2, key=lambda i: complete(i + 1))
        return pieces[first][0]
    return pieces[-1][0] if pieces and has_sentence("".join(piece for _, piece in pieces), True) else None

"""The first sentence that a voice could speak: answer text only, without thinking and without markdown."""

from __future__ import annotations

import bisect
import re
from collections.abc import Sequence

_THINKING = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)
_MARKUP = re.compile(r"```.*?(?:```|\Z)|[*_`#>|]+|^\s*[-+]\s+", re.DOTALL | re.MULTILINE)
# A terminator counts when something follows that shows it is one: "3." may go on as "3.14".
_END = re.compile(r"(?P<latin>[.!?…][\"'”’)\]]*(?=\s))|(?P<wide>[。！？])|(?P<line>\S\s*\n)")
_ABBREVIATION = re.compile(r"(?:\b(?:mr|mrs|ms|dr|prof|st|vs|etc|e\.g|i\.e|no)|(?:^|\s)[A-Za-z])\.$", re.IGNORECASE)


def speakable(text: str) -> str:
    return _MARKUP.sub("", _THINKING.sub("", text))


def has_sentence(text: str, ended: bool) -> bool:
    """Whether `text` holds a whole sentence with a word in it; `ended`: no more text will come."""
    plain = speakable(text)
    for found in _END.finditer(plain):
        head = plain[: found.end()].strip()
        if any(c.isalnum() for c in head) and not (found["latin"] and _ABBREVIATION.search(head)):
            return True
    return ended and any(c.isalnum() for c in plain)


def first_sentence_ns(pieces: Sequence[tuple[int, str]]) -> int | None:
    """The stamp of the piece that completed the first sentence; the last piece's if nothing ends it.

    Looks at 1, 2, 4 ... pieces, then between the last two: linear in the text, wherever its first sentence ends.
    """

    def complete(count: int) -> bool:
        return has_sentence("".join(piece for _, piece in pieces[:count]), False)

    total, most = len(pieces), 1
    while most < total and not complete(most):
        most *= 2
    most = min(most, total)
    if most and complete(most):
        first = bisect.bisect_left(range(most), True, lo=most // 2, key=lambda i: complete(i + 1))
        return pieces[first][0]
    return pieces[-1][0] if pieces and has_sentence("".join(piece for _, piece in pieces), True) else None

"""Plain English text of a given length, for prompts at a depth: notes about invented people, the same for the same arguments.

The text answers none of the workloads' questions.
"""

from __future__ import annotations

import functools
import random

BLOCK_WORDS = 400


def _words(text: str, separator: str = " ") -> list[str]:
    return text.split(separator)


_WHO = _words("Mara Jonas Ines Tomas Petra Luka Vera Oskar Nadia Emil Rosa Felix Hanna Milan Klara Anton")
_DID = _words(
    "moved counted painted sorted repaired borrowed measured carried cleaned packed opened stacked labelled returned"
)
_WHAT = _words("boxes chairs lamps ropes maps jars tiles bricks books cables plates coats tools crates shelves buckets")
_KIND = _words("old blue heavy small wooden spare green broken round dusty narrow plain bright empty grey long")
_WHERE = _words("garden cellar attic harbour workshop market station library kitchen barn office bridge yard tower")
_WHEN = _words(
    "on Monday; on Friday; before noon; after lunch; last week; in March; at dawn; in the rain; without help", "; "
)


def context_text(words: int, unique: str = "") -> str:
    """Return so many words; "" for 0. unique: comes first, so that no two prompts begin alike."""
    head = f"Note {unique}.\n" if unique else ""
    if words <= 0:
        return head.strip()
    blocks = [_block(number) for number in range(-(-words // BLOCK_WORDS))]
    blocks[-1] = " ".join(blocks[-1].split(" ")[: words - BLOCK_WORDS * (len(blocks) - 1)])
    return head + "\n\n".join(blocks)


@functools.lru_cache(maxsize=1024)
def _block(number: int) -> str:
    """Return BLOCK_WORDS words of sentences."""
    rng = random.Random(f"context/{number}")
    words: list[str] = []
    while len(words) < BLOCK_WORDS:
        count, thing = rng.randint(2, 99), f"{rng.choice(_KIND)} {rng.choice(_WHAT)}"
        sentence = (
            f"{rng.choice(_WHO)} {rng.choice(_DID)} {count} {thing} in the {rng.choice(_WHERE)} {rng.choice(_WHEN)}."
        )
        words += sentence.split(" ")
    return " ".join(words[:BLOCK_WORDS])

"""Plain English text of a given length, for prompts at a depth: notes about invented people, the same for the same arguments.

The text answers none of the workloads' questions.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence

BLOCK_WORDS = 400
BLOCK_TOKENS = 512  # of a trace's blocks, as Mooncake's have


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


def blocks_text(blocks: Sequence[str], tokens: int, words_per_token: float, unique: str = "") -> str:
    """Return about `tokens` tokens of text in blocks of BLOCK_TOKENS, the same text for the same name. unique: comes first."""
    size = max(1, round(BLOCK_TOKENS * words_per_token))
    last = max(1, round((tokens - BLOCK_TOKENS * (len(blocks) - 1)) * words_per_token))
    sizes = [size] * (len(blocks) - 1) + [min(size, last)]
    parts = [" ".join(_block(name, size).split(" ")[:words]) for name, words in zip(blocks, sizes, strict=True)]
    return "\n\n".join([f"Note {unique}."] * bool(unique) + parts)


@functools.lru_cache(maxsize=1024)
def _block(name: int | str, size: int = BLOCK_WORDS) -> str:
    """Return `size` words of sentences."""
    rng = random.Random(f"context/{name}")
    words: list[str] = []
    while len(words) < size:
        count, thing = rng.randint(2, 99), f"{rng.choice(_KIND)} {rng.choice(_WHAT)}"
        sentence = (
            f"{rng.choice(_WHO)} {rng.choice(_DID)} {count} {thing} in the {rng.choice(_WHERE)} {rng.choice(_WHEN)}."
        )
        words += sentence.split(" ")
    return " ".join(words[:size])

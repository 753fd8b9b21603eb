"""Words that no list holds: what the model must copy from the prompt, not know.

In a training row such a word is only a place: batches.py fills it with another word of the same number of tokens at every
step, so that no word can be memorized. The gates use words of annie_quant/assets/workloads, which are none of these
or are real words of their own split.
"""

from __future__ import annotations

import random
import string

ONSETS = [
    "b",
    "c",
    "d",
    "f",
    "g",
    "h",
    "j",
    "k",
    "l",
    "m",
    "n",
    "p",
    "qu",
    "r",
    "s",
    "t",
    "v",
    "w",
    "y",
    "z",
    "bl",
    "br",
    "ch",
    "cl",
    "cr",
    "dr",
    "fl",
    "fr",
    "gl",
    "gr",
    "kl",
    "kn",
    "pl",
    "pr",
    "sc",
    "sh",
    "sk",
    "sl",
    "sm",
    "sn",
    "sp",
    "st",
    "sw",
    "th",
    "tr",
    "tw",
    "wh",
]
VOWELS = ["a", "e", "i", "o", "u", "ai", "ea", "ee", "oa", "oo", "ou", "ie", "y"]
CODAS = [
    "n",
    "r",
    "l",
    "s",
    "t",
    "m",
    "k",
    "d",
    "p",
    "g",
    "b",
    "f",
    "nd",
    "nt",
    "rt",
    "st",
    "ck",
    "ng",
    "nk",
    "lm",
    "sk",
    "x",
    "z",
    "ll",
    "ss",
    "th",
    "sh",
]


def syllables(rng: random.Random) -> str:
    """Return a word that can be spoken, of one to four syllables."""
    count = rng.choice((1, 2, 2, 2, 3, 3, 4))
    word = "".join(
        rng.choice(ONSETS) + rng.choice(VOWELS) + (rng.choice(CODAS) if rng.random() < 0.3 else "")
        for _ in range(count)
    )
    return word + (rng.choice(CODAS) if rng.random() < 0.5 else "")


def letters(rng: random.Random) -> str:
    return "".join(rng.choice(string.ascii_lowercase) for _ in range(rng.randint(2, 8)))


def joined(rng: random.Random, pieces: list[str]) -> str:
    """Return a word of one to four pieces of the tokenizer: so every piece is copied at times."""
    return "".join(rng.choice(pieces) for _ in range(rng.choice((1, 2, 2, 3, 4))))


def fresh(rng: random.Random, pieces: list[str]) -> str:
    """Return a word; pieces: the tokenizer's lower-case tokens without a space, or an empty list."""
    kind = rng.random()
    if pieces and kind < 0.5:
        word = joined(rng, pieces)
    elif kind < 0.92:
        word = syllables(rng)
    else:
        word = letters(rng)
    return word.capitalize() if rng.random() < 0.12 else word


def code(rng: random.Random) -> str:
    """Return a number of an order: two letters, a hyphen, five digits."""
    return (
        "".join(rng.choice(string.ascii_uppercase) for _ in range(2))
        + f"-{rng.randint(10000, 99999)}"
    )

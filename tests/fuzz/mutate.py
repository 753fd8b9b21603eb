"""Mutations of inputs for fuzzing: JSON with nodes replaced, removed or duplicated; bytes flipped, cut and overwritten."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

JUNK: list[Any] = [
    None,
    True,
    -1,
    0,
    1 << 70,
    1.5,
    float("inf"),
    "",
    "re:(",
    "*",
    "\0",
    "x" * 300,
    [],
    [None],
    [[[]]],
    {},
    {"a": {}},
    {"weights": 3},
    ["Linear", 4],
    "modelopt",
    "compressed-tensors",
    "NVFP4",
    "MIXED_PRECISION",
]
WILD = (0, 1, 255, 1 << 31, 1 << 40, (1 << 64) - 1)


def nodes(value: Any, path: tuple = ()) -> Iterator[tuple]:
    """Yield the paths to all nodes of a JSON value, the root first."""
    yield path
    for key, inner in (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    ):
        yield from nodes(inner, (*path, key))


def mutate_json(rng: random.Random, value: Any) -> Any:
    """Return the JSON with one to three nodes replaced by junk or by another one of its nodes, or removed."""
    value = copy.deepcopy(value)
    for _ in range(rng.randint(1, 3)):
        path = rng.choice([p for p in nodes(value) if p] or [()])
        if not path:
            return value
        at = value
        for key in path[:-1]:
            at = at[key]
        if rng.random() < 0.2:
            del at[path[-1]]
        else:
            at[path[-1]] = copy.deepcopy(rng.choice(JUNK))
    return value


def mutate_bytes(rng: random.Random, raw: bytes, within: int | None = None) -> bytes:
    """Return the bytes with one to three changes (flipped, overwritten, duplicated or removed), sometimes truncated.

    within    only bytes below this offset are changed; default: all
    """
    changed = bytearray(raw)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(min(within or len(changed), len(changed)) or 1)
        size = rng.choice((1, 2, 8, 40))
        what = rng.random()
        if what < 0.4:
            changed[at : at + 1] = bytes([rng.randrange(256)])
        elif what < 0.7:
            changed[at : at + 8] = rng.choice(WILD).to_bytes(8, "little")
        elif what < 0.85:
            changed[at:at] = changed[at : at + size]
        else:
            del changed[at : at + size]
    if rng.random() < 0.1:
        del changed[rng.randrange(len(changed) + 1) :]
    return bytes(changed)


def mutate(rng: random.Random, raw: bytes) -> bytes:
    """Mutate JSON (or the first of several JSON lines) as JSON in half of the cases, anything else as bytes."""
    if rng.random() < 0.5:
        return mutate_bytes(rng, raw)
    head, end, rest = raw.partition(b"\n") if raw.count(b"\n") > 1 else (raw, b"", b"")
    try:
        return json.dumps(mutate_json(rng, json.loads(head))).encode() + end + rest
    except (ValueError, RecursionError):
        return mutate_bytes(rng, raw)

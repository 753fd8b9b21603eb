"""Whether a GGUF file's counts and lengths fit in the file, looked at before the gguf package reads it.

That package believes them: a count of 2^40 keeps it busy for days. The layout (ggml/docs/gguf.md): magic, version,
tensor count, pair count, then pairs of key, type, value; then per tensor its name, dimensions, type, offset.
"""

from __future__ import annotations

import struct
from pathlib import Path

from annie_quant.errors import CheckpointError

SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # bytes of a value, by its type
STRING, ARRAY = 8, 9
MAX_DIMENSIONS = 8
MAX_NESTING = 4  # arrays of arrays


class _Walk:
    """A place in the file that only moves forward, and never beyond its end."""

    def __init__(self, raw: memoryview) -> None:
        self.raw, self.at = raw, 0

    def skip(self, size: int) -> None:
        if size > len(self.raw) - self.at:
            raise ValueError(f"at byte {self.at} it names {size} bytes and has {len(self.raw) - self.at}")
        self.at += size

    def number(self, form: str) -> int:
        start = self.at
        self.skip(struct.calcsize(form))
        return int(struct.unpack_from(form, self.raw, start)[0])

    def string(self) -> None:
        self.skip(self.number("<Q"))

    def value(self, kind: int, depth: int = 0) -> None:
        if kind == STRING:
            self.string()
        elif kind == ARRAY and depth < MAX_NESTING:
            inner, count = self.number("<I"), self.number("<Q")
            if inner in SIZES:
                self.skip(count * SIZES[inner])
            else:  # each takes bytes, so that the file's end ends a count that lies
                for _ in range(count):
                    self.value(inner, depth + 1)
        elif kind in SIZES:
            self.skip(SIZES[kind])
        else:
            raise ValueError(f"at byte {self.at} a value of type {kind}, which is not known")


def check(path: Path) -> None:
    """Raises CheckpointError where the header names more than the file holds."""
    import mmap

    try:
        with (
            path.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as held,
            memoryview(held) as raw,
        ):
            _walk(_Walk(raw))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: no GGUF file that can be read ({error})", "convert it again") from None


def _walk(walk: _Walk) -> None:
    if bytes(walk.raw[:4]) != b"GGUF":
        raise ValueError("it does not begin with GGUF")
    walk.skip(8)
    tensors, pairs = walk.number("<Q"), walk.number("<Q")
    for _ in range(pairs):
        walk.string()
        walk.value(walk.number("<I"))
    for _ in range(tensors):
        walk.string()
        dimensions = walk.number("<I")
        if dimensions > MAX_DIMENSIONS:
            raise ValueError(f"a tensor of {dimensions} dimensions")
        walk.skip(8 * dimensions + 4 + 8)

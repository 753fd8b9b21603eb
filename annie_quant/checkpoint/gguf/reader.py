"""Check that a GGUF header's counts, lengths and offsets are inside the file, before the gguf package or a server reads it.

The package trusts them: a count of 2^40 would keep it busy for days. The layout (ggml/docs/gguf.md): magic, version, tensor
count, pair count, then pairs of key, type, value; then for each tensor its name, dimensions, type, offset.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from annie_quant.core.errors import CheckpointError, need
from annie_quant.core.text import printable

if TYPE_CHECKING:
    from gguf import GGUFReader, ReaderTensor

SIZES = {
    0: 1,
    1: 1,
    2: 2,
    3: 2,
    4: 4,
    5: 4,
    6: 4,
    7: 1,
    10: 8,
    11: 8,
    12: 8,
}  # bytes of a value, by its type
STRING, ARRAY = 8, 9
MAX_DIMENSIONS = 8
MAX_NESTING = 4  # arrays of arrays


class _Cursor:
    """A position in the file that only moves forward, and never past its end."""

    def __init__(self, raw: memoryview) -> None:
        self.raw, self.position = raw, 0

    def skip(self, size: int) -> None:
        left = len(self.raw) - self.position
        if size > left:
            raise ValueError(f"{size} bytes expected at byte {self.position}, and {left} are left")
        self.position += size

    def number(self, form: str) -> int:
        start = self.position
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
            else:  # every value takes at least one byte, so the end of the file stops an invalid count
                for _ in range(count):
                    self.value(inner, depth + 1)
        elif kind in SIZES:
            self.skip(SIZES[kind])
        else:
            raise ValueError(f"unknown value type {kind} at byte {self.position}")


def check_header(path: Path) -> None:
    """Raise CheckpointError where the header describes more data than the file has."""
    try:
        with (
            path.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
            memoryview(mapped) as raw,
        ):
            _check_header(_Cursor(raw))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path}: not a GGUF file that can be read ({error})", "convert it again"
        ) from None


def _check_header(cursor: _Cursor) -> None:
    if bytes(cursor.raw[:4]) != b"GGUF":
        raise ValueError("it does not begin with GGUF")
    cursor.skip(8)
    tensors, pairs = cursor.number("<Q"), cursor.number("<Q")
    for _ in range(pairs):
        cursor.string()
        cursor.value(cursor.number("<I"))
    last = -1  # largest offset of a tensor's data, relative to the end of the header
    for _ in range(tensors):
        cursor.string()
        dimensions = cursor.number("<I")
        if dimensions > MAX_DIMENSIONS:
            raise ValueError(f"a tensor of {dimensions} dimensions")
        cursor.skip(8 * dimensions + 4)
        last = max(last, cursor.number("<Q"))
    if cursor.position + last >= len(cursor.raw):
        raise ValueError(f"tensors begin after its end: it has {len(cursor.raw)} bytes")


def open_reader(path: Path) -> GGUFReader:
    """Return the package's reader. Raises CheckpointError for anything else than a whole GGUF file."""
    gguf = need("gguf", "serve")
    check_header(path)
    try:
        return gguf.GGUFReader(path)
    except Exception as error:  # it raises errors of many types
        problem = f"not a GGUF file that can be read: cut, or of types that are not known ({printable(str(error), 80)})"
        raise CheckpointError(f"{path}: {problem}", "download it, or convert it again") from None


@contextlib.contextmanager
def opened_once(reader: GGUFReader) -> Iterator[None]:
    """Let transformers' functions, each of which opens its GGUF file anew, take this reader and one map of names per architecture.

    A vocabulary takes the package's reader ten seconds, and a map is made for every module of a model.
    """
    import gguf

    names = functools.cache(gguf.get_tensor_name_map)
    with patch.multiple(gguf, GGUFReader=lambda *_, **__: reader, get_tensor_name_map=names):
        yield


def open_gguf(path: Path) -> dict[str, ReaderTensor]:
    """Return the file's tensors (gguf.ReaderTensor) by name. Raises CheckpointError for a file that is not GGUF."""
    return {t.name: t for t in open_reader(path).tensors}


def gguf_value(reader: GGUFReader, name: str, default: Any = None) -> Any:
    """Return one of the file's settings."""
    field = reader.get_field(name)
    return default if field is None else field.contents()

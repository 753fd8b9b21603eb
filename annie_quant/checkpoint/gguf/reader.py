"""Read a GGUF header before the gguf package or a server does.

Its counts, lengths and offsets must be inside the file. The package trusts them: a count of 2^40
would keep it busy for days. The layout (ggml/docs/gguf.md): magic, version, tensor count, pair
count, then pairs of key, type, value; then for each tensor its name, dimensions, type, offset.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import re
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from annie_quant import models
from annie_quant.checkpoint import other_formats
from annie_quant.core.errors import CheckpointError, need
from annie_quant.core.text import printable
from annie_quant.models.family import GGUFNames

if TYPE_CHECKING:
    from gguf import GGUFReader, ReaderTensor

# Bytes of a value, by its type: 8 bits, 16 bits, 32 bits, a bool, 64 bits.
VALUE_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
UINT16 = 2
UINT32 = 4
STRING = 8
ARRAY = 9
GGML_NVFP4 = 40  # of ggml_type
# Of a checkpoint with NVFP4 linears without an input scale.
BLACKWELL_PROMPTS = (
    "on a Blackwell GPU the inputs of W4A16 linears have 4 bits in prompts, too "
    "(ggml-org/llama.cpp#22196; judged by eval --numerics llama.cpp-blackwell)"
)
MAX_DIMENSIONS = 8
MAX_NESTING = 4  # arrays of arrays
MAX_NAME_BYTES = 1000  # of a key or a tensor's name that is looked at


@dataclass(frozen=True)
class GgufHeader:
    """What a GGUF header states.

    types: tensor name → number of its ggml_type.
    part, parts: the file's number, from 1, and the number of files of a split model.
    """

    architecture: str
    types: dict[str, int]
    part: int = 1
    parts: int = 1


class _Cursor:
    """A position in the file that only moves forward, and never past its end."""

    def __init__(self, raw: memoryview) -> None:
        self.raw = raw
        self.position = 0

    def skip(self, size: int) -> int:
        """Move forward, and return the position before."""
        start = self.position
        left = len(self.raw) - start
        if size > left:
            raise ValueError(f"{size} bytes expected at byte {start}, and {left} are left")
        self.position += size
        return start

    def number(self, form: str) -> int:
        start = self.skip(struct.calcsize(form))
        return int(struct.unpack_from(form, self.raw, start)[0])

    def string(self) -> str:
        """Return a string, or its beginning."""
        length = self.number("<Q")
        start = self.skip(length)
        text = bytes(self.raw[start : start + min(length, MAX_NAME_BYTES)])
        return text.decode("utf-8", "replace")

    def skip_value(self, kind: int, depth: int = 0) -> None:
        if kind == STRING:
            self.skip(self.number("<Q"))
        elif kind == ARRAY and depth < MAX_NESTING:
            inner = self.number("<I")
            count = self.number("<Q")
            if inner in VALUE_BYTES:
                self.skip(count * VALUE_BYTES[inner])
            else:  # every value takes at least one byte, so the end of the file stops the loop
                for _ in range(count):
                    self.skip_value(inner, depth + 1)
        elif kind in VALUE_BYTES:
            self.skip(VALUE_BYTES[kind])
        else:
            raise ValueError(f"unknown value type {kind} at byte {self.position}")


def read_header(path: Path) -> GgufHeader:
    """Return a file's header. CheckpointError: it describes more data than the file has."""
    try:
        with (
            path.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
            memoryview(mapped) as raw,
        ):
            return _read_header(_Cursor(raw))
    except (OSError, ValueError) as error:
        message = f"{path}: not a GGUF file that can be read ({error})"
        raise CheckpointError(message, "convert it again") from None


def _read_header(cursor: _Cursor) -> GgufHeader:
    start = bytes(cursor.raw[: len(other_formats.LFS_PREFIX)])
    if other_formats.is_lfs_pointer(start):
        raise ValueError("a git-lfs pointer in place of the file: git lfs pull")
    if not start.startswith(other_formats.GGUF_MAGIC):
        raise ValueError("it does not begin with GGUF")
    cursor.skip(8)
    tensors = cursor.number("<Q")
    pairs = cursor.number("<Q")
    architecture = ""
    split = {"split.no": 0, "split.count": 1}
    for _ in range(pairs):
        key = cursor.string()
        kind = cursor.number("<I")
        if key == "general.architecture" and kind == STRING:
            architecture = cursor.string()
        elif key in split and kind in (UINT16, UINT32):
            split[key] = cursor.number("<H" if kind == UINT16 else "<I")
        else:
            cursor.skip_value(kind)
    types = {}
    last_offset = -1  # of a tensor's data, relative to the end of the header
    for _ in range(tensors):
        name = cursor.string()
        dimensions = cursor.number("<I")
        if dimensions > MAX_DIMENSIONS:
            raise ValueError(f"a tensor of {dimensions} dimensions")
        cursor.skip(8 * dimensions)
        types[name] = cursor.number("<I")
        last_offset = max(last_offset, cursor.number("<Q"))
    if cursor.position + last_offset >= len(cursor.raw):
        raise ValueError(f"tensors begin after its end: it has {len(cursor.raw)} bytes")
    return GgufHeader(architecture, types, split["split.no"] + 1, max(1, split["split.count"]))


def part_path(path: Path, part: int, parts: int) -> Path:
    """Return the path of another file of a split model, by llama.cpp's names."""
    stem = re.sub(r"-\d{5}-of-\d{5}$", "", path.stem)
    return path.with_name(f"{stem}-{part:05d}-of-{parts:05d}{path.suffix}")


def check_parts(path: Path, header: GgufHeader) -> None:
    """Raise CheckpointError for a file of a split model that llama.cpp does not load it from."""
    parts = header.parts
    named = f"{path}: part {header.part} of {parts} of a split GGUF file"
    if header.part != 1:
        raise CheckpointError(named, f"give the first part: {part_path(path, 1, parts)}")
    for part in range(2, parts + 1):
        other = part_path(path, part, parts)
        if not other.is_file():
            raise CheckpointError(f"{named}, and {other.name} is missing", "download it, too")


def check_served_by_llama_cpp(path: Path) -> None:
    """Raise CheckpointError for a file that is damaged, or that llama.cpp computes wrongly."""
    header = read_header(path)
    if header.parts > 1:
        check_parts(path, header)
    if GGML_NVFP4 not in header.types.values():
        return
    for family in models.families():
        if family.gguf and family.gguf.architecture == header.architecture:
            refuse_wrong_nvfp4(family.gguf, header.types, path)


def has_weights_only_nvfp4(path: Path) -> bool:
    """Return whether a file has an NVFP4 linear without an input scale."""
    types = read_header(path).types
    nvfp4 = [name for name, kind in types.items() if kind == GGML_NVFP4]
    return any(f"{name.removesuffix('.weight')}.input_scale" not in types for name in nvfp4)


def refuse_wrong_nvfp4(names: GGUFNames, tensors: Iterable[str], where: Path) -> None:
    """Raise CheckpointError where llama.cpp does not compute NVFP4.

    tensors: the names of all tensors, of a folder or of a GGUF file.
    """
    if not names.computes_nvfp4(tensors):
        message = f"{where}: llama.cpp does not compute NVFP4 in this {names.architecture} model"
        hint = "annie-quant convert --to gguf --type BF16, or serve the folder with vLLM"
        raise CheckpointError(message, hint)


def open_reader(path: Path) -> GGUFReader:
    """Return the package's reader. Raises CheckpointError for anything else than a whole GGUF file."""
    gguf = need("gguf", "serve")
    header = read_header(path)
    if header.parts > 1:
        first = part_path(path, 1, header.parts)
        message = f"{path}: part {header.part} of {header.parts} of a split GGUF file"
        raise CheckpointError(message, f"join them: llama-gguf-split --merge {first} JOINED.gguf")
    try:
        return gguf.GGUFReader(path)
    except Exception as error:  # it raises errors of many types
        problem = "not a GGUF file that can be read: cut, or of types that are not known"
        message = f"{path}: {problem} ({printable(str(error), 80)})"
        raise CheckpointError(message, "download it, or convert it again") from None


@contextlib.contextmanager
def opened_once(reader: GGUFReader) -> Iterator[None]:
    """Let transformers' functions take this reader and one map of names per architecture.

    Each of them opens its GGUF file anew. A vocabulary takes the package's reader ten seconds, and
    a map is made for every module of a model.
    """
    import gguf

    names = functools.cache(gguf.get_tensor_name_map)
    with patch.multiple(gguf, GGUFReader=lambda *_, **__: reader, get_tensor_name_map=names):
        yield


def open_gguf(path: Path) -> dict[str, ReaderTensor]:
    """Return the file's tensors (gguf.ReaderTensor) by name.

    Raises CheckpointError for a file that is not GGUF.
    """
    return {t.name: t for t in open_reader(path).tensors}


def gguf_value(reader: GGUFReader, name: str, default: Any = None) -> Any:
    """Return one of the file's settings."""
    field = reader.get_field(name)
    return default if field is None else field.contents()

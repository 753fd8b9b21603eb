"""One safetensors file: read and build its header, and map its tensors.

The safetensors library checks sizes and offsets before data are read.

Format (huggingface/safetensors, README "Format"): 8 bytes little-endian header size N, N bytes of
JSON, then the data. Each entry is {"dtype", "shape", "data_offsets": [begin, end]} relative to the
data; entries may not overlap or leave holes.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from annie_quant.checkpoint import other_formats
from annie_quant.core.errors import CheckpointError
from annie_quant.core.files import owner
from annie_quant.core.text import printable
from annie_quant.core.untrusted import JsonObject

# In the library's messages
LARGER_FILE = "invalid header length"
UNFILLED_FILE = "not fully covered"
HEADER_FAULTS = ("offset", "shape", "type", "field", "covered", "invalid value", "variant")
PREFIX_BYTES = 8
MAX_NAME_LENGTH = 1000  # characters; the longest names in use have about 150

DTYPES: dict[str, np.dtype] = {
    name: np.dtype(kind)
    for name, kind in {
        "BOOL": "?",
        "U8": "u1",
        "I8": "i1",
        "U16": "<u2",
        "I16": "<i2",
        "U32": "<u4",
        "I32": "<i4",
        "U64": "<u8",
        "I64": "<i8",
        "F16": "<f2",
        "F32": "<f4",
        "F64": "<f8",
        "BF16": ml_dtypes.bfloat16,
        "F8_E4M3": ml_dtypes.float8_e4m3fn,
        "F8_E5M2": ml_dtypes.float8_e5m2,
        "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    }.items()
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class ShardError(CheckpointError):
    """An invalid file of a model folder.

    `code` is the finding's code in an audit, `tensor` the tensor it concerns.
    """

    def __init__(
        self, code: str, message: str, hint: str = "download the file again", tensor: str = ""
    ) -> None:
        super().__init__(message, hint)
        self.code = code
        self.tensor = tensor


@dataclass(frozen=True)
class TensorInfo:
    """Position of one tensor.

    dtype: safetensors' name of the type.
    file: name of the shard.
    offset: bytes from the start of the file.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    offset: int
    size_bytes: int

    @property
    def numpy_dtype(self) -> np.dtype:
        return DTYPES[self.dtype]

    @property
    def elements(self) -> int:
        return self.size_bytes // self.numpy_dtype.itemsize


def refuse_lfs_pointer(raw: bytes, path: Path) -> None:
    """Raise ShardError for a git-lfs pointer. raw: the file's first bytes."""
    if other_formats.is_lfs_pointer(raw):
        message = f"{path.name}: a git-lfs pointer in place of the file: git lfs pull"
        raise ShardError("lfs_pointer", message, f"git -C {path.parent} lfs pull")


def read_header(path: Path) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """Return the tensors by name, in file order, and the metadata strings.

    The safetensors library checks that the header is valid, and that the tensors fill the file.

    Raises ShardError for what it refuses, and for names and types that are not known here.
    """
    with path.open("rb") as file:
        refuse_lfs_pointer(file.read(len(other_formats.LFS_PREFIX)), path)
    try:
        with safe_open(path, "numpy"):
            pass
    except SafetensorError as error:
        reason = str(error).partition("header: ")[2] or str(error)
        raise _refusal(path, printable(reason, 200)) from None
    entries, start = _entries(path)
    metadata = entries.pop("__metadata__", {})
    infos = [_info(name, entry, start, path.name) for name, entry in entries.items()]
    infos.sort(key=lambda info: (info.offset, info.size_bytes))
    return {info.name: info for info in infos}, metadata


def _entries(path: Path) -> tuple[JsonObject, int]:
    """Return the header's JSON object, and the position of the data."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(PREFIX_BYTES), "little")
        return json.loads(file.read(length)), PREFIX_BYTES + length


def _end_of_data(path: Path) -> int:
    """Return the size of the file that the header describes."""
    entries, start = _entries(path)
    entries.pop("__metadata__", None)
    return start + max((entry["data_offsets"][1] for entry in entries.values()), default=0)


def _refusal(path: Path, reason: str) -> ShardError:
    """Return the error for a file that the library refuses. reason: the library's message."""
    size = path.stat().st_size
    with path.open("rb") as file:
        is_object = file.read(PREFIX_BYTES + 1).endswith(b"{")
    if LARGER_FILE in reason and is_object:
        return ShardError("shard_truncated", f"{path.name}: the file has {size} bytes: {reason}")
    if UNFILLED_FILE in reason:
        end = _end_of_data(path)
        if end > size:
            message = f"truncated: the header describes {end} bytes and the file has {size}"
            return ShardError("shard_truncated", f"{path.name}: {message}")
    is_header = any(words in reason for words in HEADER_FAULTS)
    code = "invalid_header" if is_header else "not_safetensors"
    return ShardError(code, f"{path.name}: not a valid safetensors file: {reason}")


def _info(name: str, entry: JsonObject, data_start: int, file: str) -> TensorInfo:
    if not name or not name.isprintable() or len(name) > MAX_NAME_LENGTH:
        raise ShardError("invalid_header", f"{file}: {name[:120]!a} is not a tensor name")
    dtype = entry["dtype"]
    if dtype not in DTYPES:
        message = f"{file}: {name[:120]}: dtype {dtype!r} is not known"
        raise ShardError("invalid_header", message, tensor=name)
    begin, end = entry["data_offsets"]
    return TensorInfo(name, dtype, tuple(entry["shape"]), file, data_start + begin, end - begin)


def build(entries: list[tuple[str, str, tuple[int, ...]]], metadata: dict[str, str]) -> bytes:
    """Return prefix and header for tensors (name, dtype, shape) stored in this order.

    The header is padded with spaces to 8 bytes.
    """
    table: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    begin = 0
    for name, dtype, shape in entries:
        end = begin + DTYPES[dtype].itemsize * int(np.prod(shape, dtype=object))
        table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(PREFIX_BYTES, "little") + text


class Shard:
    """One safetensors file, mapped. `tensors` are in file order; `metadata` are its strings."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self.size_bytes = os.fstat(file.fileno()).st_size
                self.tensors, self.metadata = read_header(path)
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            hint = (
                "free some memory"
                if error.errno == errno.ENOMEM
                else "check the file's permissions"
            )
            raise ShardError(
                "shard_unreadable", f"{path.name}: {error.strerror}{owner(path)}", hint
            ) from None

    def tensor(self, info: TensorInfo) -> np.ndarray:
        """Return a read-only view of the mapped bytes, or a copy where they are not aligned."""
        if info.elements == 0:
            return np.empty(info.shape, info.numpy_dtype)
        array = np.frombuffer(
            self._map, info.numpy_dtype, count=info.elements, offset=info.offset
        ).reshape(info.shape)
        return array if array.flags.aligned else array.copy()

    def release(self, info: TensorInfo, begin: int = 0, end: int | None = None) -> None:
        """Give the mapped pages of a tensor's bytes begin..end back to the kernel.

        Resident memory stays low.
        """
        first = -(-(info.offset + begin) // mmap.PAGESIZE) * mmap.PAGESIZE
        last = info.offset + (info.size_bytes if end is None else end)
        length = last // mmap.PAGESIZE * mmap.PAGESIZE - first
        if length > 0:
            self._map.madvise(mmap.MADV_DONTNEED, first, length)

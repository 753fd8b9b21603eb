"""One safetensors file: parse and build its header, and map its tensors.

Sizes and offsets are checked before data are read.

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

from annie_quant.checkpoint import other_formats
from annie_quant.core.errors import CheckpointError
from annie_quant.core.files import owner

MAX_HEADER_BYTES = 100_000_000  # the safetensors library's own limit
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


def header_bytes(prefix: bytes, file_size: int, file: str) -> int:
    """Return the header's length in bytes, from the file's first 9 bytes.

    It is checked against the file's size.

    Raises ShardError for a file that is not safetensors.
    """
    if len(prefix) < PREFIX_BYTES:
        raise ShardError(
            "not_safetensors", f"{file}: {file_size} bytes, too short for a safetensors file"
        )
    size = int.from_bytes(prefix[:PREFIX_BYTES], "little")
    if (
        size > MAX_HEADER_BYTES
        or size < 2
        or prefix[PREFIX_BYTES : PREFIX_BYTES + 1] not in (b"{", b"")
    ):
        raise ShardError(
            "not_safetensors", f"{file}: not a safetensors file (it has no valid header)"
        )
    if PREFIX_BYTES + size > file_size:
        message = (
            f"{file}: the header needs {PREFIX_BYTES + size} bytes and the file has {file_size}"
        )
        raise ShardError("shard_truncated", message)
    return size


def parse(
    header: bytes, data_start: int, file_size: int, file: str
) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """Return the tensors by name, in file order, and the metadata strings.

    Any invalid input raises ShardError.
    """
    try:
        entries = json.loads(header, object_pairs_hook=_no_duplicates, parse_constant=_no_constant)
    except _Duplicate as error:
        raise ShardError("invalid_header", f"{file}: the header has {error} twice") from None
    except (ValueError, RecursionError) as error:
        raise ShardError(
            "not_safetensors", f"{file}: the header is not JSON ({str(error)[:80]})"
        ) from None
    if not isinstance(entries, dict):
        raise ShardError("not_safetensors", f"{file}: the header is not a JSON object")
    metadata = entries.pop("__metadata__", None)
    if metadata is None:
        metadata = {}
    if not isinstance(metadata, dict) or any(not isinstance(v, str) for v in metadata.values()):
        raise ShardError("invalid_header", f"{file}: __metadata__ must map strings to strings")
    infos = [_info(name, entry, data_start, file) for name, entry in entries.items()]
    infos.sort(key=lambda i: (i.offset, i.size_bytes))
    _check_extent(infos, data_start, file_size, file)
    return {i.name: i for i in infos}, metadata


class _Duplicate(ValueError):
    pass


def _no_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    entries: dict[str, object] = {}
    for key, value in pairs:
        if key in entries:
            raise _Duplicate(repr(key[:80]))
        entries[key] = value
    return entries


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is not JSON")


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62


def _info(name: str, entry: object, data_start: int, file: str) -> TensorInfo:
    def invalid(reason: str) -> ShardError:
        return ShardError("invalid_header", f"{file}: {name[:120]}: {reason}", tensor=name)

    if not name or not name.isprintable() or len(name) > MAX_NAME_LENGTH:
        raise ShardError("invalid_header", f"{file}: {name[:120]!a} is not a tensor name")
    if not isinstance(entry, dict):
        raise invalid("the entry is not an object")
    dtype = entry.get("dtype")
    shape = entry.get("shape")
    offsets = entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise invalid(f"dtype {str(dtype)[:40]!r} is not known")
    if not isinstance(shape, list) or len(shape) > 8 or not all(_is_size(n) for n in shape):
        raise invalid(f"shape {str(shape)[:80]} is not a list of sizes")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_size(n) for n in offsets):
        raise invalid(f"data_offsets {str(offsets)[:80]}, expected [begin, end]")
    begin, end = offsets
    needed = DTYPES[dtype].itemsize
    for n in shape:
        needed *= n
    if end - begin != needed:
        raise invalid(f"{dtype} {shape} needs {needed} bytes and the offsets give {end - begin}")
    return TensorInfo(name, dtype, tuple(shape), file, data_start + begin, needed)


def _check_extent(infos: list[TensorInfo], data_start: int, file_size: int, file: str) -> None:
    position = data_start
    for info in infos:
        if info.offset != position:
            fault = (
                "overlaps the tensor before it"
                if info.offset < position
                else "leaves a hole before it"
            )
            raise ShardError(
                "invalid_header", f"{file}: {info.name[:120]} {fault}", tensor=info.name
            )
        position += info.size_bytes
    if position > file_size:
        message = (
            f"{file}: truncated: the header describes {position} bytes and the file has {file_size}"
        )
        raise ShardError("shard_truncated", message, tensor=infos[-1].name if infos else "")
    if position < file_size:
        raise ShardError(
            "invalid_header", f"{file}: {file_size - position} bytes after the last tensor"
        )


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
                refuse_lfs_pointer(file.read(len(other_formats.LFS_PREFIX)), path)
                file.seek(0)
                prefix = file.read(PREFIX_BYTES + 1)
                length = header_bytes(prefix, self.size_bytes, path.name)
                file.seek(PREFIX_BYTES)
                raw = file.read(length)
                start = PREFIX_BYTES + length
                self.tensors, self.metadata = parse(raw, start, self.size_bytes, path.name)
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

"""A model folder on disk: mapped reading of its shards.

Reading maps the files and hands out views, so a model larger than memory can be walked; `release` gives pages back.
Writing is in writer.py.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from annie_quant.checkpoint import header
from annie_quant.checkpoint.header import ShardError, TensorInfo
from annie_quant.errors import CheckpointError
from annie_quant.files import owner

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_JSON_BYTES = 100_000_000  # of an index or a config; the index of 400 B parameters has some 10 MB
PIECE_BYTES = 1 << 25
OTHER_FORMATS = (".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack")
_PART = re.compile(r"-(\d{5})-of-(\d{5})\.safetensors$")


class Shard:
    """One safetensors file, mapped. `tensors` are in file order; `metadata` are its strings."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self.size_bytes = os.fstat(file.fileno()).st_size
                prefix = file.read(header.PREFIX_BYTES + 1)
                length = header.header_bytes(prefix, self.size_bytes, path.name)
                file.seek(header.PREFIX_BYTES)
                raw = file.read(length)
                start = header.PREFIX_BYTES + length
                self.tensors, self.metadata = header.parse(raw, start, self.size_bytes, path.name)
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            hint = "close something" if error.errno == errno.ENOMEM else "check the file's permissions"
            raise ShardError("shard_unreadable", f"{path.name}: {error.strerror}{owner(path)}", hint) from None

    def tensor(self, info: TensorInfo) -> np.ndarray:
        """A read-only view of the mapped bytes; copied where the file leaves it unaligned."""
        if info.elements == 0:
            return np.empty(info.shape, info.numpy_dtype)
        array = np.frombuffer(self._map, info.numpy_dtype, count=info.elements, offset=info.offset).reshape(info.shape)
        return array if array.flags.aligned else array.copy()

    def release(self, info: TensorInfo, begin: int = 0, end: int | None = None) -> None:
        """Tell the kernel that these pages (a tensor's bytes begin..end) are done with: resident memory stays bounded."""
        first = -(-(info.offset + begin) // mmap.PAGESIZE) * mmap.PAGESIZE
        last = info.offset + (info.size_bytes if end is None else end)
        length = last // mmap.PAGESIZE * mmap.PAGESIZE - first
        if length > 0:
            self._map.madvise(mmap.MADV_DONTNEED, first, length)


class ModelFolder:
    """A checkpoint folder: config.json, safetensors shards (single, indexed, or numbered), and the small files.

    Raises CheckpointError (one line) for a missing folder or shard, a file that is no safetensors, a header that lies,
    a truncated file, a shard name with a path in it, a link out of the folder.
    """

    def __init__(self, path: str | os.PathLike) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            kind, hint = ("a file" if self.path.exists() else "not there"), "give a checkpoint's folder"
            if self.path.suffix == ".gguf":
                hint = f"make a folder of it: annie-quant convert {self.path} --to modelopt --like SOURCE"
            raise ShardError("no_folder", f"{self.path}: {kind}, expected a model folder", hint)
        self.shards: dict[str, Shard] = {}
        self.tensors: dict[str, TensorInfo] = {}
        self.unindexed: list[str] = []
        weight_map = self._weight_map()
        for file in sorted(set(weight_map.values())) if weight_map else self._files():
            self.shards[file] = shard = Shard(self._checked(file))
            for name, info in shard.tensors.items():
                if weight_map and weight_map.get(name) != file:
                    self.unindexed.append(name)
                    continue
                if name in self.tensors:
                    raise ShardError(
                        "duplicate_tensor", f"{name}: both in {self.tensors[name].file} and in {file}", tensor=name
                    )
                self.tensors[name] = info
        for name, file in weight_map.items():
            if name not in self.tensors:
                raise ShardError("tensor_missing", f"{INDEX} says {name} is in {file}, and it is not", tensor=name)

    # -- what there is
    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def __iter__(self) -> Iterator[str]:
        """Tensor names, file by file in the order of their bytes: the fastest order to read them."""
        return iter(self.tensors)

    def info(self, name: str) -> TensorInfo:
        if name not in self.tensors:
            raise ShardError("tensor_missing", f"{self.path.name}: there is no tensor {name}", tensor=name)
        return self.tensors[name]

    def tensor(self, name: str) -> np.ndarray:
        """One tensor as a read-only array in its own dtype (bfloat16 and float8 from ml_dtypes)."""
        info = self.info(name)
        return self.shards[info.file].tensor(info)

    def pieces(self, name: str) -> Iterator[np.ndarray]:
        """One tensor's elements in order, some megabytes at a time; their pages are given back after each."""
        flat = self.tensor(name).reshape(-1)
        step = max(1, PIECE_BYTES // flat.itemsize)
        for start in range(0, flat.size, step):
            yield flat[start : start + step]
            self.release(name, start * flat.itemsize, min(start + step, flat.size) * flat.itemsize)

    def rows(self, name: str, elements: int = 1 << 24) -> Iterator[np.ndarray]:
        """A matrix's rows in order, about `elements` at a time; their pages are given back after each."""
        matrix = self.tensor(name)
        width = max(1, matrix[:1].size)
        step = max(1, elements // width)
        for start in range(0, matrix.shape[0], step):
            yield matrix[start : start + step]
            stop = min(start + step, matrix.shape[0])
            self.release(name, start * width * matrix.itemsize, stop * width * matrix.itemsize)

    def scalar(self, name: str) -> np.float32:
        """A one-element tensor as float32."""
        info = self.info(name)
        if info.elements != 1:
            raise ShardError("scale_shape", f"{name}: shape {list(info.shape)}, expected one number", tensor=name)
        return np.float32(self.tensor(name).reshape(())[()])

    def release(self, name: str, begin: int = 0, end: int | None = None) -> None:
        """Give a tensor's mapped pages back, all or those of its bytes begin..end."""
        info = self.info(name)
        self.shards[info.file].release(info, begin, end)

    @property
    def weight_bytes(self) -> int:
        return sum(info.size_bytes for info in self.tensors.values())

    # -- the small files
    def json(self, name: str) -> dict[str, Any] | None:
        """A JSON object beside the shards, or None where there is no such file."""
        return self.json_at(self.path / name)

    @staticmethod
    def json_at(path: Path) -> dict[str, Any] | None:
        """The JSON object of a file, or None where there is no such file."""
        if not path.is_file():
            return None
        size = path.stat().st_size
        if size > MAX_JSON_BYTES:
            raise ShardError(
                "config_unreadable", f"{path.name}: {size} bytes, more than the {MAX_JSON_BYTES} that are read"
            )
        try:
            value = json.loads(path.read_bytes())
        except (ValueError, RecursionError) as error:
            raise ShardError(
                "config_unreadable", f"{path.name}: no JSON ({str(error)[:80]})", "restore the file"
            ) from None
        if not isinstance(value, dict):
            raise ShardError("config_unreadable", f"{path.name}: no JSON object", "restore the file")
        return value

    @property
    def config(self) -> dict[str, Any]:
        """config.json, which every model folder has."""
        config = self.json("config.json")
        if config is None:
            raise ShardError("config_missing", f"{self.path}: no config.json", "copy it from the source checkpoint")
        return config

    @property
    def text_config(self) -> dict[str, Any]:
        """The language model's part of config.json: `text_config` where there is one."""
        config = self.config
        inner = config.get("text_config")
        return {**config, **inner} if isinstance(inner, dict) else config

    def small_files(self) -> list[Path]:
        """Tokenizer, template, processor and licence files: all that is neither weights nor their index."""
        skip = (".safetensors", *OTHER_FORMATS)
        return sorted(
            inside(self.path, f)
            for f in self.path.iterdir()
            if f.is_file() and f.name != INDEX and not f.name.endswith(skip) and not f.name.startswith(".")
        )

    # -- finding the shards
    def _weight_map(self) -> dict[str, str]:
        index = self.json(INDEX)
        if index is None:
            return {}
        weights = index.get("weight_map")
        if not isinstance(weights, dict) or not all(isinstance(v, str) for v in weights.values()):
            raise ShardError("index_lies", f"{INDEX}: weight_map must map tensor names to file names")
        if not weights:
            raise ShardError("index_lies", f"{INDEX}: weight_map is empty")
        odd = next((n for n in weights if not n.isprintable() or len(n) > header.MAX_NAME), None)
        if odd is not None:
            raise ShardError("index_lies", f"{INDEX}: {odd[:120]!a} is no tensor name")
        return weights

    def _files(self) -> list[str]:
        files = sorted(f.name for f in self.path.glob("*.safetensors"))
        if SINGLE in files:
            return [SINGLE]
        if not files:
            other = sorted(f.name for f in self.path.iterdir() if f.suffix in OTHER_FORMATS)
            seen = f"it has {other[0]}, which is no safetensors" if other else "it holds no .safetensors file"
            raise ShardError("no_weights", f"{self.path}: {seen}", "give a checkpoint saved as safetensors")
        numbered = [_PART.search(f) for f in files]
        if all(numbered):
            total = int(numbered[0].group(2))  # type: ignore[union-attr]
            there = {int(m.group(1)) for m in numbered if m}
            missing = sorted(set(range(1, total + 1)) - there)
            if missing and total < 100_000:
                raise ShardError("shard_missing", f"{self.path.name}: shard {missing[0]} of {total} is missing")
        return files

    def _checked(self, file: str) -> Path:
        """A shard's path: a plain name, inside the folder (or a hub cache's blobs, where its links point)."""
        if Path(file).name != file or file in ("", ".", "..") or not file.isprintable() or "\\" in file:
            raise ShardError(
                "path_escapes", f"{INDEX}: {file[:120]!r} is no plain file name", "do not trust this folder"
            )
        path = self.path / file
        try:
            there = path.exists()
        except OSError:  # a name that no file system takes
            there = False
        if not there:
            raise ShardError("shard_missing", f"{self.path.name}: shard {file[:120]} is missing")
        return inside(self.path, path)


def inside(folder: Path, path: Path) -> Path:
    """The path, unless it is a link that leads out of the folder (and not into a hub cache's blobs)."""
    real, home = path.resolve(), folder.resolve()
    if real.parent != home and real.parent != home.parent.parent / "blobs":
        raise ShardError("path_escapes", f"{path.name}: a link that leaves the folder", "do not trust this folder")
    return path


def open_folder(path: str | os.PathLike | ModelFolder) -> ModelFolder:
    return path if isinstance(path, ModelFolder) else ModelFolder(path)


__all__ = ["CheckpointError", "ModelFolder", "Shard", "ShardError", "TensorInfo", "open_folder"]

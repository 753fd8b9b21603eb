"""Write safetensors shards: planned first, then streamed; a shard has its name only when it is complete.

A plan names every tensor's dtype and shape, so the headers are known before a weight is read. Arrays are made one after
the other, in file order. With `resume` a shard that an interrupted run completed is kept if its header is the planned one.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from annie_quant.checkpoint import header
from annie_quant.checkpoint.shards import INDEX, SINGLE, ModelFolder
from annie_quant.core.errors import DiskFull
from annie_quant.core.files import replacing, write_json
from annie_quant.core.progress import SILENT, ByteProgress, Progress

DEFAULT_SHARD_BYTES = 5_000_000_000


@dataclass(frozen=True)
class Planned:
    """A tensor to be written.

    load: returns the array, or its rows in order as several arrays.
    source_bytes: bytes that are read to make it, for progress; None: its own size.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    load: Callable[[], np.ndarray | Iterable[np.ndarray]]
    source_bytes: int | None = None

    @property
    def size_bytes(self) -> int:
        return header.DTYPES[self.dtype].itemsize * int(np.prod(self.shape, dtype=object))

    @property
    def work_bytes(self) -> int:
        return self.size_bytes if self.source_bytes is None else self.source_bytes


def planned(name: str, array: np.ndarray) -> Planned:
    """Plan a tensor that is in memory already (a scale, a small tensor)."""
    return Planned(name, header.NAMES[array.dtype], array.shape, lambda: array)


@dataclass(frozen=True)
class ShardPlan:
    """One file of the output: its name, its header, and its tensors in file order."""

    name: str
    head: bytes
    items: list[Planned]

    @property
    def size_bytes(self) -> int:
        return len(self.head) + sum(t.size_bytes for t in self.items)

    @property
    def work_bytes(self) -> int:
        return sum(t.work_bytes for t in self.items)


def split(plan: list[Planned], shard_bytes: int) -> list[list[Planned]]:
    """Split into consecutive groups of at most `shard_bytes`; a larger tensor is a group by itself."""
    groups: list[list[Planned]] = [[]]
    filled = 0
    for item in plan:
        if groups[-1] and filled + item.size_bytes > shard_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(item)
        filled += item.size_bytes
    return groups


def layout(plan: list[Planned], shard_bytes: int) -> list[ShardPlan]:
    """Return the shards of a plan, under the names that every reader expects."""
    groups = split(plan, shard_bytes)
    n = len(groups)
    names = [SINGLE] if n == 1 else [f"model-{i:05d}-of-{n:05d}.safetensors" for i in range(1, n + 1)]
    heads = (header.build([(t.name, t.dtype, t.shape) for t in g], {"format": "pt"}) for g in groups)
    return [ShardPlan(*parts) for parts in zip(names, heads, groups, strict=True)]


def write(
    folder: str | os.PathLike,
    plan: list[Planned],
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    progress: Progress = SILENT,
    resume: bool = False,
    write_shards: Callable[[Path, list[ShardPlan], ByteProgress], None] | None = None,
) -> list[Path]:
    """Write the planned tensors into `folder` and return the paths of the shards.

    resume: keep shards that an earlier run completed (same header). They must be of the same source: see staging.py.
    write_shards: writes the missing shards; None writes them here, one after the other.
    The index is written last. Raises DiskFull where the disk has not enough space.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    shards = layout(plan, shard_bytes)
    missing = [s for s in shards if not (resume and is_complete(folder, s))]
    need_room(folder, sum(s.size_bytes for s in missing))
    total = sum(s.work_bytes for s in shards)
    done = ByteProgress(progress, total, done_before=total - sum(s.work_bytes for s in missing))
    if write_shards is not None:
        write_shards(folder, missing, done)
    else:
        for shard in missing:
            write_shard(folder, shard, done)
    write_index(folder, shards)
    return [folder / s.name for s in shards]


def write_shard(folder: Path, shard: ShardPlan, progress: ByteProgress | None = None) -> None:
    """Write one shard, which has its name only when it is complete and on the disk."""
    with replacing(folder / shard.name) as file:
        file.write(shard.head)
        for item in shard.items:
            for part in parts(item):
                file.write(part)
            if progress is not None:
                progress.add(item.work_bytes)


def write_index(folder: Path, shards: list[ShardPlan]) -> None:
    """Write the index of which tensor is in which file, for more than one shard."""
    if len(shards) > 1:
        weight_map = {t.name: s.name for s in shards for t in s.items}
        total = sum(t.size_bytes for s in shards for t in s.items)
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def parts(item: Planned) -> Iterator[memoryview]:
    """Yield the bytes of one tensor, checked against its plan."""
    loaded = item.load()
    written = 0
    for array in [loaded] if isinstance(loaded, np.ndarray) else loaded:
        if array.dtype != header.DTYPES[item.dtype]:
            raise ValueError(f"{item.name}: got {array.dtype}, {item.dtype} was planned")
        raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        written += raw.nbytes
        yield raw.data
    if written != item.size_bytes:
        raise ValueError(f"{item.name}: got {written} bytes, {item.size_bytes} were planned")


def is_complete(folder: Path, shard: ShardPlan) -> bool:
    """Return whether an earlier run completed this shard: same header, same length."""
    path = folder / shard.name
    try:
        if path.stat().st_size != shard.size_bytes:
            return False
        with path.open("rb") as file:
            return file.read(len(shard.head)) == shard.head
    except OSError:
        return False


def need_room(folder: Path, size_bytes: int) -> None:
    """Raise DiskFull where the disk of `folder` has less than `size_bytes` free."""
    free = shutil.disk_usage(folder).free
    if size_bytes > free:
        raise DiskFull(
            f"{folder}: {size_bytes / 1e9:.2f} GB to write and {free / 1e9:.2f} GB free",
            "free some disk, or choose --output",
        )


def copy_small_files(folder: ModelFolder, target: Path) -> None:
    """Copy the tokenizer, template, processor and licence files; the configurations are written separately."""
    for path in folder.small_files():
        if path.name not in ("config.json", "hf_quant_config.json"):
            shutil.copyfile(path, target / path.name)


@dataclass(frozen=True)
class Settings:
    """A dialect's quantization settings: config.json's quantization_config, and further JSON files by name."""

    quantization_config: dict[str, Any]
    files: dict[str, dict[str, Any]]


def write_settings(target: Path, config: dict[str, Any], settings: Settings | None) -> None:
    """Write config.json with the quantization settings, and the dialect's other files. None: for plain weights."""
    if settings is None:
        write_json(target / "config.json", {k: v for k, v in config.items() if k != "quantization_config"})
        return
    for name, value in settings.files.items():
        write_json(target / name, value)
    write_json(target / "config.json", config | {"quantization_config": settings.quantization_config})

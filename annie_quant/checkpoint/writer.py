"""Writing safetensors shards: planned first, then streamed, each shard under its name only when it is whole.

A plan names every tensor's dtype and shape, so headers are known before a weight is read; arrays are made one at a
time, in order. With `resume` a shard that a killed run left whole is kept when its header is the planned one.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from annie_quant.checkpoint import header
from annie_quant.checkpoint.shards import INDEX, SINGLE, ModelFolder
from annie_quant.errors import NoRoom
from annie_quant.files import replacing, write_json

DEFAULT_SHARD_BYTES = 5_000_000_000


@dataclass(frozen=True)
class Planned:
    """A tensor to be written. `load` gives the array, or its rows in order as several arrays.

    source_bytes: what must be read to make it, where that is not its own size; progress counts those.
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
    """A tensor that is at hand already (scales, small ones)."""
    return Planned(name, header.NAMES[array.dtype], array.shape, lambda: array)


@dataclass(frozen=True)
class ShardPlan:
    """One file of the output: its name, header, and the tensors in order."""

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
    """Consecutive groups of at most `shard_bytes`; a tensor larger than that has a shard of its own."""
    groups: list[list[Planned]] = [[]]
    filled = 0
    for item in plan:
        if groups[-1] and filled + item.size_bytes > shard_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(item)
        filled += item.size_bytes
    return groups


def layout(plan: list[Planned], shard_bytes: int, metadata: dict[str, str] | None = None) -> list[ShardPlan]:
    """The shards that the plan makes, named as every reader expects them."""
    groups = split(plan, shard_bytes)
    n = len(groups)
    names = [SINGLE] if n == 1 else [f"model-{i:05d}-of-{n:05d}.safetensors" for i in range(1, n + 1)]
    heads = (header.build([(t.name, t.dtype, t.shape) for t in g], metadata or {"format": "pt"}) for g in groups)
    return [ShardPlan(*parts) for parts in zip(names, heads, groups, strict=True)]


def write(
    folder: str | os.PathLike,
    plan: list[Planned],
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    metadata: dict[str, str] | None = None,
    progress: Callable[[int], None] = lambda size_bytes: None,
    resume: bool = False,
) -> list[Path]:
    """Write the planned tensors into `folder` and return the shards' paths. `progress` hears bytes as they are done.

    resume: keep shards that an earlier run left whole (same header). They must be of the same source: see staging.py.
    The index is written last. Raises NoRoom where the disk has not enough room.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    shards = layout(plan, shard_bytes, metadata)
    missing = [s for s in shards if not (resume and finished(folder, s))]
    need_room(folder, sum(s.size_bytes for s in missing))
    for shard in shards:
        if shard in missing:
            write_shard(folder, shard, progress)
        else:
            progress(shard.work_bytes)
    write_index(folder, shards)
    return [folder / s.name for s in shards]


def write_shard(folder: Path, shard: ShardPlan, progress: Callable[[int], None] = lambda size_bytes: None) -> None:
    """One shard, which has its name only when it is whole and on the disk."""
    with replacing(folder / shard.name) as file:
        file.write(shard.head)
        for item in shard.items:
            for part in parts(item):
                file.write(part)
            progress(item.work_bytes)


def write_index(folder: Path, shards: list[ShardPlan]) -> None:
    """The list of which tensor is where, for more than one shard."""
    if len(shards) > 1:
        weight_map = {t.name: s.name for s in shards for t in s.items}
        total = sum(t.size_bytes for s in shards for t in s.items)
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def parts(item: Planned) -> Iterator[memoryview]:
    """The bytes of one tensor, checked against its plan."""
    loaded = item.load()
    written = 0
    for array in [loaded] if isinstance(loaded, np.ndarray) else loaded:
        if array.dtype != header.DTYPES[item.dtype]:
            raise ValueError(f"{item.name}: {array.dtype} arrived, {item.dtype} was planned")
        raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        written += raw.nbytes
        yield raw.data
    if written != item.size_bytes:
        raise ValueError(f"{item.name}: {written} bytes arrived, {item.size_bytes} were planned")


def finished(folder: Path, shard: ShardPlan) -> bool:
    """Whether an earlier run left this very shard: same header, same length."""
    path = folder / shard.name
    try:
        if path.stat().st_size != shard.size_bytes:
            return False
        with path.open("rb") as file:
            return file.read(len(shard.head)) == shard.head
    except OSError:
        return False


def need_room(folder: Path, size_bytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if size_bytes > free:
        raise NoRoom(
            f"{folder}: {size_bytes / 1e9:.2f} GB to write and {free / 1e9:.2f} GB free",
            "free some disk, or choose --output",
        )


def carry(folder: ModelFolder, target: Path) -> None:
    """Copy the tokenizer, template, processor and licence files; the configurations are written anew."""
    for path in folder.small_files():
        if path.name not in ("config.json", "hf_quant_config.json"):
            shutil.copyfile(path, target / path.name)

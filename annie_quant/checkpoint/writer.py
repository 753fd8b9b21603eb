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
from annie_quant.checkpoint.shards import INDEX, SINGLE
from annie_quant.errors import EnvironmentFault
from annie_quant.files import replacing, write_json

DEFAULT_SHARD_BYTES = 5_000_000_000


@dataclass(frozen=True)
class Planned:
    """A tensor to be written. `load` gives the array, or its rows in order as several arrays."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    load: Callable[[], np.ndarray | Iterable[np.ndarray]]

    @property
    def size_bytes(self) -> int:
        return header.DTYPES[self.dtype].itemsize * int(np.prod(self.shape, dtype=object))


def planned(name: str, array: np.ndarray) -> Planned:
    """A tensor that is at hand already (scales, small ones)."""
    return Planned(name, header.NAMES[array.dtype], array.shape, lambda: array)


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


def write(
    folder: str | os.PathLike,
    plan: list[Planned],
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    metadata: dict[str, str] | None = None,
    progress: Callable[[int], None] = lambda size_bytes: None,
    resume: bool = False,
) -> list[Path]:
    """Write the planned tensors into `folder` and return the shards' paths. `progress` hears bytes as they are done.

    resume: keep shards that an earlier run left whole (same header); `metadata` must then name the source, or shards
    made from other weights of the same shapes would be kept too. The index is written last. Raises EnvironmentFault
    where the disk has not enough room.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    groups = split(plan, shard_bytes)
    names = (
        [SINGLE]
        if len(groups) == 1
        else [f"model-{i:05d}-of-{len(groups):05d}.safetensors" for i in range(1, len(groups) + 1)]
    )
    heads = [header.build([(t.name, t.dtype, t.shape) for t in g], metadata or {"format": "pt"}) for g in groups]
    sizes = [len(h) + sum(t.size_bytes for t in g) for h, g in zip(heads, groups, strict=True)]
    done = [resume and finished(folder / n, h, s) for n, h, s in zip(names, heads, sizes, strict=True)]
    need_room(folder, sum(s for s, d in zip(sizes, done, strict=True) if not d))
    for name, head, group, ready, size in zip(names, heads, groups, done, sizes, strict=True):
        if ready:
            progress(size)
            continue
        with replacing(folder / name) as file:
            file.write(head)
            for item in group:
                for part in parts(item):
                    file.write(part)
                progress(item.size_bytes)
    if len(groups) > 1:
        weight_map = {t.name: n for n, g in zip(names, groups, strict=True) for t in g}
        total = sum(t.size_bytes for t in plan)
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    return [folder / n for n in names]


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


def finished(path: Path, head: bytes, size_bytes: int) -> bool:
    """Whether an earlier run left this very shard: same header, same length."""
    try:
        if path.stat().st_size != size_bytes:
            return False
        with path.open("rb") as file:
            return file.read(len(head)) == head
    except OSError:
        return False


def need_room(folder: Path, size_bytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if size_bytes > free:
        raise EnvironmentFault(
            f"{folder}: {size_bytes / 1e9:.2f} GB to write and {free / 1e9:.2f} GB free",
            "free some disk, or choose --output",
        )

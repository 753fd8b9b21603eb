"""Write a model folder.

Shards that are planned first, then streamed, in a folder that has its name only when it is
complete.

A plan has every tensor's dtype and shape, so the headers are known before a weight is read. Arrays
are loaded one after the other, in file order. With `resume`, a shard that an interrupted run
completed is kept if its header is the planned one.

The output is written into `.NAME.part` in the same parent folder. With a key (a description of the
inputs and settings) that folder survives a kill: the next run with the same key uses its finished
shards; a run with any other key starts again.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from annie_quant.checkpoint import header
from annie_quant.checkpoint.shards import INDEX, SINGLE, ModelFolder, without_quantization
from annie_quant.core.errors import DiskFull, EnvironmentFault, UsageError
from annie_quant.core.files import replacing, take_lock, write_json
from annie_quant.core.progress import SILENT, ByteProgress, Progress
from annie_quant.core.resume import KEY_FILE, keyed_folder
from annie_quant.core.untrusted import JsonObject

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
    return Planned(name, header.DTYPE_NAMES[array.dtype], array.shape, lambda: array)


def copied(folder: ModelFolder, name: str, new_name: str | None = None) -> Planned:
    """Plan a tensor as a folder has it. new_name: None keeps its name."""
    info = folder.info(name)
    return Planned(new_name or name, info.dtype, info.shape, partial(folder.pieces, name))


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


def layout(plan: list[Planned], shard_bytes: int) -> list[ShardPlan]:
    """Return the shards of a plan, under the names that every reader expects.

    shard_bytes: largest size of a shard that has more than one tensor.
    """
    groups: list[list[Planned]] = [[]]
    filled = 0
    for item in plan:
        if groups[-1] and filled + item.size_bytes > shard_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(item)
        filled += item.size_bytes
    shards = []
    for number, group in enumerate(groups, 1):
        name = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        head = header.build([(t.name, t.dtype, t.shape) for t in group], {"format": "pt"})
        shards.append(ShardPlan(SINGLE if len(groups) == 1 else name, head, group))
    return shards


def write(
    folder: str | os.PathLike,
    plan: list[Planned],
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    progress: Progress = SILENT,
    resume: bool = False,
) -> list[Path]:
    """Write the planned tensors into `folder` and return the paths of the shards.

    resume: keep shards that an earlier run completed (same header). They must be of the same
        source: see `staged`.
    The index is written last. Raises DiskFull where the disk has not enough space.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    shards = layout(plan, shard_bytes)
    missing = [s for s in shards if not (resume and is_shard_complete(folder, s))]
    check_free_space(folder, sum(s.size_bytes for s in missing))
    total = sum(s.work_bytes for s in shards)
    done = ByteProgress(progress, total, done_before=total - sum(s.work_bytes for s in missing))
    for shard in missing:
        write_shard(folder, shard, done)
    if len(shards) > 1:
        weight_map: dict[str, str] = {}
        for shard in shards:
            weight_map |= dict.fromkeys((t.name for t in shard.items), shard.name)
        metadata = {"total_size": sum(t.size_bytes for t in plan)}
        write_json(folder / INDEX, {"metadata": metadata, "weight_map": weight_map})
    return [folder / s.name for s in shards]


def write_shard(folder: Path, shard: ShardPlan, progress: ByteProgress | None = None) -> None:
    """Write one shard, which has its name only when it is complete and on the disk."""
    with replacing(folder / shard.name) as file:
        file.write(shard.head)
        for item in shard.items:
            for piece in tensor_bytes(item):
                file.write(piece)
            if progress is not None:
                progress.add(item.work_bytes)


def tensor_bytes(item: Planned) -> Iterator[memoryview]:
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


def is_shard_complete(folder: Path, shard: ShardPlan) -> bool:
    """Return whether an earlier run completed this shard: same header, same length."""
    try:
        with (folder / shard.name).open("rb") as file:
            return (
                file.read(len(shard.head)) == shard.head
                and os.fstat(file.fileno()).st_size == shard.size_bytes
            )
    except OSError:
        return False


def check_free_space(folder: Path, size_bytes: int) -> None:
    """Raise DiskFull where the disk of `folder` has less than `size_bytes` free."""
    free = shutil.disk_usage(folder).free
    if size_bytes > free:
        message = f"{folder}: {size_bytes / 1e9:.2f} GB to write and {free / 1e9:.2f} GB free"
        raise DiskFull(message, "free some disk, or choose --output")


def copy_small_files(folder: ModelFolder, target: Path) -> None:
    """Copy the tokenizer, template, processor and licence files.

    The configurations are written separately.
    """
    for path in folder.small_files():
        if path.name not in ("config.json", "hf_quant_config.json"):
            shutil.copyfile(path, target / path.name)


@dataclass(frozen=True)
class QuantSettings:
    """A dialect's quantization settings.

    config.json's quantization_config, and further JSON files by name.
    """

    quantization_config: JsonObject
    files: dict[str, JsonObject]


def write_settings(target: Path, config: JsonObject, settings: QuantSettings | None) -> None:
    """Write config.json with the quantization settings, and the dialect's other files.

    None: for plain weights.
    """
    content = without_quantization(config)
    if settings is not None:
        for name, value in settings.files.items():
            write_json(target / name, value)
        content["quantization_config"] = settings.quantization_config
    write_json(target / "config.json", content)


# ---- the folder, which appears under its name only when it is complete


def check_output(
    output: Path, force: bool, inputs: Iterable[str | os.PathLike | None] = ()
) -> None:
    """Raise UsageError where `output` cannot be the output.

    That is a file, a link, a folder with content (without `force`), or one that holds an input.
    """
    if output.is_symlink() or (output.exists() and not output.is_dir()):
        raise UsageError(
            f"{output} is a file or a link, expected a folder to create", "choose another --output"
        )
    check_inputs(output, inputs)
    if output.exists() and any(output.iterdir()) and not force:
        raise UsageError(
            f"{output} exists and is not empty", "choose another --output, or add --force"
        )


@contextlib.contextmanager
def staged(
    output: str | os.PathLike,
    key: dict[str, object] | None = None,
    force: bool = False,
    inputs: Iterable[str | os.PathLike | None] = (),
) -> Iterator[Path]:
    """Yield the folder to write into; on success it takes the name `output`.

    key: JSON that decides whether the result of an interrupted run may be used; None uses nothing
        of it.
    force: replace an output that exists.
    inputs: files and folders that are read. An output that is one of them or contains one is
        refused, also with `force`.
    Raises UsageError where the output is in the way, EnvironmentFault where it cannot be written or
    another run is writing it.
    """
    output = check_name(output)
    check_output(output, force, inputs)
    part = output.with_name(f".{output.name}.part")
    lock = open_lock(part)
    keep = False
    try:
        if key is None:
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir()
        else:
            keyed_folder(part, key)
        remove_temporary(part)
        yield part
        (part / KEY_FILE).unlink(missing_ok=True)
        remove_temporary(part)
        take_name(part, output)
    except BaseException as error:
        # A fault of the source would occur again; a full disk or Ctrl-C would not.
        may_pass = (
            not isinstance(error, Exception)
            or isinstance(error, OSError)
            or type(error) is EnvironmentFault
        )
        keep = key is not None and may_pass and any(part.glob("*.safetensors"))
        raise
    finally:
        if not keep:
            shutil.rmtree(part, ignore_errors=True)
        lock_path(part).unlink(missing_ok=True)
        os.close(lock)


def check_inputs(output: Path, inputs: Iterable[str | os.PathLike | None]) -> None:
    """Raise UsageError where writing `output` would replace a file or folder that is read."""
    target = output.resolve()
    for path in inputs:
        if path is None:
            continue
        source = Path(path).resolve()
        reason = None
        if target == source:
            reason = "is the checkpoint itself"
        elif target in source.parents:
            reason = f"contains {source.name}, which is read"
        if reason:
            raise UsageError(f"{output} {reason}", "choose another --output")


def check_name(output: str | os.PathLike) -> Path:
    """Return the path of an output folder.

    Raises UsageError where it has no name (".", "..", "/").
    """
    output = Path(output)
    if output.name in ("", ".."):
        raise UsageError(
            f"{output}: expected the name of a folder to create", "for example --output ./out"
        )
    return output


def lock_path(part: Path) -> Path:
    return part.with_name(part.name + ".lock")


def open_lock(part: Path) -> int:
    """Open and lock the folder's lock file. The kernel releases the lock when the process ends."""
    path = lock_path(part)
    while True:
        try:
            part.parent.mkdir(parents=True, exist_ok=True)
            lock = os.open(path, os.O_CREAT | os.O_RDWR, 0o644)
        except OSError as error:
            message = f"{part.parent}: cannot be written to ({error.strerror})"
            raise EnvironmentFault(message, "choose another --output") from None
        try:
            if not take_lock(lock, path):
                message = f"another run is writing {part.name[1:-5]}"
                raise EnvironmentFault(message, "wait for it, or choose another --output")
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_ino == os.fstat(lock).st_ino:
                    return lock  # and not a file that the last owner has just removed
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)


def remove_temporary(part: Path) -> None:
    """Remove temporary files of writers that were killed."""
    for temporary in part.glob(".*.part"):
        temporary.unlink()


def take_name(part: Path, output: Path) -> None:
    """Rename `part` to `output`. An existing output is renamed first, and removed last."""
    old = output.with_name(f".{output.name}.old")
    if output.exists():
        shutil.rmtree(old, ignore_errors=True)
        output.rename(old)
    part.rename(output)
    folder = os.open(output.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
    shutil.rmtree(old, ignore_errors=True)


def source_key(folder: ModelFolder) -> str:
    """Return a hash of the source files' sizes and times.

    By it a rerun keeps no shard of another source.
    """
    digest = hashlib.sha256(str(folder.path.resolve()).encode())
    for path in [*(s.path for s in folder.shards.values()), folder.path / "config.json"]:
        stat = path.stat()
        digest.update(f"{path.name} {stat.st_size} {stat.st_mtime_ns}".encode())
    return digest.hexdigest()

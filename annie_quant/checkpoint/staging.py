"""Make an output folder that appears under its name only when it is complete, and resume one that was interrupted.

The work happens in `.NAME.part` in the same parent folder. With a key (what the output is made from, and how) that
folder is kept after a kill: the next run with the same key finds the finished shards there, any other key starts again.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.core.errors import EnvironmentFault, UsageError
from annie_quant.core.files import take_lock
from annie_quant.core.resume import KEY_FILE, keyed_folder


def check_output(output: Path, force: bool, inputs: Iterable[str | os.PathLike | None] = ()) -> None:
    """Raise UsageError where `output` is a file, a link, or a folder with content (without `force`), or holds an input."""
    if output.is_symlink() or (output.exists() and not output.is_dir()):
        raise UsageError(f"{output} is a file or a link, expected a folder to create", "choose another --output")
    keep_inputs(output, inputs)
    if output.exists() and any(output.iterdir()) and not force:
        raise UsageError(f"{output} exists and is not empty", "choose another --output, or add --force")


@contextlib.contextmanager
def staged(
    output: str | os.PathLike,
    key: dict[str, object] | None = None,
    force: bool = False,
    inputs: Iterable[str | os.PathLike | None] = (),
) -> Iterator[Path]:
    """Yield the folder to write into; on success it takes the name `output`.

    key: JSON that decides whether the result of an interrupted run may be used; None uses nothing of it.
    force: replace an output that exists.
    inputs: files and folders that are read. An output that is one of them or contains one is refused, also with `force`.
    Raises UsageError where the output is in the way, EnvironmentFault where it cannot be written or another run is
    writing it.
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
        # A fault of the source will be there again; a full disk or Ctrl-C will not.
        passing = not isinstance(error, Exception) or isinstance(error, OSError) or type(error) is EnvironmentFault
        keep = key is not None and passing and any(part.glob("*.safetensors"))
        raise
    finally:
        if not keep:
            shutil.rmtree(part, ignore_errors=True)
        lock_path(part).unlink(missing_ok=True)
        os.close(lock)


def keep_inputs(output: Path, inputs: Iterable[str | os.PathLike | None]) -> None:
    """Raise UsageError where writing `output` would replace a file or folder that is read."""
    target = output.resolve()
    for path in inputs:
        if path is not None and target in (source := Path(path).resolve(), *source.parents):
            reason = "is the checkpoint itself" if target == source else f"contains {source.name}, which is read"
            raise UsageError(f"{output} {reason}", "choose another --output")


def check_name(output: str | os.PathLike) -> Path:
    """Return the path of an output folder, or raise UsageError where it has no name of its own (".", "..", "/")."""
    output = Path(output)
    if output.name in ("", ".."):
        raise UsageError(f"{output}: expected the name of a folder to create", "for example --output ./out")
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
            raise EnvironmentFault(
                f"{part.parent}: cannot be written to ({error.strerror})", "choose another --output"
            ) from None
        try:
            if not take_lock(lock, path):
                raise EnvironmentFault(
                    f"another run is writing {part.name[1:-5]}", "wait for it, or choose another --output"
                )
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_ino == os.fstat(lock).st_ino:
                    return lock  # and not a file that its last owner has just removed
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)


def remove_temporary(part: Path) -> None:
    """Remove temporary files of writers that were killed."""
    for temporary in part.glob(".*.part"):
        temporary.unlink()


def take_name(part: Path, output: Path) -> None:
    """Rename `part` to `output`; what had that name is moved away first and removed last."""
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
    """Return a hash of the source files' sizes and times, so that a rerun keeps no shard of another source."""
    digest = hashlib.sha256(str(folder.path.resolve()).encode())
    for path in [*(s.path for s in folder.shards.values()), folder.path / "config.json"]:
        stat = path.stat()
        digest.update(f"{path.name} {stat.st_size} {stat.st_mtime_ns}".encode())
    return digest.hexdigest()

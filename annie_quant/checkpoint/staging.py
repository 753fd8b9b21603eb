"""Making a folder so that it appears under its name only when it is whole, and so that a killed run goes on.

The work happens in `.NAME.part` beside the target. With a stamp (what the output is made from and how) that folder
outlives a kill: the next run with the same stamp finds the finished shards there, any other stamp starts anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.errors import EnvironmentFault, UsageError
from annie_quant.files import take_lock, write_json

STAMP = ".stamp.json"


@contextlib.contextmanager
def staged(output: str | os.PathLike, stamp: dict[str, Any] | None = None, force: bool = False) -> Iterator[Path]:
    """The folder to write into; on success it takes the name `output`.

    stamp: JSON that decides whether what an earlier, stopped run left may be used; None keeps nothing.  force: replace
    an output that exists.  Raises UsageError where the output is in the way, EnvironmentFault where it cannot be
    written or another run is writing it.
    """
    output = named(output)
    if output.is_symlink() or (output.exists() and not output.is_dir()):
        raise UsageError(f"{output} is a file or a link, expected a folder to make", "choose another --output")
    if output.exists() and any(output.iterdir()) and not force:
        raise UsageError(f"{output} exists and is not empty", "choose another --output, or add --force")
    part = output.with_name(f".{output.name}.part")
    lock = open_lock(part)
    keep = False
    try:
        prepare(part, stamp)
        yield part
        (part / STAMP).unlink(missing_ok=True)
        remove_loose(part)
        take_name(part, output)
    except BaseException as error:
        # A fault of the source stays one when run again; a full disk or Ctrl-C does not.
        passing = not isinstance(error, Exception) or isinstance(error, OSError) or type(error) is EnvironmentFault
        keep = stamp is not None and passing and any(part.glob("*.safetensors"))
        raise
    finally:
        if not keep:
            shutil.rmtree(part, ignore_errors=True)
        lock_path(part).unlink(missing_ok=True)
        os.close(lock)


def named(output: str | os.PathLike) -> Path:
    """The path of a folder that can be made beside others: one with a name of its own."""
    output = Path(output)
    if output.name in ("", ".."):
        raise UsageError(f"{output}: expected the name of a folder to make", "for example --output ./out")
    return output


def lock_path(part: Path) -> Path:
    return part.with_name(part.name + ".lock")


def open_lock(part: Path) -> int:
    """Held while the folder is made; the kernel lets go of it when the process dies."""
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
                    return lock  # and not a file that its last holder has just removed
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)


def prepare(part: Path, stamp: dict[str, Any] | None) -> None:
    """An empty folder with its stamp, or the one that a stopped run with the same stamp left."""
    wanted = None if stamp is None else json.loads(json.dumps(stamp, default=str))
    try:
        same = wanted is not None and json.loads((part / STAMP).read_text()) == wanted
    except (OSError, ValueError):
        same = False
    if same:
        remove_loose(part)
        return
    if part.exists():
        shutil.rmtree(part)
    part.mkdir()
    if stamp is not None:
        write_json(part / STAMP, wanted)


def remove_loose(part: Path) -> None:
    """Temporary files of writers that were killed."""
    for loose in part.glob(".*.part"):
        loose.unlink()


def take_name(part: Path, output: Path) -> None:
    """Rename, with whatever stood there before moved aside first and removed last."""
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


def fingerprint(folder: ModelFolder) -> str:
    """Names a source's files by size and time, so that a rerun never keeps shards of another source."""
    digest = hashlib.sha256(str(folder.path.resolve()).encode())
    for path in [*(s.path for s in folder.shards.values()), folder.path / "config.json"]:
        stat = path.stat()
        digest.update(f"{path.name} {stat.st_size} {stat.st_mtime_ns}".encode())
    return digest.hexdigest()

"""File writes that are atomic (a temporary file in the same folder, synced, then renamed), and locks between processes."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import math
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from annie_quant.core.errors import EnvironmentFault

ASSETS = Path(__file__).resolve().parents[1] / "assets"

# flock's errors on a file system without locks, such as NFS without its lock service.
NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)


@contextlib.contextmanager
def replacing(path: str | os.PathLike, mode: str = "wb") -> Iterator[IO]:
    """Open a temporary file next to `path`.

    On success it is synced and renamed to `path`, on failure it is removed.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with temporary.open(mode, encoding=None if "b" in mode else "utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def follow_umask(folder: Path) -> None:
    """Give the files of a folder the mode of new files; some libraries write files that only their owner can read."""
    mask = os.umask(0)
    os.umask(mask)
    for path in folder.iterdir():
        if path.is_file():
            path.chmod(0o666 & ~mask)


def write_text(path: str | os.PathLike, text: str) -> None:
    with replacing(path, "w") as file:
        file.write(text)


def write_json(path: str | os.PathLike, value: object) -> None:
    """Write a value as indented JSON; numbers that are not finite become null."""
    write_text(
        path, json.dumps(finite(value), indent=1, ensure_ascii=False, sort_keys=False) + "\n"
    )


def finite(value: object) -> Any:
    """Return a value of dicts, lists and numbers with None for each NaN and infinity, which JSON does not have."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_json(path: str | os.PathLike) -> Any:
    return json.loads(Path(path).read_text(encoding="utf-8"))


def read_whole_json(path: str | os.PathLike) -> Any:
    """Return the value in a JSON file, or None where the file is missing or is not valid JSON."""
    try:
        return read_json(path)
    except (FileNotFoundError, ValueError, RecursionError):
        return None


def sha256_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def sha256_file(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def owner(path: str | os.PathLike) -> str:
    """Return a note for an error message where `path` belongs to another user, as files of a container do; else ""."""
    path = Path(path)
    with contextlib.suppress(OSError):
        uid = (path if path.exists() else path.parent).stat().st_uid
        if uid != os.geteuid():
            return f", it belongs to user {uid} and this is user {os.geteuid()}"
    return ""


def check_writable(path: Path) -> None:
    """Raise EnvironmentFault if a file cannot be written there; its folder is made."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise EnvironmentFault(
            f"{path}: cannot be written ({error.strerror}{owner(path.parent)})",
            "choose another --output",
        ) from error


def take_lock(file: IO | int, path: str | os.PathLike) -> bool:
    """Lock an open file against other processes until it is closed.

    Return False where another process holds the lock.

    On a file system without locks this logs a warning and returns True: nothing could run there
    otherwise.

    path: for the messages.
    Raises EnvironmentFault for any other error.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise EnvironmentFault(
                f"{path}: cannot be locked ({error.strerror})", "choose another --output"
            ) from error
        logging.getLogger(__name__).warning(
            "annie-quant: %s: this file system has no locks (%s); make sure that no second command writes there",
            path,
            error.strerror,
        )
    return True


def exists(path: Path) -> bool:
    """Return whether a path exists; False for one that no file can have (too long, a null character)."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def is_folder(path: Path) -> bool:
    """Return whether a path is a folder; False for one that no file can have."""
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False

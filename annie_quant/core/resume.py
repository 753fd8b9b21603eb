"""Resuming interrupted work.

What was finished is stored under a key, any JSON value that describes all of its inputs.

KeyedJson            one value in a file
keyed_folder         a folder of files
JsonLines            an append-only log, whose lines have their own keys

Files are replaced atomically, lines are appended completely or not at all. What was stored under
another key, and what a kill cut short, counts as not done; it is discarded, never mixed in.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from annie_quant.core.errors import EnvironmentFault, UsageError
from annie_quant.core.files import read_whole_json, take_lock, write_json

_T = TypeVar("_T")

KEY_FILE = "key.json"
_BLOCK_BYTES = 64 << 10


class KeyedJson:
    """One JSON value in a file, valid for one key.

    A missing, torn or foreign file counts as no value.
    """

    def __init__(self, path: Path, key: object) -> None:
        self.path = path
        # As JSON reads it back, so that a tuple and a list, or a Path and its text, are equal.
        self._key = json.loads(json.dumps(key, sort_keys=True, default=str))

    def load(self, default: object = None) -> Any:
        stored = read_whole_json(self.path)
        if not isinstance(stored, dict) or stored.get("key") != self._key or "value" not in stored:
            return default
        return stored["value"]

    def save(self, value: object) -> None:
        write_json(self.path, {"key": self._key, "value": value})


def keyed_folder(folder: Path, key: object) -> Path:
    """Return `folder`, emptied first unless it was made for the same `key`."""
    mark = KeyedJson(folder / KEY_FILE, key)
    if not mark.load(default=False):
        shutil.rmtree(folder, ignore_errors=True)
        mark.save(True)
    return folder


def read_lines(path: str | os.PathLike[str], decode: Callable[[bytes, str], _T]) -> list[_T]:
    """Return the values of a log's complete lines; the file is not changed.

    decode: called with each line and its place, for messages.
    """
    content = Path(path).read_bytes()
    lines = content[: content.rfind(b"\n") + 1].splitlines()
    return [decode(line, f"{path}: line {number}") for number, line in enumerate(lines, 1)]


class JsonLines:
    """An append-only log with one JSON object per line.

    A last line that a kill cut short is removed when it is opened.

    sync: force the lines to the disk before `append` returns.
    exclusive: raise UsageError if another process has the log open in this way.
    restart: discard what earlier runs wrote.
    private: a new file is readable by its owner only.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        sync: bool = False,
        exclusive: bool = False,
        restart: bool = False,
        private: bool = False,
    ) -> None:
        self.path = Path(path)
        self._sync = sync
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self.path, flags, 0o600 if private else 0o666)
        except OSError as error:
            message = f"{self.path} cannot be written: {error.strerror}"
            raise EnvironmentFault(message, "choose another --output") from error
        try:
            if exclusive and not take_lock(self._file, self.path):
                raise UsageError(
                    f"{self.path}: another annie-quant writes there", "wait until it has ended"
                )
            self.size_bytes = 0 if restart else self._end_of_last_line()
            os.ftruncate(self._file, self.size_bytes)
        except BaseException:
            os.close(self._file)
            raise

    def _end_of_last_line(self) -> int:
        end = os.fstat(self._file).st_size
        while end > 0:
            start = max(0, end - _BLOCK_BYTES)
            newline = os.pread(self._file, end - start, start).rfind(b"\n")
            if newline >= 0:
                return start + newline + 1
            end = start
        return 0

    def values(self, decode: Callable[[bytes, str], _T]) -> list[_T]:
        """Return what the log has, as `read_lines` does."""
        return read_lines(self.path, decode)

    def append(self, *lines: bytes) -> None:
        """Write encoded objects, one per line: all of them, or none where EnvironmentFault is raised."""
        data = b"".join(line + b"\n" for line in lines)
        written = 0
        try:
            while written < len(data):
                written += os.write(self._file, data[written:])
            if self._sync:
                os.fsync(self._file)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self.size_bytes)
            full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
            message = f"{self.path}: {'the disk is full' if full else error.strerror}; all earlier lines are safe"
            raise EnvironmentFault(
                message, "free some space and run the same command again: it resumes"
            ) from error
        self.size_bytes += len(data)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # an append that failed has reported it
            os.close(self._file)

    def __enter__(self) -> JsonLines:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

"""Resuming interrupted work: a folder, a JSON file and a JSON-lines log, each tied to the inputs they were made from.

A key is any JSON value that describes all inputs. What was stored under another key is discarded, never mixed in.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from annie_quant.core.errors import EnvironmentFault, UsageError
from annie_quant.core.files import read_whole_json, take_lock, write_json

KEY_FILE = "key.json"


def plain_key(key: object) -> object:
    """Return `key` as JSON reads it back, so that a tuple and a list, or a Path and its text, are equal."""
    return json.loads(json.dumps(key, sort_keys=True, default=str))


def keyed_folder(folder: Path, key: object, wait_s: float = 0.0) -> Path:
    """Return `folder`, emptied first unless it was made for the same `key`.

    wait_s: seconds to wait for another process, which makes the folder for this key.
    """
    key = plain_key(key)
    deadline = time.monotonic() + wait_s
    while read_whole_json(folder / KEY_FILE) != key:
        if time.monotonic() < deadline:
            time.sleep(0.1)
            continue
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        write_json(folder / KEY_FILE, key)
    return folder


class KeyedJson:
    """One JSON value in a file, valid for one key. A missing, torn or foreign file counts as no value."""

    def __init__(self, path: Path, key: object) -> None:
        self.path, self._key = path, plain_key(key)

    def load(self, default: Any = None) -> Any:
        stored = read_whole_json(self.path)
        if not isinstance(stored, dict) or stored.get("key") != self._key or "value" not in stored:
            return default
        return stored["value"]

    def save(self, value: object) -> None:
        write_json(self.path, {"key": self._key, "value": value})


class JsonLines:
    """An append-only log with one JSON object per line. A last line that a kill cut short is removed when it is opened.

    sync: force the lines to the disk before `append` returns. exclusive: raise UsageError if another process has the log
    open in this way. restart: discard what earlier runs wrote.
    """

    def __init__(
        self, path: str | os.PathLike[str], sync: bool = False, exclusive: bool = False, restart: bool = False
    ) -> None:
        self.path, self._sync = Path(path), sync
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("a+b")
            if exclusive and not take_lock(self._file, self.path):
                raise UsageError(f"{self.path}: another annie-quant writes there", "wait until it has ended")
            if restart:
                self._file.truncate(0)
            self._file.seek(0)
            content = self._file.read()
            complete = content.rfind(b"\n") + 1
            if complete < len(content):
                self._file.truncate(complete)
        except OSError as error:
            raise EnvironmentFault(
                f"{self.path} cannot be written: {error.strerror}", "choose another folder"
            ) from error
        self._content = content[:complete]

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """Yield (number from 1, line without its end) of everything that earlier runs wrote. Can be read once."""
        content, self._content = self._content, b""
        yield from enumerate(content.splitlines(), 1)

    def append(self, *lines: bytes) -> None:
        """Write encoded objects, one per line."""
        try:
            self._file.write(b"".join(line + b"\n" for line in lines))
            self._file.flush()
            if self._sync:
                os.fsync(self._file.fileno())
        except OSError as error:
            reason = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else error.strerror
            raise EnvironmentFault(
                f"{self.path}: {reason}; all earlier lines are safe",
                "free some space and run the same command again: it resumes",
            ) from error

    def close(self) -> None:
        with contextlib.suppress(OSError):  # of a line whose append has failed and was reported
            self._file.close()

    def __enter__(self) -> JsonLines:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

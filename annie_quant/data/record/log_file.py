"""A file of JSON lines that is appended to, readable by its owner only, and never larger than its limit."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

from annie_quant.errors import EnvironmentFault, UsageError
from annie_quant.files import take_lock

BLOCK_BYTES = 64 << 10


class LogFile:
    """Append whole lines. A last line that a kill cut short is removed when the file is opened.

    stopped: why nothing more is written; "" while lines are written.
    Raises UsageError where another process writes to the file, EnvironmentFault where it cannot be opened.
    """

    def __init__(self, path: Path, most_bytes: int) -> None:
        self.path, self.most_bytes, self.stopped = path, most_bytes, ""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise EnvironmentFault(f"{path} cannot be written: {error.strerror}", "choose another --output") from error
        try:
            if not take_lock(self._file, path):
                raise UsageError(f"{path}: another annie-quant writes there", "choose another --output")
            self.size_bytes = self._end_of_last_line()
            os.ftruncate(self._file, self.size_bytes)
        except BaseException:
            os.close(self._file)
            raise

    def _end_of_last_line(self) -> int:
        end = os.fstat(self._file).st_size
        while end > 0:
            start = max(0, end - BLOCK_BYTES)
            newline = os.pread(self._file, end - start, start).rfind(b"\n")
            if newline >= 0:
                return start + newline + 1
            end = start
        return 0

    def append(self, line: bytes) -> bool:
        """Write one line. Return False where the limit is reached or the disk is full: then nothing of it is in the file."""
        if self.stopped:
            return False
        data = line + b"\n"
        if self.size_bytes + len(data) > self.most_bytes:
            self.stopped = f"{self.path} has reached {self.most_bytes / 1e6:,.0f} MB (--max-mb)"
            return False
        try:
            written = 0
            while written < len(data):
                written += os.write(self._file, data[written:])
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
            self.stopped = f"{self.path}: {'the disk is full' if full else error.strerror}"
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self.size_bytes)
            return False
        self.size_bytes += len(data)
        return True

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.fsync(self._file)
        os.close(self._file)

"""records.jsonl: a line a request, written as soon as it is finished: a killed run loses nothing that was done."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from annie_quant.errors import EnvironmentFault


class Records:
    """Append-only. A last line that a kill tore is cut off when the file is opened again."""

    def __init__(self, path: str | os.PathLike) -> None:
        self.path = Path(path)
        self.rows = self._load()
        try:
            self._file = self.path.open("ab")
        except OSError as error:
            raise EnvironmentFault(f"{self.path} cannot be written: {error.strerror}") from error

    def _load(self) -> list[dict[str, Any]]:
        if not self.path.exists():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            return []
        whole = self.path.read_bytes()
        kept = whole.rfind(b"\n") + 1
        if kept < len(whole):
            os.truncate(self.path, kept)
        return _rows(self.path, whole[:kept])

    def append(self, row: dict[str, Any]) -> None:
        line = json.dumps(_plain(row), ensure_ascii=False, allow_nan=False).encode() + b"\n"
        try:
            self._file.write(line)
            self._file.flush()
        except OSError as error:
            raise EnvironmentFault(
                f"{self.path}: {error.strerror}; everything before is kept",
                "free some space and run the same command again: it resumes",
            ) from error
        self.rows.append(row)

    def close(self) -> None:
        self._file.close()


def read_records(path: str | os.PathLike) -> list[dict[str, Any]]:
    """The rows of a records.jsonl, without its torn last line; the file is left alone."""
    whole = Path(path).read_bytes()
    return _rows(Path(path), whole[: whole.rfind(b"\n") + 1])


def _rows(path: Path, whole: bytes) -> list[dict[str, Any]]:
    rows = []
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise ValueError("no object")
        except (ValueError, RecursionError) as error:
            raise EnvironmentFault(
                f"{path}: line {number} is no record: {error}",
                "delete that line, or start again with another --output",
            ) from error
        rows.append(row)
    return rows


def _plain(value: Any) -> Any:
    """NumPy numbers and arrays as Python's; what is not a number (nan, inf) as null, which JSON can hold."""
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    return None if isinstance(value, float) and not math.isfinite(value) else value

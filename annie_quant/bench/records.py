"""records.jsonl: one line per request, written as soon as it is finished, so that a killed run loses nothing."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from annie_quant import schema
from annie_quant.files import replacing
from annie_quant.resume import JsonLines
from annie_quant.schema import RequestRecord

_HINT = "delete that line, or start again with another --output"


class Records:
    """The records of a run directory: those of earlier runs, and an append-only log for new ones."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._log = JsonLines(path)
        try:
            self.rows = _decode(Path(path), self._log.lines())
        except BaseException:
            self._log.close()
            raise

    def append(self, record: RequestRecord) -> None:
        self._log.append(schema.encode(record))
        self.rows.append(record)

    def close(self) -> None:
        self._log.close()

    def rewrite(self) -> None:
        """Write all rows again, after close, because their checks have changed."""
        write_records(self._log.path, self.rows)


def write_records(path: Path, records: Iterable[RequestRecord]) -> None:
    with replacing(path) as file:
        file.writelines(schema.encode(record) + b"\n" for record in records)


def read_records(path: str | os.PathLike[str]) -> list[RequestRecord]:
    """The records of a records.jsonl, without a last line that a kill cut short; the file is not changed.

    Raises EnvironmentFault that names the line for one that is not a record.
    """
    content = Path(path).read_bytes()
    return _decode(Path(path), enumerate(content[: content.rfind(b"\n") + 1].splitlines(), 1))


def _decode(path: Path, lines: Iterable[tuple[int, bytes]]) -> list[RequestRecord]:
    return [schema.decode(RequestRecord, line, f"{path}: line {number}", hint=_HINT) for number, line in lines]

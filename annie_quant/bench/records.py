"""records.jsonl: one line per request, written as soon as it is finished, so that a killed run loses nothing."""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterable
from pathlib import Path

from annie_quant import schema
from annie_quant.bench.confounds import SLOW_FACTOR, SLOW_MS
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


# ---- requests that a backend left unanswered when it hung; in their own file, because a resumed run sends them again

FILE = "unanswered.jsonl"
HUNG, NOT_SENT = "hung", "not_sent"  # RequestRecord.cause


def hangs(elapsed_s: float, answered: Iterable[RequestRecord]) -> bool:
    """Return whether a request that was stopped after elapsed_s took ten times the median of its backend's others, and 1 s more."""
    times = [r.e2e_ms for r in answered if r.e2e_ms is not None and not r.error]
    median_ms = statistics.median(times) if times else 0.0
    return 1000 * elapsed_s > max(SLOW_FACTOR * median_ms, median_ms + SLOW_MS)


def write_unanswered(folder: Path, records: Iterable[RequestRecord]) -> None:
    """Write the records of a run's unanswered requests; without any, remove those of an earlier part of the run."""
    rows = list(records)
    if rows:
        write_records(folder / FILE, rows)
    else:
        (folder / FILE).unlink(missing_ok=True)


def read_unanswered(folder: Path) -> list[RequestRecord]:
    path = folder / FILE
    return read_records(path) if path.is_file() else []

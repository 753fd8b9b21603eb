"""Requests that a backend left unanswered when it hung until the time budget ended: failed answers of that backend.

They have their own file, because a resumed run sends them again and removes it.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from pathlib import Path

from annie_quant.bench.confounds import SLOW_FACTOR, SLOW_MS
from annie_quant.bench.records import read_records, write_records
from annie_quant.schema import RequestRecord

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

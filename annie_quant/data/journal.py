"""The log of an unfinished `annie-quant data` run, next to its output, so that a killed run loses at most one batch.

First line: {"key": the run's settings}. Then one line per requested batch: {"batch": ..., "rows": [...]} with its cost and the
rows that were kept, so that a budget holds over several runs. The log is deleted when the output is complete.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from annie_quant.errors import UsageError
from annie_quant.resume import JsonLines


class JournalBatch(msgspec.Struct):
    """A requested batch. failed: why it failed, or ""."""

    category: str
    cost_usd: float | None = None
    tokens: int = 0
    failed: str = ""


class JournalLine(msgspec.Struct, omit_defaults=True):
    """One line; `row` (one line per row, before its batch) was written up to version 0.1.0."""

    key: dict[str, Any] | None = None
    batch: JournalBatch | None = None
    rows: list[dict[str, Any]] | None = None
    row: dict[str, Any] | None = None


def journal_path(output: Path) -> Path:
    return output.with_name(f".{output.name}.journal")


class Journal:
    """Rows and costs of a run. output: None keeps them in memory only. restart: discard an earlier, unfinished run.

    Raises UsageError if another process writes the same output, or if an unfinished run had other settings.
    """

    def __init__(self, output: Path | None, key: dict[str, Any], restart: bool = False) -> None:
        self.rows: list[dict[str, Any]] = []
        self.batches: Counter[str] = Counter()  # category → number of requested batches
        self.cost_usd, self.tokens = 0.0, 0
        self._log: JsonLines | None = None
        if output is None:
            return
        self._log = JsonLines(journal_path(output), sync=True, exclusive=True, restart=restart)
        lines = list(self._decoded(self._log))
        if not lines:
            self._log.append(msgspec.json.encode(JournalLine(key=key)))
        elif lines[0].key != key:
            different = [k for k in key if (lines[0].key or {}).get(k) != key[k]]
            raise UsageError(
                f"{self._log.path}: an unfinished run with another {', '.join(different)} is stored there",
                "repeat that run's command, or add --force to start again",
            )
        rows: list[dict[str, Any]] = []
        for line in lines[1:]:
            if line.row is not None:
                rows.append(line.row)
            elif line.batch is not None:
                self._count(line.batch, rows if line.rows is None else line.rows)
                rows = []

    def _decoded(self, log: JsonLines) -> Iterator[JournalLine]:
        for number, line in log.lines():
            try:
                yield msgspec.json.decode(line, type=JournalLine)
            except msgspec.DecodeError as error:
                raise UsageError(
                    f"{log.path}, line {number}: {error}", "add --force to start again without its conversations"
                ) from error

    def add(
        self, category: str, rows: list[dict[str, Any]], cost_usd: float | None, tokens: int, failed: str = ""
    ) -> None:
        """Record one batch: the rows of it that are kept, and its cost."""
        batch = JournalBatch(category, cost_usd, tokens, failed)
        if self._log is not None:
            self._log.append(msgspec.json.encode(JournalLine(batch=batch, rows=rows)))
        self._count(batch, rows)

    def _count(self, batch: JournalBatch, rows: list[dict[str, Any]]) -> None:
        self.rows += rows
        self.batches[batch.category] += 1
        self.cost_usd += batch.cost_usd or 0.0
        self.tokens += batch.tokens

    def close(self, finished: bool) -> None:
        """Close the log, and delete it if the run has finished."""
        if self._log is not None:
            self._log.close()
            if finished:
                self._log.path.unlink(missing_ok=True)

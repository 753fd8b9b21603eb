"""What a run of a teacher has made so far: a file of lines beside the output, so that a killed run loses one batch.

First line: the key of the run's settings. Then {"row": ...} for each conversation that was kept and {"batch": ...} for
each batch that was asked for, with its cost, so that a budget holds over several runs. It goes when the output is there.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from annie_quant.errors import UsageError
from annie_quant.files import take_lock


def journal_path(output: Path) -> Path:
    return output.with_name(f".{output.name}.journal")


class Journal:
    def __init__(self, output: Path | None, key: dict[str, Any], anew: bool = False) -> None:
        self.path = journal_path(output) if output is not None else None
        self.rows: list[dict[str, Any]] = []
        self.batches: dict[str, int] = {}  # category → batches asked for
        self.cost_usd, self.tokens = 0.0, 0
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("a+b")
        if not take_lock(self._file, self.path):
            raise UsageError(f"{self.path}: another annie-quant data writes there", "wait for it to end")
        lines = [] if anew else self._whole_lines()
        if lines and lines[0].get("key") != key:
            differs = [k for k in key if lines[0].get("key", {}).get(k) != key[k]]
            raise UsageError(
                f"{self.path}: an unfinished run with another {', '.join(differs)} is kept there",
                "run it again as it was, or add --force to begin anew",
            )
        if not lines:
            self._file.truncate(0)
            self._write({"key": key})
        for line in lines[1:]:
            self._take(line)
        self._sync()

    def _whole_lines(self) -> list[dict[str, Any]]:
        """The lines of an earlier run up to its last whole batch: of half a batch neither cost nor number is known."""
        self._file.seek(0)
        lines: list[dict[str, Any]] = []
        good = whole = position = 0
        for raw in self._file:
            try:
                if not raw.endswith(b"\n"):
                    break
                lines.append(dict(json.loads(raw)))
            except (TypeError, ValueError):
                break
            position += len(raw)
            if "row" not in lines[-1]:
                good, whole = position, len(lines)
        self._file.truncate(good)
        return lines[:whole]

    def add(
        self, category: str, rows: list[dict[str, Any]], cost_usd: float | None, tokens: int, failed: str = ""
    ) -> None:
        """One batch: the rows of it that are kept, and what it cost."""
        batch = {"category": category, "cost_usd": cost_usd, "tokens": tokens, "failed": failed}
        for line in (*({"row": row} for row in rows), {"batch": batch}):
            self._take(line)
            if self.path is not None:
                self._write(line)
        if self.path is not None:
            self._sync()

    def _take(self, line: dict[str, Any]) -> None:
        if "row" in line:
            self.rows.append(line["row"])
        elif "batch" in line:
            batch = line["batch"]
            self.batches[batch["category"]] = self.batches.get(batch["category"], 0) + 1
            self.cost_usd += batch.get("cost_usd") or 0.0
            self.tokens += batch.get("tokens") or 0

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")

    def _sync(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self, done: bool) -> None:
        if self.path is not None:
            self._file.close()
            if done:
                self.path.unlink(missing_ok=True)

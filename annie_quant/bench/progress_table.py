"""The terminal's view of a running benchmark: one row per backend, and the overall progress."""

from __future__ import annotations

import contextlib
import statistics
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from annie_quant.bench.outlook import Outlook
from annie_quant.judge.gates import decides
from annie_quant.printable import printable
from annie_quant.progress import SILENT, Progress
from annie_quant.schema import RequestRecord

RECENT = 200  # requests that the medians are taken over
WIDTH, NAME_WIDTH = 80, 16


def _recent() -> deque[float]:
    return deque(maxlen=RECENT)


@dataclass
class BackendRow:
    """Counts and recent times of one backend."""

    requests: int = 0
    errors: int = 0
    failed_gates: Counter[str] = field(default_factory=Counter)
    ttft_ms: deque[float] = field(default_factory=_recent)
    tpot_ms: deque[float] = field(default_factory=_recent)


class ProgressTable:
    """Progress of a benchmark (progress.Progress), and `add` for its records; `shown` draws it on a terminal."""

    def __init__(self, backends: Sequence[str], outlook: Outlook | None = None) -> None:
        """outlook: predicts the end of the run."""
        self.rows = {name: BackendRow() for name in backends}
        self._outlook = outlook or Outlook(backends)
        self._expected = ""
        self._position: tuple[float, float | None, str] = (0, None, "")
        self._live: Any = None
        self._step: Progress = SILENT

    def add(self, record: RequestRecord) -> None:
        row = self.rows[record.backend]
        row.requests += 1
        row.errors += bool(record.error)
        row.failed_gates.update(gate for gate in record.faults if decides(gate))
        if record.first_content_ms is not None:
            row.ttft_ms.append(record.first_content_ms)
        if record.tpot_ms is not None:
            row.tpot_ms.append(record.tpot_ms)
        self._outlook.add(record)
        self._refresh()

    def update(self, done: float, total: float | None = None, text: str = "") -> None:
        self._position = (done, total, text)
        self._expected = self._outlook.text(done, total)
        self._step.update(done, total, " · ".join(filter(None, (self._expected, text))))
        self._refresh()

    def message(self, text: str) -> None:
        self.update(*self._position[:2], text)

    def table(self) -> Any:
        from rich.box import SIMPLE_HEAD
        from rich.markup import escape
        from rich.table import Table

        done, total, text = self._position
        title = " · ".join(filter(None, (f"{done:g} of {total or 0:g} visits", self._expected, printable(text, 200))))
        table = Table(title=escape(title[:WIDTH]), title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
        for column in ("backend", "requests", "TTFT ms", "TPOT ms", "errors", "failed gates"):
            left = column in ("backend", "failed gates")
            table.add_column(
                column,
                justify="left" if left else "right",
                no_wrap=True,
                overflow="ellipsis",
                min_width=None if left else len(column),
                max_width=NAME_WIDTH if column == "backend" else None,
            )
        for name, row in self.rows.items():
            medians = [f"{statistics.median(times):.1f}" if times else "–" for times in (row.ttft_ms, row.tpot_ms)]
            failed = ", ".join(f"{gate} {count}" for gate, count in row.failed_gates.most_common(2)) or "none"
            table.add_row(escape(printable(name, 200)), str(row.requests), *medians, str(row.errors), escape(failed))
        return table

    @contextlib.contextmanager
    def shown(self, console: Any) -> Iterator[ProgressTable]:
        """Draw the table while the block runs. console: cli.console.Console; on a pipe it prints one line at the end."""
        if not console.err.is_terminal:
            with console.task("bench") as self._step:
                yield self
            self._step = SILENT
            return
        from rich.live import Live

        with Live(self.table(), console=console.err, transient=True, refresh_per_second=2) as self._live:
            yield self
        self._live = None

    def _refresh(self) -> None:
        if self._live is not None:
            self._live.update(self.table())

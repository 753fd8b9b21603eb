"""What a run shows while it goes on: a row a backend, and how far the whole is."""

from __future__ import annotations

import contextlib
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

from annie_quant.judge.tabulation import advisory

KEPT = 200  # recent requests that the medians are taken over


class Board:
    """Fed with records (`add`) and progress (`step`); `shown` draws it on a terminal, and is quiet on a pipe."""

    def __init__(self, backends: list[str]) -> None:
        self.done: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.faults: dict[str, Counter[str]] = {name: Counter() for name in backends}
        self.times: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in backends}
        self.position: tuple[int, int, str] = (0, 0, "")
        self._live: Any = None

    def add(self, row: dict[str, Any]) -> None:
        name = row["backend"]
        self.done[name] += 1
        self.errors[name] += bool(row.get("error"))
        self.faults[name].update(gate for gate in row.get("faults") or () if not advisory(gate))
        for field in ("first_content_ms", "tpot_ms"):
            if row.get(field) is not None:
                self.times[name][field] = [*self.times[name][field], row[field]][-KEPT:]
        self._refresh()

    def step(self, done: int, total: int, text: str) -> None:
        self.position = (done, total, text)
        self._refresh()

    def table(self) -> Any:
        from rich.table import Table

        done, total, text = self.position
        table = Table(title=f"{done} of {total} visits · {text}", title_justify="left")
        for column in ("backend", "requests", "TTFT p50 ms", "ms a token p50", "errors", "gate faults"):
            table.add_column(column, justify="left" if column in ("backend", "gate faults") else "right")
        for name, faults in self.faults.items():
            middle = [
                f"{statistics.median(values):.1f}" if (values := self.times[name][field]) else "–"
                for field in ("first_content_ms", "tpot_ms")
            ]
            seen = ", ".join(f"{gate} {count}" for gate, count in faults.most_common(3)) or "none"
            table.add_row(name, str(self.done[name]), *middle, str(self.errors[name]), seen)
        return table

    @contextlib.contextmanager
    def shown(self, console: Any) -> Iterator[Board]:
        """console: annie_quant.cli.console.Console. On a pipe one line stands at the end."""
        if not console.err.is_terminal:
            with console.task("bench"):
                yield self
            return
        from rich.live import Live

        with Live(self.table(), console=console.err, transient=True, refresh_per_second=2) as self._live:
            yield self
        self._live = None

    def _refresh(self) -> None:
        if self._live is not None:
            self._live.update(self.table())

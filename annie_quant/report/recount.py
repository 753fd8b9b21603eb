"""Count the served figures of run.json again from records.jsonl, and compare them.

Every report makes this check and shows its result; `annie-quant report DIR --verify` prints it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from annie_quant.bench.aggregates import gate_counts, labelled, summaries, timed, values_by_prompt
from annie_quant.documents import RequestRecord, ServedSide
from annie_quant.judge.gates import tabulate
from annie_quant.judge.metrics import COMPARED
from annie_quant.judge.pairing import checks_by_prompt

Records = Sequence[RequestRecord]
TOLERANCE = 1e-3  # relative; absolute below 1
LEAST_SERVER_SHARE = 0.8  # of the server's own time; two clocks may differ a little


@dataclass(frozen=True)
class Difference:
    """A figure of run.json that the records do not give; counted: None where they give no figure at all."""

    figure: str
    reported: float
    counted: float | None

    @property
    def message(self) -> str:
        return f"{self.figure}: {self.reported} in run.json, {self.counted} from the records"


@dataclass
class Recount:
    compared: int = 0
    differences: list[Difference] = field(default_factory=list)

    @property
    def equal(self) -> int:
        return self.compared - len(self.differences)

    @property
    def summary(self) -> str:
        return f"{self.equal} of {self.compared} served figures counted again from the records with the same result"

    def compare(self, figure: str, reported: float, counted: float | None) -> None:
        self.compared += 1
        if counted is None or abs(reported - counted) > TOLERANCE * max(1.0, abs(reported)):
            self.differences.append(Difference(figure, reported, counted))


def check(reported: Mapping[str, ServedSide], measured: Records, sampled: Collection[str]) -> Recount:
    """Compare passes and n of each gate, and the p50 of each metric. reported: by backend. sampled: workloads not greedy."""
    result, fit = Recount(), timed(measured)
    for backend, side in reported.items():
        counts = gate_counts([r for r in measured if r.backend == backend], _greedy(measured, sampled))
        for gate, row in side.gates.items():
            passes, n = counts.get(gate, (None, None))
            result.compare(f"{backend}: {gate}, passes", row.passes, passes)
            result.compare(f"{backend}: {gate}, n", row.n, n)
        by_label = labelled(r for r in fit if r.backend == backend)
        for workload, summary in side.workloads.items():
            for metric in COMPARED:
                if (figures := getattr(summary, metric)) is not None:
                    p50 = quantile(values(by_label.get(workload, ()), metric), 0.5)
                    result.compare(f"{backend}: {workload}, {metric} p50", figures.p50, p50)
    return result


def served(measured: Records, sampled: Collection[str]) -> dict[str, ServedSide]:
    """Return what records alone give of each backend: gates and percentiles."""
    sides, fit = {}, timed(measured)
    for backend in dict.fromkeys(r.backend for r in measured):
        own = [r for r in measured if r.backend == backend]
        sides[backend] = ServedSide(
            gates=tabulate(checks_by_prompt(own, _greedy(measured, sampled)).values()),
            workloads={w: summaries(rows) for w, rows in labelled(r for r in fit if r.backend == backend).items()},
        )
    return sides


def _greedy(measured: Records, sampled: Collection[str]) -> set[str]:
    return {r.workload for r in measured} - set(sampled)


def before_server(measured: Records) -> int:
    """Count requests that ended, by the client's clock, well before the server's own times allow."""
    early = 0
    for record in measured:
        times = [(record.server_timings or {}).get(k) for k in ("prompt_ms", "predicted_ms")]
        numbers = [t for t in times if isinstance(t, (int, float)) and 0 <= t < 1e15]
        if record.e2e_ms is not None and not record.error and len(numbers) == 2:
            early += record.e2e_ms < LEAST_SERVER_SHARE * sum(numbers)
    return early


def values(records: Iterable[RequestRecord], metric: str) -> list[float]:
    """Return all values of a metric, sorted; itl_ms gives every gap of every stream."""
    return sorted(value for some in values_by_prompt(records, metric).values() for value in some)


def quantile(ordered: Sequence[float], at: float) -> float | None:
    """Return a quantile, linear between the values of a sample; None of an empty one."""
    return float(np.quantile(ordered, at)) if len(ordered) else None

"""Count the served figures of run.json again from records.jsonl, without the benchmark's code, and compare them.

Every report makes this check and shows its result; `annie-quant report DIR --verify` prints it. Left out of times, as in
the benchmark: failed and cold requests, answers with a stamp from before their request was sent, and stalls.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from annie_quant.judge.gates import tabulate
from annie_quant.judge.metrics import COMPARED, METRICS
from annie_quant.schema import MetricSummary, RequestRecord, ServedSide, WorkloadSummary

K = TypeVar("K", bound=Hashable)
Records = Sequence[RequestRecord]
TOLERANCE = 1e-3  # relative; absolute below 1
STALL_FACTOR, STALL_MS = 10.0, 1000.0  # a stall's first token takes ten times the median, and a second more
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
    """Compare passes and n of each gate, and the p50 of each metric. reported: by backend."""
    result = Recount()
    everything, timed = group(measured, lambda r: r.backend), group(timed_requests(measured), lambda r: r.backend)
    for backend, side in reported.items():
        checks = answer_checks(everything.get(backend, []), sampled)
        for gate, row in side.gates.items():
            outcomes = [answer[gate] for answer in checks if gate in answer]
            result.compare(f"{backend}: {gate}, passes", row.passes, sum(outcomes) if outcomes else None)
            result.compare(f"{backend}: {gate}, n", row.n, len(outcomes) or None)
        by_label = group(timed.get(backend, []), label)
        for workload, summary in side.workloads.items():
            for metric in COMPARED:
                row = getattr(summary, metric)
                if row is not None:
                    p50 = quantile(sorted(values(by_label.get(workload, []), metric)), 0.5)
                    result.compare(f"{backend}: {workload}, {metric} p50", row.p50, p50)
    return result


def served(measured: Records, sampled: Collection[str]) -> dict[str, ServedSide]:
    """What records alone give of each backend: gates and percentiles, without intervals of medians."""
    timed = group(timed_requests(measured), lambda r: r.backend)
    return {
        backend: ServedSide(
            gates=tabulate(answer_checks(records, sampled)),
            workloads={w: _summary(rows) for w, rows in group(timed.get(backend, []), label).items()},
        )
        for backend, records in group(measured, lambda r: r.backend).items()
    }


def _summary(records: Records) -> WorkloadSummary:
    summary = WorkloadSummary(n=len(records))
    for metric in COMPARED:
        ordered = sorted(values(records, metric))
        if ordered:
            p50, p90, p99 = (quantile(ordered, at) or 0.0 for at in (0.5, 0.9, 0.99))
            prompts = len({r.prompt for r in records if values([r], metric)})
            mean = statistics.fmean(ordered)
            row = MetricSummary(
                p50=p50, p90=p90, p99=p99, mean=mean, low=None, high=None, n=len(ordered), n_prompts=prompts
            )
            setattr(summary, metric, row)
    return summary


def label(record: RequestRecord) -> str:
    """The workload with its load: "greeting@8"."""
    return record.workload + record.load.label


def group(records: Iterable[RequestRecord], key: Callable[[RequestRecord], K]) -> dict[K, list[RequestRecord]]:
    groups: dict[K, list[RequestRecord]] = defaultdict(list)
    for record in records:
        groups[key(record)].append(record)
    return groups


def timed_requests(measured: Records) -> list[RequestRecord]:
    """The requests whose times count."""
    complete = [r for r in measured if not r.error and not r.cold and not _stamp_fault(r)]
    stalled: set[int] = set()
    for records in group(complete, lambda r: (r.backend, label(r), r.turn)).values():
        firsts = [(r.first_token_ms, id(r)) for r in records if r.first_token_ms is not None]
        if firsts:
            median = statistics.median(first for first, _ in firsts)
            limit = max(STALL_FACTOR * median, median + STALL_MS)
            stalled.update(key for first, key in firsts if first > limit)
    return [r for r in complete if id(r) not in stalled]


def _stamp_fault(record: RequestRecord) -> bool:
    first, sent = record.first_event_ms, record.sent_ms
    return first is not None and sent is not None and first < sent


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
    """All values of a metric in the order of the records; itl_ms gives every gap of every stream."""
    definition, numbers = METRICS[metric], []
    for record in records:
        value = getattr(record, definition.field)
        if value is not None and not (definition.server_counted and record.tokens_estimated):
            numbers += value if isinstance(value, list) else [value]
    return numbers


def answer_checks(records: Records, sampled: Collection[str]) -> list[dict[str, bool]]:
    """The checks of each answer. Repeats of a greedy prompt are one answer, which passes if all of them do."""
    answers: dict[Hashable, dict[str, bool]] = defaultdict(dict)
    for index, record in enumerate(records):
        answer = answers[record.prompt, index if record.workload in sampled else None]
        for gate, passed in record.checks.items():
            answer[gate] = answer.get(gate, True) and passed
    return list(answers.values())


def quantile(ordered: Sequence[float], at: float) -> float | None:
    """Linear between the values of a sorted sample; None of an empty one."""
    if not ordered:
        return None
    place = at * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])

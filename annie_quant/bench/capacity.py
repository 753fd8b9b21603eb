"""Capacity: the highest rate of arrivals at which a share of the requests meets limits on TTFT and ITL (goodput).

Rates are doubled until one fails, then bisected. A rate is measured in runs of an open loop, each after a lead-in that is not
counted; after each run a sequential test decides whether the share of good requests is above or below the target. Requests
are not independent: a queue fails in clumps, so their number is divided by the design effect, which the segments of the runs
show. The interval is from the highest rate that surely meets the limits to the lowest that surely does not.
tests/perf/bench_rules.py simulates it against queues whose capacity is known.

run() searches against servers, into a run directory that can be resumed.
"""

from __future__ import annotations

import itertools
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from annie_quant import schema
from annie_quant.bench.aggregate import aggregate_records
from annie_quant.bench.backend import Backend
from annie_quant.bench.measure import BudgetEnded, Measurement
from annie_quant.bench.plan import Visit
from annie_quant.bench.records import Records
from annie_quant.bench.run_config import backend_settings, prepare_folder, workload_settings
from annie_quant.errors import ServerError, UsageError
from annie_quant.host import environment
from annie_quant.judge.library import load_workloads
from annie_quant.judge.statistics import wilson
from annie_quant.judge.workloads import Case, Workload
from annie_quant.progress import SILENT, Progress
from annie_quant.schema import Bench, BenchConfig, Ended, Load, RequestRecord

SHARE = 0.95
LEAST_SEGMENT, LEAST_LEAD_IN, MOST_LEAD_IN = 48, 16, 2000  # requests
SEGMENTS = 4  # of a run
MOST_RUNS = 4  # at one rate; then it is undecided
LEAST_DESIGN_EFFECT = 3.0
LEVEL = 0.05 / 2 / 4 / MOST_RUNS  # one side of the interval, about four rates near the capacity, a look after each run
RESOLUTION = 1.1  # ratio of the two ends at which the search stops
MOST_RATES = 24

Send = Callable[[float, int, int], Sequence[bool]]  # (rate per second, number of the run, requests) → good, by arrival


class Limits(msgspec.Struct, frozen=True):
    """What a good request meets; None is not limited. share: of the requests, which the capacity's rate still reaches."""

    ttft_ms: float | None = None
    itl_ms: float | None = None
    share: float = SHARE

    def __post_init__(self) -> None:
        if self.ttft_ms is None and self.itl_ms is None:
            raise UsageError("a capacity needs a limit", "pass --ttft-ms, --itl-ms or both")
        if not 0.5 <= self.share < 1:
            raise UsageError(f"the share must be from 0.5 up to, but not, 1; got {self.share}")

    def met(self, record: RequestRecord) -> bool:
        """Return whether a request is complete, and its first content and mean ITL are in time, with its wait for a connection."""
        if record.error:
            return False
        firsts = [record.scheduled_first_content_ms or record.first_content_ms, record.first_tool_ms]
        first = min((t for t in firsts if t is not None), default=None)
        if self.ttft_ms is not None and (first is None or first > self.ttft_ms):
            return False
        return self.itl_ms is None or record.tpot_ms is None or record.tpot_ms <= self.itl_ms


class RateResult(msgspec.Struct, kw_only=True):
    """One rate: its share of good requests with the sequential interval, and what that decides about it."""

    rate_per_s: float
    n: int
    good: int
    low: float
    high: float
    design_effect: float
    meets: bool | None


class Capacity(msgspec.Struct, kw_only=True):
    """The capacity of one backend. low: the highest rate that meets the limits, 0 where none did; high: the lowest that does
    not, None where all did. estimate: where the share of good requests crosses the target."""

    limits: Limits
    low: float
    high: float | None
    estimate: float | None
    rates: list[RateResult]
    complete: bool = True

    @property
    def sentence(self) -> str:
        limits = self.limits
        parts = [
            f"{name} ≤ {value:g} ms" for name, value in (("TTFT", limits.ttft_ms), ("ITL", limits.itl_ms)) if value
        ]
        target = f"{limits.share:.0%} of requests with {' and '.join(parts)}"
        if self.high is None:
            return f"at least {self.low:.3g} requests/s ({target}): no rate that was tried fails"
        if not self.low:
            return f"below {self.high:.3g} requests/s ({target}): no rate that was tried is sure to meet the limits"
        middle = "" if self.estimate is None else f"{self.estimate:.3g} "
        return f"{middle}requests/s, 95 % interval {self.low:.3g} to {self.high:.3g} ({target})"


class BudgetSpent(Exception):
    """Raised by `send` when no more batches may be sent; what is known by then is the result."""


def lead_in(rate: float, limits: Limits, alone_s: float) -> int:
    """Return how many requests pass before a queue that starts empty is near its steady state.

    Where a share of 95 % is just within a limit of L arrivals, a single queue relaxes over about L² / 2 arrivals, and the lead-in
    is twice that; the number in flight settles within a few times the duration of a request.
    """
    settled = _arrivals_within(rate, limits) ** 2
    return min(MOST_LEAD_IN, max(LEAST_LEAD_IN, math.ceil(settled), math.ceil(3 * rate * alone_s)))


def _arrivals_within(rate: float, limits: Limits) -> float:
    return rate * (limits.ttft_ms or 0.0) / 1e3


def search(send: Send, limits: Limits, alone_s: float, resolution: float = RESOLUTION) -> Capacity:
    """Search the capacity. alone_s: the duration of a request with no other in flight; the first rate is half its inverse."""
    results: dict[float, RateResult] = {}
    complete = True
    try:
        rate: float | None = 0.5 / alone_s
        while rate is not None and len(results) < MOST_RATES:
            _measure(send, limits, rate, alone_s, results)
            rate = _next_rate(results, resolution)
    except BudgetSpent:
        complete = False
    return _capacity(limits, results, complete)


def _measure(send: Send, limits: Limits, rate: float, alone_s: float, results: dict[float, RateResult]) -> None:
    """Send runs at a rate until it is decided, MOST_RUNS were sent, or the budget is spent."""
    segments: list[Sequence[bool]] = []
    skipped = lead_in(rate, limits, alone_s)
    size = max(LEAST_SEGMENT, skipped // 2)
    for run in range(MOST_RUNS):
        good = send(rate, run, skipped + SEGMENTS * size)[skipped:]
        segments += [good[i : i + size] for i in range(0, len(good), size)]
        results[rate] = judge(rate, segments, limits)
        if results[rate].meets is not None:
            return


def judge(rate: float, segments: Sequence[Sequence[bool]], limits: Limits) -> RateResult:
    """Return what the segments of a rate's runs decide.

    Failures of a queue come in clumps, of about L² / 5 arrivals within a limit of L: that is the least design effect, also where
    no failure was seen.
    """
    from scipy.stats import norm, t

    good, n = sum(map(sum, segments)), sum(map(len, segments))
    p = good / n
    share = limits.share
    effect = max(LEAST_DESIGN_EFFECT, _arrivals_within(rate, limits) ** 2 / 5)
    if 0 < p < 1 and len(segments) > 1:
        spread = statistics.variance([sum(s) / len(s) for s in segments]) * n / len(segments) / (p * (1 - p))
        few = float(t.ppf(1 - LEVEL, len(segments) - 1) / norm.ppf(1 - LEVEL))
        effect = max(effect, spread * few**2)
    independent = max(1, round(n / effect))
    low, high = wilson(p * independent, independent, 1 - 2 * LEVEL)
    meets = True if low >= share else False if high < share else None
    return RateResult(rate_per_s=rate, n=n, good=good, low=low, high=high, design_effect=effect, meets=meets)


def _bracket(results: dict[float, RateResult]) -> tuple[float, float | None]:
    """The highest rate that meets the limits below the lowest that does not."""
    high = min((rate for rate, r in results.items() if r.meets is False), default=None)
    low = max((rate for rate, r in results.items() if r.meets and (high is None or rate < high)), default=0.0)
    return low, high


def _next_rate(results: dict[float, RateResult], resolution: float) -> float | None:
    """The next rate to measure; None when the interval is narrow enough, or only undecided rates are inside it."""
    low, high = _bracket(results)
    inside = sorted(
        rate for rate, r in results.items() if r.meets is None and rate > low and (high is None or rate < high)
    )
    if high is None:
        return 2 * max(results)
    if not low:
        return min(results) / 2
    edges = [low, *inside, high]
    # An undecided rate is near the capacity: narrow the two outer gaps, half of each gap at a time.
    gaps = [(edges[1] / low, low, edges[1]), (high / edges[-2], edges[-2], high)]
    ratio, left, right = max(gaps)
    return math.sqrt(left * right) if ratio > resolution else None


def _capacity(limits: Limits, results: dict[float, RateResult], complete: bool) -> Capacity:
    low, high = _bracket(results)
    rows = [results[rate] for rate in sorted(results)]
    estimate = None
    if low and high is not None:
        estimate = math.sqrt(low * high)
        near = [(r.rate_per_s, math.log(max(r.n - r.good, 0.5) / r.n)) for r in rows if low <= r.rate_per_s <= high]
        target = math.log(1 - limits.share)  # a queue's tail is exponential: the logarithm is about linear in the rate
        for (left, below), (right, above) in itertools.pairwise(near):
            if below <= target < above:
                estimate = left + (right - left) * (target - below) / (above - below)
                break
    return Capacity(limits=limits, low=low, high=high, estimate=estimate, rates=rows, complete=complete)


ALONE_REQUESTS, WARMUP_REQUESTS = 8, 2


class CapacityResult(msgspec.Struct, kw_only=True):
    """capacity.json: the capacity of each backend over one workload."""

    workload: str
    capacities: dict[str, Capacity]


class _Measurement(Measurement):
    """Sends open-loop runs of one workload to one backend at a time."""

    def search(self, name: str, workload: Workload, limits: Limits, seconds: float | None) -> Capacity:
        """Return the capacity of a backend, after requests one at a time that give the first rate."""
        self.deadline = None if seconds is None else time.monotonic() + seconds
        cases = [case for case in workload.cases if not case.turns]

        def send(rate: float, run: int, count: int) -> list[bool]:
            self.progress.message(f"{name}: {rate:.3g} requests/s, run {run + 1}, {count} requests")
            records = self._send_run(name, workload, cases, Load(0, round(rate, 6)), count, run)
            return [limits.met(record) for record in records]

        try:
            for i in range(WARMUP_REQUESTS):
                self._visit(Visit(-1, name, workload, ((cases[i % len(cases)], i),), warmup=True))
            alone = [self._send_run(name, workload, cases, Load(), 1, run)[0] for run in range(ALONE_REQUESTS)]
        except BudgetEnded:
            return Capacity(limits=limits, low=0.0, high=None, estimate=None, rates=[], complete=False)
        times = [r.e2e_ms for r in alone if r.e2e_ms and not r.error]
        if not times:
            raise ServerError(
                f"backend {name!r}: no request was answered ({alone[0].error})", "annie-quant doctor --server URL"
            )
        return search(send, limits, statistics.median(times) / 1e3)

    def _send_run(
        self, name: str, workload: Workload, cases: Sequence[Case], load: Load, count: int, run: int
    ) -> list[RequestRecord]:
        """Send `count` requests at a load and return their records in order of arrival; finished ones are not sent again."""
        per_case = -(-count // len(cases))
        chosen = list(itertools.islice(itertools.product(range(per_case), cases), count))
        pairs = tuple((case, run * 10_000 + repeat) for repeat, case in chosen)
        visit = Visit(run, name, workload, pairs, load)
        try:
            self._visit(visit)
        except BudgetEnded:
            if load.rate_per_s is None:
                raise
            raise BudgetSpent from None
        return [self.done[visit.ids(case, repeat)[0]] for case, repeat in pairs]


def run(
    backends: Sequence[Backend],
    workload: Workload | str,
    output: str | os.PathLike[str],
    limits: Limits,
    *,
    budget_s: float | None = None,
    timeout_s: float = 120.0,
    seed: int = 0,
    progress: Progress = SILENT,
) -> CapacityResult:
    """Search each backend's capacity over a workload's single-turn prompts, one backend after the other.

    budget_s: for all backends together; what is known by then is the result. Writes records.jsonl, bench.json and capacity.json
    into `output`. Raises UsageError for a workload of conversations only, ServerError where a server does not answer.
    """
    loaded = workload if isinstance(workload, Workload) else load_workloads([workload])[0]
    if all(case.turns for case in loaded.cases):
        raise UsageError(
            f"{loaded.name} has conversations only; a capacity needs single prompts", "pass another --workload"
        )
    folder = Path(output)
    config = BenchConfig(
        backends=[backend_settings(b) for b in backends],
        workloads={loaded.name: workload_settings(loaded)},
        seed=seed,
        timeout_s=timeout_s,
        with_memory=False,
    )
    prepare_folder(folder, config, [loaded], resume=True)
    records = Records(folder / "records.jsonl")
    capacities: dict[str, Capacity] = {}
    try:
        measurement = _Measurement(config, backends, [loaded], folder, records, progress, lambda record: None)
        measurement._identify(smoke=True)
        for index, backend in enumerate(backends):
            share_s = None if budget_s is None else budget_s / len(backends)
            capacities[backend.name] = measurement.search(backend.name, loaded, limits, share_s)
            progress.update(index + 1, len(backends), f"{backend.name}: {capacities[backend.name].sentence}")
    finally:
        records.close()
    result = CapacityResult(workload=loaded.name, capacities=capacities)
    schema.write(folder / "capacity.json", result)
    bench = Bench(
        ended=Ended(),
        requests=sum(not r.warmup for r in records.rows),
        environment=environment(),
        config=config,
        backends=measurement.identities,
        aggregates=aggregate_records(records.rows, config, measurement.identities),
    )
    schema.write(folder / "bench.json", bench)
    return result

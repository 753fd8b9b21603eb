"""The search of a capacity (bench/capacity.py) against servers, into a run directory that can be resumed."""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from annie_quant import judge, schema
from annie_quant.bench.aggregate import aggregate_records
from annie_quant.bench.backend import Backend
from annie_quant.bench.capacity import BudgetSpent, Capacity, Limits, search
from annie_quant.bench.measure import BudgetEnded, Measurement
from annie_quant.bench.plan import Visit
from annie_quant.bench.records import Records
from annie_quant.bench.run_config import backend_settings, prepare_folder, workload_settings
from annie_quant.errors import ServerError, UsageError
from annie_quant.host import environment
from annie_quant.judge.workloads import Case, Workload
from annie_quant.progress import SILENT, Progress
from annie_quant.schema import Bench, BenchConfig, Ended, Load, RequestRecord

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
    loaded = workload if isinstance(workload, Workload) else judge.load_workloads([workload])[0]
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

"""A benchmark from start to end: smoke question, warm-ups, interleaved measured requests, aggregates, exports.

A run directory is resumed: what records.jsonl has is not sent again. Ctrl-C or a dead server ends the run, and everything
that was finished is kept.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from annie_quant import documents, judge
from annie_quant.bench import endpoints, memory
from annie_quant.bench.aggregates import aggregate_records
from annie_quant.bench.backend import Backend, scrape_metrics, store_metrics
from annie_quant.bench.exports import export
from annie_quant.bench.measure import Measurement, OnRecord
from annie_quant.bench.plan import applies
from annie_quant.bench.reference_answers import STORED, store_reference, stored_reference
from annie_quant.bench.run_folder import (
    RecordLog,
    prepare_folder,
    read_unanswered,
    workload_settings,
    write_records,
)
from annie_quant.core.errors import UsageError
from annie_quant.core.host import environment
from annie_quant.core.progress import SILENT, Progress
from annie_quant.documents import Bench, BenchConfig, Load, Roles
from annie_quant.judge import decision
from annie_quant.judge.workloads import Workload


def run(
    backends: Sequence[Backend],
    workloads: Sequence[Workload | str],
    output: str | os.PathLike[str],
    *,
    concurrency: int | Sequence[int] = 1,
    rates: Sequence[float] = (),
    trace_speeds: Sequence[float] = (1.0,),
    resume: bool = True,
    progress: Progress = SILENT,
    watch: OnRecord | None = None,
    reference_run: str | os.PathLike[str] | None = None,
    candidate: str | None = None,
    reference: str | None = None,
    incumbent: str | None = None,
    **settings: Any,
) -> Bench:
    """Measure `backends` over `workloads` into the folder `output`, and return what bench.json holds.

    workloads: objects or names. concurrency: requests in flight at one backend, or several levels. rates: further levels,
    in arrivals per second (Poisson, open loop). trace_speeds: how many times as fast a trace's requests arrive. resume:
    continue the run in the folder; False starts again. watch: called with each measured record. reference_run: the folder of
    an earlier run with a bf16 side, whose answers all sides are compared with. candidate, reference, incumbent: names of backends
    (reference: also of the side of reference_run); what is not stated follows from their order and formats (decision/roles.py).
    settings: fields of schema.BenchConfig, which has their defaults: warmup, runs, n, seed, prefix_cache, timeout_s, with_memory,
    budget_s, stop_early.

    Raises UsageError (bad arguments, a folder with another benchmark), ServerError (a server does not answer).
    """
    loaded = [w if isinstance(w, Workload) else judge.load_workloads([w])[0] for w in workloads]
    levels = [concurrency] if isinstance(concurrency, int) else list(concurrency)
    loads = [*(Load(level) for level in levels), *(Load(0, rate) for rate in rates)]
    used = [load for load in loads if any(applies(load, w) for w in loaded)]
    used += [Load(0, None, speed) for speed in trace_speeds if any(w.has_arrivals for w in loaded)]
    run_dir = None if reference_run is None else Path(reference_run)
    names = [b.name for b in backends]
    elsewhere = reference if run_dir is not None and reference not in names else None
    config = BenchConfig(
        roles=Roles(candidate=candidate, reference=None if elsewhere else reference, incumbent=incumbent),
        backends=[b.settings for b in backends],
        loads=used,
        workloads={w.name: workload_settings(w) for w in loaded},
        **settings,
    )
    _check(config, loaded)
    config.reference = config.roles.incumbent or backends[0].name
    return execute(
        config, backends, loaded, Path(output), resume, progress, watch or (lambda record: None), run_dir, elsewhere
    )


def execute(
    config: BenchConfig,
    backends: Sequence[Backend],
    workloads: Sequence[Workload],
    folder: Path,
    resume: bool,
    progress: Progress,
    on_record: OnRecord,
    reference_run: Path | None = None,
    reference_name: str | None = None,
) -> Bench:
    """Measure with checked settings, aggregate, and write bench.json and the exports. reference_name: a side of reference_run."""
    prepare_folder(folder, config, workloads, resume)
    if reference_run is not None:
        store_reference(reference_run, folder, workloads, reference_name)
    recorded = stored_reference(folder)
    records = RecordLog(folder / "records.jsonl")
    try:
        measurement = Measurement(config, backends, workloads, folder, records, progress, on_record, recorded)
        metrics = scrape_metrics(backends)
        with measurement.sampling_memory():
            ended = measurement.run()
            levels = measurement.memory()
        store_metrics(folder, metrics, scrape_metrics(backends) if metrics else {})
        traces = memory.read_traces(folder)
        for name, peak in measurement.peaks.items():
            traces[name] = [*traces.get(name, ()), *peak.trace]
        if traces:
            documents.write(folder / memory.FILE, traces)
    finally:
        records.close()
    if measurement.compare_with_reference():
        records.rewrite()
    if recorded:
        write_records(folder / STORED, recorded)  # with their checks
    identities = measurement.identities
    rows = [*records.rows, *read_unanswered(folder)]
    aggregates = aggregate_records(rows, config, identities, levels, ended, recorded, traces)
    bench = Bench(
        ended=ended,
        requests=sum(not r.warmup for r in records.rows),
        environment=environment(),
        config=config,
        backends=identities,
        memory=levels,
        aggregates=aggregates,
        verdict=judge.verdict(aggregates),
    )
    documents.write(folder / "bench.json", bench)
    export(folder)
    return bench


def _check(config: BenchConfig, workloads: Sequence[Workload]) -> None:
    names = [b.name for b in config.backends]
    if not names:
        raise UsageError("no backend to measure", "give at least one: --backend-a NAME URL")
    if len(set(names)) < len(names):
        raise UsageError(f"two backends have the same name: {', '.join(names)}", "give each its own")
    decision.assign(names, {}, config.roles)  # raises for a role that names no side
    if not config.workloads:
        raise UsageError("no workload to measure", "name one: --workloads greeting")
    if config.runs < 1 or config.warmup < 0 or (config.n is not None and config.n < 1):
        raise UsageError(
            "runs and n must be 1 or more and warmup 0 or more; "
            f"got runs={config.runs}, n={config.n}, warmup={config.warmup}"
        )
    if not config.loads:
        raise UsageError("no load to measure under", "give a concurrency or a rate")
    for backend in config.backends:
        endpoint = endpoints.ENDPOINTS[backend.endpoint]
        if not endpoint.with_tools and (tools := [w.name for w in workloads if any(w.tools_for(c) for c in w.cases)]):
            raise UsageError(
                f"backend {backend.name!r}: the {backend.endpoint} endpoint cannot offer tools, and {tools[0]} has some",
                "choose --workloads without tools, or another endpoint",
            )
    if config.prefix_cache not in ("warm", "off"):
        raise UsageError(f"prefix_cache must be 'warm' or 'off', got {config.prefix_cache!r}")
    if config.stop_early and len(config.loads) > 1:
        raise UsageError("stopping early works with one load", "run each load separately")

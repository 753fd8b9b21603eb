"""The benchmark's run: smoke request, warm-ups, interleaved measured requests, records as they come, aggregates.

A run directory is resumed: what records.jsonl holds is not asked again. Ctrl-C and a dead server end the run, and all
that was finished is kept.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from annie_quant import judge
from annie_quant.bench.aggregate import aggregate_records
from annie_quant.bench.backend import Backend
from annie_quant.bench.export import export
from annie_quant.bench.load_profile import Load
from annie_quant.bench.run_config import config_of, open_folder
from annie_quant.bench.session import Progress, Session, Watch
from annie_quant.bench.store import Records
from annie_quant.errors import UsageError
from annie_quant.files import write_json
from annie_quant.host import environment
from annie_quant.judge.workloads import Workload
from annie_quant.pipeline.run_directory import SCHEMA_VERSION


def run(
    backends: Sequence[Backend],
    workloads: Sequence[Workload | str],
    output: str | os.PathLike,
    *,
    warmup: int = 2,
    runs: int = 5,
    n: int | None = None,
    seed: int = 0,
    concurrency: int | Sequence[int] = 1,
    rates: Sequence[float] = (),
    resume: bool = True,
    progress: Progress | None = None,
    watch: Watch | None = None,
    prefix_cache: str = "warm",
    timeout_s: float = 120.0,
    reference: str | None = None,
    with_memory: bool = True,
    budget_s: float | None = None,
    stop_early: bool = False,
) -> dict[str, Any]:
    """Measure `backends` over `workloads` (objects or names) into the folder `output`; returns what bench.json holds.

    warmup: requests for each backend and workload that are never counted. runs: times each case is measured. n: at
    most so many cases of a workload (chosen by `seed`; None: all). concurrency: requests in flight at one backend, or
    several levels. rates: further levels, in arrivals a second (Poisson, open loop). prefix_cache: "warm" (as servers
    come; declared in the record) or "off" (no reuse between requests, where the server can). reference: the backend that
    verbosity is measured against (default: the first). budget_s: stop measuring after so many seconds; what is left is
    said in the verdict, and the same call goes on with it. stop_early: look at a few planned moments, and stop when every
    gate and every comparison is decided at a level that allows for the looks (bench/sequential.py).
    progress(done, total, text); watch(record) after each measured request.

    Raises UsageError (bad arguments, a folder of another benchmark), ServerError (a server is not there or went away).
    """
    loaded = [w if isinstance(w, Workload) else judge.load_workloads([w])[0] for w in workloads]
    levels = [concurrency] if isinstance(concurrency, int) else list(concurrency)
    loads = [Load(level) for level in levels] + [Load(0, rate) for rate in rates]
    _check(backends, loaded, warmup, runs, n, loads, prefix_cache)
    if stop_early and len(loads) > 1:
        raise UsageError("stopping early is for one level of load", "measure the levels in runs of their own")
    folder = Path(output)
    config = config_of(backends, loaded, warmup, runs, n, seed, loads, prefix_cache, reference or backends[0].name)
    open_folder(folder, config, loaded, resume)
    records = Records(folder / "records.jsonl")
    try:
        greedy = frozenset(w.name for w in loaded if not w.temperature)
        session = Session(list(backends), folder, records, timeout_s, prefix_cache, progress, watch, greedy)
        with session.watched(with_memory):
            ended = session.measure(loaded, warmup, runs, n, seed, loads, budget_s, stop_early)
            ended["prefix_cache"] = prefix_cache
            seen = session.identities
            memories = session.memory(loaded, n, seed) if with_memory else {}
    finally:
        records.close()
    aggregates = aggregate_records(
        records.rows,
        config["workloads"],
        seen,
        reference=config["reference"],
        seed=seed,
        memories=memories,
        ended=ended,
    )
    result = {
        "schema_version": SCHEMA_VERSION,
        "ended": ended,
        "requests": sum(not row.get("warmup") for row in records.rows),
        "environment": environment(),
        "config": config,
        "backends": seen,
        "memory": memories,
        "aggregates": aggregates,
        "verdict": judge.verdict(aggregates),
    }
    write_json(folder / "bench.json", result)
    export(folder)
    return result


def _check(
    backends: Sequence[Backend],
    workloads: Sequence[Workload],
    warmup: int,
    runs: int,
    n: int | None,
    loads: Sequence[Load],
    prefix_cache: str,
) -> None:
    names = [b.name for b in backends]
    if not names:
        raise UsageError("there is no backend to measure", "give at least one: --backend-a NAME URL")
    if len(set(names)) < len(names):
        raise UsageError(f"two backends have the same name: {', '.join(names)}", "give each its own")
    if not workloads:
        raise UsageError("there is no workload to measure")
    if runs < 1 or warmup < 0 or (n is not None and n < 1):
        raise UsageError(f"runs and n must be 1 or more and warmup 0 or more; got runs={runs}, n={n}, warmup={warmup}")
    if not loads:
        raise UsageError("there is no load to measure under", "give a concurrency or a rate")
    if prefix_cache not in ("warm", "off"):
        raise UsageError(f"prefix_cache is 'warm' or 'off', got {prefix_cache!r}")

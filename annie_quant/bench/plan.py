"""What a benchmark measures, and which prompts go to which backend in which order.

Randomised blocks interleave the backends over the same prompts.

A block has two prompts. For the first the backends take turns in a random order, for the second in the reverse order (ABBA
for two backends), so that a slow drift of the machine affects all of them alike.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from annie_quant import documents
from annie_quant.bench import endpoints
from annie_quant.bench.backend import Backend
from annie_quant.bench.run_folder import workload_settings
from annie_quant.core.errors import UsageError
from annie_quant.core.files import sha256_text
from annie_quant.core.untrusted import JsonObject
from annie_quant.documents import BenchConfig, Load, Roles
from annie_quant.judge import decision
from annie_quant.judge.library import build_workload, load_workloads
from annie_quant.judge.workloads import Case, Workload, context_text

PathLike = str | os.PathLike[str]
ALONE = Load()
OPEN_LOOP_REQUESTS = 32  # of an open loop, before the next backend's requests


@dataclass(frozen=True)
class BenchPlan:
    """Checked settings of a benchmark: `run` of bench/session.py measures it.

    reference_run   folder of an earlier run with a bf16 side, whose answers all sides are compared with
    reference_name  that side's name there; None: its reference
    """

    config: BenchConfig
    backends: tuple[Backend, ...]
    workloads: tuple[Workload, ...]
    folder: Path
    resume: bool = True
    reference_run: Path | None = None
    reference_name: str | None = None

    @property
    def names(self) -> list[str]:
        return [backend.name for backend in self.backends]


def plan_benchmark(
    backends: Sequence[Backend],
    workloads: Sequence[Workload | str],
    output: PathLike,
    *,
    concurrency: int | Sequence[int] = 1,
    rates: Sequence[float] = (),
    trace_speeds: Sequence[float] = (1.0,),
    resume: bool = True,
    reference_run: PathLike | None = None,
    candidate: str | None = None,
    reference: str | None = None,
    incumbent: str | None = None,
    **settings: Any,
) -> BenchPlan:
    """Return the plan of a benchmark; the arguments are those of `run`. Raises UsageError for bad arguments."""
    loaded = [w if isinstance(w, Workload) else load_workloads([w])[0] for w in workloads]
    levels = [concurrency] if isinstance(concurrency, int) else list(concurrency)
    loads = [*(Load(level) for level in levels), *(Load(0, rate) for rate in rates)]
    used = [load for load in loads if any(applies(load, w) for w in loaded)]
    used += [Load(0, None, speed) for speed in trace_speeds if any(w.has_arrivals for w in loaded)]
    elsewhere = reference if reference_run is not None and reference not in [b.name for b in backends] else None
    config = BenchConfig(
        roles=Roles(candidate=candidate, reference=None if elsewhere else reference, incumbent=incumbent),
        backends=[b.settings for b in backends],
        loads=used,
        workloads={w.name: workload_settings(w) for w in loaded},
        **settings,
    )
    _check(config, loaded)
    run = None if reference_run is None else Path(reference_run)
    return BenchPlan(config, tuple(backends), tuple(loaded), Path(output), resume, run, elsewhere)


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


@dataclass(frozen=True)
class Visit:
    """The requests that are sent to one backend together: (case, repeat) pairs, as many as the load defines."""

    block: int
    backend: str
    workload: Workload
    cases: tuple[tuple[Case, int], ...]
    load: Load = ALONE
    warmup: bool = False

    def ids(self, case: Case, repeat: int) -> list[str]:
        """Return a record's id for each turn."""
        load = self.load.label.replace("/", "p")  # "@2ps" of "@2/s": a "/" separates the parts of an id
        name = f"{self.backend}/{self.workload.name}{load}"
        return [f"{name}/{case.id}/{repeat}/{turn}" for turn in range(case.n_turns)]


def choose(workload: Workload, n: int | None, seed: int) -> list[Case]:
    """Return all cases, or n of them: the same ones for the same seed; of a trace, the first n."""
    if n is None or n >= len(workload.cases):
        return list(workload.cases)
    if workload.has_arrivals:
        return list(workload.cases[:n])
    picked = random.Random(f"{seed}/{workload.name}").sample(range(len(workload.cases)), n)
    return [workload.cases[i] for i in sorted(picked)]


def planned_visits(backends: Sequence[str], workloads: Sequence[Workload], config: BenchConfig) -> list[Visit]:
    """Return all measured visits in order. The same arguments give the same plan, so that a run can be resumed."""
    return [visit for load in config.loads for visit in _plan_load(backends, workloads, config, load)]


def _plan_load(backends: Sequence[str], workloads: Sequence[Workload], config: BenchConfig, load: Load) -> list[Visit]:
    rng = random.Random(f"{config.seed}/{load.label}")
    together = requests_together(load)
    groups: list[tuple[Workload, tuple[tuple[Case, int], ...]]] = []
    for workload in workloads:
        if not applies(load, workload):
            continue
        chosen = choose(workload, config.n, config.seed)
        requests = [(case, repeat) for repeat in range(config.runs) for case in chosen]
        if load.trace_speed is None:
            requests += [(case, config.runs) for case in measured_again(chosen, config)]
            rng.shuffle(requests)
        groups += [(workload, tuple(requests[i : i + together])) for i in range(0, len(requests), together)]
    rng.shuffle(groups)
    visits = []
    order: list[str] = []
    for index, (workload, cases) in enumerate(groups):
        order = order[::-1] if index % 2 else rng.sample(list(backends), len(backends))
        visits += [Visit(index // 2, name, workload, cases, load) for name in order]
    return visits


def measured_again(chosen: Sequence[Case], config: BenchConfig) -> list[Case]:
    """Return the cases that get one measurement more than config.runs: the A/A measurement of runs without repeats."""
    if config.runs > 1:
        return []
    return random.Random(f"{config.seed}/again").sample(list(chosen), int(len(chosen) * config.noise_share))


def warmups(backends: Sequence[str], workloads: Sequence[Workload], config: BenchConfig) -> list[Visit]:
    """Return config.warmup requests per backend and workload, sent before anything is measured and never counted."""
    return [
        Visit(-1, name, workload, ((cases[i % len(cases)], i),), warmup=True)
        for workload in workloads
        for cases in [choose(workload, config.n, config.seed)]
        for i in range(config.warmup)
        for name in backends
    ]


# ---- loads: a number of requests in flight (closed loop), or a rate of arrivals (open loop)


def requests_together(load: Load) -> int:
    """Return how many requests are sent to one backend before the next backend's requests."""
    return load.concurrency or OPEN_LOOP_REQUESTS


def applies(load: Load, workload: Workload) -> bool:
    """Return whether a workload is measured under a load: a trace under its own arrivals alone, anything else under the others."""
    return workload.has_arrivals == (load.trace_speed is not None)


def arrival_times(load: Load, prompts: Sequence[str], cases: Sequence[Case]) -> list[float] | None:
    """Return the start times, in seconds, of an open loop's requests; None in a closed loop.

    The prompts seed a rate's arrivals, so that every backend gets the same. A trace's are those of its cases, the first at 0.
    """
    from annie_quant import stream

    if load.trace_speed is not None:
        return stream.trace([case.arrival_s or 0.0 for case in cases], load.trace_speed)
    if load.rate_per_s is None:
        return None
    seed = int(sha256_text("\n".join(prompts))[:8], 16)
    return stream.poisson(len(prompts), load.rate_per_s, seed)


# ---- contexts: the first server reports once per run how many words of the text make a token; all servers get the same text

SAMPLE_WORDS = 600
LOWEST, HIGHEST = 0.1, 2.0


class ContextSize(msgspec.Struct, kw_only=True):
    """context.json of a run directory."""

    words_per_token: float


def sized(
    workloads: Sequence[Workload], folder: Path, prompt_tokens: Callable[[JsonObject], int | None]
) -> list[Workload]:
    """Return the workloads with words_per_token as measured, in this run or when it was started.

    prompt_tokens: sends a chat completion's body and returns usage.prompt_tokens; None leaves the workloads' own figure.
    """
    if not any(w.context is not None and (w.context.tokens or any(c.blocks for c in w.cases)) for w in workloads):
        return list(workloads)
    path = folder / "context.json"
    if path.exists():
        measured = documents.decode(ContextSize, path).words_per_token
    else:
        tokens = prompt_tokens(_sample())
        if not tokens:
            return list(workloads)
        measured = min(HIGHEST, max(LOWEST, SAMPLE_WORDS / tokens))
        documents.write(path, ContextSize(words_per_token=measured))
    return [
        w if w.context is None else replace(w, context=msgspec.structs.replace(w.context, words_per_token=measured))
        for w in workloads
    ]


def _sample() -> JsonObject:
    """Return the request whose prompt is SAMPLE_WORDS words of the context text."""
    case = {"id": "words", "messages": [{"role": "user", "content": context_text(SAMPLE_WORDS)}]}
    workload = build_workload({"name": "context", "max_tokens": 1, "temperature": 0.0, "gates": [], "cases": [case]})
    return workload.request(workload.cases[0])

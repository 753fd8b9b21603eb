"""Which prompts go to which backend, in which order: randomised blocks that interleave the backends over the same prompts.

A block has two prompts. For the first the backends take turns in a random order, for the second in the reverse order (ABBA
for two backends), so that a slow drift of the machine affects all of them alike.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from annie_quant import documents
from annie_quant.core.files import sha256_text
from annie_quant.documents import BenchConfig, Load
from annie_quant.judge.library import build_workload
from annie_quant.judge.workloads import Case, Workload, context_text

ALONE = Load()
OPEN_LOOP_REQUESTS = 32  # of an open loop, before the next backend's requests


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
        """A record's id for each turn."""
        name = f"{self.backend}/{self.workload.name}{self.load.label}".replace("/s", "ps")
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
    """How many requests are sent to one backend before the next backend's requests."""
    return load.concurrency or OPEN_LOOP_REQUESTS


def applies(load: Load, workload: Workload) -> bool:
    """Whether a workload is measured under a load: a trace under its own arrivals alone, anything else under the others."""
    return workload.has_arrivals == (load.trace_speed is not None)


def arrival_times(load: Load, prompts: Sequence[str], cases: Sequence[Case]) -> list[float] | None:
    """Start times in seconds of an open loop's requests; None in a closed loop.

    The prompts seed a rate's arrivals, so that every backend gets the same. A trace's are those of its cases, the first at 0.
    """
    from annie_quant import stream

    if load.trace_speed is not None:
        return stream.trace([case.arrival_s or 0.0 for case in cases], load.trace_speed)
    if load.rate_per_s is None:
        return None
    seed = int(sha256_text("\n".join(prompts))[:8], 16)
    return stream.poisson(len(prompts), load.rate_per_s, seed)


# ---- contexts: the first server is asked once per run how many words of the text make a token; all servers get the same text

SAMPLE_WORDS = 600
LOWEST, HIGHEST = 0.1, 2.0


class ContextSize(msgspec.Struct, kw_only=True):
    """context.json of a run directory."""

    words_per_token: float


def sized(
    workloads: Sequence[Workload], folder: Path, prompt_tokens: Callable[[dict[str, Any]], int | None]
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


def _sample() -> dict[str, Any]:
    """Return the request whose prompt is SAMPLE_WORDS words of the context text."""
    case = {"id": "words", "messages": [{"role": "user", "content": context_text(SAMPLE_WORDS)}]}
    workload = build_workload({"name": "context", "max_tokens": 1, "temperature": 0.0, "gates": [], "cases": [case]})
    return workload.request(workload.cases[0])

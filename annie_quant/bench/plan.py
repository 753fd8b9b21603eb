"""Which prompts go to which backend, in which order: randomised blocks that interleave the backends over the same prompts.

A block has two prompts. For the first the backends take turns in a random order, for the second in the reverse order (ABBA
for two backends), so that a slow drift of the machine affects all of them alike.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from annie_quant.bench.load_profile import ALONE, applies, requests_together
from annie_quant.judge.workloads import Case, Workload
from annie_quant.schema import BenchConfig, Load


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


def plan(backends: Sequence[str], workloads: Sequence[Workload], config: BenchConfig) -> list[Visit]:
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

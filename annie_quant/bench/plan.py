"""Who is asked what, in which order: randomised blocks that interleave the backends over identical prompts.

Two prompts make a block. In the first the backends take their turns in a random order, in the second in the reverse
(for two: ABBA), so that a slow drift of the machine meets all of them alike.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from annie_quant.bench.load_profile import ALONE, Load
from annie_quant.judge.workloads import Case, Workload


@dataclass(frozen=True)
class Visit:
    """One prompt (or conversation) put to one backend, or as many as the load says."""

    block: int
    backend: str
    workload: Workload
    cases: tuple[tuple[Case, int], ...]  # (case, repeat), all that go out together
    load: Load = ALONE
    warmup: bool = False

    def ids(self, case: Case, repeat: int) -> list[str]:
        """A record's id for each turn."""
        name = f"{self.backend}/{self.workload.name}{self.load.label}".replace("/s", "ps")
        return [f"{name}/{case.id}/{repeat}/{turn}" for turn in range(case.n_turns)]


def choose(workload: Workload, n: int | None, seed: int) -> list[Case]:
    """All cases, or n of them: the same ones for the same seed."""
    if n is None or n >= len(workload.cases):
        return list(workload.cases)
    picked = random.Random(f"{seed}/{workload.name}").sample(range(len(workload.cases)), n)
    return [workload.cases[i] for i in sorted(picked)]


def plan(
    backends: Sequence[str],
    workloads: Sequence[Workload],
    *,
    runs: int,
    n: int | None,
    seed: int,
    load: Load = ALONE,
) -> list[Visit]:
    """Every measured visit, in the order of asking. The same arguments give the same plan: resuming needs it."""
    rng = random.Random(f"{seed}/{load.label}")
    groups: list[tuple[Workload, tuple[tuple[Case, int], ...]]] = []
    for workload in workloads:
        asked = [(case, repeat) for repeat in range(runs) for case in choose(workload, n, seed)]
        rng.shuffle(asked)
        groups += [(workload, tuple(asked[i : i + load.together])) for i in range(0, len(asked), load.together)]
    rng.shuffle(groups)
    visits = []
    order: list[str] = []
    for index, (workload, cases) in enumerate(groups):
        order = order[::-1] if index % 2 else rng.sample(list(backends), len(backends))
        visits += [Visit(index // 2, name, workload, cases, load) for name in order]
    return visits


def warmups(
    backends: Sequence[str],
    workloads: Sequence[Workload],
    count: int,
    n: int | None,
    seed: int,
) -> list[Visit]:
    """`count` requests for each backend and workload, asked before anything is measured and never counted."""
    return [
        Visit(-1, name, workload, ((cases[i % len(cases)], i),), warmup=True)
        for workload in workloads
        for cases in [choose(workload, n, seed)]
        for i in range(count)
        for name in backends
    ]

"""What a benchmark measures, and which prompts go to which backend in which order.

Randomised blocks interleave the backends over the same prompts.

A block has two prompts. For the first the backends take turns in a random order, for the second in the reverse order (ABBA
for two backends), so that a slow drift of the machine affects all of them alike.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from annie_quant import documents
from annie_quant.bench.aggregates import gate_counts, judged_pairs, timed, values_by_prompt
from annie_quant.bench.backend import Backend
from annie_quant.bench.cliffs import PREFIX as LADDER
from annie_quant.bench.run_folder import workload_settings
from annie_quant.core.errors import UsageError
from annie_quant.core.files import sha256_text
from annie_quant.core.untrusted import JsonObject
from annie_quant.documents import (
    BenchConfig,
    Load,
    PairedGate,
    PairedResult,
    RequestLoad,
    RequestRecord,
    Roles,
    by_backend,
)
from annie_quant.judge import decision
from annie_quant.judge.gates import GATES, LARGE_N, Threshold, decides
from annie_quant.judge.library import build_workload, load_workloads
from annie_quant.judge.pairing import deciding_by_prompt
from annie_quant.judge.statistics import compare, holm, wilson
from annie_quant.judge.workloads import Case, Workload, context_text

PathLike = str | os.PathLike[str]
ALONE = Load()
JSON_CHARACTERS = 3.0  # of tools and messages per token, at least
OPEN_LOOP_REQUESTS = 32  # of an open loop, before the next backend's requests


@dataclass(frozen=True)
class BenchPlan:
    """Checked settings of a benchmark: `run` of bench/session.py measures it.

    reference_run   folder of an earlier run with a bf16 side, whose answers all sides are compared with
    reference_name  that side's name there; None: its reference
    stop_at_smoke   end the run where a server has no words for the smoke question
    """

    config: BenchConfig
    backends: tuple[Backend, ...]
    workloads: tuple[Workload, ...]
    folder: Path
    resume: bool = True
    reference_run: Path | None = None
    reference_name: str | None = None
    stop_at_smoke: bool = True


def plan_benchmark(
    backends: Sequence[Backend],
    workloads: Sequence[Workload | str],
    output: PathLike,
    *,
    concurrency: int | Sequence[int] = 1,
    rates: Sequence[float] = (),
    trace_speeds: Sequence[float] = (1.0,),
    resume: bool = True,
    stop_at_smoke: bool = True,
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
    elsewhere = (
        reference
        if reference_run is not None and reference not in [b.name for b in backends]
        else None
    )
    config = BenchConfig(
        roles=Roles(
            candidate=candidate, reference=None if elsewhere else reference, incumbent=incumbent
        ),
        backends=[b.settings for b in backends],
        loads=used,
        workloads={w.name: workload_settings(w) for w in loaded},
        **settings,
    )
    _check(config)
    run = None if reference_run is None else Path(reference_run)
    return BenchPlan(
        config=config,
        backends=tuple(backends),
        workloads=tuple(loaded),
        folder=Path(output),
        resume=resume,
        reference_run=run,
        reference_name=elsewhere,
        stop_at_smoke=stop_at_smoke,
    )


def _check(config: BenchConfig) -> None:
    names = [b.name for b in config.backends]
    if not names:
        raise UsageError("no backend to measure", "give at least one: --backend-a NAME URL")
    if len(set(names)) < len(names):
        raise UsageError(
            f"two backends have the same name: {', '.join(names)}", "give each its own"
        )
    decision.assign(names, {}, config.roles)  # raises for a role that names no side
    if not config.workloads:
        raise UsageError("no workload to measure", "name one: --workloads greeting")
    if config.runs < 1 or config.warmup < 0 or (config.n is not None and config.n < 1):
        got = f"runs={config.runs}, n={config.n}, warmup={config.warmup}"
        raise UsageError(f"runs and n must be 1 or more and warmup 0 or more; got {got}")
    for name in ("budget_s", "timeout_s"):
        seconds = getattr(config, name)
        if seconds is not None and not 0 < seconds < math.inf:
            raise UsageError(f"{name} must be a number of seconds above 0; got {seconds:g}")
    if not config.loads:
        raise UsageError("no load to measure under", "give a concurrency or a rate")
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
        load = self.load.label.replace(
            "/", "p"
        )  # "@2ps" of "@2/s": a "/" separates the parts of an id
        name = f"{self.backend}/{self.workload.name}{load}"
        return [f"{name}/{case.id}/{repeat}/{turn}" for turn in range(case.n_turns)]

    def record(self, case: Case, repeat: int, turn: int) -> RequestRecord:
        """Return the record of one request with what is planned; the rest is set when it is sent."""
        context = self.workload.context
        return RequestRecord(
            id=self.ids(case, repeat)[turn],
            backend=self.backend,
            workload=self.workload.name,
            case=case.id,
            turn=turn,
            repeat=repeat,
            block=self.block,
            warmup=self.warmup,
            load=RequestLoad(
                concurrency=self.load.concurrency,
                rate_per_s=self.load.rate_per_s,
                trace_speed=self.load.trace_speed,
                depth=context.tokens if context else None,
                prefix=context.prefix if context else None,
                n_tools=len(self.workload.tools_for(case) or ()),
            ),
        )


def fits(visit: Visit, most: float | None) -> bool:
    """Return whether a level of a ladder fits a context of `most` tokens: a ladder ends where the server's context does."""
    workload = visit.workload
    if not most or not workload.name.startswith(LADDER):
        return True
    sent = [[workload.tools_for(case), case.messages, case.turns] for case, _ in visit.cases]
    tokens = max(len(json.dumps(parts)) for parts in sent) / JSON_CHARACTERS
    return (
        workload.context.tokens if workload.context else 0
    ) + tokens + workload.max_tokens <= most


def choose(workload: Workload, n: int | None, seed: int) -> list[Case]:
    """Return all cases, or n of them: the same ones for the same seed; of a trace, the first n."""
    if n is None or n >= len(workload.cases):
        return list(workload.cases)
    if workload.has_arrivals:
        return list(workload.cases[:n])
    picked = random.Random(f"{seed}/{workload.name}").sample(range(len(workload.cases)), n)
    return [workload.cases[i] for i in sorted(picked)]


def planned_visits(
    backends: Sequence[str], workloads: Sequence[Workload], config: BenchConfig
) -> list[Visit]:
    """Return all measured visits in order. The same arguments give the same plan, so that a run can be resumed."""
    return [
        visit for load in config.loads for visit in _plan_load(backends, workloads, config, load)
    ]


def _plan_load(
    backends: Sequence[str], workloads: Sequence[Workload], config: BenchConfig, load: Load
) -> list[Visit]:
    rng = random.Random(f"{config.seed}/{load.label}")
    together = load.concurrency or OPEN_LOOP_REQUESTS
    groups: list[tuple[Workload, tuple[tuple[Case, int], ...]]] = []
    for workload in (w for w in workloads if applies(load, w)):
        chosen = choose(workload, config.n, config.seed)
        requests = [(case, repeat) for repeat in range(config.runs) for case in chosen]
        if load.trace_speed is None:
            requests += [(case, config.runs) for case in measured_again(chosen, config)]
            rng.shuffle(requests)
        groups += [
            (workload, tuple(requests[i : i + together])) for i in range(0, len(requests), together)
        ]
    if load.trace_speed is None:
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
    return random.Random(f"{config.seed}/again").sample(
        list(chosen), int(len(chosen) * config.noise_share)
    )


def warmups(
    backends: Sequence[str], workloads: Sequence[Workload], config: BenchConfig
) -> list[Visit]:
    """Return config.warmup requests per backend and workload, sent before anything is measured and never counted."""
    visits = []
    for workload in workloads:
        cases = choose(workload, config.n, config.seed)
        for i in range(config.warmup):
            case = cases[i % len(cases)]
            visits += [Visit(-1, name, workload, ((case, i),), warmup=True) for name in backends]
    return visits


# ---- loads: a number of requests in flight (closed loop), or a rate of arrivals (open loop)


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


def _has_text_of_a_length(workload: Workload) -> bool:
    context = workload.context
    return context is not None and bool(
        context.tokens or any(case.prompt_tokens for case in workload.cases)
    )


LOWEST = 0.1
HIGHEST = 2.0


class ContextSize(msgspec.Struct, kw_only=True):
    """context.json of a run directory."""

    words_per_token: float


def sized(
    workloads: Sequence[Workload], folder: Path, prompt_tokens: Callable[[JsonObject], int | None]
) -> list[Workload]:
    """Return the workloads with words_per_token as measured, in this run or when it was started.

    prompt_tokens: sends a chat completion's body and returns usage.prompt_tokens; None leaves the workloads' own figure.
    """
    if not any(map(_has_text_of_a_length, workloads)):
        return list(workloads)
    path = folder / "context.json"
    if not path.exists():
        case = {
            "id": "words",
            "messages": [{"role": "user", "content": context_text(SAMPLE_WORDS)}],
        }
        sample = build_workload(
            {"name": "context", "max_tokens": 1, "temperature": 0.0, "gates": [], "cases": [case]}
        )
        tokens = prompt_tokens(sample.request(sample.cases[0]))
        if not tokens:
            return list(workloads)
        documents.write(
            path, ContextSize(words_per_token=min(HIGHEST, max(LOWEST, SAMPLE_WORDS / tokens)))
        )
    size = {"words_per_token": documents.decode(ContextSize, path).words_per_token}
    return [
        replace(w, context=msgspec.structs.replace(w.context, **size)) if w.context else w
        for w in workloads
    ]


# ---- when to stop early without more false findings: interim looks (group-sequential), of which the early ones use little alpha
#
# LOOKS looks at the 5 % level would report chance as a difference in far more than 5 of 100 runs. Each of the LOOKS - 1 early looks
# is made at LEVEL, 1 % together, and the end at the usual 5 % (Haybittle-Peto; tests/perf/verdict_rule.py --looks simulates it). A
# run stops when everything is decided: each deciding gate keeps or loses by the paired rule (judge/decision/rule.py) at LEVEL,
# and each compared time differs significantly or is equivalent (its interval is within EQUIVALENT of the other side's median). The
# gates of a single backend are compared with their absolute requirements.

LOOKS = 5
LEVEL = 0.0025  # of each early look; 1 % for all of them
EQUIVALENT = 0.03
METRICS = ("ttft_content_ms", "tpot_ms")


def looks(visits: int, block: int) -> list[int]:
    """Return after how many visits to look, in whole blocks: LOOKS - 1 times (the last look is the end)."""
    marks = {visits * k // LOOKS // block * block for k in range(1, LOOKS)}
    return sorted(mark for mark in marks if 0 < mark < visits)


def open_questions(
    records: Sequence[RequestRecord],
    backends: Sequence[str],
    greedy: Collection[str],
    roles: Roles | None = None,
) -> list[str]:
    """Return what the records cannot decide yet; empty when everything is decided.

    roles: None: those that follow from the order of the backends.
    """
    undecided = [*_open_gates(records, backends, greedy, roles)]
    times = [*compared_times(records, backends, confidence=1 - LEVEL)]
    for (a, b, metric, result), p in zip(
        times, holm([result.p for *_, result in times]), strict=True
    ):
        if not (p is not None and p < LEVEL) and not _equivalent(result):
            undecided.append(f"{a} against {b}: {metric}")
    return undecided


def compared_times(
    records: Sequence[RequestRecord], backends: Sequence[str], confidence: float = 0.95
) -> Iterator[tuple[str, str, str, PairedResult]]:
    """Yield (a, b, metric, result) of each compared time that both backends have, one request in flight."""
    fit = by_backend((r for r in timed(records) if r.load.alone), backends)
    for a, b in itertools.combinations(backends, 2):
        for metric in METRICS:
            x = values_by_prompt(fit[a], metric)
            y = values_by_prompt(fit[b], metric)
            if x and y:
                yield a, b, metric, compare(x, y, confidence=confidence)


def paired_gates(
    records: Sequence[RequestRecord],
    backends: Sequence[str],
    greedy: Collection[str],
    roles: Roles | None,
) -> Iterator[tuple[str, Mapping[str, PairedGate]]]:
    """Yield each backend that has a reference, with its judged gates that decide."""
    roles = roles or decision.assign(backends, {})
    own = by_backend(records, backends)
    for name in backends:
        reference = decision.other_side(roles, name)
        if reference is not None:
            before = deciding_by_prompt(own[reference], greedy)
            after = deciding_by_prompt(own[name], greedy)
            gates, _ = judged_pairs(before, after, bf16=reference == roles.reference)
            yield name, decision.deciding(gates)


def _open_gates(
    records: Sequence[RequestRecord],
    backends: Sequence[str],
    greedy: Collection[str],
    roles: Roles | None,
) -> Iterator[str]:
    for name, gates in paired_gates(records, backends, greedy, roles):
        for gate, pair in gates.items():
            if not decision.decided_at(gate, pair, LEVEL):
                yield f"{name}: {gate} (lost {pair.lost} and won {pair.won} of {pair.n})"
    if len(backends) == 1:
        name = backends[0]
        for gate, (passes, n) in gate_counts(
            [r for r in records if r.backend == name], greedy
        ).items():
            if decides(gate) and not _gate_decided(passes, n, GATES[gate].threshold):
                yield f"{name}: {gate} ({passes} of {n})"


def _gate_decided(passes: int, n: int, threshold: Threshold) -> bool:
    if threshold.kind == "zero":
        return passes < n or n >= LARGE_N
    low, high = wilson(passes, n, 1 - LEVEL)
    return low >= threshold.limit or high < threshold.limit


def _equivalent(result: PairedResult) -> bool:
    if result.low is None or result.high is None or not result.median_a:
        return False
    margin = EQUIVALENT * result.median_a
    return -margin <= result.low and result.high <= margin

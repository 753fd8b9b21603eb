"""What a benchmark measures, and which prompts go to which backend in which order.

Randomised blocks interleave the backends over the same prompts.

A block has two prompts. For the first the backends take turns in a random order, for the second in the reverse order (ABBA
for two backends), so that a slow drift of the machine affects all of them alike.
"""

from __future__ import annotations

import json
import math
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from annie_quant import documents
from annie_quant.bench.backend import Backend
from annie_quant.bench.cliffs import PREFIX as LADDER
from annie_quant.bench.run_folder import workload_settings
from annie_quant.core.errors import UsageError
from annie_quant.core.files import sha256_text
from annie_quant.core.untrusted import JsonObject
from annie_quant.documents import BenchConfig, Load, RequestLoad, RequestRecord, Roles
from annie_quant.judge import decision
from annie_quant.judge.library import build_workload, load_workloads
from annie_quant.judge.workloads import Case, Workload, context_text

ALONE = Load()
JSON_CHARACTERS = 3.0  # of tools and messages per token, at least
TEMPLATE_TOKENS = 200  # of a chat template around a text, and the error of the text's length
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
    output: str | os.PathLike[str],
    *,
    concurrency: int | Sequence[int] = 1,
    rates: Sequence[float] = (),
    trace_speeds: Sequence[float] = (1.0,),
    resume: bool = True,
    stop_at_smoke: bool = True,
    reference_run: str | os.PathLike[str] | None = None,
    candidate: str | None = None,
    reference: str | None = None,
    incumbent: str | None = None,
    **settings: Any,
) -> BenchPlan:
    """Return the plan of a benchmark; the arguments are those of `run`. Raises UsageError for bad arguments."""
    loaded = [w if isinstance(w, Workload) else load_workloads([w])[0] for w in workloads]
    levels = [concurrency] if isinstance(concurrency, int) else list(concurrency)
    loads = [*(Load(level) for level in levels), *(Load(0, rate) for rate in rates)]
    loads = [load for load in loads if any(applies(load, w) for w in loaded)]
    if any(w.has_arrivals for w in loaded):
        loads += [Load(0, None, speed) for speed in trace_speeds]
    # A reference that is not a side of this run is one of the earlier run.
    is_recorded = reference_run is not None and reference not in [b.name for b in backends]
    own_reference = None if is_recorded else reference
    config = BenchConfig(
        roles=Roles(
            candidate=candidate,
            reference=own_reference,
            incumbent=incumbent,
        ),
        backends=[b.settings for b in backends],
        loads=loads,
        workloads={w.name: workload_settings(w) for w in loaded},
        **settings,
    )
    _check(config)
    return BenchPlan(
        config=config,
        backends=tuple(backends),
        workloads=tuple(loaded),
        folder=Path(output),
        resume=resume,
        reference_run=None if reference_run is None else Path(reference_run),
        reference_name=reference if is_recorded else None,
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
        # "@2ps" of "@2/s": a "/" separates the parts of an id
        load = self.load.label.replace("/", "p")
        name = f"{self.backend}/{self.workload.name}{load}"
        return [f"{name}/{case.id}/{repeat}/{turn}" for turn in range(case.n_turns)]

    @property
    def all_ids(self) -> list[str]:
        """The ids of all its records."""
        return [i for case, repeat in self.cases for i in self.ids(case, repeat)]

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
    if most and workload.has_lengths:
        lengths = [case.tokens + case.n_turns * workload.max_tokens for case, _ in visit.cases]
        return max(lengths) + TEMPLATE_TOKENS <= most
    if not most or not workload.name.startswith(LADDER):
        return True
    sent = [[workload.tools_for(case), case.messages, case.turns] for case, _ in visit.cases]
    tokens = max(len(json.dumps(parts)) for parts in sent) / JSON_CHARACTERS
    if workload.context:
        tokens += workload.context.tokens
    return tokens + workload.max_tokens <= most


def choose_cases(workload: Workload, n: int | None, seed: int) -> list[Case]:
    """Return all cases, or n of them: the same ones for the same seed; of a trace, the first n.

    Prompts of given lengths are one measurement: all of them are used.
    """
    if n is None or n >= len(workload.cases) or workload.has_lengths:
        return list(workload.cases)
    if workload.has_arrivals:
        return list(workload.cases[:n])
    indices = random.Random(f"{seed}/{workload.name}").sample(range(len(workload.cases)), n)
    return [workload.cases[i] for i in sorted(indices)]


def planned_visits(
    backends: Sequence[str], workloads: Sequence[Workload], config: BenchConfig
) -> list[Visit]:
    """Return all measured visits in order. The same arguments give the same plan, so that a run can be resumed."""
    visits = []
    for load in config.loads:
        visits += _plan_load(backends, workloads, config, load)
    return visits


def _plan_load(
    backends: Sequence[str], workloads: Sequence[Workload], config: BenchConfig, load: Load
) -> list[Visit]:
    rng = random.Random(f"{config.seed}/{load.label}")
    together = load.concurrency or OPEN_LOOP_REQUESTS
    groups: list[tuple[Workload, tuple[tuple[Case, int], ...]]] = []
    for workload in workloads:
        if not applies(load, workload):
            continue
        cases = choose_cases(workload, config.n, config.seed)
        requests = [(case, repeat) for repeat in range(config.runs) for case in cases]
        if load.trace_speed is None:
            requests += [(case, config.runs) for case in measured_again(cases, config)]
            rng.shuffle(requests)
        for start in range(0, len(requests), together):
            groups.append((workload, tuple(requests[start : start + together])))
    if load.trace_speed is None:
        rng.shuffle(groups)
    visits = []
    order: list[str] = []
    for index, (workload, group) in enumerate(groups):
        order = order[::-1] if index % 2 else rng.sample(list(backends), len(backends))
        visits += [
            Visit(
                index // 2,
                name,
                workload,
                group,
                load,
            )
            for name in order
        ]
    return visits


def measured_again(chosen: Sequence[Case], config: BenchConfig) -> list[Case]:
    """Return the cases that get one measurement more than config.runs: the A/A measurement of runs without repeats."""
    if config.runs > 1:
        return []
    count = int(len(chosen) * config.noise_share)
    return random.Random(f"{config.seed}/again").sample(list(chosen), count)


def warmups(
    backends: Sequence[str], workloads: Sequence[Workload], config: BenchConfig
) -> list[Visit]:
    """Return config.warmup requests per backend, workload and length of a prompt.

    They are sent before anything is measured and never counted. A server compiles and tunes its
    kernels for each length, so the first request of a length may take several times as long.
    """
    visits = []
    for workload in workloads:
        by_length: dict[int, list[Case]] = {}
        for case in choose_cases(workload, config.n, config.seed):
            length = case.prompt_tokens if workload.has_lengths else 0
            by_length.setdefault(length, []).append(case)
        for cases in by_length.values():
            for i in range(config.warmup):
                requests = ((cases[i % len(cases)], i),)
                visits += [Visit(-1, name, workload, requests, warmup=True) for name in backends]
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
MIN_WORDS_PER_TOKEN = 0.1
MAX_WORDS_PER_TOKEN = 2.0


def _has_text_of_a_length(workload: Workload) -> bool:
    context = workload.context
    if context is None:
        return False
    return bool(context.tokens) or any(case.prompt_tokens for case in workload.cases)


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
        message = {"role": "user", "content": context_text(SAMPLE_WORDS)}
        case = {"id": "words", "messages": [message]}
        sample = build_workload(
            {
                "name": "context",
                "max_tokens": 1,
                "temperature": 0.0,
                "gates": [],
                "cases": [case],
            }
        )
        tokens = prompt_tokens(sample.request(sample.cases[0]))
        if not tokens:
            return list(workloads)
        measured = min(MAX_WORDS_PER_TOKEN, max(MIN_WORDS_PER_TOKEN, SAMPLE_WORDS / tokens))
        documents.write(path, ContextSize(words_per_token=measured))
    words_per_token = documents.decode(ContextSize, path).words_per_token
    result = []
    for workload in workloads:
        context = workload.context
        if context:
            context = msgspec.structs.replace(context, words_per_token=words_per_token)
        result.append(replace(workload, context=context))
    return result

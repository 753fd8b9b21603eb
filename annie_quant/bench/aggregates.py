"""Compute the aggregates of a benchmark from its records: percentiles, gates, paired comparisons, turns, answer length, crossover.

Warm-ups, cold starts, stalls and failed requests are left out of all timings; failed requests count in the gates.
"""

from __future__ import annotations

import itertools
import os
import statistics
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np

from annie_quant import documents
from annie_quant.bench import machine, memory, stability
from annie_quant.bench.cliffs import cliff_findings, measured_ladders
from annie_quant.bench.confounds import find_confounds, impossible, stalls
from annie_quant.bench.findings import depth_findings, drift_findings, growth_findings
from annie_quant.bench.reference_answers import RECORDED, stored_reference
from annie_quant.bench.run_folder import read_records, read_unanswered, valid_records
from annie_quant.core.errors import UsageError
from annie_quant.documents.statistics import LimitedMetric
from annie_quant.judge import decision
from annie_quant.judge.gates import count, tabulate
from annie_quant.judge.metrics import COMPARED, METRICS, metric_value
from annie_quant.judge.pairing import checks_by_prompt, deciding_by_prompt, pair_by_prompt
from annie_quant.judge.statistics import LEVEL, compare, holm, median_interval

Values = dict[Hashable, list[float]]
CheckedPrompts = Mapping[Hashable, Mapping[str, bool]]  # prompt → gate → passed

# R28 and R29: on the median of requests with no other in flight, thinking off.
SPEED_LIMITS: dict[str, tuple[LimitedMetric, float]] = {
    "ttft": ("ttft_content_ms", 120.0),
    "decode": ("decode_tok_s", 25.0),
}
MEMORY_SOURCES = (
    "gpu_process_bytes",
    "process_rss_bytes",
    "system_used_bytes",
)  # the first that a server has


def aggregate(
    folder: str | os.PathLike[str], stated: documents.Roles | None = None
) -> documents.Aggregates:
    """Compute the aggregates of a run directory again, from its records.jsonl and bench.json.

    stated: roles instead of the run's
    """
    root = Path(folder)
    bench = documents.read_bench(root)
    try:
        every = read_records(root / "records.jsonl", every=True)
    except FileNotFoundError as error:
        problem = f"{root} holds no finished benchmark (records.jsonl is missing)"
        raise UsageError(problem, f"annie-quant bench ... --output {root}") from error
    if stated is not None and stated.names:
        bench.config.roles = stated
    records = valid_records(every)
    state = machine.summarize(machine.read_samples(root), [r for r in every if not r.warmup])
    measured = bench.memory, bench.ended, stored_reference(root), memory.read_traces(root), state
    return aggregate_records(
        [*records, *read_unanswered(root)], bench.config, bench.backends, *measured
    )


def aggregate_records(
    records: Sequence[documents.RequestRecord],
    config: documents.BenchConfig,
    identities: Mapping[str, documents.Identity],
    levels: Mapping[str, documents.MemoryLevels] | None = None,
    ended: documents.Ended | None = None,
    reference: Sequence[documents.RequestRecord] = (),
    traces: Mapping[str, memory.Trace] | None = None,
    state: documents.MachineState | None = None,
) -> documents.Aggregates:
    """Aggregate the records of a benchmark.

    records: all of them, warm-ups included
    identities: what each backend reports about itself, by backend
    levels: measured memory, by backend
    ended: how the run ended; a run that left out requests is a caveat
    reference: bf16's records of an earlier run, with which all sides are compared where none of them is bf16
    traces: memory over the run, by backend
    state: of the machine over the run
    """
    levels = levels or {}
    formats = {name: identity.format for name, identity in identities.items() if identity.format}
    roles = decision.assign(list(identities), formats, config.roles)
    slopes = {name: memory.growth(trace, config.seed) for name, trace in (traces or {}).items()}
    growths = {name: slope for name, slope in slopes.items() if slope}
    measured = [r for r in records if not r.warmup]
    fit = timed(measured)
    served = {}
    for name, identity in identities.items():
        own = [r for r in measured if r.backend == name]
        own_fit = [r for r in fit if r.backend == name]
        served[name] = documents.ServedSide(
            model=(named if isinstance(named := identity.meta.get("model"), str) else None)
            or identity.model,
            runtime=identity.runtime,
            format=identity.format or "",
            requests=len(own),
            errors=sum(bool(r.answer.error) for r in own),
            left_out_of_timings=len(own) - len(own_fit),
            gates=tabulate(checks_by_prompt(own, config.greedy).values()),
            speed_gates=_speed_gates(own_fit, config.with_thinking, config.seed),
            workloads={
                label: summaries(rows, config.seed) for label, rows in labelled(own_fit).items()
            },
            memory_bytes=_memory_bytes(levels.get(name)),
            memory=levels.get(name),
            memory_growth=growths.get(name),
        )
    pair_sides(served, roles, measured, config.greedy, reference)
    fit_by_backend = documents.by_backend(fit, served)
    turns = {name: _turns(rows, config.seed) for name, rows in fit_by_backend.items()}
    pairs = list(itertools.combinations(served, 2))
    comparisons: list[documents.Comparison] = []
    for a, b in pairs:
        comparisons += _comparisons(fit, a, b, config.seed)
    floors = {name: _floors(rows, config.seed) for name, rows in fit_by_backend.items()}
    stability.set_noise(comparisons, floors)
    drifts = stability.find_drifts(fit, list(served), config.seed)
    depths = stability.compare_depths(fit, list(served), config.seed)
    findings = find_confounds(identities, records, config, ended or documents.Ended())
    findings += [*growth_findings(growths), *drift_findings(drifts), *depth_findings(depths)]
    by_axis = measured_ladders(measured)
    ladders: dict[str, list[documents.Ladder]] = {}
    for ladder in by_axis:
        ladders.setdefault(ladder.backend, []).append(ladder.ladder)
    findings += [*cliff_findings(by_axis), *machine.findings(state, len(measured), list(served))]
    return documents.Aggregates(
        roles=roles,
        served=served,
        comparisons=comparisons,
        noise={name: rows for name, rows in floors.items() if rows},
        drift=drifts,
        turns=turns,
        crossover=[row for a, b in pairs if (row := _crossover(served, a, b))],
        ladders=ladders,
        machine=state,
        confounds=findings,
    )


def timed(measured: Sequence[documents.RequestRecord]) -> list[documents.RequestRecord]:
    """Return the requests whose times count: no cold starts, stalls, failures, impossible stamps or invalid ones."""
    complete = [
        r
        for r in measured
        if not r.cold and not r.answer.error and not r.load.invalid and not impossible(r)
    ]
    stalled = {id(r) for r in stalls(complete)}
    return [r for r in complete if id(r) not in stalled]


# ---- gates


def pair_sides(
    served: Mapping[str, documents.ServedSide],
    roles: documents.Roles,
    measured: Sequence[documents.RequestRecord],
    greedy: Collection[str],
    recorded: Sequence[documents.RequestRecord] = (),
) -> None:
    """Set each backend's paired gates, from its reference's answers to the same prompts.

    The reference's answers are bf16's, of this run or recorded by an earlier one, else those of the side to replace.
    """
    references = {name: decision.other_side(roles, name) for name in served}
    if recorded and roles.reference is None:
        references = dict.fromkeys(served, RECORDED)
    needed = {*references, *references.values()} if any(references.values()) else set()
    sides = documents.by_backend(measured, filter(None, needed))
    rows = {name: deciding_by_prompt(own, greedy) for name, own in sides.items()}
    rows[RECORDED] = deciding_by_prompt(recorded, greedy)
    for name, reference in references.items():
        if reference is None:
            continue
        side = served[name]
        side.judged_by = reference
        side.paired, side.pooled = judged_pairs(
            rows[reference], rows[name], reference in (roles.reference, RECORDED)
        )
        side.gates = decision.apply(side.gates, side.paired)


def judged_pairs(
    reference: CheckedPrompts, own: CheckedPrompts, bf16: bool
) -> tuple[dict[str, documents.PairedGate], documents.PooledGates | None]:
    """Pair one backend's checks with its reference's, and judge each gate and all together. bf16: as for pair_by_prompt."""
    paired, pooled = pair_by_prompt(reference, own, bf16)
    gates, together = decision.judge_gates({"served": paired}, {"served": pooled})
    return gates["served"], together["served"]


def gate_counts(
    records: Sequence[documents.RequestRecord], greedy: Collection[str]
) -> dict[str, tuple[int, int]]:
    """Return gate → (passes, n) of one backend's records, repeats of a greedy prompt counted once."""
    return count(checks_by_prompt(records, greedy).values())


def _speed_gates(
    records: Sequence[documents.RequestRecord], thinking: Collection[str], seed: int
) -> dict[str, documents.SpeedGate]:
    """Compare the median content TTFT and decode speed with their limits: one request in flight, thinking off."""
    single = [r for r in records if r.workload not in thinking and r.load.alone]
    gates = {}
    for gate, (metric, limit) in SPEED_LIMITS.items():
        median = summary(values_by_prompt(single, metric), seed)
        if median:
            low, high = (median.p50 if end is None else end for end in (median.low, median.high))
            if gate == "ttft":
                passes = high <= limit
                fails = low > limit
            else:
                passes = low >= limit
                fails = high < limit
            verdict: documents.Outcome = "undecided"
            if passes or fails:
                verdict = "pass" if passes else "fail"
            interval = {"low": median.low, "high": median.high}
            gates[gate] = documents.SpeedGate(
                metric=metric,
                value=median.p50,
                n=median.n,
                limit=limit,
                verdict=verdict,
                **interval,
            )
    return gates


# ---- metrics


def values_by_prompt(records: Iterable[documents.RequestRecord], metric: str) -> Values:
    """Return the values of a metric by prompt; token metrics only where the server itself counted."""
    values: Values = defaultdict(list)
    for record in records:
        value = metric_value(record, metric)
        if value is not None:
            values[record.prompt] += value if isinstance(value, list) else [value]
    return dict(values)


def summary(by_prompt: Values, seed: int = 0) -> documents.MetricSummary | None:
    """Summarize a metric's values; None where there are none."""
    if not by_prompt:
        return None
    pooled = np.concatenate([np.asarray(v, dtype=np.float64) for v in by_prompt.values()])
    p50, p90, p99 = np.percentile(pooled, [50, 90, 99]).tolist()
    low, high = median_interval([statistics.median(v) for v in by_prompt.values()], seed=seed)
    mean = float(pooled.mean())
    n = int(pooled.size)
    n_prompts = len(by_prompt)
    return documents.MetricSummary(
        p50=p50, p90=p90, p99=p99, mean=mean, low=low, high=high, n=n, n_prompts=n_prompts
    )


def summaries(
    records: Sequence[documents.RequestRecord], seed: int = 0
) -> documents.WorkloadSummary:
    metrics = {name: summary(values_by_prompt(records, name), seed) for name in METRICS}
    return documents.WorkloadSummary(n=len(records), **metrics)


def labelled(
    records: Iterable[documents.RequestRecord],
) -> dict[str, list[documents.RequestRecord]]:
    """Return records by workload and load: "greeting", "greeting@8", "greeting@2/s"."""
    groups: dict[str, list[documents.RequestRecord]] = defaultdict(list)
    for record in records:
        groups[record.workload + record.load.level.label].append(record)
    return dict(sorted(groups.items()))


def _memory_bytes(levels: documents.MemoryLevels | None) -> documents.MemoryBytes | None:
    """Return the figures for the report: NVML's per process, else resident memory, else what the whole machine uses."""
    sources = [name for name in MEMORY_SOURCES if levels and getattr(levels.idle, name) is not None]
    if not sources:
        return None
    figures = {name: getattr(levels, name) for name in ("idle", "one", "five", "peak")}
    sizes = {
        name: getattr(figure, sources[0]) for name, figure in figures.items() if figure is not None
    }
    return documents.MemoryBytes(source=sources[0], **sizes)


# ---- two backends


def _comparisons(
    records: Sequence[documents.RequestRecord], a: str, b: str, seed: int
) -> list[documents.Comparison]:
    """Compare all metrics of each workload that both backends have, and of all workloads together."""
    sides = documents.by_backend(records, (a, b))
    left = labelled(sides[a])
    right = labelled(sides[b])
    groups = [(label, left[label], right[label]) for label in left if label in right]
    if len(groups) > 1:
        ours = [r for label, *_ in groups for r in left[label] if r.load.alone]
        theirs = [r for label, *_ in groups for r in right[label] if r.load.alone]
        groups.append(("all", ours, theirs))
    rows = []
    for label, ours, theirs in groups:
        for metric in COMPARED:
            result = compare(
                values_by_prompt(ours, metric), values_by_prompt(theirs, metric), seed=seed
            )
            figures = msgspec.structs.asdict(result)
            if result.n_prompts:
                rows.append(
                    documents.Comparison(a=a, b=b, workload=label, metric=metric, **figures)
                )
    adjust(rows)
    return rows


def _floors(records: Sequence[documents.RequestRecord], seed: int) -> list[documents.NoiseFloor]:
    """Return the noise of one backend by workload, load and metric, and of all workloads together."""
    groups = labelled(records)
    if len(groups) > 1:
        groups["all"] = [r for r in records if r.load.alone]
    return stability.noise_floors(records, groups, seed)


def adjust(rows: Sequence[documents.AdjustedResult]) -> None:
    """Set p_holm and significant of each row: Holm's adjustment over all of them."""
    for row, p in zip(rows, holm([row.p for row in rows]), strict=True):
        row.p_holm = p
        row.significant = p is not None and p < LEVEL


def _turns(records: Sequence[documents.RequestRecord], seed: int) -> list[documents.TurnPoint]:
    """Return content TTFT by turn, over the workloads that are conversations, one request in flight."""
    conversations = {r.workload for r in records if r.turn > 0}
    by_turn: dict[int, list[documents.RequestRecord]] = defaultdict(list)
    for record in records:
        if record.workload in conversations and record.load.alone:
            by_turn[record.turn].append(record)
    points = []
    for turn, group in sorted(by_turn.items()):
        ttft, total = (
            summary(values_by_prompt(group, metric), seed)
            for metric in ("ttft_content_ms", "e2e_ms")
        )
        figures = {"ttft_content_ms": ttft.p50, "low": ttft.low, "high": ttft.high} if ttft else {}
        e2e_ms = total.p50 if total else None
        points.append(documents.TurnPoint(turn=turn + 1, n=len(group), e2e_ms=e2e_ms, **figures))
    return points


def mean_times(side: documents.ServedSide) -> tuple[float, float, int] | None:
    """Return TTFT and TPOT in ms, the means of the workloads' medians without other requests, and the number of workloads."""
    alone = [w for label, w in side.workloads.items() if "@" not in label]
    medians = [
        (w.ttft_content_ms.p50, w.tpot_ms.p50) for w in alone if w.ttft_content_ms and w.tpot_ms
    ]
    if not medians:
        return None
    ttft_ms, tpot_ms = (statistics.fmean(column) for column in zip(*medians, strict=True))
    return ttft_ms, tpot_ms, len(medians)


def _crossover(
    served: Mapping[str, documents.ServedSide], a: str, b: str
) -> documents.Crossover | None:
    """Return the number of tokens at which two backends have the same total latency (TTFT + tokens x TPOT, medians)."""
    ours = mean_times(served[a])
    theirs = mean_times(served[b])
    if ours is None or theirs is None:
        return None
    ttft_a, tpot_a, _ = ours
    ttft_b, tpot_b, _ = theirs
    tokens = (ttft_b - ttft_a) / (tpot_a - tpot_b) if tpot_a != tpot_b else None
    tokens = tokens if tokens and tokens > 0 else None
    short = a if ttft_a <= ttft_b else b
    long = a if tpot_a < tpot_b else b
    return documents.Crossover(
        a=a, b=b, tokens=tokens, faster_when_short=short, faster_when_long=long
    )

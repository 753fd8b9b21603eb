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
from annie_quant.bench import machine
from annie_quant.bench.cliffs import cliff_findings, measured_ladders
from annie_quant.bench.confounds import find_confounds, impossible, stalls
from annie_quant.bench.noise import noise_floors, set_noise
from annie_quant.bench.prefill import prefill_lines, with_known_zeros
from annie_quant.bench.reference_answers import RECORDED, stored_reference
from annie_quant.bench.run_folder import read_records, read_unanswered, valid_records
from annie_quant.core.errors import UsageError
from annie_quant.documents.statistics import LimitedMetric
from annie_quant.judge import decision
from annie_quant.judge.gates import count, tabulate
from annie_quant.judge.metrics import COMPARED, METRICS, metric_value
from annie_quant.judge.pairing import checks_by_prompt, deciding_by_prompt, pair_by_prompt
from annie_quant.judge.statistics import LEVEL, compare, holm, median_interval

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
    return aggregate_records(
        [*valid_records(every), *read_unanswered(root)],
        bench.config,
        bench.backends,
        bench.memory,
        bench.ended,
        stored_reference(root),
        machine.summarize(machine.read_samples(root), [r for r in every if not r.warmup]),
    )


def aggregate_records(
    records: Sequence[documents.RequestRecord],
    config: documents.BenchConfig,
    identities: Mapping[str, documents.Identity],
    levels: Mapping[str, documents.MemoryLevels] | None = None,
    ended: documents.Ended | None = None,
    reference: Sequence[documents.RequestRecord] = (),
    state: documents.MachineState | None = None,
) -> documents.Aggregates:
    """Aggregate the records of a benchmark.

    records: all of them, warm-ups included
    identities: what each backend reports about itself, by backend
    levels: measured memory, by backend
    ended: how the run ended; a run that left out requests is a caveat
    reference: bf16's records of an earlier run, with which all sides are compared where none of them is bf16
    state: of the machine over the run
    """
    names = list(identities)
    records = with_known_zeros(records, identities)
    formats = {name: identity.format for name, identity in identities.items() if identity.format}
    roles = decision.assign(names, formats, config.roles)
    measured = [r for r in records if not r.warmup]
    own_measured = documents.by_backend(measured, names)
    timed_records = timed(measured)
    own_timed = documents.by_backend(timed_records, names)
    served = {}
    for name, identity in identities.items():
        side = _served_side(identity, own_measured[name], own_timed[name], config)
        side.memory = (levels or {}).get(name)
        side.memory_bytes = _memory_bytes(side.memory)
        served[name] = side
    pair_sides(
        served,
        roles,
        measured,
        config.greedy,
        reference,
    )
    pairs = list(itertools.combinations(served, 2))
    comparisons: list[documents.Comparison] = []
    crossovers = []
    for a, b in pairs:
        comparisons += _comparisons(
            own_timed[a],
            own_timed[b],
            a,
            b,
            config.seed,
        )
        crossovers.append(_crossover(served, a, b))
    floors = {name: _floors(rows, config.seed) for name, rows in own_timed.items()}
    set_noise(comparisons, floors)
    measured_by_axis = measured_ladders(measured)
    ladders: dict[str, list[documents.Ladder]] = {}
    for row in measured_by_axis:
        ladders.setdefault(row.backend, []).append(row.ladder)
    return documents.Aggregates(
        roles=roles,
        served=served,
        comparisons=comparisons,
        noise={name: rows for name, rows in floors.items() if rows},
        turns={name: _turns(rows, config.seed) for name, rows in own_timed.items()},
        crossover=[row for row in crossovers if row is not None],
        prefill={name: prefill_lines(rows) for name, rows in own_timed.items()},
        ladders=ladders,
        machine=state,
        confounds=[
            *find_confounds(identities, records, config, ended or documents.Ended()),
            *cliff_findings(measured_by_axis),
            *machine.findings(state, len(measured), names),
        ],
    )


def _served_side(
    identity: documents.Identity,
    measured: Sequence[documents.RequestRecord],
    timed_records: Sequence[documents.RequestRecord],
    config: documents.BenchConfig,
) -> documents.ServedSide:
    """Return one backend's gates, speed and percentiles, from its own records."""
    model = identity.meta.get("model")
    by_label = labelled(timed_records)
    return documents.ServedSide(
        model=(model if isinstance(model, str) else "") or identity.model,
        runtime=identity.runtime,
        format=identity.format or "",
        requests=len(measured),
        errors=sum(bool(r.answer.error) for r in measured),
        left_out_of_timings=len(measured) - len(timed_records),
        gates=tabulate(checks_by_prompt(measured, config.greedy).values()),
        speed_gates=_speed_gates(timed_records, config.with_thinking, config.seed),
        workloads={label: summaries(rows, config.seed) for label, rows in by_label.items()},
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
        if median is None:
            continue
        low = median.p50 if median.low is None else median.low
        high = median.p50 if median.high is None else median.high
        # A longer time is worse, a higher speed is better.
        is_time = gate == "ttft"
        verdict: documents.Outcome = "undecided"
        if high <= limit if is_time else low >= limit:
            verdict = "pass"
        elif low > limit if is_time else high < limit:
            verdict = "fail"
        gates[gate] = documents.SpeedGate(
            metric=metric,
            value=median.p50,
            n=median.n,
            limit=limit,
            verdict=verdict,
            low=median.low,
            high=median.high,
        )
    return gates


# ---- metrics


def values_by_prompt(
    records: Iterable[documents.RequestRecord], metric: str
) -> dict[Hashable, list[float]]:
    """Return the values of a metric by prompt; token metrics only where the server itself counted."""
    values: dict[Hashable, list[float]] = defaultdict(list)
    for record in records:
        value = metric_value(record, metric)
        if value is not None:
            values[record.prompt] += value if isinstance(value, list) else [value]
    return dict(values)


def summary(
    by_prompt: Mapping[Hashable, Sequence[float]], seed: int = 0
) -> documents.MetricSummary | None:
    """Summarize a metric's values; None where there are none."""
    if not by_prompt:
        return None
    values = np.concatenate([np.asarray(v, dtype=np.float64) for v in by_prompt.values()])
    p50, p90, p99 = np.percentile(values, [50, 90, 99]).tolist()
    low, high = median_interval([statistics.median(v) for v in by_prompt.values()], seed=seed)
    return documents.MetricSummary(
        p50=p50,
        p90=p90,
        p99=p99,
        mean=float(values.mean()),
        low=low,
        high=high,
        n=int(values.size),
        n_prompts=len(by_prompt),
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
    if levels is None:
        return None
    for source in MEMORY_SOURCES:
        if getattr(levels.idle, source) is not None:
            peak = None if levels.peak is None else getattr(levels.peak, source)
            return documents.MemoryBytes(
                source=source,
                idle=getattr(levels.idle, source),
                one=getattr(levels.one, source),
                five=getattr(levels.five, source),
                peak=peak,
            )
    return None


# ---- two backends


def _with_all(
    records: Sequence[documents.RequestRecord], labels: Iterable[str]
) -> dict[str, list[documents.RequestRecord]]:
    """Return the records by these labels of workload and load and, of several, as "all" those that were alone."""
    by_label = labelled(records)
    groups = {label: by_label[label] for label in labels}
    if len(groups) > 1:
        groups["all"] = [r for label in groups for r in groups[label] if r.load.alone]
    return groups


def _comparisons(
    left: Sequence[documents.RequestRecord],
    right: Sequence[documents.RequestRecord],
    a: str,
    b: str,
    seed: int,
) -> list[documents.Comparison]:
    """Compare all metrics of each workload that both backends have, and of all workloads together."""
    labels = [label for label in labelled(left) if label in labelled(right)]
    ours = _with_all(left, labels)
    theirs = _with_all(right, labels)
    rows = []
    for label, metric in itertools.product(ours, COMPARED):
        before = values_by_prompt(ours[label], metric)
        after = values_by_prompt(theirs[label], metric)
        result = compare(before, after, seed=seed)
        if result.n_prompts:
            figures = msgspec.structs.asdict(result)
            rows.append(
                documents.Comparison(
                    a=a,
                    b=b,
                    workload=label,
                    metric=metric,
                    **figures,
                )
            )
    adjust(rows)
    return rows


def _floors(records: Sequence[documents.RequestRecord], seed: int) -> list[documents.NoiseFloor]:
    """Return the noise of one backend by workload, load and metric, and of all workloads together."""
    groups = labelled(records)
    if len(groups) > 1:
        groups["all"] = [r for r in records if r.load.alone]
    return noise_floors(records, groups, seed)


def adjust(rows: Sequence[documents.AdjustedResult]) -> None:
    """Set p_holm and significant of each row: Holm's adjustment over all of them."""
    for row, p in zip(rows, holm([row.p for row in rows]), strict=True):
        row.p_holm = p
        row.significant = p is not None and p < LEVEL


def _turns(records: Sequence[documents.RequestRecord], seed: int) -> list[documents.TurnPoint]:
    """Return content TTFT by turn, over the workloads that are conversations, one request in flight."""
    # Prompts of given lengths have a context of 0 tokens: their turns are no conversation.
    conversations = {r.workload for r in records if r.turn > 0 and r.load.depth != 0}
    by_turn: dict[int, list[documents.RequestRecord]] = defaultdict(list)
    for record in records:
        if record.workload in conversations and record.load.alone:
            by_turn[record.turn].append(record)
    points = []
    for turn, group in sorted(by_turn.items()):
        point = documents.TurnPoint(turn=turn + 1, n=len(group))
        ttft = summary(values_by_prompt(group, "ttft_content_ms"), seed)
        total = summary(values_by_prompt(group, "e2e_ms"), seed)
        if ttft:
            point.ttft_content_ms = ttft.p50
            point.low = ttft.low
            point.high = ttft.high
        if total:
            point.e2e_ms = total.p50
        known = [r.tokens for r in group if r.tokens.computed_tokens is not None]
        if known:
            point.prompt_tokens = statistics.median(tokens.prompt_tokens for tokens in known)
            point.cached_tokens = statistics.median(tokens.cached_tokens or 0 for tokens in known)
        points.append(point)
    return points


def mean_times(side: documents.ServedSide) -> tuple[float, float, int] | None:
    """Return TTFT and TPOT in ms, the means of the workloads' medians without other requests, and the number of workloads."""
    times = []
    for label, workload in side.workloads.items():
        if "@" not in label and workload.ttft_content_ms and workload.tpot_ms:
            times.append((workload.ttft_content_ms.p50, workload.tpot_ms.p50))
    if not times:
        return None
    ttft_ms, tpot_ms = map(statistics.fmean, zip(*times, strict=True))
    return ttft_ms, tpot_ms, len(times)


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
    tokens = (ttft_b - ttft_a) / (tpot_a - tpot_b) if tpot_a != tpot_b else 0.0
    return documents.Crossover(
        a=a,
        b=b,
        tokens=tokens if tokens > 0 else None,
        faster_when_short=a if ttft_a <= ttft_b else b,
        faster_when_long=a if tpot_a < tpot_b else b,
    )

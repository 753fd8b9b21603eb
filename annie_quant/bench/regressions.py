"""Compare a run with a stored one: what got significantly worse, by backend, workload and metric, over the same prompts.

Prompts are the same where their content is: an id that has another content in the stored run is left out.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from annie_quant import documents
from annie_quant.bench.aggregates import CheckedPrompts, adjust, labelled, timed, values_by_prompt
from annie_quant.bench.cache_findings import cache_difference
from annie_quant.bench.machine import unequal
from annie_quant.bench.reference_answers import contents
from annie_quant.bench.run_folder import read_records, read_unanswered
from annie_quant.core.errors import UsageError
from annie_quant.documents import (
    AdjustedResult,
    Inputs,
    MachineState,
    PairedGate,
    PooledGates,
    RequestRecord,
    Standing,
    read_bench,
)
from annie_quant.judge import decision
from annie_quant.judge.metrics import COMPARED, METRICS
from annie_quant.judge.pairing import deciding_by_prompt, pair_by_prompt
from annie_quant.judge.statistics import compare

MIN_LOSS = 0.02  # of the stored median: smaller losses do not matter, however significant


class MetricChange(AdjustedResult, kw_only=True):
    """One metric of one workload; a: the stored run, b: the new one.

    change: share of the stored median.
    """

    backend: str
    change: float


class LostGate(msgspec.Struct, kw_only=True):
    """A gate that the new run loses against the stored one, on the prompts that both have; "all" is all gates together."""

    backend: str
    gate: str
    pair: PairedGate | PooledGates


class Regression(msgspec.Struct, kw_only=True):
    """A run compared with a stored one.

    worse, better: the significant changes that are larger than the limit.
    gates_lost: the gates that the new run loses.
    rows: all that was compared.
    outcome: of the gates and the times together.
    silent: backends that answered in the stored run and not once in the new one.
    left_out: prompts ("workload/case") whose content is another one than in the stored run.
    machine: how the machines of the two runs differ by the probe; "" where they do not, or it was not measured.
    caches: one line per backend whose prefix cache had other parts of the prompts.
    """

    worse: list[MetricChange]
    better: list[MetricChange]
    gates_lost: list[LostGate]
    rows: list[MetricChange]
    outcome: Standing = "undecided"
    silent: list[str] = []
    left_out: list[str] = []
    machine: str = ""
    caches: list[str] = []

    @property
    def lost(self) -> bool:
        return bool(self.worse or self.gates_lost or self.silent)


def regression(
    before: str | os.PathLike[str], after: str | os.PathLike[str], least_loss: float = MIN_LOSS
) -> Regression:
    """Compare two run directories over the backends, workloads and prompts that they share.

    least_loss: changes up to this share of the stored median are ignored. Raises UsageError when nothing is shared.
    """
    stored = _read_run(Path(before))
    new = _read_run(Path(after))
    left_out = _keep_same_prompts(stored, new)
    shared = [name for name in stored.records if name in new.records]
    if not any(stored.prompts(name) & new.prompts(name) for name in shared):
        problem = f"; {len(left_out)} ids have another content" if left_out else ""
        raise UsageError(
            f"{before} and {after} share no backend, workload and prompt{problem}",
            "run with the same backends and workloads",
        )
    rows: list[MetricChange] = []
    for backend in shared:
        rows += _changes(stored, new, backend)
    adjust(rows)
    gates_lost, outcome = _gates_lost(stored, new, shared)
    result = Regression(
        worse=[],
        better=[],
        gates_lost=gates_lost,
        rows=rows,
        outcome=outcome,
        silent=[name for name in shared if new.is_silent(name) and not stored.is_silent(name)],
        left_out=left_out,
        machine=unequal(stored.machine, new.machine),
        caches=[*_cache_lines(stored, new, shared)],
    )
    for row in rows:
        better = METRICS[row.metric].better
        if row.significant and abs(row.change) > least_loss and better != "neither":
            is_worse = (row.change > 0) == (better == "lower")
            (result.worse if is_worse else result.better).append(row)
    if result.lost:
        result.outcome = "loses"
    return result


def _cache_lines(stored: _MeasuredRun, new: _MeasuredRun, backends: Sequence[str]) -> Iterator[str]:
    for name in backends:
        difference = cache_difference(stored.records[name], new.records[name])
        if difference is not None:
            yield (
                f"{name} did not compute the same part of {difference.n} of {difference.of} prompts: in {difference.workload} "
                f"{difference.x:.0f} of {difference.tokens:.0f} tokens were cached in the stored run, {difference.y:.0f} now; "
                "TTFT differs by that too"
            )


@dataclass
class _MeasuredRun:
    """The measured records of a run by backend, in the order of their first record."""

    folder: Path
    greedy: Collection[str]
    machine: MachineState | None
    records: dict[str, list[RequestRecord]]

    @property
    def all_records(self) -> list[RequestRecord]:
        return [record for rows in self.records.values() for record in rows]

    def prompts(self, backend: str) -> set[tuple[str, str, int]]:
        return {record.prompt for record in self.records[backend]}

    def is_silent(self, backend: str) -> bool:
        """Return whether no request of a backend has an answer."""
        return all(record.answer.error for record in self.records[backend])

    def checks(self, backend: str) -> CheckedPrompts:
        return deciding_by_prompt(self.records[backend], self.greedy)

    def contents(self, has_digests: bool) -> dict[tuple[str, str], str | bytes]:
        """Return what was asked by (workload, case): its digest, else the prompt of inputs.json."""
        if has_digests:
            return {(r.workload, r.case): r.prompt_sha256 for r in self.all_records}
        path = self.folder / "inputs.json"
        if not path.is_file():
            raise UsageError(
                f"{self.folder} has no inputs.json, so its prompts cannot be compared",
                "measure it again",
            )
        return dict(contents(documents.decode(Inputs, path, error=UsageError).workloads))


def _read_run(folder: Path) -> _MeasuredRun:
    bench = read_bench(folder)
    by_backend: dict[str, list[RequestRecord]] = {}
    for record in [*read_records(folder / "records.jsonl"), *read_unanswered(folder)]:
        if not record.warmup:
            by_backend.setdefault(record.backend, []).append(record)
    return _MeasuredRun(folder, bench.config.greedy, bench.aggregates.machine, by_backend)


def _keep_same_prompts(stored: _MeasuredRun, new: _MeasuredRun) -> list[str]:
    """Remove the records of prompts whose content differs; return their ids."""
    records = [*stored.all_records, *new.all_records]
    # A run of version 0.2.0 or older has no digests.
    has_digests = all(record.prompt_sha256 for record in records)
    before = stored.contents(has_digests)
    after = new.contents(has_digests)
    differing = {key for key in before.keys() & after.keys() if before[key] != after[key]}
    for run in (stored, new):
        for backend, rows in run.records.items():
            run.records[backend] = [r for r in rows if (r.workload, r.case) not in differing]
        run.records = {backend: rows for backend, rows in run.records.items() if rows}
    if not has_digests:
        for record in records:
            record.prompt_sha256 = ""  # its ids are compared
    return sorted(f"{workload}/{case}" for workload, case in differing)


def _changes(stored: _MeasuredRun, new: _MeasuredRun, backend: str) -> list[MetricChange]:
    before = labelled(timed(stored.records[backend]))
    after = labelled(timed(new.records[backend]))
    changes = []
    for label, metric in itertools.product(before, COMPARED):
        if label not in after:
            continue
        values = values_by_prompt(before[label], metric)
        result = compare(values, values_by_prompt(after[label], metric))
        if result.median_a and result.median_difference is not None:
            change = MetricChange(
                backend=backend,
                workload=label,
                metric=metric,
                change=result.median_difference / result.median_a,
                **msgspec.structs.asdict(result),
            )
            changes.append(change)
    return changes


def _gates_lost(
    stored: _MeasuredRun, new: _MeasuredRun, backends: Sequence[str]
) -> tuple[list[LostGate], Standing]:
    """Judge the new answers of all backends together, with the stored ones as their reference (judge/decision/rule.py)."""
    paired: dict[str, Mapping[str, PairedGate]] = {}
    together: dict[str, PooledGates | None] = {}
    for name in backends:
        paired[name], together[name] = pair_by_prompt(
            stored.checks(name), new.checks(name), bf16=False
        )
    gates, pooled = decision.judge_gates(paired, together)
    lost = []
    for name, own in gates.items():
        for gate in decision.member_verdict(own, pooled[name]).loses:
            pair = pooled[name] if gate == decision.POOLED else own[gate]
            if pair is not None:
                lost.append(
                    LostGate(
                        backend=name,
                        gate=gate,
                        pair=pair,
                    )
                )
    return lost, decision.verdict_of(gates, pooled).verdict


def losses(result: Regression) -> list[str]:
    """Return what got worse, one line each."""
    lines = [
        f"worse: {row.backend} {row.workload} {row.metric} {row.median_a:.4g} → {row.median_b:.4g} "
        f"({row.change:+.1%}, p {row.p_holm:.2g} after Holm, {row.n_prompts} prompts)"
        for row in result.worse
    ]
    lines += [
        f"no answer: {backend} failed every request, and answered in the stored run"
        for backend in result.silent
    ]
    return lines + [
        f"gate lost: {lost.backend} {lost.gate}, {lost.pair.lost} lost and {lost.pair.won} won of {lost.pair.n} answers "
        f"(p {lost.pair.p_holm or lost.pair.p:.2g})"
        for lost in result.gates_lost
    ]

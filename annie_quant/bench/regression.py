"""A run against a stored one: what got significantly worse, by backend, workload and metric."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from annie_quant.bench.aggregate import adjust, labelled, timed, values_by_prompt
from annie_quant.bench.records import read_records
from annie_quant.errors import UsageError
from annie_quant.judge.metrics import COMPARED, METRICS
from annie_quant.judge.statistics import compare
from annie_quant.schema import AdjustedResult, GateResult, RequestRecord, ServedSide, read_bench

LEAST_LOSS = 0.02  # of the stored median: smaller losses do not matter, however significant


class Change(AdjustedResult, kw_only=True):
    """One metric of one workload; a: the stored run, b: the new one. change: share of the stored median."""

    backend: str
    change: float


class LostGate(msgspec.Struct, kw_only=True):
    """A deciding gate that did not fail in the stored run and fails in the new one."""

    backend: str
    gate: str
    before: GateResult
    after: GateResult


class Regression(msgspec.Struct, kw_only=True):
    """worse and better: the significant changes that are larger than the limit. rows: all that was compared."""

    worse: list[Change]
    better: list[Change]
    gates_lost: list[LostGate]
    rows: list[Change]

    @property
    def lost(self) -> bool:
        return bool(self.worse or self.gates_lost)


def regression(
    before: str | os.PathLike[str], after: str | os.PathLike[str], least_loss: float = LEAST_LOSS
) -> Regression:
    """Compare two run directories over the backends, workloads and prompts that they share.

    least_loss: changes up to this share of the stored median are ignored. Raises UsageError when nothing is shared.
    """
    runs = [read_bench(folder).aggregates.served for folder in (before, after)]
    records = [
        timed([r for r in read_records(Path(folder) / "records.jsonl") if not r.warmup]) for folder in (before, after)
    ]
    rows = [row for backend in runs[0] if backend in runs[1] for row in _changes(records, backend)]
    if not rows:
        raise UsageError(
            f"{before} and {after} share no backend, workload and prompt", "run with the same backends and workloads"
        )
    adjust(rows)
    significant = [row for row in rows if row.significant and abs(row.change) > least_loss]
    up = {"lower": "worse", "higher": "better", "neither": ""}
    down = {"lower": "better", "higher": "worse", "neither": ""}
    kinds = [(up if row.change > 0 else down)[METRICS[row.metric].better] for row in significant]
    return Regression(
        worse=[row for row, kind in zip(significant, kinds, strict=True) if kind == "worse"],
        better=[row for row, kind in zip(significant, kinds, strict=True) if kind == "better"],
        gates_lost=_gates_lost(*runs),
        rows=rows,
    )


def _changes(records: Sequence[Sequence[RequestRecord]], backend: str) -> list[Change]:
    before, after = (labelled(r for r in side if r.backend == backend) for side in records)
    changes = []
    for label in before:
        for metric in COMPARED if label in after else ():
            result = compare(values_by_prompt(before[label], metric), values_by_prompt(after[label], metric))
            if result.median_a and result.median_difference is not None:
                changes.append(
                    Change(
                        backend=backend,
                        workload=label,
                        metric=metric,
                        change=result.median_difference / result.median_a,
                        **msgspec.structs.asdict(result),
                    )
                )
    return changes


def _gates_lost(before: Mapping[str, ServedSide], after: Mapping[str, ServedSide]) -> list[LostGate]:
    return [
        LostGate(backend=backend, gate=gate, before=old, after=new)
        for backend, side in before.items()
        if backend in after
        for gate, old in side.gates.items()
        for new in [after[backend].gates.get(gate)]
        if new and not new.advisory and old.verdict != "fail" and new.verdict == "fail"
    ]


def losses(result: Regression) -> list[str]:
    """Return what got worse, one line each."""
    lines = [
        f"worse: {row.backend} {row.workload} {row.metric} {row.median_a:.4g} → {row.median_b:.4g} "
        f"({row.change:+.1%}, p {row.p_holm:.2g} after Holm, {row.n_prompts} prompts)"
        for row in result.worse
    ]
    return lines + [
        f"gate lost: {lost.backend} {lost.gate} {lost.before.passes}/{lost.before.n} → "
        f"{lost.after.passes}/{lost.after.n}"
        for lost in result.gates_lost
    ]

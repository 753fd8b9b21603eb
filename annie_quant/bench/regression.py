"""A run against a stored one: what got significantly worse, by backend, workload and metric."""

from __future__ import annotations

import os
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path

import msgspec

from annie_quant.bench.aggregate import adjust, labelled, timed, values_by_prompt
from annie_quant.bench.records import read_records
from annie_quant.errors import UsageError
from annie_quant.judge import decision
from annie_quant.judge.metrics import COMPARED, METRICS
from annie_quant.judge.pairing import deciding_by_prompt, pair_by_prompt
from annie_quant.judge.statistics import compare
from annie_quant.schema import AdjustedResult, PairedGate, PooledGates, RequestRecord, read_bench

Checked = Mapping[Hashable, Mapping[str, bool]]  # prompt → gate → passed
LEAST_LOSS = 0.02  # of the stored median: smaller losses do not matter, however significant


class Change(AdjustedResult, kw_only=True):
    """One metric of one workload; a: the stored run, b: the new one. change: share of the stored median."""

    backend: str
    change: float


class LostGate(msgspec.Struct, kw_only=True):
    """A gate that the new run loses against the stored one, on the prompts that both have; "all" is all gates together."""

    backend: str
    gate: str
    pair: PairedGate | PooledGates


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
        gates_lost=_gates_lost(*(served_checks(folder) for folder in (before, after))),
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


def served_checks(folder: str | os.PathLike[str]) -> dict[str, Checked]:
    """Return per backend the checks of its answers, by prompt."""
    records = [r for r in read_records(Path(folder) / "records.jsonl") if not r.warmup]
    greedy = read_bench(folder).config.greedy
    names = dict.fromkeys(r.backend for r in records)
    return {name: deciding_by_prompt([r for r in records if r.backend == name], greedy) for name in names}


def _gates_lost(before: Mapping[str, Checked], after: Mapping[str, Checked]) -> list[LostGate]:
    """Judge the new answers of all backends together, with the stored ones as their reference (judge/decision/paired.py)."""
    pairs = {name: pair_by_prompt(rows, after[name]) for name, rows in before.items() if name in after}
    gates, pooled = decision.judge_gates(
        {name: own for name, (own, _) in pairs.items()}, {name: together for name, (_, together) in pairs.items()}
    )
    lost = []
    for name, own in gates.items():
        for gate in decision.member_verdict(own, pooled[name]).loses:
            pair = pooled[name] if gate == decision.POOLED else own[gate]
            if pair is not None:
                lost.append(LostGate(backend=name, gate=gate, pair=pair))
    return lost


def losses(result: Regression) -> list[str]:
    """Return what got worse, one line each."""
    lines = [
        f"worse: {row.backend} {row.workload} {row.metric} {row.median_a:.4g} → {row.median_b:.4g} "
        f"({row.change:+.1%}, p {row.p_holm:.2g} after Holm, {row.n_prompts} prompts)"
        for row in result.worse
    ]
    return lines + [
        f"gate lost: {lost.backend} {lost.gate}, {lost.pair.lost} lost and {lost.pair.won} won of {lost.pair.n} answers "
        f"(p {lost.pair.p_holm or lost.pair.p:.2g})"
        for lost in result.gates_lost
    ]

"""Compare a run with a stored one: what got significantly worse, by backend, workload and metric, over the same prompts.

Prompts are the same where their content is: an id that has another content in the stored run is left out.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from annie_quant import documents
from annie_quant.bench.aggregates import CheckedPrompts, adjust, labelled, timed, values_by_prompt
from annie_quant.bench.machine import unequal
from annie_quant.bench.reference_answers import contents
from annie_quant.bench.run_folder import read_records, read_unanswered
from annie_quant.core.errors import UsageError
from annie_quant.documents import (
    AdjustedResult,
    Inputs,
    PairedGate,
    PooledGates,
    RequestRecord,
    Standing,
    by_backend,
    read_bench,
)
from annie_quant.judge import decision
from annie_quant.judge.metrics import COMPARED, METRICS
from annie_quant.judge.pairing import deciding_by_prompt, pair_by_prompt
from annie_quant.judge.statistics import compare

LEAST_LOSS = 0.02  # of the stored median: smaller losses do not matter, however significant


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
    """

    worse: list[MetricChange]
    better: list[MetricChange]
    gates_lost: list[LostGate]
    rows: list[MetricChange]
    outcome: Standing = "undecided"
    silent: list[str] = []
    left_out: list[str] = []
    machine: str = ""

    @property
    def lost(self) -> bool:
        return bool(self.worse or self.gates_lost or self.silent)


def regression(
    before: str | os.PathLike[str], after: str | os.PathLike[str], least_loss: float = LEAST_LOSS
) -> Regression:
    """Compare two run directories over the backends, workloads and prompts that they share.

    least_loss: changes up to this share of the stored median are ignored. Raises UsageError when nothing is shared.
    """
    folders = [Path(before), Path(after)]
    runs = [read_bench(folder) for folder in folders]
    greedy = [run.config.greedy for run in runs]
    read = (
        [*read_records(folder / "records.jsonl"), *read_unanswered(folder)] for folder in folders
    )
    measured = [_without_warmups(side) for side in read]
    measured, left_out = _same_prompts(folders, measured)
    by_side = [_by_backend(side) for side in measured]
    shared = [name for name in by_side[0] if name in by_side[1]]
    stored, new = (_prompts(side) for side in measured)
    if not stored & new:
        problem = f"; {len(left_out)} ids have another content" if left_out else ""
        raise UsageError(
            f"{before} and {after} share no backend, workload and prompt{problem}",
            "run with the same backends and workloads",
        )
    records = [timed(side) for side in measured]
    silent = [_silent(side, shared) for side in by_side]
    rows: list[MetricChange] = []
    for backend in shared:
        rows += _changes(records, backend)
    adjust(rows)
    significant = [row for row in rows if row.significant and abs(row.change) > least_loss]
    signs = {"lower": -1, "higher": 1, "neither": 0}
    gains = [row.change * signs[METRICS[row.metric].better] for row in significant]
    checks_before = {name: deciding_by_prompt(by_side[0][name], greedy[0]) for name in shared}
    checks_after = {name: deciding_by_prompt(by_side[1][name], greedy[1]) for name in shared}
    gates_lost, standing = _gates_lost(checks_before, checks_after)
    result = Regression(
        worse=[row for row, gain in zip(significant, gains, strict=True) if gain < 0],
        better=[row for row, gain in zip(significant, gains, strict=True) if gain > 0],
        gates_lost=gates_lost,
        rows=rows,
        outcome=standing,
        silent=[n for n in shared if n in silent[1] - silent[0]],
        left_out=left_out,
        machine=unequal(*(run.aggregates.machine for run in runs)),
    )
    if result.lost:
        result.outcome = "loses"
    return result


def _without_warmups(records: Sequence[RequestRecord]) -> list[RequestRecord]:
    return [r for r in records if not r.warmup]


def _by_backend(records: Sequence[RequestRecord]) -> dict[str, list[RequestRecord]]:
    """Return the records of each backend, in the order of their first record."""
    by_backend: dict[str, list[RequestRecord]] = {}
    for record in records:
        by_backend.setdefault(record.backend, []).append(record)
    return by_backend


def _prompts(records: Sequence[RequestRecord]) -> set[tuple[str, tuple[str, str, int]]]:
    return {(r.backend, r.prompt) for r in records}


def _silent(side: Mapping[str, Sequence[RequestRecord]], names: Sequence[str]) -> set[str]:
    """Return the backends of which no request has an answer."""
    return {name for name in names if all(r.answer.error for r in side[name])}


def _same_prompts(
    folders: Sequence[Path], measured: Sequence[list[RequestRecord]]
) -> tuple[list[list[RequestRecord]], list[str]]:
    """Return (each run's records of prompts with the same content in both, the prompts that are left out)."""
    before, after = _contents(folders, measured)
    changed = {key for key in before.keys() & after.keys() if before[key] != after[key]}
    same = [_unchanged(side, changed) for side in measured]
    records = list(itertools.chain(*same))
    if not all(r.prompt_sha256 for r in records):
        # A run of version 0.2.0 or older: its ids are compared.
        for record in records:
            record.prompt_sha256 = ""
    return same, sorted(f"{workload}/{case}" for workload, case in changed)


def _unchanged(
    records: Sequence[RequestRecord], changed: set[tuple[str, str]]
) -> list[RequestRecord]:
    return [r for r in records if (r.workload, r.case) not in changed]


def _contents(
    folders: Sequence[Path], measured: Sequence[Sequence[RequestRecord]]
) -> tuple[dict[tuple[str, str], str | bytes], ...]:
    """Return what each run asked by (workload, case): its digests where both runs have them, else the prompts of inputs.json."""
    if all(r.prompt_sha256 for r in itertools.chain(*measured)):
        return tuple(map(_digests, measured))
    for folder in folders:
        if not (folder / "inputs.json").is_file():
            raise UsageError(
                f"{folder} has no inputs.json, so its prompts cannot be compared",
                "measure it again",
            )
    inputs = [
        documents.decode(Inputs, folder / "inputs.json", error=UsageError) for folder in folders
    ]
    return tuple(dict(contents(file.workloads)) for file in inputs)


def _digests(records: Sequence[RequestRecord]) -> dict[tuple[str, str], str | bytes]:
    return {(r.workload, r.case): r.prompt_sha256 for r in records}


def _changes(records: Sequence[Sequence[RequestRecord]], backend: str) -> list[MetricChange]:
    before, after = (labelled(by_backend(side, [backend])[backend]) for side in records)
    changes = []
    for label in before:
        for metric in COMPARED if label in after else ():
            result = compare(
                values_by_prompt(before[label], metric), values_by_prompt(after[label], metric)
            )
            if result.median_a and result.median_difference is not None:
                figures = msgspec.structs.asdict(result) | {
                    "change": result.median_difference / result.median_a
                }
                changes.append(
                    MetricChange(backend=backend, workload=label, metric=metric, **figures)
                )
    return changes


def _gates_lost(
    before: Mapping[str, CheckedPrompts], after: Mapping[str, CheckedPrompts]
) -> tuple[list[LostGate], Standing]:
    """Judge the new answers of all backends together, with the stored ones as their reference (judge/decision/rule.py)."""
    pairs = {
        name: pair_by_prompt(rows, after[name], bf16=False)
        for name, rows in before.items()
        if name in after
    }
    gates, pooled = decision.judge_gates(
        {name: own for name, (own, _) in pairs.items()},
        {name: together for name, (_, together) in pairs.items()},
    )
    lost = []
    for name, own in gates.items():
        for gate in decision.member_verdict(own, pooled[name]).loses:
            pair = pooled[name] if gate == decision.POOLED else own[gate]
            if pair is not None:
                lost.append(LostGate(backend=name, gate=gate, pair=pair))
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

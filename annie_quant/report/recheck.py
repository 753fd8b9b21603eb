"""Figures and verdict of a run directory, computed again from its stored records and answers.

check_figures(run)       count the served figures of run.json again from records.jsonl, and compare them
caveats(run)             the verdict's caveats, and what these checks add
judge_again(run_dir)     judge the stored answers with today's rule, and with other roles where they are named
verdict_differences      whether that gives the stored verdict

Every report checks the figures and shows the result; `annie-quant report DIR --verify` prints it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from annie_quant import bench, documents
from annie_quant.bench.aggregates import gate_counts, labelled, timed, values_by_prompt
from annie_quant.documents import RequestRecord, Roles, Run
from annie_quant.judge import decision
from annie_quant.judge.metrics import COMPARED
from annie_quant.report.run import LoadedRun, MeasuredSide, ServedModel, load

TOLERANCE = 1e-3  # relative; absolute below 1
MIN_SERVER_SHARE = 0.8  # of the server's own time; two clocks may differ a little


@dataclass(frozen=True)
class RecountDifference:
    """A figure of run.json that the records do not give.

    counted: None where they give no figure at all.
    """

    figure: str
    reported: float
    counted: float | None

    @property
    def message(self) -> str:
        return f"{self.figure}: {self.reported} in run.json, {self.counted} from the records"


@dataclass
class Recount:
    compared: int = 0
    differences: list[RecountDifference] = field(default_factory=list)

    @property
    def equal(self) -> int:
        return self.compared - len(self.differences)

    @property
    def summary(self) -> str:
        return f"{self.equal} of {self.compared} served figures counted again from the records with the same result"

    def compare(self, figure: str, reported: float, counted: float | None) -> None:
        self.compared += 1
        if counted is None or abs(reported - counted) > TOLERANCE * max(1.0, abs(reported)):
            self.differences.append(RecountDifference(figure, reported, counted))


def check_figures(run: LoadedRun, sides: Sequence[MeasuredSide] | None = None) -> Recount | None:
    """Compare passes and n of each gate, and the p50 of each metric, with the records; None without served sides or records.

    sides: those to check (default: all).
    """
    served = [s for s in (run.sides if sides is None else sides) if isinstance(s, ServedModel)]
    if not served or not run.records:
        return None
    result = Recount()
    fit = timed(run.measured)
    for side in served:
        counts = gate_counts([r for r in run.measured if r.backend == side.name], run.greedy)
        for gate, row in side.gates.items():
            passes, n = counts.get(gate, (None, None))
            result.compare(f"{side.name}: {gate}, passes", row.passes, passes)
            result.compare(f"{side.name}: {gate}, n", row.n, n)
        by_label = labelled(r for r in fit if r.backend == side.name)
        for workload, summary in side.data.workloads.items():
            for metric in COMPARED:
                figures = getattr(summary, metric)
                if figures is not None:
                    p50 = quantile(values(by_label.get(workload, ()), metric), 0.5)
                    result.compare(f"{side.name}: {workload}, {metric} p50", figures.p50, p50)
    return result


def before_server(measured: Sequence[RequestRecord]) -> int:
    """Count requests that ended, by the client's clock, well before the server's own times allow."""
    early = 0
    for record in measured:
        stated = record.timings.server_timings or {}
        times = [stated.get(field) for field in ("prompt_ms", "predicted_ms")]
        numbers = [t for t in times if isinstance(t, (int, float)) and 0 <= t < 1e15]
        if len(numbers) == 2 and record.timings.e2e_ms is not None and not record.answer.error:
            early += record.timings.e2e_ms < MIN_SERVER_SHARE * sum(numbers)
    return early


def values(records: Iterable[RequestRecord], metric: str) -> list[float]:
    """Return all values of a metric, sorted; itl_ms gives every gap of every stream."""
    return sorted(value for some in values_by_prompt(records, metric).values() for value in some)


def quantile(ordered: Sequence[float], at: float) -> float | None:
    """Return a quantile, linear between the values of a sample; None of an empty one."""
    return float(np.quantile(ordered, at)) if len(ordered) else None


def caveats(run: LoadedRun) -> list[str]:
    """Return the verdict's caveats, and what the checks of the benchmark and of the stored evidence found."""
    texts = [*run.verdict.caveats, *(confound.message for confound in run.aggregates.confounds)]
    texts += [
        f"eval/{model}.json does not hold: {first(lines)}" for model, lines in run.evidence.items()
    ]
    early = before_server(run.measured)
    if early:
        texts.append(
            f"{early} of {len(run.measured)} requests ended, by the client's clock, before the server's own times "
            "allow: clocks on this machine cannot be trusted to milliseconds."
        )
    return list(dict.fromkeys(texts))


def first(lines: Sequence[str]) -> str:
    """Return the first of several lines, with the number of the others."""
    return lines[0] + (f" (and {len(lines) - 1} more differences)" if len(lines) > 1 else "")


def judge_again(run_dir: str | os.PathLike[str], stated: Roles | None = None) -> Run:
    """Return run.json with the run's records and evaluations judged by today's rule; write nothing.

    stated: roles instead of the run's.
    Raises UsageError for a folder without a run, and for a role that names no side.
    """
    folder = Path(run_dir)
    run = load(run_dir)
    aggregates = run.aggregates
    if aggregates.roles is None and (stated is None or not stated.names):
        stated = _older_roles(run)
    if (folder / "bench.json").is_file() and run.records:
        aggregates = replace(
            bench.aggregate(folder, stated),
            models=aggregates.models,
            offline=aggregates.offline,
            members=aggregates.members,
            blocking=aggregates.blocking,
        )
    elif stated is not None and stated.names:
        names = list(aggregates.served or aggregates.offline)
        aggregates = replace(
            aggregates, roles=decision.assign(names, decision.formats_of(aggregates), stated)
        )
    for model, numerics in aggregates.offline.items():
        both = {**numerics, **aggregates.members.get(model, {})}
        if not any(_has_comparison(side) for side in both.values()):
            continue  # without a reference (version 0.1.0), the absolute requirements stay
        sides, _ = decision.judge_sides(both)
        aggregates.offline[model] = {name: sides[name] for name in numerics}
        aggregates.members[model] = {name: sides[name] for name in sides if name not in numerics}
    candidate = run.verdict.candidate
    if aggregates.roles is not None or candidate not in aggregates.offline:
        candidate = None
    verdict = decision.run_verdict(aggregates, candidate)
    return replace(run.document, aggregates=aggregates, verdict=verdict)


def _has_comparison(side: documents.OfflineSide) -> bool:
    results = side.gates.values()
    return bool(side.paired) or any(result.meets is not None for result in results)


def verdict_differences(run: LoadedRun, judged: Run) -> list[str]:
    """Return a line where judge_again gives another verdict than is stored, if today's rule made that one too."""
    stored = run.document.verdict
    again = judged.verdict
    if stored.rule != again.rule or (stored.outcome, stored.sentence) == (
        again.outcome,
        again.sentence,
    ):
        return []
    texts = [f"{verdict.outcome} ({verdict.sentence})" for verdict in (stored, again)]
    return [
        f"the run's verdict does not hold: {texts[0]} is stored, {texts[1]} follows from its records"
    ]


def _older_roles(run: LoadedRun) -> Roles | None:
    """Return the roles of a verdict that has none (version 0.2.0 or older), from what its candidate's gates were compared with."""
    served = run.aggregates.served
    verdict = run.verdict
    candidate = decision.served_as(run.aggregates, verdict.candidate) if verdict.candidate else None
    if candidate is None:
        return None
    incumbent = verdict.incumbent if verdict.incumbent in served else None
    reference = served[candidate].judged_by
    reference = reference if reference in served and reference != incumbent else None
    return Roles(
        candidate=candidate,
        reference=reference,
        incumbent=incumbent,
    )


def write_judgement(run_dir: str | os.PathLike[str], stated: Roles | None = None) -> Run:
    """Judge a run directory again, and store the verdict in its run.json."""
    run = judge_again(run_dir, stated)
    documents.write_run(run_dir, run)
    return run

"""Judge a run directory again: its stored answers, with today's rule, and with other roles where they are named."""

from __future__ import annotations

import os
from pathlib import Path

from msgspec.structs import replace

from annie_quant import bench, documents
from annie_quant.documents import Roles, Run
from annie_quant.judge import decision
from annie_quant.report.run import LoadedRun, load


def judge_again(run_dir: str | os.PathLike[str], stated: Roles | None = None) -> Run:
    """Return run.json with the run's records and evaluations judged by today's rule; write nothing.

    stated: roles instead of the run's. Raises UsageError for a folder without a run, and for a role that names no side.
    """
    folder, run = Path(run_dir), load(run_dir)
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
        aggregates = replace(aggregates, roles=decision.assign(names, decision.formats_of(aggregates), stated))
    for model, numerics in aggregates.offline.items():
        sides, _ = decision.judge_sides({**numerics, **aggregates.members.get(model, {})})
        aggregates.offline[model] = {name: sides[name] for name in numerics}
        aggregates.members[model] = {name: sides[name] for name in sides if name not in numerics}
    candidate = (
        run.verdict.candidate if aggregates.roles is None and run.verdict.candidate in aggregates.offline else None
    )
    return replace(run.document, aggregates=aggregates, verdict=decision.verdict(aggregates, candidate))


def _older_roles(run: LoadedRun) -> Roles | None:
    """Return the roles that the verdict of version 0.2.0 or older has stored: what its candidate's gates were compared with."""
    served, verdict = run.aggregates.served, run.verdict
    candidate = decision.served_as(run.aggregates, verdict.candidate) if verdict.candidate else None
    if candidate is None:
        return None
    incumbent = verdict.incumbent if verdict.incumbent in served else None
    reference = served[candidate].judged_by
    reference = reference if reference in served and reference != incumbent else None
    return Roles(candidate=candidate, reference=reference, incumbent=incumbent)


def write_judgement(run_dir: str | os.PathLike[str], stated: Roles | None = None) -> Run:
    """Judge a run directory again, and store the verdict in its run.json."""
    run = judge_again(run_dir, stated)
    documents.write_run(run_dir, run)
    return run

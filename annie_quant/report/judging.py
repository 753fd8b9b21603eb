"""Judge a run directory again: its stored answers, with today's rule, and with other roles where they are named."""

from __future__ import annotations

import os
from pathlib import Path

from msgspec.structs import replace

from annie_quant import bench, schema
from annie_quant.judge import decision
from annie_quant.report.run import load
from annie_quant.schema import Roles, Run


def judge_again(run_dir: str | os.PathLike[str], said: Roles | None = None) -> Run:
    """Return run.json with the run's records and evaluations judged by today's rule; write nothing.

    said: roles instead of the run's. Raises UsageError for a folder without a run, and for a role that names no side.
    """
    folder, run = Path(run_dir), load(run_dir)
    aggregates = run.aggregates
    if (folder / "bench.json").is_file() and run.records:
        aggregates = replace(
            bench.aggregate(folder, said),
            models=aggregates.models,
            offline=aggregates.offline,
            members=aggregates.members,
        )
    elif said is not None and said.names:
        names = list(aggregates.served or aggregates.offline)
        aggregates = replace(aggregates, roles=decision.assign(names, decision.formats_of(aggregates), said))
    for model, numerics in aggregates.offline.items():
        sides, _ = decision.judge_sides({**numerics, **aggregates.members.get(model, {})})
        aggregates.offline[model] = {name: sides[name] for name in numerics}
        aggregates.members[model] = {name: sides[name] for name in sides if name not in numerics}
    candidate = None if said is not None and said.names else run.verdict.candidate
    if candidate not in {*aggregates.served, *aggregates.offline, *(side.model for side in aggregates.served.values())}:
        candidate = None
    return replace(run.document, aggregates=aggregates, verdict=decision.verdict(aggregates, candidate))


def write_judgement(run_dir: str | os.PathLike[str], said: Roles | None = None) -> Run:
    """Judge a run directory again, and store the verdict in its run.json."""
    run = judge_again(run_dir, said)
    schema.write_run(run_dir, run)
    return run

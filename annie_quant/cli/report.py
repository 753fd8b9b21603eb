"""`annie-quant report`: the report of a run, or trends over several runs."""

from __future__ import annotations

import sys
from pathlib import Path

import click

import annie_quant
from annie_quant.cli.common import PATH, console, echo, role_options
from annie_quant.schema import Roles


@click.command()
@click.argument("run_dirs", nargs=-1, required=True, type=PATH)
@click.option("--output", type=PATH, help="Folder of the trends of several runs. Default: trends.")
@click.option(
    "--verify",
    is_flag=True,
    help="Count the served figures again from records.jsonl; print what differs, write nothing.",
)
@click.option(
    "--judge", is_flag=True, help="First judge the stored answers again, with today's rule; run.json is changed."
)
@role_options
def report(
    run_dirs: tuple[Path, ...],
    output: Path | None,
    verify: bool,
    judge: bool,
    candidate: str | None,
    reference: str | None,
    incumbent: str | None,
) -> None:
    """Write report.html, report.md and comparison.md into a run directory; for several runs, trends.html and trends.md.

    The stored verdict is shown. --judge, and each role that is named, judges the run again. With --verify the exit code is 1 if
    a figure of run.json differs from the records.
    """
    from annie_quant.report.judging import write_judgement
    from annie_quant.report.pages import trends

    stated = Roles(candidate=candidate, reference=reference, incumbent=incumbent)
    if judge or stated.names:
        if len(run_dirs) > 1 or verify:
            raise click.UsageError("--judge and roles are for the report of one run, without --verify")
        console.note(write_judgement(run_dirs[0], stated).verdict.sentence)
    if len(run_dirs) == 1 and output is not None:
        raise click.UsageError(
            "--output is for the trends of several runs; the report of one run is written into its folder"
        )
    if verify:
        _verify(run_dirs)
        return
    several = len(run_dirs) > 1
    paths = trends.build(run_dirs, output or Path("trends")) if several else annie_quant.report.build(run_dirs[0])
    for path in paths:
        echo(str(path))


def _verify(run_dirs: tuple[Path, ...]) -> None:
    checks = [(folder, annie_quant.report.verify(folder)) for folder in run_dirs]
    for folder, check in checks:
        echo(f"{folder}: {check.summary}")
        for difference in check.differences:
            echo(f"  {difference.message}")
    if any(check.differences for _, check in checks):
        sys.exit(1)


@click.command()
@click.argument("run_dir", type=PATH)
def export(run_dir: Path) -> None:
    """Write a benchmark's results.csv and exports/ again (GuideLLM, AIPerf, vLLM, the original plan's script)."""
    from annie_quant import bench

    for path in bench.export(run_dir):
        echo(str(path))

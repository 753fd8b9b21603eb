"""`annie-quant report`: the report of a run, or trends over several runs."""

from __future__ import annotations

import sys
from pathlib import Path

import click

import annie_quant
from annie_quant.cli.common import PATH, echo


@click.command()
@click.argument("run_dirs", nargs=-1, required=True, type=PATH)
@click.option("--output", type=PATH, help="Folder of the trends of several runs. Default: trends.")
@click.option(
    "--verify",
    is_flag=True,
    help="Count the served figures again from records.jsonl; print what differs, write nothing.",
)
def report(run_dirs: tuple[Path, ...], output: Path | None, verify: bool) -> None:
    """Write report.html, report.md and comparison.md into a run directory; for several runs, trends.html and trends.md.

    With --verify the exit code is 1 if a figure of run.json differs from the records.
    """
    from annie_quant.report.pages import trends

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

"""`annie-quant report`: the report of a run, or trends over several runs."""

from __future__ import annotations

from pathlib import Path

import click

import annie_quant


@click.command()
@click.argument("run_dirs", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--output", type=click.Path(path_type=Path), help="Folder of the trends of several runs. Default: trends."
)
def report(run_dirs: tuple[Path, ...], output: Path | None) -> None:
    """Write report.html, report.md and comparison.md into a run directory; for several runs, trends.html and trends.md."""
    from annie_quant.report.pages import trends

    if len(run_dirs) == 1 and output is not None:
        raise click.UsageError(
            "--output is for the trends of several runs; the report of one run is written into its folder"
        )
    several = len(run_dirs) > 1
    paths = trends.build(run_dirs, output or Path("trends")) if several else annie_quant.report.build(run_dirs[0])
    for path in paths:
        click.echo(str(path))

"""`annie-quant demo`: the whole line on the embedded model."""

from __future__ import annotations

from pathlib import Path

import click

from annie_quant.cli.common import console


@click.command()
@click.option(
    "--output",
    default="runs/demo",
    show_default=True,
    type=click.Path(path_type=Path),
    help="Run directory; a finished stage is not done again.",
)
@click.option("--n-offline", default=25, show_default=True, help="Prompts a gate in the offline evaluation.")
@click.option("--n-served", default=100, show_default=True, help="Prompts a gate on the servers.")
def demo(output: Path, n_offline: int, n_served: int) -> None:
    """Run the whole line on the embedded model: quantize, audit, evaluate, serve, measure, judge, report."""
    from annie_quant.pipeline.demo import run

    verdict = run(output, n_offline=n_offline, n_served=n_served, console=console)
    console.print_verdict(verdict)

"""`annie-quant demo`: all stages on the embedded model."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

from annie_quant.cli.common import PATH, console


@click.command()
@click.option(
    "--output",
    default="runs/demo",
    show_default=True,
    type=PATH,
    help="Run directory; finished stages are not repeated.",
)
@click.option("--n-offline", default=25, show_default=True, help="Prompts per gate in the offline evaluation.")
@click.option("--n-served", default=100, show_default=True, help="Prompts per gate on the servers.")
def demo(output: Path, n_offline: int, n_served: int) -> None:
    """Run all stages on the embedded model: quantize, audit, evaluate, serve, measure, judge, report."""
    from annie_quant.pipeline import demo as pipeline

    result = pipeline.run(output, n_offline=n_offline, n_served=n_served, console=console)
    console.print_verdict(msgspec.to_builtins(result))

"""`annie-quant demo`: all stages on the embedded model."""

from __future__ import annotations

from pathlib import Path

import click

from annie_quant.cli.common import console, persona_option, workloads_option


@click.command()
@click.option(
    "--output",
    default="runs/demo",
    show_default=True,
    type=click.Path(path_type=Path),
    help="Run directory; finished stages are not repeated.",
)
@click.option("--n-offline", default=25, show_default=True, help="Prompts per gate in the offline evaluation.")
@click.option("--n-served", default=100, show_default=True, help="Prompts per gate on the servers.")
@persona_option
@workloads_option
def demo(output: Path, n_offline: int, n_served: int, persona: str | None, workloads: str | None) -> None:
    """Run all stages on the embedded model: quantize, audit, evaluate, serve, measure, judge, report."""
    from annie_quant.pipeline import demo as pipeline

    verdict = pipeline.run(
        output, n_offline=n_offline, n_served=n_served, console=console, persona=persona, workloads=workloads
    )
    console.print_verdict(verdict)

"""`annie-quant demo`: all stages on the embedded model."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

from annie_quant.cli import tables
from annie_quant.cli.common import PATH, console, persona_option, workloads_option

NEXT = "annie-quant init --prompt prompt.txt --tools tools.json --output mine"  # then what it prints


@click.command()
@click.option(
    "--output",
    default="runs/demo",
    show_default=True,
    type=PATH,
    help="Run directory; finished stages are not repeated.",
)
@click.option(
    "--n-offline",
    type=click.IntRange(1),
    default=60,
    show_default=True,
    help="Prompts per gate in the offline evaluation.",
)
@click.option(
    "--n-served", type=click.IntRange(1), default=60, show_default=True, help="Prompts per gate on the servers."
)
@persona_option
@workloads_option
def demo(output: Path, n_offline: int, n_served: int, persona: str | None, workloads: str | None) -> None:
    """Run all stages on the embedded model: quantize, audit, evaluate, serve, measure, judge, report."""
    from annie_quant.pipeline import demo as pipeline

    done = pipeline.run(
        output, n_offline=n_offline, n_served=n_served, console=console, persona=persona, workloads=workloads
    )
    result = msgspec.to_builtins(done)
    console.print_lines(tables.run_lines(result, console.width))
    console.print_verdict(result)
    console.note(f"for your own model: {NEXT}")

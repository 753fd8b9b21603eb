"""`annie-quant search`: try strategies, cheapest first, until one keeps all gates.

`annie-quant demo`: all stages on the embedded model.
"""

from __future__ import annotations

import sys
from pathlib import Path

import click
import msgspec

from annie_quant.cli import tables
from annie_quant.cli.common import PATH, console, emit, json_option, persona_option, workloads_option


@click.command()
@click.option("--model", required=True, type=PATH, help="Folder of the bf16 checkpoint.")
@click.option("--calib-data", required=True, type=PATH, help="JSON lines of conversations.")
@click.option("--output", required=True, type=PATH, help="Run directory; finished steps are not repeated.")
@click.option("--n", type=click.IntRange(1), default=100, show_default=True, help="Prompts per gate.")
@persona_option
@workloads_option
@click.option("--all", "every", is_flag=True, help="Evaluate every strategy on all prompts, also after one that keeps.")
@click.option("--strategies", help="Names, comma-separated, in the order to try. Default: all, cheapest first.")
@click.option(
    "--require",
    default="w4a4,w4a16",
    show_default=True,
    help="Numerics with which all gates must keep; w4a16 alone allows weight-only checkpoints.",
)
@click.option(
    "--seeds",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Calibration draws in which a strategy must keep.",
)
@click.option("--calib-samples", default=128, show_default=True, help="Conversations to calibrate with.")
@click.option("--allow-prompt-mismatch", is_flag=True, help="Accept data that was made for another system prompt.")
@click.option("--anyway", is_flag=True, help="Continue with a model that lacks the manners in bf16.")
@json_option
def search(
    model: Path,
    calib_data: Path,
    output: Path,
    n: int,
    persona: str | None,
    workloads: str | None,
    every: bool,
    strategies: str | None,
    require: str,
    seeds: int,
    calib_samples: int,
    allow_prompt_mismatch: bool,
    anyway: bool,
    as_json: bool,
) -> None:
    """Try the strategies, cheapest first, and stop at the first that keeps every gate of bf16. Exit code 1 if none does."""
    from annie_quant.cli.pipeline.search import SearchSettings, run
    from annie_quant.cli.pipeline.search_table import outcome, tree

    settings = SearchSettings(
        model=model,
        calib_data=calib_data,
        output=output,
        n=n,
        every=every,
        strategies=strategies.split(",") if strategies else None,
        required=require.split(","),
        samples=calib_samples,
        allow_prompt_mismatch=allow_prompt_mismatch,
        anyway=anyway,
        persona=persona,
        workloads=workloads,
        seeds=seeds,
    )
    result = run(settings, console)
    if as_json:
        emit(msgspec.to_builtins(result))
    else:
        sides = [
            tables.Column(f"{row.strategy} {kind}", side.gates, side.paired, side.pooled)
            for row in result.strategies
            for kind, side in row.numerics.items()
        ]
        console.print_lines(tables.side_lines(sides, tables.Column("bf16", result.reference), console.width))
        for line in tree(result):
            console.print_lines(tables.wrap_tree(line, console.width))
        console.note(outcome(result))
        console.note(f"table: {output / 'search.md'}")
    sys.exit(0 if result.chosen else 1)


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
    default=54,
    show_default=True,
    help="Prompts per gate in the offline evaluation.",
)
@click.option(
    "--n-served", type=click.IntRange(1), default=54, show_default=True, help="Prompts per gate on the servers."
)
@persona_option
@workloads_option
def demo(output: Path, n_offline: int, n_served: int, persona: str | None, workloads: str | None) -> None:
    """Run all stages on the embedded model: quantize, audit, evaluate, serve, measure, judge, report."""
    from annie_quant.cli.pipeline import demo as pipeline

    done = pipeline.run(
        output, n_offline=n_offline, n_served=n_served, console=console, persona=persona, workloads=workloads
    )
    result = msgspec.to_builtins(done)
    console.print_lines(tables.run_lines(result, console.width))
    console.print_verdict(result)
    console.note(f"for your own model: {NEXT}")

"""`annie-quant search`: try strategies, cheapest first, until one keeps all gates.

`annie-quant demo`: all stages on the embedded model.
"""

from __future__ import annotations

import sys

from annie_quant.cli import tables
from annie_quant.cli.common import console, emit
from annie_quant.cli.options import command
from annie_quant.cli.pipeline import DemoSettings, SearchSettings

NEXT = "annie-quant init --prompt prompt.txt --tools tools.json --output mine"  # then what it prints


@command(SearchSettings)
def search(settings: SearchSettings) -> None:
    """Try the strategies, cheapest first, and stop at the first that keeps every gate of bf16. Exit code 1 if none does."""
    from annie_quant.cli.pipeline.search import run
    from annie_quant.cli.pipeline.search_table import outcome, tree

    result = run(settings, console)
    if settings.as_json:
        emit(result)
    else:
        sides = [
            tables.Column.of(f"{row.strategy} {kind}", side)
            for row in result.strategies
            for kind, side in row.numerics.items()
        ]
        console.print_lines(tables.side_lines(sides, tables.Column("bf16", result.reference), console.width))
        for line in tree(result):
            console.print_lines(tables.wrap_tree(line, console.width))
        console.note(outcome(result))
        console.note(f"table: {settings.output / 'search.md'}")
    sys.exit(0 if result.chosen else 1)


@command(DemoSettings)
def demo(settings: DemoSettings) -> None:
    """Run all stages on the embedded model: quantize, audit, evaluate, serve, measure, judge, report."""
    from annie_quant.cli.pipeline.demo import run

    result = run(settings, console)
    for line in result.summary:
        console.print_lines(tables.wrap(line, console.width))
    console.note(f"report: {result.report}")
    console.note(f"for your own model: {NEXT}")

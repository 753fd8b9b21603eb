"""`annie-quant export`: a run in the formats of other tools."""

from __future__ import annotations

from pathlib import Path

import click

from annie_quant.cli.common import PATH, echo


@click.command()
@click.argument("run_dir", type=PATH)
def export(run_dir: Path) -> None:
    """Write a benchmark's results.csv and exports/ again (GuideLLM, AIPerf, vLLM, the original plan's script)."""
    from annie_quant import bench

    for path in bench.export(run_dir):
        echo(str(path))

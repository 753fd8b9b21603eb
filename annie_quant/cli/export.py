"""`annie-quant export`: a run in the formats of other tools, or in an experiment tracker."""

from __future__ import annotations

from pathlib import Path

import click

from annie_quant.cli.common import PATH, echo


@click.command()
@click.argument("run_dir", type=PATH)
@click.option(
    "--to",
    "target",
    default="files",
    show_default=True,
    type=click.Choice(["files", "mlflow", "wandb"]),
    help="files: results.csv and exports/ (GuideLLM, AIPerf, vLLM, Prometheus); else a tracker whose package is installed.",
)
@click.option("--project", default="annie-quant", show_default=True, help="MLflow's experiment or W&B's project.")
def export(run_dir: Path, target: str, project: str) -> None:
    """Write a benchmark's exports again, or log its figures, settings and files to MLflow or Weights & Biases."""
    from annie_quant import bench
    from annie_quant.bench.exchange import trackers

    if target == "files":
        for path in bench.export(run_dir):
            echo(str(path))
        return
    echo(f"{target}: run {trackers.log(run_dir, target, project)} in {project}")

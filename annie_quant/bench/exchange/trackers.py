"""A run's figures and files in an experiment tracker: MLflow or Weights & Biases, each where its package is installed.

A metric is named backend/workload/metric/p50 (or p99), a gate backend/gate/NAME with its pass rate. Settings are parameters;
run.json, results.csv and the report are its files. MLflow's server is that of MLFLOW_TRACKING_URI; WANDB_MODE=offline
writes a local folder.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from annie_quant.errors import EnvironmentFault, need
from annie_quant.printable import printable
from annie_quant.schema import Bench, read_bench

FILES = ("run.json", "bench.json", "results.csv", "report.html", "report.md", "capacity.json")
_NOT_ALLOWED = re.compile(r"[^A-Za-z0-9_\-. /]")


def metrics(bench: Bench) -> dict[str, float]:
    """Return the figures by name; characters that MLflow does not accept in a name are replaced by "_"."""
    return {_NOT_ALLOWED.sub("_", name): value for name, value in _metrics(bench)}


def _metrics(bench: Bench) -> Iterator[tuple[str, float]]:
    for backend, side in bench.aggregates.served.items():
        for workload, summary in side.workloads.items():
            for metric, values in summary.metrics():
                yield f"{backend}/{workload}/{metric}/p50", values.p50
                yield f"{backend}/{workload}/{metric}/p99", values.p99
        for gate, result in side.gates.items():
            yield f"{backend}/gate/{gate}", result.rate
    for row in bench.aggregates.comparisons:
        if row.median_difference is not None:
            yield f"{row.b} - {row.a}/{row.workload}/{row.metric}", row.median_difference


def parameters(bench: Bench) -> dict[str, str]:
    """Return the settings that a tracked run is found by, as text."""
    config = bench.config
    values = {
        "warmup": config.warmup,
        "runs": config.runs,
        "n": config.n,
        "seed": config.seed,
        "prefix_cache": config.prefix_cache,
        "workloads": ", ".join(config.workloads),
        "verdict": bench.verdict.outcome,
        "annie_quant": bench.environment.packages.get("annie-quant"),
        "cpu": bench.environment.cpu,
    }
    for name, identity in bench.backends.items():
        values |= {
            f"{name}.model": identity.model,
            f"{name}.runtime": identity.runtime,
            f"{name}.version": identity.version,
        }
    return {key: str(value)[:400] for key, value in values.items() if value not in (None, "")}


def log(folder: Path, tracker: str, project: str) -> str:
    """Log a run directory and return the tracked run's id. tracker: "mlflow" or "wandb".

    Raises EnvironmentFault where the package is not installed, or refuses the run.
    """
    bench = read_bench(folder)
    package = need(tracker, "trackers")
    try:
        return (_to_mlflow if tracker == "mlflow" else _to_wandb)(package, bench, folder, project)
    except Exception as error:  # each package and its transports raise their own types
        raise EnvironmentFault(
            f"{tracker} refused the run: {printable(str(error), 300)}",
            "set MLFLOW_TRACKING_URI to your server" if tracker == "mlflow" else "wandb login, or WANDB_MODE=offline",
        ) from error


def _to_mlflow(mlflow: Any, bench: Bench, folder: Path, experiment: str) -> str:
    mlflow.set_experiment(experiment)
    with mlflow.start_run(run_name=folder.resolve().name) as run:
        mlflow.log_params(parameters(bench))
        mlflow.log_metrics(metrics(bench))
        for name in FILES:
            if (folder / name).is_file():
                mlflow.log_artifact(str(folder / name))
        return str(run.info.run_id)


def _to_wandb(wandb: Any, bench: Bench, folder: Path, project: str) -> str:
    run = wandb.init(project=project, name=folder.resolve().name, config=parameters(bench))
    run.summary.update(metrics(bench))
    artifact = wandb.Artifact(f"run-{run.id}", type="benchmark")
    for name in FILES:
        if (folder / name).is_file():
            artifact.add_file(str(folder / name))
    run.log_artifact(artifact)
    run.finish()
    return str(run.id)

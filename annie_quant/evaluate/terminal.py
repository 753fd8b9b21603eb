"""What `annie-quant eval` does: evaluation, layer sensitivity where asked for, and the files beside each other."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from annie_quant import files
from annie_quant.errors import EnvironmentFault
from annie_quant.evaluate import layers
from annie_quant.evaluate.evaluation import Progress, evaluate
from annie_quant.evaluate.process_group import finish, team

__all__ = ["finish", "first_process", "lines", "run"]


def run(
    checkpoint: Path,
    reference: Path,
    *,
    numerics: Sequence[str],
    n: int,
    conversations: Path | None,
    text: Path | None,
    layers_n: int | None,
    output: Path | None,
    progress: Progress,
    rows: int = 128,
) -> dict[str, Any]:
    """evaluate()'s result; with layers_n also `layers` and, under the numerics they were measured with, kl.by_layer.

    rows: answers a batch. Writes output, and beside it OUTPUT.layers.json (from which a killed run goes on) and OUTPUT.layers.svg.
    """
    if output is not None and first_process():
        writable(output)  # said now, and not after an hour of evaluation
    result = evaluate(
        checkpoint,
        reference,
        numerics=numerics,
        n_per_gate=n,
        conversations=conversations,
        text=text,
        progress=progress,
        rows=rows,
    )
    if layers_n is not None and list(result["numerics"]) != ["bf16"]:
        kept = None if output is None else output.with_suffix(".layers.json")
        which = next(iter(result["numerics"]))
        found = layers.sensitivity(
            checkpoint, reference, numerics=which, output=kept, progress=progress, n_per_gate=layers_n, rows=rows
        )
        result["layers"] = found
        result["numerics"][which]["kl"]["by_layer"] = layers.by_layer(found)
        if output is not None and first_process():
            layers.plot(found, output.with_suffix(".layers.svg"))
    if output is not None and first_process():
        files.write_json(output, result)
    return result


def writable(path: Path) -> None:
    """Raise EnvironmentFault where the file cannot be written later."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        probe = path.with_name(f".{path.name}.{os.getpid()}.part")
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise EnvironmentFault(
            f"{path}: cannot be written ({error.strerror}{files.owner(path.parent)})", "choose another --output"
        ) from error


def first_process() -> bool:
    """Whether this process is the one that prints and writes."""
    return team().rank == 0


def lines(result: dict[str, Any]) -> Iterator[str]:
    """A line a numerics for people."""
    for name, side in result["numerics"].items():
        kl = side["kl"]
        if kl["n_tokens"]:
            yield (
                f"{name}: KL mean {kl['mean']:.4g}, p99 {kl['p99']:.3g} over {kl['n_tokens']} tokens; {kl['flips']} flips"
                f" ({kl['flips_predicted']:.0f} predicted from margins); perplexity {kl['perplexity']:.3f} (reference"
                f" {kl['perplexity_reference']:.3f}); {side['verbosity_ratio'] or 0:.2f} of the reference's length"
            )
        if side["kl_text"]:
            text = side["kl_text"]
            yield f"{name}, text: perplexity {text['perplexity']:.3f} (reference {text['perplexity_reference']:.3f})"
    if "layers" in result:
        rows = sorted(layers.by_layer(result["layers"]), key=lambda row: -row["kl"])
        yield "most divergence: " + ", ".join(f"{row['layer']} {row['kl']:.3g}" for row in rows[:3])

"""`annie-quant compare`: forms of one model against its bf16 source."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

import annie_quant
from annie_quant.cli.common import PATH, console, emit, json_option


@click.command()
@click.argument("source", type=PATH)
@click.argument("forms", nargs=-1, required=True, type=PATH)
@click.option("--worst", default=3, show_default=True, help="Tensors with the largest error to list per form.")
@click.option("--plot", type=PATH, help="Also draw a plot: a file named .svg, .png or .pdf.")
@json_option
def compare(source: Path, forms: tuple[Path, ...], worst: int, plot: Path | None, as_json: bool) -> None:
    """Compare forms of one model (folders, GGUF files) with its bf16 SOURCE, tensor by tensor."""
    with console.task("compare"):
        comparison = annie_quant.checkpoint.compare(source, annie_quant.checkpoint.labels(forms))
        if plot:
            comparison.plot(plot)
    if as_json:
        emit(comparison.to_dict(worst))
        return
    for form, summary in comparison.summary.items():
        console.print_mapping(form, msgspec.to_builtins(summary))
        for row in comparison.worst(form, worst):
            console.note(f"  worst: {row.tensor} {row.format} rel-L2 {row.rel_l2:.4f}")

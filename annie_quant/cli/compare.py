"""`annie-quant compare`: forms of one model against its bf16 source, or runs and reports of benchmarks as one table."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import click
import msgspec

import annie_quant
from annie_quant.cli import tables
from annie_quant.cli.common import PATH, console, emit, json_option


@click.command()
@click.argument("source", type=PATH)
@click.argument("forms", nargs=-1, type=PATH)
@click.option("--worst", default=3, show_default=True, help="Tensors with the largest error to list per form.")
@click.option("--plot", type=PATH, help="Also draw a plot: a file named .svg, .png or .pdf.")
@json_option
def compare(source: Path, forms: tuple[Path, ...], worst: int, plot: Path | None, as_json: bool) -> None:
    """Compare forms of one model (folders, GGUF files) with its bf16 SOURCE, tensor by tensor.

    Where all paths are run directories, or reports of GuideLLM, AIPerf or vllm bench serve, print them as one table.
    """
    from annie_quant.bench.exchange import is_report

    if is_report(source):
        _compare_runs((source, *forms), as_json)
        return
    if not forms:
        raise click.UsageError("pass a source and one form or more, or run directories: annie-quant compare runs/*")
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


def _compare_runs(paths: Sequence[Path], as_json: bool) -> None:
    from annie_quant.bench.exchange import read

    common = os.path.commonpath([path.resolve().parent for path in paths])
    rows = []
    for path in paths:
        own = read(path)
        for row in own:
            row.source = os.path.relpath(path.resolve(), common)
        rows += own
    if as_json:
        emit({"rows": msgspec.to_builtins(rows)})
        return
    console.print_lines(tables.report_lines(rows, console.width))

"""audit, convert, compare: the faults of a checkpoint, another dialect, and several forms of one model."""

from __future__ import annotations

import sys
from pathlib import Path

import click
import msgspec

import annie_quant
from annie_quant.cli.common import console, emit, json_option
from annie_quant.progress import Lines


@click.command()
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option(
    "--source", type=click.Path(path_type=Path), help="The bf16 checkpoint it was made from: adds the error per tensor."
)
@click.option("--repair", is_flag=True, help="Write a repaired copy in the same parent folder, then audit that.")
@click.option("--output", type=click.Path(path_type=Path), help="With --repair: the folder of the repaired copy.")
@click.option("--names", type=click.Choice(["old", "new"]), help="With --repair: config fields and tensor names for "
              "transformers 4.57 (old) or from 5.2 (new).")  # fmt: skip
@click.option("--force", is_flag=True, help="With --repair: replace an output that exists.")
@click.option("--tensors", is_flag=True, help="Also print one line per tensor.")
@json_option
def audit(
    checkpoint: Path,
    source: Path | None,
    repair: bool,
    output: Path | None,
    names: str | None,
    force: bool,
    tensors: bool,
    as_json: bool,
) -> None:
    """Read every tensor of a checkpoint and report its faults. Exit code 1 if there is one."""
    if not repair and (output or names or force):
        raise click.UsageError("--output, --names and --force belong to --repair")
    repaired = None
    if repair:
        with console.task("repair"):
            repaired = annie_quant.checkpoint.repair(checkpoint, source=source, output=output, names=names, force=force)
        checkpoint = Path(repaired.path)
    result = annie_quant.checkpoint.audit(checkpoint, source=source)
    if as_json:
        emit(result.to_dict() | ({"repair": msgspec.to_builtins(repaired)} if repaired else {}))
    else:
        for action in repaired.actions if repaired else ():
            console.note(f"repaired: {action}")
        if repaired and not repaired.actions:
            console.note("nothing to repair")
        console.print_audit(checkpoint, result, tensors)
    sys.exit(0 if result.ok else 1)


@click.command()
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option("--to", "target", required=True, type=click.Choice(["modelopt", "compressed-tensors", "gguf"]))
@click.option("--type", "kind", help="GGUF type: BF16, F16, NVFP4 (as the checkpoint is), Q8_0, Q4_K_M, Q5_K_M, Q6_K.")
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    help="Folder, or file for GGUF. Default: in the checkpoint's parent folder.",
)
@click.option(
    "--like", type=click.Path(path_type=Path), help="From GGUF: a folder of the same model, for config and tokenizer."
)
@click.option("--force", is_flag=True, help="Replace an output that exists.")
@json_option
def convert(
    checkpoint: Path, target: str, kind: str | None, output: Path | None, like: Path | None, force: bool, as_json: bool
) -> None:
    """Change a checkpoint's dialect, or write it as GGUF."""
    with console.task(f"convert to {target}") as step:
        result = annie_quant.checkpoint.convert(
            checkpoint, to=target, output=output, type=kind, like=like, force=force, progress=Lines(step.say)
        )
    if as_json:
        emit(msgspec.to_builtins(result))
    else:
        console.note(f"{result.path}: {result.size_bytes / 1e6:.1f} MB")
        for line in result.loss:
            console.note(f"lost in conversion: {line}")


@click.command()
@click.argument("source", type=click.Path(path_type=Path))
@click.argument("forms", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--worst", default=3, show_default=True, help="Tensors with the largest error to list for each form.")
@click.option("--plot", type=click.Path(path_type=Path), help="Also draw it: a file named .svg, .png or .pdf.")
@json_option
def compare(source: Path, forms: tuple[Path, ...], worst: int, plot: Path | None, as_json: bool) -> None:
    """Compare several forms of one model (folders, GGUF files) with its bf16 SOURCE, tensor by tensor."""
    with console.task("compare"):
        result = annie_quant.checkpoint.compare(source, annie_quant.checkpoint.labels(forms))
        if plot:
            result.plot(plot)
    if as_json:
        emit(result.to_dict(worst))
        return
    for form, summary in result.summary.items():
        console.print_mapping(form, msgspec.to_builtins(summary))
        for row in result.worst(form, worst):
            console.note(f"  worst: {row.tensor} {row.format} rel-L2 {row.rel_l2:.4f}")

"""audit, convert, compare: what is on disk, in another dialect, and one form against another."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

import annie_quant
from annie_quant.cli.common import console, emit, json_option


@click.command()
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option(
    "--source", type=click.Path(path_type=Path), help="The bf16 checkpoint it was made from: adds the error per tensor."
)
@click.option("--repair", is_flag=True, help="Write a mended copy beside it, then audit that.")
@click.option("--output", type=click.Path(path_type=Path), help="With --repair: the mended copy's folder.")
@click.option("--names", type=click.Choice(["old", "new"]), help="With --repair: config fields and tensor names for "
              "transformers 4.57 (old) or from 5.2 (new).")  # fmt: skip
@click.option("--force", is_flag=True, help="With --repair: replace an output that exists.")
@click.option("--tensors", is_flag=True, help="Also print a line for every tensor.")
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
    """Read every tensor of a checkpoint and name what is wrong with it. Exit code 1 on a fault."""
    if not repair and (output or names or force):
        raise click.UsageError("--output, --names and --force belong to --repair")
    mended: dict[str, Any] = {}
    if repair:
        with console.task("repair"):
            mended = annie_quant.checkpoint.repair(checkpoint, source=source, output=output, names=names, force=force)
        checkpoint = Path(mended["path"])
    found = annie_quant.checkpoint.audit(checkpoint, source=source)
    if as_json:
        emit(found.to_dict() | ({"repair": mended} if repair else {}))
    else:
        for action in mended.get("actions", ()):
            console.note(f"mended: {action}")
        if repair and not mended["actions"]:
            console.note("nothing needed mending")
        console.print_audit(checkpoint, found, tensors)
    sys.exit(0 if found.ok else 1)


@click.command()
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option("--to", "target", required=True, type=click.Choice(["modelopt", "compressed-tensors", "gguf"]))
@click.option("--type", "kind", help="GGUF type: BF16, F16, NVFP4 (as the checkpoint is), Q8_0, Q4_K_M, Q5_K_M, Q6_K.")
@click.option(
    "--output", type=click.Path(path_type=Path), help="Folder, or file for GGUF. Default: beside the checkpoint."
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
    done = 0
    with console.task(f"convert to {target}") as step:

        def progress(size_bytes: int) -> None:
            nonlocal done
            done += size_bytes
            step.say(f"{done / 1e6:,.0f} MB")

        result = annie_quant.checkpoint.convert(
            checkpoint, to=target, output=output, type=kind, like=like, force=force, progress=progress
        )
    if as_json:
        emit(result)
    else:
        console.note(f"{result['path']}: {result['size_bytes'] / 1e6:.1f} MB")
        for line in result["loss"]:
            console.note(f"lost on the way: {line}")


@click.command()
@click.argument("source", type=click.Path(path_type=Path))
@click.argument("forms", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--worst", default=3, show_default=True, help="Tensors with the largest error to list for each form.")
@click.option("--plot", type=click.Path(path_type=Path), help="Also draw it: a file named .svg, .png or .pdf.")
@json_option
def compare(source: Path, forms: tuple[Path, ...], worst: int, plot: Path | None, as_json: bool) -> None:
    """Several forms of one model (folders, GGUF files) against its bf16 SOURCE, tensor by tensor."""
    with console.task("compare"):
        found = annie_quant.checkpoint.compare(source, annie_quant.checkpoint.labels(forms))
        if plot:
            found.plot(plot)
    if as_json:
        emit(found.to_dict(worst))
        return
    for form, summary in found.summary.items():
        console.print_mapping(form, summary)
        for row in found.worst(form, worst):
            console.note(f"  worst: {row['tensor']} {row['format']} rel-L2 {row['rel_l2']:.4f}")

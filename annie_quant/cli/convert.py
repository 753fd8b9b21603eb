"""`annie-quant convert`: write a checkpoint in another dialect or as GGUF."""

from __future__ import annotations

from pathlib import Path

import click

import annie_quant
from annie_quant.cli.common import PATH, console, emit, json_option, quiet_engines


@click.command()
@click.argument("checkpoint", type=PATH)
@click.option(
    "--to",
    "target",
    required=True,
    type=click.Choice(["modelopt", "compressed-tensors", "gguf", "bf16", "hf"]),
    help="Dialect of the copy; bf16: plain weights; hf: a GGUF file as a bf16 folder with its tokenizer.",
)
@click.option("--type", "kind", help="GGUF type: BF16, F16, NVFP4 (as the checkpoint), Q8_0, Q4_K_M, Q5_K_M, Q6_K.")
@click.option("--output", type=PATH, help="Folder, or file for GGUF. Default: in the checkpoint's parent folder.")
@click.option("--like", type=PATH, help="From GGUF: a folder of the same model, for config and tokenizer.")
@click.option("--force", is_flag=True, help="Replace an existing output.")
@json_option
def convert(
    checkpoint: Path, target: str, kind: str | None, output: Path | None, like: Path | None, force: bool, as_json: bool
) -> None:
    """Convert a checkpoint to another dialect, or write it as GGUF."""
    with console.task(f"convert to {target}") as step:
        if target == "hf":
            if kind or like:
                raise click.UsageError("--to hf takes neither --type nor --like: the file holds all that is needed")
            quiet_engines()
            from annie_quant.hf import gguf_source

            result = gguf_source.convert(checkpoint, output, force, step)
        else:
            result = annie_quant.checkpoint.convert(
                checkpoint, to=target, output=output, type=kind, like=like, force=force, progress=step
            )
    if as_json:
        emit(result)
        return
    console.note(f"{result.path}: {result.size_bytes / 1e6:.1f} MB")
    for line in result.loss:
        console.note(f"lost in conversion: {line}")

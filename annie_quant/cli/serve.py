"""`annie-quant serve`: a server of a checkpoint, or the command and recipe for one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

import annie_quant
from annie_quant.cli.common import console


@click.command()
@click.argument("model", type=click.Path(path_type=Path))
@click.option("--runtime", default="llama.cpp", show_default=True, help="vllm, sglang or llama.cpp.")
@click.option("--port", default=8000, show_default=True)
@click.option(
    "--use", help='A dated recipe of vLLM or SGLang: "2026-11-27b", "2026-11-mtp", "cpu" ...; default: the newest.'
)
@click.option("--recipe", type=click.Path(path_type=Path), help="Write the recipe as YAML (sparkrun) and stop.")
@click.option("--dry-run", is_flag=True, help="Print the command and stop.")
def serve(model: Path, runtime: str, port: int, use: str | None, recipe: Path | None, dry_run: bool) -> None:
    """Serve a checkpoint (or a GGUF file) and wait until Ctrl-C."""
    options: dict[str, Any] = {"recipe": use} if use else {}
    if recipe:
        click.echo(str(annie_quant.serve.write_recipe(model, recipe, runtime=runtime, port=port, **options)))
    if dry_run:
        click.echo(annie_quant.serve.command(model, runtime=runtime, port=port, **options))
    if recipe or dry_run:
        return
    with console.task(f"{runtime} on port {port}") as step:
        server = annie_quant.serve.start(model, runtime=runtime, port=port, say=step.say, **options)
    console.note(f"ready: {server.url}/v1   (Ctrl-C stops it)")
    try:
        server.wait()
    finally:
        server.stop()

"""`annie-quant serve`: serve a checkpoint, or print the command or write the recipe for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

import annie_quant
from annie_quant.cli.common import PATH, console, echo


@click.command()
@click.argument("model", type=PATH)
@click.option("--runtime", default="llama.cpp", show_default=True, help="vllm, sglang or llama.cpp.")
@click.option("--port", default=8000, show_default=True, help="Port on this machine.")
@click.option(
    "--use",
    metavar="RECIPE",
    help='A dated recipe of vLLM or SGLang: "2026-11-27b", "2026-11-mtp", "cpu" ... Default: the newest.',
)
@click.option("--write-recipe", "recipe_file", type=PATH, help="Write the recipe as YAML (sparkrun) and exit.")
@click.option("--recipe", "old_recipe_file", type=PATH, hidden=True)  # the name until 0.1
@click.option("--dry-run", is_flag=True, help="Print the command and exit.")
def serve(
    model: Path,
    runtime: str,
    port: int,
    use: str | None,
    recipe_file: Path | None,
    old_recipe_file: Path | None,
    dry_run: bool,
) -> None:
    """Serve a checkpoint (or a GGUF file) until Ctrl-C.

    Before a command is printed or a recipe written the checkpoint is audited: one that the runtime does not load is refused.
    """
    options: dict[str, Any] = {"recipe": use} if use else {}
    recipe_file = recipe_file or old_recipe_file
    for note in annie_quant.serve.check(model, runtime=runtime, **options) if recipe_file or dry_run else ():
        console.note(note)
    if recipe_file:
        echo(str(annie_quant.serve.write_recipe(model, recipe_file, runtime=runtime, port=port, **options)))
    if dry_run:
        echo(annie_quant.serve.command(model, runtime=runtime, port=port, **options))
    if recipe_file or dry_run:
        return
    with console.task(f"{runtime} on port {port}") as step:
        server = annie_quant.serve.start(model, runtime=runtime, port=port, progress=step, **options)
    console.note(f"ready: {server.url}/v1   (Ctrl-C stops it)")
    try:
        server.wait()
    finally:
        server.stop()

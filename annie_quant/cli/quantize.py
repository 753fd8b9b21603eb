"""`annie-quant quantize`: one strategy.

`annie-quant serve`: serve a checkpoint, or print the command or write the recipe for it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

import annie_quant
from annie_quant.cli.common import (
    PATH,
    console,
    echo,
    emit,
    json_option,
    persona_option,
    quiet_engines,
    refuse_stale_prompt,
)
from annie_quant.core.errors import CheckpointError


@click.command()
@click.option("--strategy", required=True, help="naive, direct, mlp_only, ... (an unknown name prints the list).")
@click.option("--model", required=True, type=PATH, help="Folder of the bf16 checkpoint.")
@click.option("--calib-data", type=PATH, help="JSON lines of conversations (annie-quant data).")
@persona_option
@click.option("--calib-samples", default=512, show_default=True, help="Conversations to calibrate with.")
@click.option(
    "--exclude-layers",
    default="",
    help='Parts that stay as they are, e.g. "linear_attn,layers.0,layers.31", or fnmatch patterns.',
)
@click.option(
    "--scale",
    help="Block scales where our codec chooses them: amax, four_over_six, sweep. Default: the strategy's own.",
)
@click.option(
    "--kv-cache",
    default="none",
    show_default=True,
    help="KV cache that the checkpoint asks for: none, fp8 (calibrated scales) or fp8_cast.",
)
@click.option("--set", "settings", multiple=True, metavar="NAME=VALUE", help="A strategy's own setting; repeatable.")
@click.option("--effort", type=click.Choice(["fast", "normal", "max"]), help="best: how many recipes it compares.")
@click.option("--ray", metavar="ADDRESS", help='direct: make the shards on this Ray cluster ("local" starts one here).')
@click.option("--seed", default=0, show_default=True, help="Same seed, same bytes.")
@click.option("--output", required=True, type=PATH, help="Folder of the new checkpoint.")
@click.option("--force", is_flag=True, help="Replace an output that exists.")
@click.option("--allow-prompt-mismatch", is_flag=True, help="Continue with data made for another system prompt.")
@click.option(
    "--dry-run", is_flag=True, help="Print size, memory and time to expect (--model 9b and 27b work too), and stop."
)
@json_option
def quantize(
    strategy: str,
    model: Path,
    calib_data: Path | None,
    persona: str | None,
    calib_samples: int,
    exclude_layers: str,
    scale: str | None,
    kv_cache: str,
    settings: tuple[str, ...],
    effort: str | None,
    ray: str | None,
    seed: int,
    output: Path,
    force: bool,
    allow_prompt_mismatch: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Quantize a bf16 checkpoint to NVFP4 with one strategy."""
    from annie_quant.quantize import estimates

    if invalid := [item for item in settings if "=" not in item]:
        raise click.UsageError(f"--set {invalid[0]}: expected NAME=VALUE")
    settings += (f"effort={effort}",) if effort else ()
    options = dict(item.split("=", 1) for item in settings)
    if dry_run or estimates.is_large(model):
        try:
            lines = estimates.estimate(model, strategy, calib_samples, options=options, calib_data=calib_data).lines()
        except CheckpointError:
            if dry_run:
                raise
            lines = []
        for line in lines:
            echo(line, err=not dry_run)
    if dry_run:
        return
    quiet_engines()
    refuse_stale_prompt(calib_data, allow_prompt_mismatch, persona)
    with console.task(f"quantize ({strategy})") as step:
        result = annie_quant.quantize.run(
            strategy,
            model,
            output,
            calib_data=calib_data,
            calib_samples=calib_samples,
            persona=persona,
            exclude=exclude_layers,
            scale=scale,
            force=force,
            report=step,
            seed=seed,
            allow_prompt_mismatch=allow_prompt_mismatch,
            kv_cache=kv_cache,
            **options | ({"ray": ray} if ray else {}),
        )
    if as_json:
        emit(result)
        return
    sizes = f"{result.size_bytes / 1e6:.1f} MB from {result.source_bytes / 1e6:.1f} MB"
    console.note(f"{result.output}: {sizes}")
    for note in result.notes:
        console.note(note)


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
@click.option("--dry-run", is_flag=True, help="Print the command and exit.")
def serve(
    model: Path,
    runtime: str,
    port: int,
    use: str | None,
    recipe_file: Path | None,
    dry_run: bool,
) -> None:
    """Serve a checkpoint (or a GGUF file) until Ctrl-C.

    Before a command is printed or a recipe written the checkpoint is audited: one that the runtime does not load is refused.
    """
    options: dict[str, Any] = {"recipe": use} if use else {}
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

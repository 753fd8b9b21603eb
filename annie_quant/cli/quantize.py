"""`annie-quant quantize`: one strategy.

`annie-quant serve`: serve a checkpoint, or print the command or write the recipe for it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import click
import msgspec

import annie_quant
from annie_quant.cli.common import console, echo, emit, quiet_engines, refuse_stale_prompt
from annie_quant.cli.options import AllowMismatch, Argument, AsJson, Force, Option, PersonaName, command
from annie_quant.core.errors import CheckpointError


class QuantizeOptions(msgspec.Struct, frozen=True, kw_only=True):
    strategy: Annotated[str, Option("naive, direct, mlp_only, ... (an unknown name prints the list).")]
    model: Annotated[Path, Option("Folder of the bf16 checkpoint.")]
    calib_data: Annotated[Path | None, Option("JSON lines of conversations (annie-quant data).")] = None
    persona: PersonaName = None
    calib_samples: Annotated[int, Option("Conversations to calibrate with.")] = 512
    exclude_layers: Annotated[
        str, Option('Parts that stay as they are, e.g. "linear_attn,layers.0,layers.31", or fnmatch patterns.')
    ] = ""
    scale: Annotated[
        str | None,
        Option("Block scales where our codec chooses them: amax, four_over_six, sweep. Default: the strategy's own."),
    ] = None
    kv_cache: Annotated[
        str, Option("KV cache that the checkpoint asks for: none, fp8 (calibrated scales) or fp8_cast.")
    ] = "none"
    settings: Annotated[
        tuple[str, ...], Option("A strategy's own setting; repeatable.", name="set", metavar="NAME=VALUE")
    ] = ()
    effort: Annotated[Literal["fast", "normal", "max"] | None, Option("best: how many recipes it compares.")] = None
    max_gb: Annotated[float | None, Option("best: GB of weights at most; formats are chosen by measured loss.")] = None
    min_tps: Annotated[
        float | None, Option("best: tokens per second of one stream at least, as predicted for --device.")
    ] = None
    max_loss: Annotated[
        float | None,
        Option("best: divergence of held-out answers at most, in nats: mean KL plus that of the tokens that decide."),
    ] = None
    device: Annotated[
        str | None,
        Option(
            "Whose speed is predicted: gb10, h200, a rate in GB/s, or a device file (doctor --measure). Default: this machine "
            "where it was measured, else gb10.",
            metavar="NAME|GB/S|FILE",
        ),
    ] = None
    ray: Annotated[
        str | None,
        Option('direct: make the shards on this Ray cluster ("local" starts one here).', metavar="ADDRESS"),
    ] = None
    seed: Annotated[int, Option("Same seed, same bytes.")] = 0
    output: Annotated[Path, Option("Folder of the new checkpoint.")]
    force: Force = False
    allow_prompt_mismatch: AllowMismatch = False
    dry_run: Annotated[
        bool, Option("Print size, memory and time to expect (--model 9b and 27b work too), and stop.")
    ] = False
    as_json: AsJson = False


@command(QuantizeOptions)
def quantize(options: QuantizeOptions) -> None:
    """Quantize a bf16 checkpoint to NVFP4 with one strategy."""
    from annie_quant.checkpoint import ModelFolder, decode_speed
    from annie_quant.quantize import estimates

    strategy, model, samples = options.strategy, options.model, options.calib_samples
    if invalid := [item for item in options.settings if "=" not in item]:
        raise click.UsageError(f"--set {invalid[0]}: expected NAME=VALUE")
    own = dict(item.split("=", 1) for item in options.settings)
    limits = {name: getattr(options, name) for name in ("effort", "max_gb", "min_tps", "max_loss")}
    own |= {name: str(value) for name, value in limits.items() if value is not None}
    device = decode_speed.find_device(options.device) if options.device else None
    if device and strategy == "best":
        own["device"] = str(options.device)
    if options.dry_run or estimates.is_large(model):
        try:
            lines = estimates.estimate(
                model, strategy, samples, options=own, calib_data=options.calib_data, device=device
            ).lines()
        except CheckpointError:
            if options.dry_run:
                raise
            lines = []
        for line in lines:
            echo(line, err=not options.dry_run)
    if options.dry_run:
        return
    quiet_engines()
    refuse_stale_prompt(options.calib_data, options.allow_prompt_mismatch, options.persona)
    with console.task(f"quantize ({strategy})") as step:
        result = annie_quant.quantize.run(
            strategy,
            model,
            options.output,
            calib_data=options.calib_data,
            calib_samples=samples,
            persona=options.persona,
            exclude=options.exclude_layers,
            scale=options.scale,
            force=options.force,
            report=step,
            seed=options.seed,
            allow_prompt_mismatch=options.allow_prompt_mismatch,
            kv_cache=options.kv_cache,
            **own | ({"ray": options.ray} if options.ray else {}),
        )
    if options.as_json:
        emit(result)
        return
    sizes = f"{result.size_bytes / 1e6:.1f} MB from {result.source_bytes / 1e6:.1f} MB"
    console.note(f"{result.output}: {sizes}")
    console.note(decode_speed.describe(decode_speed.predict(ModelFolder(result.output), device)))
    for note in result.notes:
        console.note(note)


class ServeOptions(msgspec.Struct, frozen=True, kw_only=True):
    model: Annotated[Path, Argument()]
    runtime: Annotated[str, Option("vllm, sglang or llama.cpp.")] = "llama.cpp"
    port: Annotated[int, Option("Port on this machine.")] = 8000
    use: Annotated[
        str | None,
        Option(
            'A dated recipe of vLLM or SGLang: "2026-11-27b", "2026-11-mtp", "cpu" ... Default: the newest.',
            metavar="RECIPE",
        ),
    ] = None
    write_recipe: Annotated[Path | None, Option("Write the recipe as YAML (sparkrun) and exit.")] = None
    dry_run: Annotated[bool, Option("Print the command and exit.")] = False


@command(ServeOptions)
def serve(options: ServeOptions) -> None:
    """Serve a checkpoint (or a GGUF file) until Ctrl-C.

    Before a command is printed or a recipe written the checkpoint is audited: one that the runtime does not load is refused.
    """
    model, serving = options.model, annie_quant.serve
    chosen: dict[str, Any] = {"recipe": options.use} if options.use else {}
    if options.write_recipe or options.dry_run:
        for note in serving.check(model, runtime=options.runtime, **chosen):
            console.note(note)
        runtime, port = options.runtime, options.port
        if options.write_recipe:
            echo(str(serving.write_recipe(model, options.write_recipe, runtime, port, **chosen)))
        if options.dry_run:
            echo(serving.command(model, runtime, port, **chosen))
        return
    with console.task(f"{options.runtime} on port {options.port}") as step:
        server = serving.start(model, runtime=options.runtime, port=options.port, progress=step, **chosen)
    console.note(f"ready: {server.url}/v1   (Ctrl-C stops it)")
    try:
        server.wait()
    finally:
        server.stop()

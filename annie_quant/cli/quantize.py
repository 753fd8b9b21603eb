"""The commands that make and run checkpoints: `quantize`, `search`, `demo` and `serve`.

`annie-quant quantize`: one strategy.

`annie-quant search`: try strategies, from the fewest bytes per token up, until one keeps all gates.

`annie-quant demo`: all stages on the embedded model.

`annie-quant serve`: serve a checkpoint, or print the command or write the recipe for it.
"""

from __future__ import annotations

import contextlib
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from cyclopts import Parameter

import annie_quant
from annie_quant.cli import tables
from annie_quant.cli.options import (
    PORT,
    POSITIVE,
    AllowMismatch,
    AsJson,
    CachedTokens,
    Force,
    PersonaName,
    PromptTokens,
    at_least,
    keywords_of,
)
from annie_quant.cli.pipeline import DemoSettings, SearchSettings
from annie_quant.cli.terminal import console, echo, emit, quiet_engines
from annie_quant.core.errors import CheckpointError, UsageError


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class QuantizeOptions:
    """Options of `annie-quant quantize`.

    Attributes:
        strategy: naive, direct, mlp_only, ... (an unknown name prints the list).
        model: Folder of the bf16 checkpoint.
        adapter: Folder of a LoRA adapter, which is merged into the checkpoint first.
        calib_data: JSON lines of conversations (annie-quant data).
        calib_samples: Conversations to calibrate with.
        calib_tokens: Tokens of a conversation at most; longer ones are left out. Default: the model's context, or what memory
            allows.
        answers: own: the model answers the conversations' prompts itself, and is calibrated on that; given: the file's answers.
        mixture: How much an answer counts by what it does: given (each once); gates or logs (as often as the persona's gates or
            the logs have it); or factors, as "declines=2,calls=0.5".
        engine: own: this package; modelopt: NVIDIA ModelOpt runs its configuration of the same recipe (naive, mlp_only, awq_lite,
            auto_mixed, w4a16_mixed).
        exclude_layers: Parts that stay as they are, e.g. "linear_attn,layers.0,layers.31", or fnmatch patterns.
        scale: Block scales where our codec chooses them: amax, four_over_six, sweep. Default: the strategy's own.
        kv_cache: KV cache that the checkpoint asks for: none, fp8 (calibrated scales) or fp8_cast.
        settings: A strategy's own setting; repeatable.
        max_gb: best: GB of weights at most; formats are chosen by measured loss.
        min_tps: best: tokens per second of one stream at least, as predicted for --device.
        max_loss: best: divergence of held-out answers at most, in nats: mean KL plus that of the tokens that decide.
        max_ttft_ms: best: milliseconds to the first token at most, as predicted for --device and --prompt-tokens.
        device: Whose speed is predicted: gb10, h200, a rate in GB/s, or a device file (doctor --measure). Default: this machine
            where it was measured, else gb10.
        seed: Same seed, same bytes.
        output: Folder of the new checkpoint.
        dry_run: Print size, memory and time to expect (--model 9b and 27b work too), and stop.
    """

    strategy: str
    model: Path
    adapter: Path | None = None
    calib_data: Path | None = None
    persona: PersonaName = None
    calib_samples: Annotated[int, at_least(1)] = 512
    calib_tokens: Annotated[int | None, at_least(1)] = None
    answers: Literal["own", "given"] = "own"
    mixture: str = "given"
    engine: Literal["own", "modelopt"] = "own"
    exclude_layers: str = ""
    scale: str | None = None
    kv_cache: str = "none"
    settings: Annotated[tuple[str, ...], Parameter(name="--set")] = ()
    max_gb: Annotated[float | None, POSITIVE] = None
    min_tps: Annotated[float | None, POSITIVE] = None
    max_loss: Annotated[float | None, POSITIVE] = None
    max_ttft_ms: Annotated[float | None, POSITIVE] = None
    device: str | None = None
    prompt_tokens: PromptTokens = None
    cached_tokens: CachedTokens = 0
    seed: int = 0
    output: Path
    force: Force = False
    allow_prompt_mismatch: AllowMismatch = False
    dry_run: bool = False
    as_json: AsJson = False


_LIMITS = ("max_gb", "min_tps", "max_loss", "max_ttft_ms")
# Options that are settings of quantize.run under the same name.
_SETTINGS = (
    "adapter",
    "calib_data",
    "calib_samples",
    "calib_tokens",
    "answers",
    "mixture",
    "engine",
    "persona",
    "scale",
    "force",
    "seed",
    "allow_prompt_mismatch",
    "kv_cache",
)


def quantize(options: QuantizeOptions) -> None:
    """Quantize a bf16 checkpoint to NVFP4 with one strategy."""
    quiet_engines()  # before the estimate imports transformers
    from annie_quant.checkpoint import ModelFolder, decode_speed, first_token
    from annie_quant.data import behaviours
    from annie_quant.data.rows import check_calibration
    from annie_quant.quantize import estimates, strategies
    from annie_quant.quantize.runner import exclude_patterns

    strategy = options.strategy
    model = options.model
    samples = options.calib_samples
    invalid = [item for item in options.settings if "=" not in item]
    if invalid:
        raise UsageError(f"--set {invalid[0]}: expected NAME=VALUE")
    own: dict[str, Any] = dict(item.split("=", 1) for item in options.settings)
    limits = {name: getattr(options, name) for name in _LIMITS}
    own |= {name: value for name, value in limits.items() if value is not None}
    device = decode_speed.find_device(options.device) if options.device else None
    if strategy == "best":
        own |= {"device": options.device or "", "cached_tokens": options.cached_tokens}
        own["prompt_tokens"] = options.prompt_tokens or 0
    own = msgspec.structs.asdict(strategies.find(strategy).settings(own))
    prompt = first_token.Prompt(options.prompt_tokens, options.cached_tokens)
    if prompt != first_token.Prompt() and str(model) not in estimates.published_sizes():
        prompt.within(ModelFolder(model))
    mixture = behaviours.GIVEN_MIXTURE
    notes = []
    data = options.calib_data
    if data is not None:
        compared = behaviours.compare(data, options.persona)
        mixture = behaviours.mixture_of(options.mixture, compared)
        notes = behaviours.notes_on(compared, data)
    adapter_lines = _adapter_lines(options) if options.dry_run else []
    if options.dry_run or estimates.is_large(model):
        with contextlib.nullcontext() if options.dry_run else contextlib.suppress(CheckpointError):
            estimate = estimates.estimate(
                model,
                strategy,
                samples,
                options=own,
                calib_data=data,
                calib_tokens=options.calib_tokens,
                device=device,
                answers=options.answers,
                prompt=prompt,
                exclude=exclude_patterns(options.exclude_layers),
                mixture=mixture,
            )
            for line in estimate.lines():
                echo(line, err=not options.dry_run)
    for note in notes:
        console.note(note)
    if options.dry_run:
        for line in adapter_lines:
            echo(line)
        return
    needs_answer = options.answers == "given"
    allow = options.allow_prompt_mismatch
    for note in check_calibration(data, options.persona, allow, needs_answer):
        console.note(note)
    with console.task(f"quantize ({strategy})") as step:
        settings = keywords_of(options, *_SETTINGS) | own
        result = annie_quant.quantize.run(
            strategy, model, options.output, exclude=options.exclude_layers, report=step, **settings
        )
    if options.as_json:
        emit(result)
        return
    sizes = f"{result.size_bytes / 1e6:.1f} MB from {result.source_bytes / 1e6:.1f} MB"
    console.note(f"{result.output}: {sizes}")
    folder = ModelFolder(result.output)
    console.note(decode_speed.describe(decode_speed.predict(folder, device)))
    console.note(first_token.describe_folder(folder, device=device, prompt=prompt))
    for note in result.notes:
        console.note(note)


def _adapter_lines(options: QuantizeOptions) -> list[str]:
    """Return what would be merged, and the disk that it takes; nothing without an adapter."""
    from annie_quant.checkpoint.adapters import plan_merge
    from annie_quant.quantize import estimates, strategies
    from annie_quant.quantize.merged_base import disk_line

    if options.adapter is None:
        return []
    if str(options.model) in estimates.published_sizes():
        raise UsageError(f"--adapter needs a folder, and --model {options.model} is only a size")
    plan = plan_merge(options.model, options.adapter)
    disk = disk_line(plan, strategies.find(options.strategy), options.output)
    return [disk, plan.line(), plan.prompt_files.line, *plan.notes]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Options of `annie-quant serve`.

    Attributes:
        runtime: The server, such as vllm, sglang or llama.cpp.
        port: Port on this machine.
        use: A dated recipe of that server: "2026-11-27b", "2026-11-mtp", "cpu" ... Default: the newest.
        write_recipe: Write the recipe as YAML (sparkrun) and exit.
        context: Tokens per conversation at most. Default: the recipe's.
        streams: Conversations at once at most. Default: the recipe's.
        memory_share: Share of the memory that the server reserves. Default: the recipe's.
        keep_free_gb: GB of memory that stay free: with less the server is not started, or is killed. 0: no guard. Default: a
            twelfth of unified memory, else a thirty-second part.
        dry_run: Print the command and exit.
    """

    runtime: str = "llama.cpp"
    port: Annotated[int, PORT] = 8000
    use: str | None = None
    write_recipe: Path | None = None
    prompt_tokens: PromptTokens = None
    cached_tokens: CachedTokens = 0
    context: Annotated[int | None, at_least(1)] = None
    streams: Annotated[int | None, at_least(1)] = None
    memory_share: Annotated[float | None, POSITIVE] = None
    keep_free_gb: Annotated[float | None, at_least(0)] = None
    dry_run: bool = False


def serve(model: Path, /, *, options: ServeOptions = ServeOptions()) -> None:
    """Serve a checkpoint (or a GGUF file) until Ctrl-C.

    Before a command is printed or a recipe written the checkpoint is audited: one that the runtime does not load is refused.
    Before a start the memory is predicted: a server that needs more than is available is refused. While it serves, a guard kills
    it when almost no memory is left, because a machine with unified memory would freeze.
    """
    from annie_quant.core import host
    from annie_quant.ops import memory_budget
    from annie_quant.ops.server import Guard

    runtime = options.runtime
    port = options.port
    serving = annie_quant.serve
    chosen: dict[str, Any] = {"recipe": options.use} if options.use else {}
    limits = memory_budget.ServingLimits(options.context, options.streams, options.memory_share)
    memory = host.memory()
    keep_free_bytes = 0
    if memory:
        keep_free_bytes = memory_budget.default_keep_free(memory)
    if options.keep_free_gb is not None:
        keep_free_bytes = round(options.keep_free_gb * 1e9)
    if options.write_recipe or options.dry_run:
        for note in serving.check(model, runtime=runtime, **chosen):
            console.note(note)
        if options.write_recipe:
            echo(str(serving.write_recipe(model, options.write_recipe, runtime, port, **chosen)))
        if options.dry_run:
            for line in _predicted(model, options):
                console.note(line)
            words = limits.applied(
                shlex.split(serving.command(model, runtime, port, **chosen)), runtime
            )
            if memory and memory_budget.is_in_system_memory(runtime):
                need = memory_budget.need_of(model, words, runtime)
                console.note(f"on this machine: {need.describe(memory.total_bytes)}")
            echo(shlex.join(words))
        return
    if memory and memory_budget.is_in_system_memory(runtime):
        words = limits.applied(
            shlex.split(serving.command(model, runtime, port, **chosen)), runtime
        )
        with contextlib.suppress(CheckpointError):  # the server's own error says more
            need = memory_budget.need_of(model, words, runtime)
            memory_budget.check(need, memory, keep_free_bytes)
    if runtime in memory_budget.OPTIONS:
        chosen["change"] = lambda words: limits.applied(words, runtime)
    else:
        given = {"context": options.context, "parallel": options.streams}
        chosen |= {name: value for name, value in given.items() if value is not None}
    chosen["guard"] = Guard(keep_free_bytes)
    with console.task(f"{runtime} on port {port}") as step:
        server = serving.start(model, runtime=runtime, port=port, progress=step, **chosen)
    with server:
        console.note(f"ready: {server.url}/v1   (Ctrl-C stops it)")
        server.wait()


def _predicted(model: Path, options: ServeOptions) -> list[str]:
    """Return the predicted speed and time to the first token as lines, or that there are none."""
    from annie_quant.checkpoint import ModelFolder, decode_speed, draft_speed, first_token

    if not model.is_dir():
        what = "tokens per second and first token: not predicted for a GGUF file"
        return [f"{what}, measured by annie-quant bench --workloads first_token"]
    folder = ModelFolder(model)
    prompt = first_token.Prompt(options.prompt_tokens, options.cached_tokens)
    return [
        decode_speed.describe(decode_speed.predict(folder)),
        first_token.describe_folder(folder, options.runtime, prompt=prompt),
        *draft_speed.describe_folder(folder),
    ]


NEXT = (
    "annie-quant init --prompt prompt.txt --tools tools.json --output mine"  # then what it prints
)


def search(settings: SearchSettings) -> None:
    """Try `best` from the fewest bytes per token up, until one checkpoint keeps every gate of bf16. Exit code 1 if none does."""
    quiet_engines()
    from annie_quant.cli.pipeline import search_text
    from annie_quant.cli.pipeline.search import plan, run

    if settings.dry_run:
        for line in plan(settings, console):
            echo(line)
        return
    result = run(settings, console)
    if settings.as_json:
        emit(result)
    else:
        rows = [(row.strategy, *side) for row in result.strategies for side in row.numerics.items()]
        sides = [tables.Column.of(f"{strategy} {kind}", side) for strategy, kind, side in rows]
        console.print_lines(
            tables.side_lines(sides, tables.Column("bf16", result.reference), console.width)
        )
        for line in search_text.tree(result):
            console.print_lines(tables.wrap_tree(line, console.width))
        console.note(search_text.outcome(result))
        console.note(f"table: {settings.output / 'search.md'}")
    sys.exit(0 if result.chosen else 1)


def demo(settings: DemoSettings = DemoSettings()) -> None:
    """Run all stages on the embedded model: quantize, audit, evaluate, serve, measure, judge, report."""
    quiet_engines()
    from annie_quant.cli.pipeline.demo import run

    result = run(settings, console)
    for line in result.summary:
        console.print_lines(tables.wrap(line, console.width))
    console.note(f"report: {result.report}")
    console.note(f"for your own model: {NEXT}")

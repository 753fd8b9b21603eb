"""`annie-quant eval`: compare a checkpoint with its bf16 reference, without a server.

`annie-quant lm-eval`: lm-eval's own command line, which knows the model annie_quant.

`annie-quant retention`: a quantized model's scores next to bf16's, from two runs of lm-eval.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Annotated

import click
import msgspec

from annie_quant.cli import options as opt
from annie_quant.cli import tables
from annie_quant.cli.terminal import console, emit, quiet_engines, refuse_stale_prompt
from annie_quant.core.errors import need
from annie_quant.core.templates import render_text
from annie_quant.documents import Evaluation


class EvalOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of `annie-quant eval`.

    reference: The bf16 checkpoint.
    numerics: Profiles: w4a4, w4a16, float32, vllm-cutlass, vllm-emulation, vllm-marlin, vllm-cpu, vllm-cpu-w4a16,
        llama.cpp-cpu, llama.cpp-blackwell (docs/numerics.md).
    calib_data: Conversations whose assistant tokens are also scored.
    text: A plain text file: its perplexity and KL divergence.
    layers: Also measure the divergence per layer, with a plot.
    layers_n: Prompts per gate for --layers.
    rows: Answers per batch. Processes share whole batches, so fewer rows can keep more processes busy.
    processes: Processes on this machine that share the work; default: 1 on one GPU; else up to 4 for a small model and
        many prompts.
    output: JSON file to write; --layers resumes from its folder.
    """

    checkpoint: Annotated[Path, opt.Argument()]
    reference: Path
    n: opt.PerGate = 100
    persona: opt.PersonaName = None
    workloads: opt.WorkloadNames = None
    numerics: Annotated[tuple[str, ...], opt.Option(listed=True)] = ("w4a4", "w4a16")
    calib_data: Path | None = None
    text: Path | None = None
    layers: bool = False
    layers_n: Annotated[int, opt.Option(least=1)] = 10
    rows: Annotated[int, opt.Option(least=1)] = 128
    processes: Annotated[int | None, opt.Option(least=1)] = None
    output: Path | None = None
    allow_prompt_mismatch: opt.AllowMismatch = False
    as_json: opt.AsJson = False


@opt.command(EvalOptions, "eval")
def evaluate(options: EvalOptions) -> None:
    """Compare a checkpoint with its bf16 reference without a server: gates, KL divergence.

    Exit code 1 if the checkpoint loses what the reference does, is fragile, its export is broken, or it was not made from the
    reference; 0 if it keeps what the reference does, or n cannot decide.
    """
    quiet_engines()
    from annie_quant import judge
    from annie_quant.checkpoint import decode_speed
    from annie_quant.checkpoint.inspection import export_notes
    from annie_quant.data.workloads import personas_of, resolve
    from annie_quant.judge.decision import FAILING
    from annie_quant.offline import job
    from annie_quant.offline.pair import EvaluationJob
    from annie_quant.quantize.runner import check_checkpoint

    refuse_stale_prompt(options.calib_data, options.allow_prompt_mismatch, options.persona)
    checkpoint, reference = options.checkpoint, options.reference
    chosen = resolve(options.persona, options.workloads)
    if mismatch := check_checkpoint(checkpoint, personas_of(chosen), allow=options.allow_prompt_mismatch):
        console.note(mismatch)
    faults = export_notes(checkpoint, reference)
    for fault in faults:
        console.note(fault)
    settings = EvaluationJob(
        workloads=judge.distinct_prompts(chosen)[0],
        n_per_gate=options.n,
        extends=True,
        conversations=options.calib_data,
        layers_n=options.layers_n if options.layers else None,
        faults=faults,
        **opt.picked(options, "checkpoint", "reference", "numerics", "text", "output", "rows"),
    )
    with console.task("evaluate") as step:
        result = job.run(settings, step, options.processes)
    speed = decode_speed.predict_if_readable(checkpoint)
    if options.as_json:
        emit(result.to_dict() | {"notes": [*faults, *result.notes], "predicted": msgspec.to_builtins(speed)})
    else:
        console.print_lines(tables.evaluation_lines(result, checkpoint.name, console.width))
        for line in (*result.notes, *summary_lines(result), *([decode_speed.describe(speed)] if speed else [])):
            console.note(line)
    assert result.verdict is not None  # evaluate_pair sets it
    sys.exit(1 if result.blocking or result.verdict.verdict in FAILING else 0)


def summary_lines(result: Evaluation) -> list[str]:
    """Return a line per numerics and scored text, and per ensemble the gates whose counts differ between its members."""
    members, ranges = {}, {}
    for name, side in result.numerics.items():
        own = {k.removeprefix(f"{name}+"): m for k, m in result.members.items() if k.startswith(f"{name}+")}
        members[name], ranges[name] = own, list[str]()
        for gate, row in side.gates.items():
            passes = [row.passes, *(m.gates[gate].passes for m in own.values() if gate in m.gates)]
            if min(passes) != max(passes):
                ranges[name].append(f"{gate} {min(passes)}-{max(passes)} of {row.n}")
    worst = sorted(result.layers.by_layer(), key=lambda row: -row.kl)[:3] if result.layers else []
    return render_text("evaluation.txt", result=result, members=members, ranges=ranges, worst=worst).splitlines()


@click.command(
    name="lm-eval", context_settings={"ignore_unknown_options": True, "help_option_names": []}, add_help_option=False
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def lm_eval(arguments: tuple[str, ...]) -> None:
    """Run lm-eval with the model annie_quant: NVFP4 on any machine, under a numerics profile.

    All arguments are lm-eval's: --model annie_quant --model_args pretrained=DIR,profile=w4a4 --tasks ... --log_samples
    --output_path RUN; `annie-quant lm-eval run --help` lists them. `annie-quant retention` compares two such runs.
    """
    if not arguments or arguments[0] in ("-h", "--help"):
        click.echo(click.get_current_context().get_help())
        return
    need("lm_eval", "lm-eval")
    quiet_engines()
    importlib.import_module("annie_quant.offline.harness_model")  # registers the model
    harness = importlib.import_module("lm_eval.__main__")

    sys.argv = ["lm_eval", *arguments]
    harness.cli_evaluate()


class RetentionOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of `annie-quant retention`.

    seed: Of the bootstrap.
    """

    bf16_run: Annotated[Path, opt.Argument()]
    quantized_run: Annotated[Path, opt.Argument()]
    seed: int = 0
    as_json: opt.AsJson = False


@opt.command(RetentionOptions)
def retention(options: RetentionOptions) -> None:
    """Compare two lm-eval runs sample by sample: what the quantized model keeps of bf16's scores.

    The runs are folders of lm-eval's --output_path, made with --log_samples (annie-quant lm-eval --model annie_quant ...).
    """
    from annie_quant.judge import retention as table

    result = table.compare_runs(options.bf16_run, options.quantized_run, options.seed)
    if options.as_json:
        emit(result)
        return
    console.print_lines(list(table.lines(result)))
    for line in table.summary(result):
        console.note(line)

"""`annie-quant eval`: compare a checkpoint with its bf16 reference, without a server.

`annie-quant lm-eval`: lm-eval's own command line, which knows the model annie_quant.

`annie-quant retention`: a quantized model's scores next to bf16's, from two runs of lm-eval.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated

import click
import msgspec

from annie_quant.cli import tables
from annie_quant.cli.common import console, emit, quiet_engines, refuse_stale_prompt
from annie_quant.cli.options import (
    AllowMismatch,
    Argument,
    AsJson,
    Option,
    PerGate,
    PersonaName,
    WorkloadNames,
    command,
)
from annie_quant.cli.terminal import is_secondary_process
from annie_quant.core.errors import need
from annie_quant.documents import DraftAcceptance, EnsembleFigures, Evaluation


class EvalOptions(msgspec.Struct, frozen=True, kw_only=True):
    checkpoint: Annotated[Path, Argument()]
    reference: Annotated[Path, Option("The bf16 checkpoint.")]
    n: PerGate = 100
    persona: PersonaName = None
    workloads: WorkloadNames = None
    numerics: Annotated[
        tuple[str, ...],
        Option(
            "Profiles: w4a4, w4a16, float32, vllm-cutlass, vllm-emulation, vllm-marlin, vllm-cpu, vllm-cpu-w4a16, "
            "llama.cpp-cpu, llama.cpp-blackwell (docs/numerics.md).",
            listed=True,
        ),
    ] = ("w4a4", "w4a16")
    calib_data: Annotated[Path | None, Option("Conversations whose assistant tokens are also scored.")] = None
    text: Annotated[Path | None, Option("A plain text file: its perplexity and KL divergence.")] = None
    layers: Annotated[bool, Option("Also measure the divergence per layer, with a plot.")] = False
    layers_n: Annotated[int, Option("Prompts per gate for --layers.", least=1)] = 10
    rows: Annotated[
        int,
        Option(
            "Answers per batch. Processes share whole batches, so fewer rows can keep more processes busy.", least=1
        ),
    ] = 128
    processes: Annotated[
        int | None,
        Option(
            "Processes on this machine that share the work; default: 1 on one GPU; else up to 4 for a small model and many "
            "prompts.",
            least=1,
        ),
    ] = None
    output: Annotated[Path | None, Option("JSON file to write; --layers resumes from its folder.")] = None
    allow_prompt_mismatch: AllowMismatch = False
    as_json: AsJson = False


@command(EvalOptions, "eval")
def evaluate(options: EvalOptions) -> None:
    """Compare a checkpoint with its bf16 reference without a server: gates, KL divergence.

    Exit code 1 if the checkpoint loses what the reference does, is fragile, its export is broken, or it was not made from the
    reference; 0 if it keeps what the reference does, or n cannot decide.

    Under torchrun or accelerate launch the processes share the work, and the first one prints and writes. torchrun needs
    `--` before the command, else it reads --n itself: torchrun --nproc-per-node=2 -- $(which annie-quant) eval ...
    """
    quiet_engines()
    from annie_quant import judge
    from annie_quant.checkpoint import ModelFolder, decode_speed
    from annie_quant.checkpoint.inspection import export_notes
    from annie_quant.data.workloads import personas_of, resolve
    from annie_quant.judge.decision import FAILING
    from annie_quant.offline import job
    from annie_quant.offline.pair import EvaluationJob
    from annie_quant.offline.process_group import join_group, leave_group
    from annie_quant.quantize.prompt_provenance import check_checkpoint

    refuse_stale_prompt(options.calib_data, options.allow_prompt_mismatch, options.persona)
    checkpoint, reference = options.checkpoint, options.reference
    chosen = resolve(options.persona, options.workloads)
    if mismatch := check_checkpoint(checkpoint, personas_of(chosen), allow=options.allow_prompt_mismatch):
        console.note(mismatch)
    faults = [] if is_secondary_process() else export_notes(checkpoint, reference)
    for fault in faults:
        console.note(fault)
    settings = EvaluationJob(
        checkpoint=checkpoint,
        reference=reference,
        workloads=judge.distinct_prompts(chosen)[0],
        n_per_gate=options.n,
        extends=True,
        numerics=options.numerics,
        conversations=options.calib_data,
        text=options.text,
        layers_n=options.layers_n if options.layers else None,
        output=options.output,
        rows=options.rows,
        faults=faults,
    )
    with console.task("evaluate") as step:
        result = job.run(settings, step, options.processes)
    if join_group().is_first:
        speed = decode_speed.predict(ModelFolder(checkpoint))
        predicted = {"predicted": msgspec.to_builtins(speed)}
        document = result.to_dict() | {"notes": [*faults, *result.notes]} | predicted
        if options.as_json:
            emit(document)
        else:
            console.print_lines(tables.evaluation_lines(result, checkpoint.name, console.width))
            for line in (*result.notes, *summary_lines(result), decode_speed.describe(speed)):
                console.note(line)
    leave_group()
    assert result.verdict is not None  # evaluate_pair sets it
    sys.exit(1 if result.blocking or result.verdict.verdict in FAILING else 0)


def ensemble_line(result: Evaluation, name: str, figures: EnsembleFigures) -> str:
    """Return one line: the answers that the further members change, and the gates whose counts differ between members."""
    members = {k: m for k, m in result.members.items() if k.startswith(f"{name}+")}
    ranges = []
    for gate, row in result.numerics[name].gates.items():
        passes = [row.passes, *(m.gates[gate].passes for m in members.values() if gate in m.gates)]
        if min(passes) != max(passes):
            ranges.append(f"{gate} {min(passes)}-{max(passes)} of {row.n}")
    changed = ", ".join(f"{k.removeprefix(f'{name}+')} {m.n_changed}" for k, m in members.items())
    return (
        f"{name}: {figures.n_uncertain} of {figures.n} answers uncertain (noise of a margin {figures.noise:.2g}); changed by "
        f"{changed}; {'; '.join(ranges) or 'no gate count depends on the arithmetic'}"
    )


def draft_rates(drafts: Mapping[str, DraftAcceptance], reference: Mapping[str, DraftAcceptance]) -> str:
    """Return accepted of drafted tokens per workload, with the reference's share."""
    parts = []
    for workload, own in drafts.items():
        before = reference.get(workload)
        share = f" (bf16 {before.accepted / before.n:.0%})" if before else ""
        parts.append(f"{workload} {own.accepted} of {own.n}{share}")
    return ", ".join(parts)


def summary_lines(result: Evaluation) -> Iterator[str]:
    """Yield one line of text per numerics and scored text."""
    for name, side in result.numerics.items():
        if kl := side.kl:
            yield (
                f"{name}: KL mean {kl.mean:.4g}, p99 {kl.p99:.3g} over {kl.n_tokens} tokens; {kl.flips} flips"
                f" ({kl.flips_predicted:.0f} predicted from margins); perplexity {kl.perplexity:.3f} (reference"
                f" {kl.perplexity_reference:.3f}); {side.verbosity_ratio or 0:.2f} of the reference's length"
            )
        if kl and (decides := kl.decisions):
            yield (
                f"{name}, decisions (call, function, arguments, end): KL mean {decides.mean:.4g}, p99 {decides.p99:.3g} over"
                f" {decides.n_tokens} tokens; {decides.flips} flips"
            )
        if figures := result.ensemble.get(name):
            yield ensemble_line(result, name, figures)
        if side.drafts:
            yield f"{name}: drafts of the MTP head accepted: {draft_rates(side.drafts, result.reference_drafts)}"
        if text := side.kl_text:
            yield f"{name}, text: perplexity {text.perplexity:.3f} (reference {text.perplexity_reference:.3f})"
    if result.layers:
        worst = sorted(result.layers.by_layer(), key=lambda row: -row.kl)[:3]
        yield "most divergence: " + ", ".join(f"{row.layer} {row.kl:.3g}" for row in worst)


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
    bf16_run: Annotated[Path, Argument()]
    quantized_run: Annotated[Path, Argument()]
    seed: Annotated[int, Option("Of the bootstrap.")] = 0
    as_json: AsJson = False


@command(RetentionOptions)
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

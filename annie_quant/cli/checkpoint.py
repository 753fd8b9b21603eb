"""`annie-quant audit`, `convert` and `compare`: check and repair a checkpoint, write another form, compare with its source.

`annie-quant eval`: compare a checkpoint with its bf16 reference, without a server.
"""

from __future__ import annotations

import shlex
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from cyclopts import Parameter
from msgspec import UNSET

import annie_quant
from annie_quant.cli import options as opt
from annie_quant.cli import tables
from annie_quant.cli.terminal import console, emit, quiet_engines
from annie_quant.core.errors import UsageError
from annie_quant.core.templates import render_text
from annie_quant.documents import Audit, Evaluation, RemoteRead, TemplateLint, TensorRow

COLUMNS = (
    "name",
    "format",
    "shape",
    "group",
    "tensor_scale",
    "input_scale",
    "scale_min",
    "scale_max",
    "zero_blocks",
    "rel_l2",
)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class AuditOptions:
    """Options of `annie-quant audit`.

    Attributes:
        source: The bf16 checkpoint it was made from: adds the error per tensor. Also an address, where CHECKPOINT is one.
        repair: Write a repaired copy next to it, then audit the copy.
        output: With --repair: folder of the copy.
        names: With --repair: config fields and tensor names for transformers 4.57 (old) or from 5.2 (new).
        force: With --repair: replace an existing output.
        tensors: Also print one line per tensor.
    """

    source: str | None = None
    repair: bool = False
    output: Path | None = None
    names: Literal["old", "new"] | None = None
    force: bool = False
    tensors: bool = False
    as_json: opt.AsJson = False


def audit(checkpoint: str, /, *, options: AuditOptions = AuditOptions()) -> None:
    """Read every tensor of a checkpoint and report faults. Exit code 1 if there are any.

    CHECKPOINT is a folder, or an address: hf:OWNER/NAME[@REVISION] or the URL of a folder. From there only the headers and
    the small files are read, and the checks that need values are named as not made.
    """
    source = options.source
    if not options.repair and (options.output or options.names or options.force):
        raise UsageError("--output, --names and --force need --repair")
    repaired = None
    if options.repair and annie_quant.checkpoint.is_address(checkpoint):
        raise UsageError(f"{checkpoint}: a repair needs the weights", download_command(checkpoint))
    if options.repair:
        with console.task("repair"):
            repaired = annie_quant.checkpoint.repair(
                checkpoint,
                source=source,
                output=options.output,
                names=options.names,
                force=options.force,
            )
        checkpoint = repaired.path
    result = annie_quant.checkpoint.audit(checkpoint, source=source)
    if options.as_json:
        emit(result.to_dict() | ({"repair": repaired} if repaired else {}))
    else:
        for action in repaired.actions if repaired else ():
            console.note(f"repaired: {action}")
        if repaired and not repaired.actions:
            console.note("nothing to repair")
        print_audit(result, options.tensors)
        if result.findings and not repaired:
            console.line(f"what a code means: annie-quant explain {result.findings[0].code}")
            console.line(advice(result, source))
        if result.summary.servers and not result.remote:
            folder = annie_quant.checkpoint.ModelFolder(checkpoint)
            print_left_out(annie_quant.checkpoint.left_out_files(folder))
    sys.exit(0 if result.ok else 1)


def print_left_out(names: list[str]) -> None:
    """Print which tensors and files a command leaves out, where it does."""
    if names:
        console.line(annie_quant.checkpoint.left_out_line(names))


def print_audit(result: Audit, tensors: bool) -> None:
    """Print the summary, the loaders, and the findings, one line per code; with `tensors` one line per tensor and finding."""
    summary = result.to_dict()["summary"]
    console.print_mapping(
        result.path, {k: v for k, v in summary.items() if k not in ("loads", "servers")}
    )
    for line in summary["loads"]:
        console.line(f"  {line}")
    errors = error_line(result.tensors)
    if errors:
        console.line(f"  {errors}")
    n_tuned = sum(row.tuned for row in result.tensors)
    if n_tuned:
        console.line(
            f"  {n_tuned} norms differ from the source by at most 2 %, as tuning changes them"
        )
    if tensors:
        print_tensors(result.tensors)
    print_lint(result.template, tensors)
    groups: dict[str, list[str]] = {}
    for finding in result.findings:
        groups.setdefault(finding.code, []).append(finding.message)
    for code, messages in groups.items():
        short = not tensors and len(messages) > 1
        for message in [f"({len(messages)} findings) such as {messages[0]}"] if short else messages:
            console.line(message, mark=f"[red]{code}[/]")
    if result.ok:
        console.out.print(
            f"[green]sound[/]{', as far as the headers show' if result.remote else ''}"
        )
    if result.remote:
        console.line(unread_line(result.path, result.remote))


def unread_line(address: str, remote: RemoteRead) -> str:
    """Return what was read from afar, what was not checked, and the command that makes the other checks possible."""
    codes = remote.not_checked
    return (
        f"{remote.received_bytes / 1e6:.2f} MB of {remote.size_bytes / 1e6:,.0f} MB read: headers and small files. Values were not "
        f"checked: {len(codes)} codes such as {', '.join(codes[:3])} (all: --json). To check them: {download_command(address)}"
    )


def download_command(address: str) -> str:
    """Return the command that downloads a checkpoint, or the advice to do so where there is none."""
    if not address.startswith("hf:"):
        return "download the folder, then annie-quant audit DIR"
    name, _, revision = address.removeprefix("hf:").partition("@")
    at = f" --revision {revision}" if revision else ""
    return shlex.join(["hf", "download", name]) + f"{at} --local-dir DIR && annie-quant audit DIR"


def print_lint(lint: TemplateLint | None, limits: bool) -> None:
    """Print the faults of a chat template, and its limits or their number."""
    if lint is None:
        return
    family = lint.family or "a family that is not known here"
    if not lint.faults:
        console.line(f"  chat template of {family}: tool calls are read back as they were sent")
    for fault in lint.faults:
        console.line(str(fault), mark=f"[yellow]{fault.code}[/]")
    if limits:
        for limit in lint.limits:
            console.line(f"  limit of the {limit} ({limit.code})")
    elif lint.limits:
        codes = ", ".join(dict.fromkeys(limit.code for limit in lint.limits))
        console.line(f"  its limits (--tensors, annie-quant explain CODE): {codes}")


def error_line(rows: Sequence[TensorRow]) -> str:
    """Return the errors of the quantized tensors compared with the source; "" without a source."""
    errors = {row.name: row.rel_l2 for row in rows if row.rel_l2 is not None}
    if not errors:
        return ""
    worst = max(errors, key=errors.__getitem__)
    return (
        f"error against the source (relative L2) of {len(errors)} tensors: "
        f"median {statistics.median(errors.values()):.4f}, largest {errors[worst]:.4f} in {worst}"
    )


def advice(result: Audit, source: str | None) -> str:
    """Return the command that repairs the checkpoint, or what to do where none does."""
    count = f"{len(result.findings)} finding{'s' if len(result.findings) != 1 else ''}"
    if result.remote:
        return f"{count}; a repair needs the weights"
    repair = annie_quant.checkpoint.repair_command(result, source)
    if repair is None:
        return f"{count}; no command repairs this folder: copy or quantize it again"
    place = (
        " (SOURCE: the bf16 checkpoint that it was made from)" if repair.endswith(" SOURCE") else ""
    )
    return f"{count}; to repair a copy: {repair}{place}"


def print_tensors(rows: list[TensorRow]) -> None:
    """Print one line per tensor: format, shape, scales, zero blocks, and the error if there is a source."""
    table = [list(COLUMNS)]
    for tensor in rows:
        table.append([_cell(getattr(tensor, column)) for column in COLUMNS])
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:  # lines are never wrapped, so that they can be searched and paged
        console.line(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        )


def _cell(value: object) -> str:
    """Return a cell's text: 512x256 for a shape, four digits for a number, nothing for None."""
    if value is None or value is UNSET:
        return ""
    if isinstance(value, list):
        return "x".join(map(str, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    """Options of `annie-quant convert`.

    Attributes:
        to: Dialect of the copy; bf16: plain weights; hf: a GGUF file as a bf16 folder with its tokenizer.
            Default with --adapter: bf16.
        adapter: Folder of a LoRA adapter to merge into the checkpoint, its 16-bit base.
        type: GGUF type: BF16, F16, NVFP4 (as the checkpoint), Q8_0, Q4_K_M, Q5_K_M, Q6_K.
        chat_template: With --to hf: a file with the chat template of a GGUF file that has none, as of a base model.
        output: Folder, or file for GGUF. Default: in the checkpoint's parent folder.
    """

    to: Literal["modelopt", "compressed-tensors", "gguf", "bf16", "hf"] | None = None
    adapter: Path | None = None
    type: str | None = None
    chat_template: Path | None = None
    output: Path | None = None
    force: opt.Force = False
    as_json: opt.AsJson = False


def convert(checkpoint: Path, /, *, options: ConvertOptions = ConvertOptions()) -> None:
    """Convert a checkpoint to another dialect, write it as GGUF, or merge an adapter into it."""
    target = options.to or ("bf16" if options.adapter else None)
    if target is None:
        raise UsageError("convert needs --to, or --adapter", "annie-quant convert --help")
    with console.task(f"convert to {target}") as step:
        if target == "hf":
            if options.type:
                raise UsageError("--type is for GGUF: --to hf writes bf16 numbers")
            if options.adapter:
                raise UsageError("an adapter is merged into a bf16 folder", "--to bf16")
            quiet_engines()
            from annie_quant.offline.loading import convert_gguf

            result = convert_gguf(
                checkpoint, options.output, options.force, step, options.chat_template
            )
        else:
            result = annie_quant.checkpoint.convert(
                checkpoint,
                to=target,
                output=options.output,
                type=options.type,
                force=options.force,
                progress=step,
                adapter=options.adapter,
            )
    if options.as_json:
        emit(result)
        return
    console.note(f"{result.path}: {result.size_bytes / 1e6:.1f} MB")
    for line in result.notes:
        console.note(line)
    for line in result.loss:
        console.note(f"lost in conversion: {line}")
    print_left_out(result.left_out)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """Options of `annie-quant compare`.

    Attributes:
        worst: Tensors with the largest error to list per form.
    """

    worst: int = 3
    as_json: opt.AsJson = False


def compare(source: Path, /, *forms: Path, options: CompareOptions = CompareOptions()) -> None:
    """Compare forms of one model (folders, GGUF files) with its bf16 SOURCE, tensor by tensor."""
    if not forms:
        raise UsageError(
            "compare: nothing to compare with SOURCE", f"annie-quant compare {source} FORM ..."
        )
    with console.task("compare"):
        comparison = annie_quant.checkpoint.compare(source, annie_quant.checkpoint.labels(forms))
    if options.as_json:
        emit(comparison.to_dict(options.worst))
        return
    for form, summary in comparison.summary.items():
        console.print_mapping(form, msgspec.to_builtins(summary))
        for row in comparison.worst(form, options.worst):
            console.note(f"  worst: {row.tensor} {row.format} rel-L2 {row.rel_l2:.4f}")


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class EvalOptions:
    """Options of `annie-quant eval`.

    Attributes:
        reference: The bf16 checkpoint.
        numerics: Profiles: w4a4, w4a16, float32, vllm-cutlass, vllm-emulation, vllm-marlin, llama.cpp-cpu,
            llama.cpp-blackwell (docs/numerics.md).
        quick: One numerics, the first that the checkpoint has, without its ensemble: about a quarter of the time.
        calib_data: Conversations whose assistant tokens are also scored.
        rows: Answers per batch (default: 128; on a GPU as many as fit, up to 512).
        output: JSON file to write.
    """

    reference: Path
    n: opt.PerGate = 100
    persona: opt.PersonaName = None
    workloads: opt.WorkloadNames = None
    numerics: Annotated[tuple[str, ...], opt.COMMA_SEPARATED] = ("w4a4", "w4a16")
    quick: bool = False
    calib_data: Path | None = None
    rows: Annotated[int | None, opt.at_least(1)] = None
    prompt_tokens: opt.PromptTokens = None
    cached_tokens: opt.CachedTokens = 0
    output: Path | None = None
    allow_prompt_mismatch: opt.AllowMismatch = False
    as_json: opt.AsJson = False


def evaluate(checkpoint: Path, /, *, options: EvalOptions) -> None:
    """Compare a checkpoint with its bf16 reference without a server: gates, KL divergence.

    Exit code 1 if the checkpoint loses what the reference does, is fragile, its export is broken, or it was not made from the
    reference; 0 if it keeps what the reference does, or n cannot decide.
    """
    quiet_engines()
    from annie_quant.checkpoint import ModelFolder, decode_speed, draft_speed, first_token
    from annie_quant.data.rows import check_calibration, read_conversations
    from annie_quant.data.workloads import check_checkpoint, resolve
    from annie_quant.judge.decision import FAILING

    prompt = first_token.Prompt(options.prompt_tokens, options.cached_tokens)
    if prompt != first_token.Prompt():
        prompt.within(ModelFolder(checkpoint))
    workloads = resolve(options.persona, options.workloads)
    for note in (
        *check_calibration(options.calib_data, options.persona, options.allow_prompt_mismatch),
        check_checkpoint(checkpoint, workloads, options.allow_prompt_mismatch),
    ):
        if note:
            console.note(note)
    # torch is imported after the checks that need no model.
    from annie_quant.offline import evaluation
    from annie_quant.offline.pair import EvaluationJob

    job = EvaluationJob(
        workloads=workloads,
        n_per_gate=options.n,
        extends=True,
        conversations=read_conversations(options.calib_data) if options.calib_data else (),
        checkpoint=checkpoint,
        reference=options.reference,
        numerics=options.numerics,
        quick=options.quick,
        output=options.output,
        rows=options.rows,
    )
    job = job.audited()
    for fault in job.faults:
        console.note(fault)
    with console.task("evaluate") as step:
        result = evaluation.run(job, step, console.note)
    speed = decode_speed.predict_if_readable(job.checkpoint)
    if options.as_json:
        folder = ModelFolder(job.checkpoint)
        ttft = first_token.predict_folder(folder, prompt=prompt) if speed else None
        more = {
            "notes": [*job.faults, *result.notes],
            "predicted": speed,
            "predicted_first_token": ttft,
        }
        emit(result.to_dict() | msgspec.to_builtins(more))
    else:
        console.print_lines(tables.evaluation_lines(result, job.checkpoint.name, console.width))
        predicted = []
        if speed:
            predicted.append(decode_speed.describe(speed))
            folder = ModelFolder(job.checkpoint)
            predicted.append(first_token.describe_folder(folder, prompt=prompt))
        predicted += draft_speed.describe_evaluation(job.checkpoint, result)
        for line in (*result.notes, *_summary_lines(result), *predicted):
            console.note(line)
    assert result.verdict is not None  # evaluate_pair sets it
    sys.exit(1 if result.blocking or result.verdict.verdict in FAILING else 0)


def _summary_lines(result: Evaluation) -> list[str]:
    """Return a line per numerics and scored text, and per ensemble the gates whose counts differ between its members."""
    members = {}
    ranges = {}
    for name, side in result.numerics.items():
        own = {
            k.removeprefix(f"{name}+"): m
            for k, m in result.members.items()
            if k.startswith(f"{name}+")
        }
        members[name] = own
        ranges[name] = list[str]()
        for gate, row in side.gates.items():
            passes = [row.passes, *(m.gates[gate].passes for m in own.values() if gate in m.gates)]
            if min(passes) != max(passes):
                ranges[name].append(f"{gate} {min(passes)}-{max(passes)} of {row.n}")
    return render_text("evaluation.txt", result=result, members=members, ranges=ranges).splitlines()

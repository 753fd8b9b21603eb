"""`annie-quant validate-gpu`: is NVFP4 arithmetic right on this GPU?"""

from __future__ import annotations

import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

import annie_quant
from annie_quant.cli.common import console, echo, emit, json_option
from annie_quant.errors import CheckpointError

if TYPE_CHECKING:
    from annie_quant.gemm.stack_check import BackendResult, StackResult
    from annie_quant.gemm.stack_times import StackTimes
    from annie_quant.gemm.validate import Validation

OURS = "annie_quant"  # as gemm.stack_times names our kernel
MARKS = {"right": "[green]✓[/]", "wrong": "[red]✗[/]", "failed": "[yellow]·[/]", "missing": "[dim]·[/]"}


@click.command(name="validate-gpu")
@click.option("--bench", "with_bench", is_flag=True, help="Also time the kernels against the measured bandwidth.")
@click.option(
    "--stack", help="Also check the FP4 kernels of an installed serving stack: vllm, flashinfer, torch or all."
)
@click.option(
    "--checkpoint",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="With --stack vllm: also time its kernels and ours at this checkpoint's shapes.",
)
@click.option("--container", metavar="NAME_OR_IMAGE", help="Check the stack in a running container or an image.")
@click.option("--dry-run", is_flag=True, help="With --container: print its command and start nothing.")
@json_option
def validate_gpu(
    with_bench: bool, stack: str | None, checkpoint: Path | None, container: str | None, dry_run: bool, as_json: bool
) -> None:
    """Check NVFP4 arithmetic on this GPU against a float64 oracle. Exit code 3 without a GPU."""
    if (container is None and dry_run) or (container is not None and with_bench):
        raise click.UsageError("--dry-run needs --container, and --bench excludes it")
    if checkpoint is not None and (stack not in ("vllm", "all") or container is not None):
        raise click.UsageError("--checkpoint needs --stack vllm, without --container")
    if container is None:
        shapes = served_shapes(checkpoint) if checkpoint else None
        validation = annie_quant.gemm.validate(bench=with_bench, stack=stack, shapes=shapes)
        emit(validation.to_dict()) if as_json else print_validation(validation)
        sys.exit(0 if validation.ok else 1)
    from annie_quant.gemm import container_check

    if dry_run:
        echo(shlex.join(container_check.plan(container, stack or "all")))
        return
    result = container_check.examine(container, stack or "all")
    emit(result) if as_json else print_stack(result)
    sys.exit(1 if result.wrong else 0)


def print_validation(validation: Validation) -> None:
    """Print the GPU, one line per check, and the measurements and stack results if there are any."""
    console.print_mapping("GPU", validation.device | validation.paths)
    for check in validation.checks:
        console.line(f"{check.name}  {check.detail}", mark=MARKS["right" if check.ok else "wrong"])
    if validation.bench is not None:
        console.print_mapping("bench", asdict(validation.bench))
    if validation.stack is not None:
        print_stack(validation.stack)
    if validation.times is not None:
        print_times(validation.times)


def served_shapes(path: Path) -> list[tuple[int, int]]:
    """Return the shapes [N, K] of a checkpoint's NVFP4 linears as servers merge them, without repetitions."""
    from annie_quant import checkpoint

    folder = checkpoint.ModelFolder(path)
    shapes = {name: x.shape(folder) for name, x in checkpoint.linears(folder).items() if x.format == "nvfp4"}
    if not shapes:
        raise CheckpointError(f"{path} has no NVFP4 linears", f"annie-quant audit {shlex.quote(str(path))}")
    groups = folder.family.fused_groups(shapes)
    single = shapes.keys() - {name for group in groups for name in group}
    merged = [(sum(shapes[name][0] for name in group), shapes[group[0]][1]) for group in groups]
    return sorted({*merged, *(shapes[name] for name in single)})


def print_times(times: StackTimes) -> None:
    """Print one line per shape and number of tokens, what vLLM chooses, and the switch of our kernel where it is the fastest."""
    for row in times.rows:
        figures = ", ".join(f"{name} {us:.1f} us" for name, us in sorted(row.us.items(), key=lambda item: item[1]))
        console.line(f"{row.n}x{row.k}, {row.m} tokens: {figures}")
    for name, reason in times.missing.items():
        console.line(f"{name}: not timed: {reason}", mark=MARKS["missing"])
    for name, chosen in times.chosen.items():
        console.line(f"vLLM takes {chosen} for {name.upper()} checkpoints")
    if times.rows:
        count = sum(row.fastest == OURS for row in times.rows)
        console.line(f"{OURS} is the fastest in {count} of {len(times.rows)}; its switch: ANNIE_QUANT_VLLM_KERNEL=1")


def print_stack(result: StackResult) -> None:
    """Print one line per backend with cause and remedy of its fault, then the backend to choose."""
    for backend in result.backends:
        console.line(f"{backend.backend}: {_verdict(backend)}", mark=MARKS[backend.verdict])
        if backend.remedy:
            console.line(f"    {backend.cause}")
            console.line(f"    → {backend.remedy}")
    switch = f"   {result.switch}" if result.switch else ""
    console.line(f"choose {result.choose}{switch}" if result.choose else "no FP4 backend is right here")
    if result.note:
        console.line(result.note)


def _verdict(backend: BackendResult) -> str:
    if backend.verdict in ("right", "wrong"):
        return f"{backend.verdict}, at most {backend.worst:.3g} of what rounding allows"
    reason = next((case.error for case in backend.cases if case.error), backend.cause)
    return f"{backend.verdict}: {reason}"

"""`annie-quant validate-gpu`: is NVFP4 arithmetic right on this GPU?"""

from __future__ import annotations

import shlex
import sys
from typing import TYPE_CHECKING

import click

import annie_quant
from annie_quant.cli.common import console, echo, emit, json_option

if TYPE_CHECKING:
    from annie_quant.gemm.stack_check import BackendResult, StackResult
    from annie_quant.gemm.validate import Validation

MARKS = {"right": "[green]✓[/]", "wrong": "[red]✗[/]", "failed": "[yellow]·[/]", "missing": "[dim]·[/]"}


@click.command(name="validate-gpu")
@click.option(
    "--stack", help="Also check the FP4 kernels of an installed serving stack: vllm, flashinfer, torch or all."
)
@click.option("--container", metavar="NAME_OR_IMAGE", help="Check the stack in a running container or an image.")
@click.option("--dry-run", is_flag=True, help="With --container: print its command and start nothing.")
@json_option
def validate_gpu(stack: str | None, container: str | None, dry_run: bool, as_json: bool) -> None:
    """Check NVFP4 arithmetic on this GPU against a float64 oracle. Exit code 3 without a GPU."""
    if container is None and dry_run:
        raise click.UsageError("--dry-run needs --container")
    if container is None:
        validation = annie_quant.gemm.validate(stack=stack)
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
    """Print the GPU, one line per check, and the results of a serving stack if it was checked."""
    console.print_mapping("GPU", validation.device | validation.paths)
    for check in validation.checks:
        console.line(
            f"{check.name}  {check.detail}", mark=MARKS[{True: "right", False: "wrong", None: "missing"}[check.ok]]
        )
    if validation.stack is not None:
        print_stack(validation.stack)


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

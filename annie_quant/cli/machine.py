"""`annie-quant doctor` and `annie-quant validate-gpu`: what this machine lacks, and whether its GPU computes NVFP4 right."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import click

import annie_quant
from annie_quant.cli.common import console, emit, json_option


@click.command()
@click.argument("model", required=False, type=click.Path(path_type=Path))
@click.option("--log", type=click.Path(path_type=Path), help="A server's log, held against the known errors.")
@click.option("--fix-plan", is_flag=True, help="Print the commands that mend what was found, and nothing else.")
@json_option
def doctor(model: Path | None, log: Path | None, fix_plan: bool, as_json: bool) -> None:
    """Say what this machine (and a checkpoint) lacks for which stage, and the command that mends it. Exit 3 on a fault."""
    from annie_quant import doctor as house

    findings = house.examine(model, log)
    plan = house.fix_plan(findings)
    if as_json:
        emit({"findings": findings, "fix_plan": plan})
    elif fix_plan:
        click.echo("\n".join(plan))
    else:
        console.print_doctor(findings)
    sys.exit(3 if any(f["level"] == "fault" for f in findings) else 0)


@click.command(name="validate-gpu")
@click.option("--bench", "with_bench", is_flag=True, help="Also time the kernels against the measured bandwidth.")
@click.option(
    "--stack", help="Also judge the installed serving stack's own FP4 kernels: vllm, flashinfer, torch or all."
)
@click.option("--container", metavar="NAME_OR_IMAGE", help="Judge the stack in there: a running container or an image.")
@click.option("--dry-run", is_flag=True, help="With --container: print its command and start nothing.")
@json_option
def validate_gpu(with_bench: bool, stack: str | None, container: str | None, dry_run: bool, as_json: bool) -> None:
    """Prove NVFP4 arithmetic on this GPU against a float64 oracle. Exit code 3 where there is no GPU."""
    if (container is None and dry_run) or (container is not None and with_bench):
        raise click.UsageError("--dry-run goes with --container, and --bench without")
    if container is not None:
        from annie_quant.gemm import container_check as inside

        if dry_run:
            click.echo(shlex.join(inside.plan(container, stack or "all")))
            return
        seen = inside.examine(container, stack or "all")
        emit(seen) if as_json else console.print_stack(seen)
        sys.exit(1 if seen["wrong"] else 0)
    result = annie_quant.gemm.validate(bench=with_bench, stack=stack)
    emit(result) if as_json else console.print_validation(result)
    sys.exit(0 if result.get("ok") else 1)

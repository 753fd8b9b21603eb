"""`annie-quant doctor`: what this machine lacks, and how to fix it."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from annie_quant.cli.common import PATH, console, echo, emit, json_option, quiet_engines
from annie_quant.errors import UsageError

if TYPE_CHECKING:
    from annie_quant.doctor import Finding

MARKS = {"ok": "[green]✓[/]", "note": "[yellow]·[/]", "fault": "[red]✗[/]"}


@click.command()
@click.argument("model", required=False, type=PATH)
@click.option("--log", type=PATH, help="A server's log, compared with the known errors.")
@click.option("--fix-plan", is_flag=True, help="Print only the commands that fix the findings.")
@click.option("--server", metavar="URL", help="A running server: name the arithmetic that it runs on --checkpoint.")
@click.option("--checkpoint", type=click.Path(path_type=Path), help="The folder that --server serves.")
@click.option("--reference", type=click.Path(path_type=Path), help="The bf16 checkpoint that it was made from.")
@click.option("--images", is_flag=True, help="With --server: ask it for the colours of two small generated images.")
@click.option("--key-env", metavar="NAME", help="Environment variable with the server's key.")
@json_option
def doctor(
    model: Path | None,
    log: Path | None,
    fix_plan: bool,
    server: str | None,
    checkpoint: Path | None,
    reference: Path | None,
    images: bool,
    key_env: str | None,
    as_json: bool,
) -> None:
    """Check what this machine (and a checkpoint) lacks for which stage, with the fix. Exit code 3 on a fault.

    With --server, --checkpoint and --reference: compare the log-probabilities that a server (vLLM, llama.cpp) returns for about
    20 prompts with the checkpoint's own under each numerics profile, and name the arithmetic that it runs, or "none of these".

    With --server and --images: whether the server takes images, and names the colours of two.
    """
    from annie_quant import doctor as checks

    figures: dict[str, Any] = {}
    if images and server is None:
        raise UsageError("--images needs --server", "add --server http://127.0.0.1:8000")
    if server is not None and images:
        from annie_quant.bench.backend import key_headers
        from annie_quant.doctor.server import check_images

        findings = [check_images(server, key_headers(key_env))]
    elif server is not None:
        if checkpoint is None or reference is None:
            raise UsageError("--server needs --checkpoint and --reference", "add --checkpoint DIR --reference BF16")
        quiet_engines()
        from annie_quant.bench.backend import key_headers
        from annie_quant.doctor.server import check_server

        findings, result = check_server(server, checkpoint, reference, key_headers(key_env))
        figures = {"fingerprint": {"name": result.name, **asdict(result)}}
    else:
        findings = checks.examine(model, log)
    plan = checks.fix_plan(findings)
    if as_json:
        emit({"findings": findings, "fix_plan": plan, **figures})
    elif fix_plan:
        echo("\n".join(plan))
    else:
        print_findings(findings)
    sys.exit(3 if any(f.level == "fault" for f in findings) else 0)


def print_findings(findings: Iterable[Finding]) -> None:
    for finding in findings:
        console.line(f"{finding.check}: {finding.message}", mark=MARKS[finding.level])
        if finding.why:
            console.line(f"    {finding.why}")
        if finding.fix:
            console.line(f"    → {finding.fix}")

"""`annie-quant doctor`: what this machine lacks, and how to fix it."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from annie_quant.cli.common import PATH, console, echo, emit, json_option

if TYPE_CHECKING:
    from annie_quant.doctor import Finding

MARKS = {"ok": "[green]✓[/]", "note": "[yellow]·[/]", "fault": "[red]✗[/]"}


@click.command()
@click.argument("model", required=False, type=PATH)
@click.option("--log", type=PATH, help="A server's log, compared with the known errors.")
@click.option("--fix-plan", is_flag=True, help="Print only the commands that fix the findings.")
@json_option
def doctor(model: Path | None, log: Path | None, fix_plan: bool, as_json: bool) -> None:
    """Check what this machine (and a checkpoint) lacks for which stage, with the fix. Exit code 3 on a fault."""
    from annie_quant import doctor as checks

    findings = checks.examine(model, log)
    plan = checks.fix_plan(findings)
    if as_json:
        emit({"findings": findings, "fix_plan": plan})
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

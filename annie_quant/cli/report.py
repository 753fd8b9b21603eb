"""`annie-quant report`: the report of a run, or trends over several runs.

`annie-quant publish`: upload a run's checkpoint with its model card.

`annie-quant explain`: what a finding's code or an exit code means, and what to do.
"""

from __future__ import annotations

import difflib
import sys
from pathlib import Path
from typing import Any

import click
from msgspec.structs import asdict

import annie_quant
from annie_quant.cli.common import PATH, console, echo, emit, json_option, role_options
from annie_quant.core.errors import EXIT_CODES, UsageError
from annie_quant.core.files import write_text
from annie_quant.documents import Roles


@click.command()
@click.argument("run_dirs", nargs=-1, required=True, type=PATH)
@click.option("--output", type=PATH, help="Folder of the trends of several runs. Default: trends.")
@click.option(
    "--verify",
    is_flag=True,
    help="Count the served figures again from records.jsonl; print what differs, write nothing.",
)
@click.option(
    "--judge", is_flag=True, help="First judge the stored answers again, with today's rule; run.json is changed."
)
@role_options
def report(
    run_dirs: tuple[Path, ...],
    output: Path | None,
    verify: bool,
    judge: bool,
    candidate: str | None,
    reference: str | None,
    incumbent: str | None,
) -> None:
    """Write report.html, report.md and comparison.md into a run directory; for several runs, trends.html and trends.md.

    The stored verdict is shown. --judge, and each role that is named, judges the run again. With --verify the exit code is 1 if
    a figure of run.json differs from the records.
    """
    from annie_quant.report import trends
    from annie_quant.report.recheck import write_judgement

    stated = Roles(candidate=candidate, reference=reference, incumbent=incumbent)
    if judge or stated.names:
        if len(run_dirs) > 1 or verify:
            raise click.UsageError("--judge and roles are for the report of one run, without --verify")
        console.note(write_judgement(run_dirs[0], stated).verdict.sentence)
    if len(run_dirs) == 1 and output is not None:
        raise click.UsageError(
            "--output is for the trends of several runs; the report of one run is written into its folder"
        )
    if verify:
        _verify(run_dirs)
        return
    several = len(run_dirs) > 1
    paths = trends.build(run_dirs, output or Path("trends")) if several else annie_quant.report.build(run_dirs[0])
    for path in paths:
        echo(str(path))


def _verify(run_dirs: tuple[Path, ...]) -> None:
    checks = [(folder, annie_quant.report.verify(folder)) for folder in run_dirs]
    for folder, check in checks:
        echo(f"{folder}: {check.summary}")
        for difference in check.differences:
            echo(f"  {difference.message}")
    if any(check.differences for _, check in checks):
        sys.exit(1)


@click.command()
@click.argument("run_dir", type=PATH)
def export(run_dir: Path) -> None:
    """Write a benchmark's results.csv and exports/ again (GuideLLM, AIPerf, vLLM, the original plan's script)."""
    from annie_quant import bench

    table = run_dir / "results.csv"
    write_text(table, annie_quant.report.compose(run_dir)["results.csv"])
    for path in (table, *bench.export(run_dir)):
        echo(str(path))


@click.command()
@click.argument("run_dir", type=PATH)
@click.option(
    "--repo", required=True, metavar="OWNER/NAME", help="Repository on the Hub; created if it does not exist."
)
@click.option("--model", help="The model's name in the run. Default: the verdict's candidate.")
@click.option("--checkpoint", type=PATH, help="The model's folder, if the run has no record of it.")
@click.option("--base-model", metavar="OWNER/NAME", help="The Hub model that this one was made from.")
@click.option("--license", default="", help="The base model's licence, in the Hub's spelling: apache-2.0.")
@click.option("--calib-data", type=PATH, help="Default: calibration.jsonl of the run.")
@click.option("--public", is_flag=True, help="Make the repository public (private by default).")
@click.option("--with-report", is_flag=True, help="Also upload the report and results.csv.")
@click.option("--with-records", is_flag=True, help="Also upload every request and answer.")
@click.option(
    "--force", default="", metavar="REASON", help="Publish in spite of failures; the reason is written to the card."
)
@click.option("--dry-run", is_flag=True, help="List files and sizes, write the card, upload nothing.")
@role_options
@json_option
def publish(
    run_dir: Path,
    repo: str,
    public: bool,
    force: str,
    dry_run: bool,
    as_json: bool,
    candidate: str | None,
    reference: str | None,
    incumbent: str | None,
    **options: Any,
) -> None:
    """Upload a run's checkpoint to the Hugging Face Hub with its model card. Exit code 1 if a gate or audit fails.

    Each role that is named judges the run again first, as `annie-quant report` does.
    """
    from annie_quant.report import publishing
    from annie_quant.report.format import size
    from annie_quant.report.recheck import write_judgement

    stated = Roles(candidate=candidate, reference=reference, incumbent=incumbent)
    if stated.names:
        write_judgement(run_dir, stated)
    with console.task("audit and card"):
        plan = publishing.prepare(run_dir, repo, private=not public, forced=force, **options)
    if not as_json:
        for file in plan.files:
            echo(f"{size(file.size_bytes):>10}  {file.path}")
        console.note(
            f"{len(plan.files)} files, {size(plan.size_bytes)}, to {repo} ({'public' if public else 'private'})"
        )
        console.note(f"card: {plan.folder / 'README.md'}")
        for line in plan.objections:
            console.note(f"objection: {line}")
    if dry_run or plan.refused:
        emit(plan) if as_json else None
        if plan.refused and not as_json:
            console.error("refused", 'fix the objections, or publish anyway: --force "REASON"')
        sys.exit(1 if plan.refused else 0)
    uploaded = publishing.upload(plan, progress=console.note)
    emit(asdict(plan) | asdict(uploaded)) if as_json else console.note(f"uploaded: {uploaded.url}")


@click.command()
@click.argument("code", required=False)
@json_option
def explain(code: str | None, as_json: bool) -> None:
    """Explain CODE: that of an audit's finding or a checkpoint's error, or an exit code. Without CODE, list all."""
    from annie_quant.checkpoint.codes import CODES, DEADLY

    if code is None:
        if as_json:
            emit({**{c: e._asdict() for c, e in CODES.items()}, **{str(n): m for n, m in EXIT_CODES.items()}})
            return
        for number, meaning in EXIT_CODES.items():
            console.line(f"exit code {number}: {meaning}")
        for name, explanation in CODES.items():
            console.line(f"{name}: {explanation.meaning}")
        return
    if code.isdecimal() and int(code) in EXIT_CODES:
        result = {"code": code, "meaning": f"Exit code {code}: {EXIT_CODES[int(code)]}."}
    elif code in CODES:
        servers = "cannot load the checkpoint, or their answers are useless" if code in DEADLY else None
        result = {"code": code, **CODES[code]._asdict(), **({"servers": servers} if servers else {})}
    else:
        near = difflib.get_close_matches(code, CODES, 3)
        similar = f"; similar: {', '.join(near)}" if near else ""
        raise UsageError(f"unknown code {code[:60]!r}{similar}", "annie-quant explain lists all codes")
    if as_json:
        emit(result)
        return
    console.line(result["meaning"])
    for key in ("servers", "fix"):
        if key in result:
            console.line(f"{key}: {result[key]}")

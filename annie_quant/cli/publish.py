"""`annie-quant publish`: upload a run's checkpoint with its model card."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click
from msgspec.structs import asdict

from annie_quant.cli.common import PATH, console, echo, emit, json_option, role_options
from annie_quant.schema import Roles


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
    from annie_quant.publish import upload
    from annie_quant.report.format import size
    from annie_quant.report.judging import write_judgement

    stated = Roles(candidate=candidate, reference=reference, incumbent=incumbent)
    if stated.names:
        write_judgement(run_dir, stated)
    with console.task("audit and card"):
        plan = upload.prepare(run_dir, repo, private=not public, forced=force, **options)
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
    uploaded = upload.upload(plan, progress=console.note)
    emit(asdict(plan) | asdict(uploaded)) if as_json else console.note(f"uploaded: {uploaded.url}")

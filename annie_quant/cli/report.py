"""`annie-quant report` and `annie-quant publish`: what people see of a run."""

from __future__ import annotations

import sys
from pathlib import Path

import click

import annie_quant
from annie_quant.cli.common import console, emit, json_option


@click.command()
@click.argument("run_dirs", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--output", type=click.Path(path_type=Path), help="Of several runs: where the trends go. Default: trends")
def report(run_dirs: tuple[Path, ...], output: Path | None) -> None:
    """Write report.html, report.md and comparison.md into a run directory; of several, trends.html and trends.md."""
    from annie_quant.report.pages import trends

    if len(run_dirs) == 1 and output is not None:
        raise click.UsageError("--output is for the trends of several runs; the report of one lies in its folder")
    several = len(run_dirs) > 1
    paths = trends.build(run_dirs, output or Path("trends")) if several else annie_quant.report.build(run_dirs[0])
    for path in paths:
        click.echo(str(path))


@click.command()
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option("--repo", required=True, metavar="OWNER/NAME", help="Repository on the Hub; made where there is none.")
@click.option("--model", help="Its name in the run. Default: the verdict's candidate.")
@click.option("--checkpoint", type=click.Path(path_type=Path), help="Its folder, where the run does not know it.")
@click.option("--base-model", metavar="OWNER/NAME", help="The Hub model that this was made from.")
@click.option("--license", "licence", default="", help="The base model's licence, as the Hub spells it: apache-2.0.")
@click.option("--calib-data", type=click.Path(path_type=Path), help="Default: calibration.jsonl of the run.")
@click.option("--public", is_flag=True, help="Make the repository public (private by default).")
@click.option("--with-report", is_flag=True, help="Also upload the report and results.csv.")
@click.option("--with-records", is_flag=True, help="Also upload every request and answer.")
@click.option("--force", default="", metavar="REASON", help="Publish in spite of failures; the card gives the reason.")
@click.option("--dry-run", is_flag=True, help="List files and sizes, write the card, upload nothing.")
@json_option
def publish(
    run_dir: Path,
    repo: str,
    model: str | None,
    checkpoint: Path | None,
    base_model: str | None,
    licence: str,
    calib_data: Path | None,
    public: bool,
    with_report: bool,
    with_records: bool,
    force: str,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Upload a run's checkpoint to the Hugging Face Hub with its model card. Exit code 1 if something speaks against it."""
    from annie_quant.publish import upload as hub
    from annie_quant.report.format import size

    with console.task("audit and card"):
        plan = hub.prepare(
            run_dir,
            repo,
            model=model,
            checkpoint=checkpoint,
            base_model=base_model,
            license=licence,
            calib_data=calib_data,
            private=not public,
            with_report=with_report,
            with_records=with_records,
            forced=force,
        )
    if not as_json:
        for name, size_bytes in plan.files:
            click.echo(f"{size(size_bytes):>10}  {name}")
        console.note(
            f"{len(plan.files)} files, {size(plan.size_bytes)}, to {repo} ({'public' if public else 'private'})"
        )
        console.note(f"the card: {plan.folder / 'README.md'}")
        for line in plan.objections:
            console.note(f"against it: {line}")
    if dry_run or plan.refused:
        emit(plan.to_dict()) if as_json else None
        if plan.refused and not as_json:
            console.error("refused", 'mend what speaks against it, or say why not: --force "REASON"')
        sys.exit(1 if plan.refused else 0)
    done = hub.upload(plan, say=console.note)
    emit(plan.to_dict() | done) if as_json else console.note(f"uploaded: {done['url']}")

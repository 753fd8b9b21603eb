"""The commands `report`, `publish` and `explain`.

`annie-quant report`: the report of a run.

`annie-quant publish`: upload a run's checkpoint with its model card.

`annie-quant explain`: what a finding's code or an exit code means, and what to do.
"""

from __future__ import annotations

import difflib
import sys
from dataclasses import dataclass
from pathlib import Path

from cyclopts import Parameter
from msgspec.structs import asdict

import annie_quant
from annie_quant.cli.options import AsJson, Sides, keywords_of
from annie_quant.cli.terminal import console, echo, emit
from annie_quant.core.errors import EXIT_CODES, UsageError
from annie_quant.documents import Roles


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ReportOptions(Sides):
    """Options of `annie-quant report`.

    Attributes:
        verify: Count the served figures again from records.jsonl; print what differs, write nothing.
        judge: First judge the stored answers again, with today's rule; run.json is changed.
    """

    verify: bool = False
    judge: bool = False


def report(run_dir: Path, /, *, options: ReportOptions = ReportOptions()) -> None:
    """Write report.html, report.md and comparison.md into a run directory.

    The stored verdict is shown. --judge, and each role that is named, judges the run again. With --verify the exit code is 1 if
    a figure of run.json differs from the records.
    """
    from annie_quant.report.recheck import write_judgement

    stated = stated_roles(options)
    if options.judge or stated.names:
        if options.verify:
            raise UsageError("--judge and roles change the run: call report without --verify")
        console.note(write_judgement(run_dir, stated).verdict.sentence)
    if options.verify:
        check = annie_quant.report.verify(run_dir)
        echo(f"{run_dir}: {check.summary}")
        for difference in check.differences:
            echo(f"  {difference.message}")
        sys.exit(1 if check.differences else 0)
    for path in annie_quant.report.build(run_dir):
        echo(str(path))


def stated_roles(options: ReportOptions | PublishOptions) -> Roles:
    return Roles(
        candidate=options.candidate, reference=options.reference, incumbent=options.incumbent
    )


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class PublishOptions(Sides):
    """Options of `annie-quant publish`.

    Attributes:
        repo: Repository on the Hub; created if it does not exist.
        model: The model's name in the run. Default: the verdict's candidate.
        checkpoint: The model's folder, if the run has no record of it.
        base_model: The Hub model that this one was made from.
        license: The base model's licence, in the Hub's spelling: apache-2.0.
        calib_data: Default: calibration.jsonl of the run.
        public: Make the repository public (private by default).
        with_report: Also upload the report and results.csv.
        with_records: Also upload every request and answer.
        force: Publish in spite of failures; the reason is written to the card.
        dry_run: List files and sizes, write the card, upload nothing.
    """

    repo: str
    model: str | None = None
    checkpoint: Path | None = None
    base_model: str | None = None
    license: str = ""
    calib_data: Path | None = None
    public: bool = False
    with_report: bool = False
    with_records: bool = False
    force: str = ""
    dry_run: bool = False
    as_json: AsJson = False


def publish(run_dir: Path, /, *, options: PublishOptions) -> None:
    """Upload a run's checkpoint to the Hugging Face Hub with its model card. Exit code 1 if a gate or audit fails.

    Each role that is named judges the run again first, as `annie-quant report` does.
    """
    from annie_quant.report import publishing
    from annie_quant.report.format import size
    from annie_quant.report.recheck import write_judgement

    stated = stated_roles(options)
    if stated.names:
        write_judgement(run_dir, stated)
    with console.task("audit and card"):
        names = (
            "model",
            "checkpoint",
            "base_model",
            "license",
            "calib_data",
            "with_report",
            "with_records",
        )
        settings = keywords_of(options, *names) | {
            "private": not options.public,
            "forced": options.force,
        }
        plan = publishing.prepare(run_dir, options.repo, **settings)
    if not options.as_json:
        for file in plan.files:
            echo(f"{size(file.size_bytes):>10}  {file.path}")
        visibility = "public" if options.public else "private"
        console.note(
            f"{len(plan.files)} files, {size(plan.size_bytes)}, to {options.repo} ({visibility})"
        )
        console.note(f"card: {plan.folder / 'README.md'}")
        for line in plan.objections:
            console.note(f"objection: {line}")
    if options.dry_run or plan.refused:
        emit(plan) if options.as_json else None
        if plan.refused and not options.as_json:
            console.error("refused", 'fix the objections, or publish anyway: --force "REASON"')
        sys.exit(1 if plan.refused else 0)
    uploaded = publishing.upload(plan, progress=console.note)
    emit(asdict(plan) | asdict(uploaded)) if options.as_json else console.note(
        f"uploaded: {uploaded.url}"
    )


def explain(code: str | None = None, /, *, as_json: AsJson = False) -> None:
    """Explain CODE: that of an audit's finding or a checkpoint's error, or an exit code. Without CODE, list all."""
    from annie_quant.checkpoint.checks import CODES, DEADLY

    exits = {
        str(number): {"meaning": f"Exit code {number}: {text}."}
        for number, text in EXIT_CODES.items()
    }
    codes = {name: explanation._asdict() for name, explanation in CODES.items()}
    if code is None and as_json:
        emit({**codes, **{str(number): text for number, text in EXIT_CODES.items()}})
        return
    if code is None:
        meanings = {f"exit code {number}": text for number, text in EXIT_CODES.items()}
        for name, text in (
            meanings | {name: explanation.meaning for name, explanation in CODES.items()}
        ).items():
            console.line(f"{name}: {text}")
        return
    if code not in exits | codes:
        near = difflib.get_close_matches(code, CODES, 3)
        similar = f"; similar: {', '.join(near)}" if near else ""
        raise UsageError(
            f"unknown code {code[:60]!r}{similar}", "annie-quant explain lists all codes"
        )
    result = {"code": code, **(exits | codes)[code]}
    if code in DEADLY:
        result["servers"] = "cannot load the checkpoint, or their answers are useless"
    if as_json:
        emit(result)
        return
    for line in (
        result["meaning"],
        *(f"{key}: {result[key]}" for key in ("servers", "fix") if key in result),
    ):
        console.line(line)

"""The report of a run directory: report.html (one offline file), report.md, comparison.md, results.csv, plots/*.svg.

build(run_dir)    write all of them into the run directory; returns their paths, report.html first
compose(run_dir)  the same files as texts
verify(run_dir)   count the served figures of run.json again from records.jsonl
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from annie_quant.core.errors import UsageError
from annie_quant.core.files import write_text

if TYPE_CHECKING:
    from annie_quant.report.recheck import Recount


def build(run_dir: str | os.PathLike) -> list[Path]:
    """Write the report of a run directory, whatever parts of it exist; each file appears complete or not at all.

    Raises UsageError for a folder that holds no run, or a run.json that is not JSON.
    """
    paths = write_files(Path(run_dir), compose(run_dir))
    for plot in {*Path(run_dir).glob("plots/*.svg")}.difference(paths):  # of an earlier report
        plot.unlink()
    return paths


def write_files(folder: Path, files: Mapping[str, str]) -> list[Path]:
    """Write a report's files, and return their paths."""
    for name, text in files.items():
        write_text(folder / name, text)
    return [folder / name for name in files]


def compose(run_dir: str | os.PathLike) -> dict[str, str]:
    """Return the report's files as {relative path: text}, report.html first; write nothing."""
    from annie_quant.report import charts, pages, tables
    from annie_quant.report.run import load

    run = load(run_dir)
    figures = charts.draw(run)
    files = pages.render(run, figures) | {"results.csv": tables.csv_text(run)}
    for figure in figures:
        for panel, canvas in figure.panels:
            name = "".join(ch if ch.isalnum() and ch.isascii() else "-" for ch in panel).strip("-")[
                :80
            ]
            stem = figure.key if panel == figure.key else f"{figure.key}-{name}"
            files[f"plots/{stem}.svg"] = canvas.document()
    return {name: text.encode("utf-8", "replace").decode() for name, text in files.items()}


def verify(run_dir: str | os.PathLike) -> Recount:
    """Count passes, n and medians of every server again from records.jsonl and compare them with run.json.

    Raises UsageError where the run has no served figures or no records.
    """
    from annie_quant.report.recheck import check_figures
    from annie_quant.report.run import load

    check = check_figures(load(run_dir))
    if check is None or not check.compared:
        raise UsageError(
            f"{run_dir}: no served figures with records to verify", "annie-quant bench --output DIR"
        )
    return check

"""What people look at: report.html (one offline file), report.md and comparison.md (paste-ready), results.csv, plots/*.svg.

build(run_dir)   write all of them beside the run's own files; returns their paths, report.html first
"""

from __future__ import annotations

import os
from pathlib import Path

from annie_quant.files import write_text


def build(run_dir: str | os.PathLike) -> list[Path]:
    """Write the report of a run directory, whatever parts of it exist; each file appears whole or not at all.

    Raises UsageError for a folder that holds no run, or a run.json that is not JSON.
    """
    folder = Path(run_dir)
    files = compose(folder)
    for name, text in files.items():
        write_text(folder / name, text)
    for plot in folder.glob("plots/*.svg"):
        # Of an earlier report: its panel is no longer there, and a stale picture would be believed.
        if f"plots/{plot.name}" not in files:
            plot.unlink()
    return [folder / name for name in files]


def compose(run_dir: str | os.PathLike) -> dict[str, str]:
    """The report's files as {relative path: text}, report.html first; nothing is written."""
    from annie_quant.report import recount
    from annie_quant.report.charts import gates, sizes, timing, tool_surface
    from annie_quant.report.pages import html, markdown, tables
    from annie_quant.report.run import load

    run = load(Path(run_dir))
    clocked = recount.timed(run.measured)
    drawn = [
        gates.gate_panels(run),
        gates.offline_and_served(run),
        gates.kl_panels(run),
        sizes.pareto(run),
        tool_surface.tool_surface(run),
        timing.turns(run),
        timing.distributions(run, clocked),
        timing.streams(run, clocked),
        timing.latency_lines(run),
        sizes.memory_bars(run),
    ]
    check = None
    if run.records:
        served = {s.key.split("/", 1)[1]: s.data for s in run.of("served")}
        check = recount.check(served, run.measured, recount.greedy_workloads(run.inputs))
    csv_text = tables.csv_text(run)
    files = {
        "report.html": html.render(run, {f.key: f for f in drawn}, check, csv_text),
        "report.md": markdown.render(run, check),
        "comparison.md": markdown.comparison(run, check),
        "results.csv": csv_text,
    }
    for figure in drawn:
        for panel, canvas in figure.panels:
            stem = figure.key if panel == figure.key else f"{figure.key}-{_file_name(panel)}"
            files[f"plots/{stem}.svg"] = canvas.document()
    return {name: text.encode("utf-8", "replace").decode() for name, text in files.items()}


def _file_name(panel: str) -> str:
    return "".join(ch if ch.isalnum() and ch.isascii() else "-" for ch in panel).strip("-")[:80]

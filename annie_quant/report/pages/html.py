"""report.html: one file with its style and script inside, which requests nothing from any network.

Every value that the template writes is made safe (printable.visible) and escaped. The page's Content-Security-Policy allows its own
script by hash and nothing else, so that text from a model cannot act even where it came through unescaped.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from msgspec import to_builtins

from annie_quant import __version__
from annie_quant.files import ASSETS
from annie_quant.printable import visible
from annie_quant.report import format, recount
from annie_quant.report.charts.figure import Figure
from annie_quant.report.charts.svg import MARKS
from annie_quant.report.pages import advice, answers, comparison, tables
from annie_quant.report.run import LoadedRun
from annie_quant.schema import Environment

TEMPLATES = ASSETS / "templates"
EMBED_LIMIT = 400_000  # bytes of a download inside the page


@cache
def _environment() -> Any:
    import jinja2
    from markupsafe import Markup

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        finalize=lambda value: value if isinstance(value, Markup) else visible(value),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.globals |= {"text": format, "safe": Markup}
    environment.filters["capitalize_first"] = lambda text: text[:1].upper() + text[1:]
    return environment


def render_template(name: str, **values: Any) -> str:
    """Return the page of a template. Style, script and the script's hash are those of every page."""
    style, script = ((TEMPLATES / n).read_text(encoding="utf-8") for n in ("report.css", "report.js"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    page = _environment().get_template(name)
    return str(page.render(version=__version__, style=style + MARKS, script=script, script_hash=digest, **values))


def render(run: LoadedRun, figures: list[Figure], check: recount.Recount | None, csv_text: str) -> str:
    return render_template(
        "report.html",
        run=run,
        figures={f.key: f for f in figures},
        check=check,
        sentence=run.sentence or "No verdict has been reached for this run.",
        outcome=format.CSS[advice.outcome(run)],
        badge=advice.badge(run),
        caveats=caveats(run),
        main=tables.side_by_side(run),
        gates=tables.gates_table(run),
        kl=tables.kl_table(run),
        latency=[tables.latency_table(run, metric) for metric in tables.LABELS],
        overall=tables.comparisons_table(run, only_all=True),
        comparisons=tables.comparisons_table(run),
        stability=tables.stability_table(run),
        browser=answers.collect(run),
        checklist=advice.checklist(run),
        checklist_title=advice.checklist_title(run),
        advice=advice.recommendation(run),
        operation=advice.operation_changes(run),
        tree=advice.decision_tree(run),
        dimensions=comparison.dimensions(run),
        budget=comparison.memory_budget(run),
        missing={m.part: m for m in run.missing},
        facts=facts(run),
        downloads=_downloads(run, csv_text),
    )


def caveats(run: LoadedRun) -> list[str]:
    """The verdict's caveats, and the limits that the benchmark's own checks found."""
    texts = [*run.verdict.caveats, *(confound.message for confound in run.aggregates.confounds)]
    texts += [f"eval/{model}.json does not hold: {first(lines)}" for model, lines in run.evidence.items()]
    if early := recount.before_server(run.measured):
        texts.append(
            f"{early} of {len(run.measured)} requests ended, by the client's clock, before the server's own times "
            "allow: clocks on this machine cannot be trusted to milliseconds."
        )
    return list(dict.fromkeys(texts))


def first(lines: Sequence[str]) -> str:
    """Return the first of several lines, with the number of the others."""
    return lines[0] + (f" (and {len(lines) - 1} more differences)" if len(lines) > 1 else "")


def facts(run: LoadedRun) -> list[tuple[str, list[tuple[str, str]]]]:
    """Command, environment, settings and backends as (title, [(name, value)]); nested values are flattened."""
    argv = run.document.argv
    command = {"argv": " ".join([Path(argv[0]).name, *argv[1:]])} if argv else {}
    environment = run.document.environment
    parts: tuple[tuple[str, Any], ...] = (
        ("Command", command),
        ("Environment", environment if environment != Environment() else {}),
        ("Settings", run.document.config),
        ("Backends", run.backends),
    )
    rows = ((title, _flat(to_builtins(part))) for title, part in parts)
    return [(title, pairs) for title, pairs in rows if pairs]


def _flat(value: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    rows = []
    for key, item in value.items():
        label = f"{prefix}{key}"
        if isinstance(item, dict):
            rows += _flat(item, f"{label} · ")
        elif isinstance(item, list) and any(isinstance(i, dict) for i in item):
            rows += _flat({f"{label} {index + 1}": part for index, part in enumerate(item)})
        elif item not in (None, "", [], {}):
            rows.append((label, (", ".join(map(str, item)) if isinstance(item, list) else str(item))[:400]))
    return rows


def _downloads(run: LoadedRun, csv_text: str) -> list[tuple[str, str, str]]:
    """(name, size, data URL) of results.csv and run.json; the URL is "" for a file too large for the page."""
    files = [("results.csv", "text/csv", csv_text.encode("utf-8", "replace"))]
    path = run.folder / "run.json"
    if path.is_file():
        files.append(("run.json", "application/json", path.read_bytes()))
    return [
        (
            name,
            format.size(len(content)),
            f"data:{kind};base64,{base64.b64encode(content).decode()}" if len(content) <= EMBED_LIMIT else "",
        )
        for name, kind, content in files
    ]

"""report.html: the template, its style and script put into one file that asks nothing of any network.

The page's Content-Security-Policy allows its own script by hash and nothing else, so that no text of a model could act
even if it came through unescaped.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from pathlib import Path
from typing import Any

from annie_quant import __version__
from annie_quant.files import ASSETS
from annie_quant.judge import decision
from annie_quant.report import format, recount, typed
from annie_quant.report.charts.gates import Figure
from annie_quant.report.charts.svg import MARKS
from annie_quant.report.pages import advice, answers, comparison, tables
from annie_quant.report.run import Run
from annie_quant.schema import Outcome, Verdict

TEMPLATES = ASSETS / "templates"
EMBED_LIMIT = 400_000  # bytes of a download kept in the page


@cache
def _environment() -> Any:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.globals |= {"text": format, "safe": jinja2.utils.markupsafe.Markup}
    environment.filters["capitalize_first"] = lambda words: words[:1].upper() + words[1:]
    return environment


def template(name: str) -> Any:
    return _environment().get_template(name)


def shell() -> dict[str, str]:
    """What every page carries: style, script, and the script's hash for its Content-Security-Policy."""
    style, script = ((TEMPLATES / n).read_text(encoding="utf-8") for n in ("report.css", "report.js"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return {"version": __version__, "style": style + MARKS, "script": script, "script_hash": digest}


def render(run: Run, figures: dict[str, Figure], check: dict[str, Any] | None, csv_text: str) -> str:
    verdict = run.doc["verdict"]
    sentence = format.clean(verdict.get("sentence") or "").strip()
    return str(
        template("report.html").render(
            **shell(),
            run=run,
            figures=figures,
            check=check,
            sentence=sentence or "No verdict has been reached for this run.",
            outcome=outcome(run),
            reasons=[format.clean(r) for r in verdict["reasons"]],
            caveats=findings(run),
            main=tables.side_by_side(run),
            gates=tables.gates_table(run),
            kl=tables.kl_table(run),
            latency=[(m, tables.latency_table(run, m)) for m in tables.LABELS],
            overall=tables.comparisons_table(run, only_all=True),
            comparisons=tables.comparisons_table(run),
            browser=answers.collect(run),
            dropin=advice.checklist(run),
            advice=advice.recommendation(run),
            tree=advice.decision_tree(run),
            founding=comparison.founding_table(run),
            registry=comparison.registry(run),
            missing={m["part"]: m for m in run.missing},
            stages=run.doc["stages"],
            facts=facts(run),
            downloads=_downloads(run, csv_text),
            counts={
                "records": len(run.records),
                "measured": len(run.measured),
                "torn": run.torn_lines,
                "failed": sum(bool(r.get("error")) for r in run.measured),
            },
        )
    )


def outcome(run: Run) -> Outcome:
    """The run's outcome, as judge.decision decides it."""
    verdict = run.doc["verdict"]
    known = Verdict(sentence=verdict.get("sentence", ""), passed=verdict["passed"], candidate=verdict.get("candidate"))
    return decision.outcome(typed.aggregates(run), known)


def findings(run: Run) -> list[str]:
    """The verdict's caveats, and what the benchmark's own checks found beyond them."""
    found = run.doc["verdict"]["caveats"] + run.doc["confounds"] + run.aggregates["confounds"]
    early = recount.impossible(run.measured)
    if early:
        found = [
            *found,
            f"{early} of {len(run.measured)} requests ended, by the client's clock, before the server's own account "
            "of its work: clocks on this machine cannot be trusted to milliseconds.",
        ]
    return list(dict.fromkeys(format.clean(f) for f in found))


def facts(run: Run) -> list[tuple[str, list[tuple[str, str]]]]:
    """Environment and settings as (title, [(name, value)]), nested values flattened, nothing left out."""
    argv = run.doc["argv"]
    found = [("Command", [("argv", format.clean(" ".join([Path(argv[0]).name, *argv[1:]])))])] if argv else []
    parts = (("Environment", "environment"), ("Settings", "config"), ("Backends", "backends"))
    return found + [(title, _flat(run.doc[key])) for title, key in parts if run.doc[key]]


def _flat(value: Any, prefix: str = "") -> list[tuple[str, str]]:
    rows = []
    for key, item in value.items():
        label = f"{prefix}{format.clean(key)}"
        if isinstance(item, dict):
            rows += _flat(item, f"{label} · ")
        elif isinstance(item, list) and any(isinstance(i, dict) for i in item):
            for index, one in enumerate(item):
                rows += _flat(one, f"{label} {index + 1} · ") if isinstance(one, dict) else [(label, format.clean(one))]
        elif item not in (None, "", [], {}):
            shown = ", ".join(map(str, item)) if isinstance(item, list) else str(item)
            rows.append((label, format.clean(shown)[:400]))
    return rows


def _downloads(run: Run, csv_text: str) -> list[dict[str, str]]:
    """results.csv and run.json inside the page, where they are small enough; else the name of the file beside it."""
    files = [("results.csv", "text/csv", csv_text.encode("utf-8", "replace"))]
    path = run.folder / "run.json"
    if path.is_file():
        files.append(("run.json", "application/json", path.read_bytes()))
    found = []
    for name, kind, content in files:
        whole = len(content) <= EMBED_LIMIT
        link = f"data:{kind};base64,{base64.b64encode(content).decode()}" if whole else ""
        found.append({"name": name, "size": format.size(len(content)), "href": link})
    return found

"""The pages under independent checkers: axe-core for accessibility, html5lib for HTML."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import chromium
import pytest
import report_fixture

from annie_quant import report

# All of axe's rules; what axe cannot decide by itself ("incomplete") is not counted as a fault.
RUN_AXE = (
    "axe.run(document, {resultTypes: ['violations']}).then((r) => JSON.stringify(r.violations.map((v) => \
[v.id, v.impact, v.nodes.length, v.nodes[0].html.slice(0, 160), v.nodes[0].failureSummary])))"
)


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """The report of a whole run, and of one with parts missing."""
    folder = tmp_path_factory.mktemp("access")
    whole = report_fixture.make_run(folder / "whole", n=3)
    partial = report_fixture.make_run(folder / "partial", n=3, hostile=False, seed=1)
    document = json.loads((partial / "run.json").read_text())
    del document["aggregates"]["offline"], document["aggregates"]["models"]
    (partial / "run.json").write_text(json.dumps(document))
    for run in (whole, partial):
        report.build(run)
    return [whole / "report.html", partial / "report.html"]


def package_file(package: str, name: str) -> Path | None:
    spec = importlib.util.find_spec(package)
    folders = (spec.submodule_search_locations or ()) if spec else ()
    return next((Path(p) / name for p in folders if (Path(p) / name).is_file()), None)


def axe(pages: list[Path], spoil: str = "") -> list:
    script = package_file("axe_core_python", "axe.min.js")

    async def visit(page):
        violations = []
        for index, path in enumerate(pages):
            for dark in (False, True)[
                : 2 if index == 0 else 1
            ]:  # both themes of the page that has everything
                await page.view(1200, dark)
                await page.open(path.as_uri())
                await page.evaluate(
                    "document.querySelectorAll('details').forEach((d) => { d.open = true; })"
                )
                if spoil:
                    await page.evaluate(spoil)
                await page.evaluate(script.read_text(encoding="utf-8") + "; 0")
                violations += [
                    [path.name, dark, *v] for v in json.loads(await page.evaluate(RUN_AXE))
                ]
        return violations

    return chromium.browse(visit)


needs_axe = pytest.mark.skipif(
    chromium.find() is None or package_file("axe_core_python", "axe.min.js") is None,
    reason="Chromium or axe-core-python is not installed, so axe cannot look at the pages",
)


@needs_axe
def test_axe_reports_no_violation(pages):
    assert axe(pages) == []


@needs_axe
def test_axe_reports_a_fault(pages):
    """Negative control: a picture without a name and a heading of no contrast."""
    bad = '<img src="data:,"><p style="color:#eee;background:#fff">pale</p>'
    spoil = f"document.querySelector('main').insertAdjacentHTML('afterbegin', {bad!r})"
    assert {"image-alt", "color-contrast"} <= {v[2] for v in axe(pages[1:], spoil)}


def test_html5lib_parses_without_an_error(pages):
    html5lib = pytest.importorskip(
        "html5lib", reason="html5lib parses HTML as browsers do; not installed"
    )
    for path in pages:
        parser = html5lib.HTMLParser(strict=False)
        parser.parse(path.read_text(encoding="utf-8"))
        assert [e for e in parser.errors if "charset" not in str(e)] == [], path
    parser = html5lib.HTMLParser(strict=False)
    parser.parse(pages[0].read_text(encoding="utf-8").replace("</table>", "</div>", 1))
    assert parser.errors, "negative control"

"""The report in a real browser: no console messages, no network requests, working controls, readable text."""

from __future__ import annotations

import itertools
import subprocess
import sys

import chromium
import pytest
import report_fixture
from paths import ROOT

from annie_quant import report

pytestmark = pytest.mark.skipif(
    chromium.find() is None,
    reason="no Chromium on the PATH (apt-get install chromium), so the page cannot be opened",
)
aiohttp = pytest.importorskip(
    "aiohttp", reason="aiohttp speaks to Chromium's DevTools and is not installed"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    run = report_fixture.make_run(tmp_path_factory.mktemp("browser") / "run", n=20)
    report.build(run)
    return run


CONTRAST = """
(() => {
  const luminance = (rgb) => {
    const [r, g, b] = rgb.match(/[\\d.]+/g).map(Number).slice(0, 3).map((v) => v / 255)
      .map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (e) => {
    for (; e; e = e.parentElement) {
      const c = getComputedStyle(e).backgroundColor;
      if (!/rgba\\(.*, 0\\)|transparent/.test(c)) return c;
    }
    return "rgb(255,255,255)";
  };
  const low = [];
  const kinds = "h1,h2,h3,h4,p,td,th,a,small,summary,figcaption,button,label,svg text,mark,dt,dd,li,pre";
  for (const e of document.querySelectorAll(kinds)) {
    if (!e.textContent.trim() || !e.getClientRects().length) continue;
    const s = getComputedStyle(e);
    const a = luminance(e.closest("svg") && e.tagName === "text" ? s.fill : s.color), b = luminance(ground(e));
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    const words = e.textContent.slice(0, 30);
    if (ratio < 4.5) low.push(`${e.tagName}.${e.className.baseVal ?? e.className} ${ratio.toFixed(2)} ${words}`);
  }
  return [...new Set(low)];
})()
"""
OUTLINE = """
(() => ({
  levels: [...document.querySelectorAll("h1,h2,h3,h4")].filter((h) => h.getClientRects().length).map((h) => Number(h.tagName[1])),
  unnamed: [...document.querySelectorAll("button,input,select,a,summary")].filter((e) => !e.hidden && e.getClientRects().length &&
    !(e.textContent.trim() || e.getAttribute("aria-label") || e.labels?.length)).map((e) => e.outerHTML.slice(0, 80)),
  captions: [...document.querySelectorAll("table")].every((t) => t.caption && t.caption.textContent.trim()),
  pictures: [...document.querySelectorAll("svg")].every((s) => s.getAttribute("aria-hidden") || document.getElementById(
    s.getAttribute("aria-labelledby").split(" ")[0]).textContent),
  scopes: [...document.querySelectorAll("th")].every((t) => t.scope),
  ids: ((ids) => ids.length === new Set(ids).size)([...document.querySelectorAll("[id]")].map((e) => e.id)),
}))()
"""


def test_a_table_wider_than_a_phone_has_a_scroll_cue(folder):
    """On a phone the cue is inside the first screen of the table, also after scrolling; on a wide page there is none."""
    find = """(() => {
      const box = document.querySelector("#side-by-side .scroll"), caption = box.querySelector("caption");
      return {over: box.classList.contains("over"), wider: box.scrollWidth > box.clientWidth + 1,
        cue: getComputedStyle(caption, "::after").content, shadow: getComputedStyle(box).backgroundImage};
    })()"""

    async def visit(page):
        results = []
        for width in (390, 6000):
            await page.view(width, False)
            await page.open((folder / "report.html").as_uri())
            results.append(await page.evaluate(find))
        return results

    phone, wide = chromium.browse(visit)
    assert (
        phone["wider"]
        and phone["over"]
        and "Scroll sideways" in phone["cue"]
        and "gradient" in phone["shadow"]
    )
    assert wide["over"] == wide["wider"] and ("Scroll" in wide["cue"]) == wide["wider"]


def test_opens_quietly_at_every_width_and_in_both_themes(folder):
    async def visit(page):
        pages = []
        for width in (400, 900, 1400):
            for dark in (False, True):
                await page.view(width, dark)
                await page.open((folder / "report.html").as_uri())
                pages.append((width, await page.evaluate("document.documentElement.scrollWidth")))
        return pages, page.messages, page.requests

    pages, messages, requests = chromium.browse(visit)
    assert messages == []
    assert requests == [(folder / "report.html").as_uri()] * 6, "nothing but the file itself"
    for width, wide in pages:
        assert wide <= width, "the page itself never scrolls sideways"


def test_hostile_answers_do_nothing(folder):
    async def visit(page):
        await page.open((folder / "report.html").as_uri())
        return (
            await page.evaluate("document.title"),
            await page.evaluate("document.querySelectorAll('script').length"),
            await page.evaluate("getComputedStyle(document.body).display"),
            page.messages,
        )

    title, scripts, display, messages = chromium.browse(visit)
    assert (
        title.startswith("Naive NVFP4") and scripts == 1 and display == "block" and messages == []
    )


def test_the_policy_stops_a_script_that_got_in(folder, tmp_path):
    """Negative control for two tests at once: an injected script does not run, and the browser reports it."""
    html = (folder / "report.html").read_text(encoding="utf-8")
    (tmp_path / "bad.html").write_text(
        html.replace(
            "<main>",
            "<main><script>document.title='owned'</script><img src='https://example.invalid/x.png'>",
        ),
        encoding="utf-8",
    )

    async def visit(page):
        await page.open((tmp_path / "bad.html").as_uri())
        return await page.evaluate("document.title"), page.messages

    title, messages = chromium.browse(visit)
    assert title != "owned" and len(messages) >= 2


def test_controls_work(folder):
    async def visit(page):
        await page.view(1400, False)
        await page.open((folder / "report.html").as_uri())
        run = page.evaluate
        results = {"before": await run("document.querySelectorAll('.prompt:not([hidden])').length")}
        await run("document.querySelector('#answers .more').click()")
        results["more"] = await run("document.querySelectorAll('.prompt:not([hidden])').length")
        await run("""(() => { const s = document.querySelector('[data-for=answers] [name=fault]'); s.value = 'tool_call';
                  s.dispatchEvent(new Event('input', {bubbles: true})); })()""")
        results["faulty"] = await run(
            "[...document.querySelectorAll('.prompt:not([hidden])')].every((p) => p.dataset.gates.includes(' tool_call '))"
        )
        results["output"] = await run(
            "document.querySelector('[data-for=answers] output').textContent"
        )
        await run("""(() => { const s = document.querySelector('[data-for=answers] input[type=search]'); s.value = 'no such words';
                  s.dispatchEvent(new Event('input', {bubbles: true})); })()""")
        results["none"] = await run("document.querySelectorAll('.prompt:not([hidden])').length")
        await run("document.querySelector('#gates details').open = true")
        await run("document.querySelectorAll('#gates thead button')[3].click()")
        results["sorted"] = await run(
            "[...document.querySelector('#gates details').querySelectorAll('tbody tr')].map((r) => Number(r.cells[3].dataset.s))"
        )
        results["aria"] = await run(
            "document.querySelectorAll('#gates thead th')[3].getAttribute('aria-sort')"
        )
        await run("document.querySelector('.tabs [data-group=itl_ms]').click()")
        results["tab"] = await run(
            "[...document.querySelectorAll('#fig-distributions .panel:not([hidden])')].every((p) => p.dataset.group === 'itl_ms')"
        )
        ground = "getComputedStyle(document.body).backgroundColor"
        results["light"] = await run(ground)
        await run("document.querySelector('#theme').click()")
        results["dark"] = await run(ground)
        return results, page.messages

    results, messages = chromium.browse(visit)
    assert messages == []
    assert (
        results["before"] == 25
        and results["more"] == 50
        and results["faulty"]
        and results["none"] == 0
    )
    assert results["output"].split()[0].isdigit() and int(results["output"].split()[0]) > 0
    assert (
        results["sorted"] == sorted(results["sorted"])
        and results["aria"] == "ascending"
        and len(results["sorted"]) > 50
    )
    assert (
        results["tab"]
        and results["light"] == "rgb(255, 255, 255)"
        and results["dark"] == "rgb(20, 24, 29)"
    )


def test_it_can_be_read_by_everyone(folder):
    async def visit(page):
        results = {}
        for dark in (False, True):
            await page.view(1200, dark)
            await page.open((folder / "report.html").as_uri())
            await page.evaluate(
                "document.querySelectorAll('details').forEach((d) => { d.open = true; })"
            )
            results[dark] = await page.evaluate(CONTRAST)
        await page.evaluate("document.querySelector('h1').style.color = '#555'")
        results["pale"] = await page.evaluate(CONTRAST)
        return results, await page.evaluate(OUTLINE)

    contrast, outline = chromium.browse(visit)
    assert len(contrast.pop("pale")) == 1, (
        "negative control: a grey heading on the dark ground is reported"
    )
    assert contrast == {False: [], True: []}, "text below 4.5 : 1"
    levels = outline["levels"]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(b - a <= 1 for a, b in itertools.pairwise(levels)), "no heading level is skipped"
    assert outline["unnamed"] == [] and all(
        outline[k] for k in ("captions", "pictures", "scopes", "ids")
    )


def test_a_picture_for_the_readme(folder, tmp_path):
    command = [
        sys.executable,
        ROOT / "tools/screenshot.py",
        folder,
        tmp_path / "report.png",
        "--width=800",
        "--height=600",
    ]
    subprocess.run(command, check=True)
    picture = (tmp_path / "report.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and int.from_bytes(picture[16:20], "big") == 800

"""Figures in README.md and docs are dated, or come from a named command or page, or are counted here from the code.

A figure is a number with a unit (a duration, a size, a share, "x times", "a of b"). In README.md each paragraph with a figure has
its date, a command, or a link to a dated page that has the same figure. In docs each section (`##`) with figures has a date or a
command, unless the page's introduction has a date. Figures that the code sets are compared with it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest
from paths import ROOT

from annie_quant.cli.terminal import HEARTBEAT_S
from annie_quant.data import record_proxy, recorded_chat
from annie_quant.judge.decision.rule import MARGIN

UNIT = (
    r"(?:s|ms|us|µs|ns|min|seconds?|minutes?|hours?|days?|kB|MB|GB|TB|KiB|MiB|GiB|%|points?|times|x|×|tok/s|tokens?/s|GB/s"
    r"|TFLOPS?)"
)
NUMBER = r"(?<![\w.,/-])(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?"
FIGURE = re.compile(
    rf"{NUMBER}(?<=\d)[ \u00a0]?{UNIT}(?![\w/])|{NUMBER}(?<=\d) of (?:\d{{1,3}}(?:,\d{{3}})+|\d+)\b"
)
MONTH = "(?:January|February|March|April|May|June|July|August|September|October|November|December)"
DATE = re.compile(rf"\b20\d\d-\d\d-\d\d\b|\b(?:\d{{1,2}} )?{MONTH} 20\d\d\b")
COMMAND = re.compile(r"`(?:make [a-z-]+|annie-quant [a-z-]+[^`]*|python [^`]+|pytest [^`]*)`")
LINK = re.compile(r"\]\(((?:docs|tests/perf)/[\w/.-]+\.md)\)")
PAGES = sorted((ROOT / "docs").rglob("*.md"))
REQUIREMENTS = (
    "docs/requirements.md"  # its figures are limits, and those that the original plan stated
)
# Neither measured nor set by the code: a DGX Spark's memory; 9e9 weights of two bytes; requirement R50; levels of confidence
# and of decisions, which their sentences define; the block of an FP8 format; examples of a message and of options; a limit of
# reviews.
NOMINAL = {
    "128 GB",
    "18 GB",
    "110 GB",
    "95 %",
    "5 %",
    "0 %",
    "1 %",
    "2 %",
    "3 %",
    "8 %",
    "10 %",
    "128 x",
    "12 minutes",
    "500 ms",
    "50 ms",
    "1 MB",
}


def megabytes(folder: str) -> str:
    size = sum(
        f.stat().st_size
        for f in (ROOT / folder).rglob("*")
        if f.is_file() and ".annie_quant" not in f.parts
    )
    return f"{size / 1e6:.0f} MB"


def in_megabytes(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:g} MB"


# Figures that describe this repository: counted, so that they cannot become false.
COUNTED: dict[str, Callable[[], str]] = {
    "15 MB": lambda: megabytes("annie_quant/assets/tiny-annie"),
}
# Limits and settings that docs state.
SETTINGS: dict[str, Callable[[], str]] = COUNTED | {
    "8 MB": lambda: in_megabytes(recorded_chat.MAX_REQUEST_BYTES),
    "16 MB": lambda: in_megabytes(recorded_chat.MAX_ANSWER_BYTES),
    "256 MB": lambda: in_megabytes(record_proxy.MAX_HELD_BYTES),
    "10 s": lambda: f"{record_proxy.SHUTDOWN_S:g} s",
    "20 seconds": lambda: f"{HEARTBEAT_S:g} seconds",
    "5 points": lambda: f"{100 * MARGIN:g} points",
}


def paragraphs(text: str) -> Iterator[str]:
    """Yield blocks of prose; code blocks (indented or fenced) state commands and file names, not results."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    for block in re.split(r"\n\s*\n", text):
        lines = [line for line in block.splitlines() if not line.startswith("    ")]
        if lines:
            yield "\n".join(lines)


def unsupported(text: str) -> list[str]:
    """Return the figures of README.md that have no date, command, page or count."""
    result = []
    for paragraph in paragraphs(text):
        linked = "".join(
            (ROOT / page).read_text(encoding="utf-8") for page in LINK.findall(paragraph)
        )
        for figure in (match[0] for match in FIGURE.finditer(paragraph)):
            if figure in COUNTED and COUNTED[figure]() == figure:
                continue
            if not (
                DATE.search(paragraph)
                or COMMAND.search(paragraph)
                or (figure in linked and DATE.search(linked))
            ):
                result.append(figure)
    return result


def test_every_figure_of_the_readme_has_its_origin():
    assert unsupported((ROOT / "README.md").read_text(encoding="utf-8")) == []


def undated(text: str) -> list[str]:
    """Return the figures of a page without a date or command, apart from those that are counted or not measured."""
    introduction, *sections = re.split(r"^(?=## )", text, flags=re.MULTILINE)
    if DATE.search(introduction):
        return []
    result = []
    for section in (introduction, *sections):
        if not (DATE.search(section) or COMMAND.search(section)):
            figures = [
                match[0]
                for paragraph in paragraphs(section)
                for match in FIGURE.finditer(paragraph)
            ]
            result += [
                f for f in figures if f not in NOMINAL and (f not in SETTINGS or SETTINGS[f]() != f)
            ]
    return result


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_every_page_with_figures_is_dated(page):
    if page != ROOT / REQUIREMENTS:
        assert undated(page.read_text(encoding="utf-8")) == []


def test_an_undated_section_is_reported():
    """Negative control."""
    assert undated("It takes 3 minutes with 128 GB.") == ["3 minutes"]
    assert undated("It took 3 minutes (2026-11-22).\n## More\nIt takes 4 minutes.") == []
    assert undated("## A\nIt took 3 minutes (2026-11-22).\n## B\nIt takes 4 minutes.") == [
        "4 minutes"
    ]
    assert undated("At most 8 MB and 9 MB are kept.") == ["9 MB"]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_sizes_are_decimal(page):
    """A report of one page counts in one unit."""
    assert not re.findall(r"\b[KMG]iB\b", page.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("text", "figures"),
    [
        ("It takes 12 ms.", ["12 ms"]), ("It keeps 58 of 60 calls and loses 3.5 %.", ["58 of 60", "3.5 %"]),
        ("The file has 16 MB.", ["16 MB"]), ("It is 2.5x faster than 1,000,000 tok/s.", ["2.5x", "1,000,000 tok/s"]),
        ("It keeps 57 of 61 ([page](tests/perf/vllm_cpu.md)).", ["57 of 61"]),
    ],
)  # fmt: skip
def test_a_figure_without_an_origin_is_reported(text, figures):
    """Negative control."""
    assert unsupported(text) == figures


@pytest.mark.parametrize(
    "text",
    [
        "It takes 12 ms (2026-11-22, two cores).", "It takes 12 ms (`make perf`).", "The file has 15 MB.",
        "Python 3.10, issue 12, sm_121",
        "It was 12 ms on 21 November 2026.", "4-bit activations, n = 60, 0.2.0", "    make demo    # 8 minutes",
    ],
)  # fmt: skip
def test_a_figure_with_an_origin_and_other_numbers_are_not_reported(text):
    assert unsupported(text) == []

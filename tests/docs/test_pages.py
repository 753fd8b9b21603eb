"""The documentation: links are valid, commands and options in it exist, and the site builds without a warning."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import cyclopts
import pytest
from command_line import options_of
from paths import ROOT

from annie_quant.cli import COMMANDS
from annie_quant.cli import app as cli

NOTES = [
    *sorted((ROOT / "tests").glob("perf/*.md")),
    ROOT / "tests/faults/README.md",
    ROOT / "tests/package/README.md",
]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *NOTES,
]
NAMED = re.compile(r"\btests/(?:perf|faults|package)/[\w.]+\.(?:md|py|c|jsonl)\b")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
COMMAND = re.compile(r"annie-quant ((?!-)[a-z][a-z-]*)([^\n`|;]*)")


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", t.lower()).strip().replace(" ", "-") for t in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_are_valid(page):
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        if re.match(r"https?://", target):
            continue
        path, _, anchor = target.partition("#")
        result = (page.parent / path) if path else page
        assert result.exists(), f"{page.name}: {target}"
        if anchor:
            assert anchor in anchors(result), f"{page.name}: {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_scripts_and_notes_that_are_named_exist(page):
    """They are outside of the site, so no link leads to them."""
    for name in NAMED.findall(page.read_text(encoding="utf-8")):
        assert (ROOT / name).is_file(), f"{page.name}: {name}"


def test_each_note_is_in_the_table_of_results():
    table = (ROOT / "docs/results.md").read_text(encoding="utf-8")
    assert [note.name for note in NOTES if note.relative_to(ROOT).as_posix() not in table] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_commands_and_their_options_exist(page):
    for name, rest in COMMAND.findall(page.read_text(encoding="utf-8")):
        if (
            name not in COMMANDS
            and name not in ("search", "compare")
            and not rest.strip().startswith(("-", "D", "M", "r"))
        ):
            continue  # the package's name in a sentence
        assert name in COMMANDS, f"{page.name}: annie-quant {name}"
        known = {*options_of(name), "--help"}
        for option in re.findall(r"(?<!\S)--[a-z][a-z-]*", rest):
            assert option in known, f"{page.name}: annie-quant {name} {option}"


def command_lines(text: str) -> list[str]:
    """Return the commands in code blocks, one per line; `...` stands for options of an earlier line, so such lines are left out."""
    lines = re.findall(
        r"^ {4,}annie-quant ([a-z][a-z-]*\b.*)", re.sub(r"\\\n\s*", " ", text), re.MULTILINE
    )
    return [line for line in lines if "..." not in line and "…" not in line]


def parse(line: str) -> None:
    """Parse a command as the command line does. Raises CycloptsError for a missing or an invalid value."""
    name, *words = (
        word.partition("|")[0] for word in shlex.split(line, comments=True)
    )  # "a|b": one of both
    words = words[:-1] if words[-1:] == ["&"] else words
    cli.parse_args([name, *words], exit_on_error=False, print_error=False)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_commands_are_accepted_with_their_values(page, tmp_path, monkeypatch):
    """The pages' placeholders of a model's folder are folders here: some options need one that exists."""
    for name in ("MODEL", "BF16"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    for line in command_lines(page.read_text(encoding="utf-8")):
        try:
            parse(line)
        except cyclopts.CycloptsError as error:
            pytest.fail(f"{page.name}: annie-quant {line}: {error}")


@pytest.mark.parametrize(
    "line",
    [
        "bench --output runs/x", "quantize --strategy naive --model M", "eval M --reference B --n 0", "audit", "audit A B",
        "quantize --strategy best --effort fast --model M --output D",
    ],
)  # fmt: skip
def test_an_incomplete_command_is_reported(line):
    """Negative control."""
    assert command_lines(f"    annie-quant {line}\n    annie-quant bench ...") == [line]
    with pytest.raises(cyclopts.CycloptsError):
        parse(line)


@pytest.mark.skipif(
    any(importlib.util.find_spec(m) is None for m in ("mkdocs", "material", "mkdocstrings")),
    reason='mkdocs is not installed (pip install "annie-quant[docs]"), so the site cannot be built',
)
def test_the_site_builds_without_a_warning(tmp_path):
    ended = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=180,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-3000:]
    reference = (tmp_path / "site/reference/python/index.html").read_text(encoding="utf-8")
    for name in (
        "annie_quant.nvfp4.pack",
        "annie_quant.documents.checkpoint.Audit",
        "annie_quant.report.publishing.upload",
    ):
        assert f'id="{name}"' in reference, name
    commands = (tmp_path / "site/reference/cli/index.html").read_text(encoding="utf-8")
    assert all(f'id="{name}"' in commands for name in COMMANDS)
    contents = (tmp_path / "site/index.html").read_text(encoding="utf-8")
    for page in (ROOT / "docs").rglob("*.md"):
        place = page.relative_to(ROOT / "docs").with_suffix("").as_posix()
        assert place == "index" or f'href="{place}/"' in contents, (
            f"{page.name} is not in the contents"
        )
    outside = re.findall(r'(?:src|href)="(https?://[^"]+)"', reference)
    assert not [u for u in outside if u.endswith((".js", ".css")) or "fonts." in u], (
        "the site asks nothing of others"
    )

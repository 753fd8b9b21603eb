"""Scripts that a user starts: --help never starts the work, and `make perf` has only those that need no argument."""

from __future__ import annotations

import ast
import re

import pytest
from paths import ROOT

PROGRAMS = sorted(
    path
    for folder in (
        *("tests/perf", "tests/faults", "tests/fuzz", "tests/integration", "tests/real"),
        *("training/tiny_annie", "training/real_annie"),
    )
    for path in (ROOT / folder).glob("*.py")
    if '__name__ == "__main__"' in path.read_text()
)


def calls(path, name):
    """Return the calls of a method in a file."""
    tree = ast.parse(path.read_text())
    return [
        n for n in ast.walk(tree) if isinstance(n, ast.Call) and getattr(n.func, "attr", "") == name
    ]


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda p: f"{p.parent.name}/{p.name}")
def test_it_answers_help(path):
    parsed = calls(path, "parse_args") or calls(path, "parse_intermixed_args")
    assert calls(path, "ArgumentParser") and parsed, "--help would start the work"


def test_make_perf_needs_no_arguments():
    names = re.search(r"^PERF := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1].split()
    for name in names:
        path = ROOT / "tests/perf" / f"bench_{name}.py"
        for call in calls(path, "add_argument"):
            options = {k.arg: k.value for k in call.keywords}
            positional = not call.args[0].value.startswith("-")
            assert not (positional and "nargs" not in options), f"{path.name}: {call.args[0].value}"
            assert "required" not in options, f"{path.name}: {call.args[0].value}"

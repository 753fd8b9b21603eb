"""SECURITY.md and docs/threat-model.md name tests that exist, one in each row."""

from __future__ import annotations

import ast
import re

import pytest
from paths import TESTS

ROOT = TESTS.parent
POLICY = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
THREATS = (ROOT / "docs/threat-model.md").read_text(encoding="utf-8")
NAMED = sorted(set(re.findall(r"tests/[\w/]+\.py(?:::\w+)?", POLICY + THREATS)))
ATTACKERS = ("checkpoint", "server", "log", "report", "hub")


def rows_of(page: str) -> list[str]:
    """Return the rows of a page's tables, without their headings."""
    lines = page.splitlines()
    return [
        line
        for line, following in zip(lines, [*lines[1:], ""], strict=True)
        if line.startswith("|") and not line.startswith("|---") and not following.startswith("|---")
    ]


def rows_without_a_test(page: str) -> list[str]:
    return [
        row for row in rows_of(page) if not re.search(r"tests/|by hand", row.rpartition(" | ")[2])
    ]


def test_every_row_of_the_tables_names_a_test():
    assert len(rows_of(POLICY)) >= 25 and len(rows_of(THREATS)) >= 25
    assert rows_without_a_test(POLICY) == [] and "by hand" not in POLICY
    assert rows_without_a_test(THREATS) == [] and THREATS.count("| by hand") <= 2


def test_a_row_without_a_test_is_reported():
    """Negative control."""
    page = "| attack | what stops it | test |\n|---|---|---|\n| a | b | tests/x.py |\n| c | d | our care |\n"
    assert rows_without_a_test(page) == ["| c | d | our care |"]


def test_each_attacker_has_a_table():
    sections = dict(
        re.findall(r"^## A hostile (\w+)\n(.*?)(?=^## )", THREATS, re.MULTILINE | re.DOTALL)
    )
    assert tuple(sections) == ATTACKERS
    assert all(len(rows_of(text)) >= 4 for text in sections.values())


@pytest.mark.parametrize("name", NAMED)
def test_each_named_test_exists(name):
    path, _, function = name.partition("::")
    functions = {
        n.name
        for n in ast.walk(ast.parse((ROOT / path).read_text()))
        if isinstance(n, ast.FunctionDef)
    }
    assert function in functions if function else any(f.startswith("test_") for f in functions)

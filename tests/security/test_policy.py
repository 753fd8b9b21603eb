"""SECURITY.md names tests that exist."""

from __future__ import annotations

import ast
import re

import pytest
from paths import TESTS

ROOT = TESTS.parent
POLICY = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
NAMED = sorted(set(re.findall(r"tests/[\w/]+\.py(?:::\w+)?", POLICY)))


def test_every_row_of_the_tables_names_a_test():
    rows = [
        line
        for line in POLICY.splitlines()
        if line.startswith("|") and not line.startswith(("|---", "| promise", "| input"))
    ]
    assert len(rows) >= 25
    assert [row for row in rows if "tests/" not in row.rpartition(" | ")[2]] == []


@pytest.mark.parametrize("name", NAMED)
def test_each_named_test_exists(name):
    path, _, function = name.partition("::")
    functions = {n.name for n in ast.walk(ast.parse((ROOT / path).read_text())) if isinstance(n, ast.FunctionDef)}
    assert function in functions if function else any(f.startswith("test_") for f in functions)

"""The reference pages name modules and members that exist."""

from __future__ import annotations

import importlib
import re

import pytest
from paths import ROOT

ENTRY = re.compile(r"^::: (\S+)\n    options:\n      members: \[(.*)\]$", re.MULTILINE)


@pytest.mark.parametrize("page", ["python.md", "documents.md"])
def test_every_entry_exists(page: str) -> None:
    text = (ROOT / "docs/reference" / page).read_text(encoding="utf-8")
    entries = ENTRY.findall(text)
    assert len(entries) == text.count("\n::: ") > 0, "an entry that the pattern does not read"
    for module, members in entries:
        missing = [
            n for n in members.split(", ") if not hasattr(importlib.import_module(module), n)
        ]
        assert not missing, f"{module} has no {', '.join(missing)}"

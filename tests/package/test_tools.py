"""tools/check_imports.py reports planted violations, and nothing in correct code."""

from __future__ import annotations

import subprocess
import sys

import pytest
from paths import ROOT


def check(tool, *arguments):
    """Return (exit code, lines of the output)."""
    command = [sys.executable, str(ROOT / "tools" / tool), *map(str, arguments)]
    process = subprocess.run(command, capture_output=True, text=True)
    return process.returncode, process.stdout.splitlines()


@pytest.fixture
def package(tmp_path):
    """A package annie_quant with given modules."""

    def make(**modules):
        for name, text in modules.items():
            file = tmp_path / "annie_quant" / f"{name.replace('__', '/')}.py"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        return tmp_path / "annie_quant"

    return make


def test_the_import_layers_are_kept():
    code, lines = check("check_imports.py")
    assert (code, lines) == (0, [])


def test_an_import_of_a_higher_layer_is_reported(package):
    folder = package(judge__rules="def f():\n    from annie_quant.report import build\n", report="")
    code, lines = check("check_imports.py", folder)
    assert code == 1 and len(lines) == 1
    assert (
        lines[0].startswith("annie_quant/judge/rules.py:2:") and "may not import report" in lines[0]
    )


def test_a_forbidden_library_is_reported(package):
    code, lines = check("check_imports.py", package(bench__runner="import torch\n"))
    assert code == 1 and "bench may not import torch" in lines[0]


def test_an_import_from_a_module_that_is_gone_is_reported(package):
    code, lines = check(
        "check_imports.py", package(judge__rules="from annie_quant.judge.gone import gate\n")
    )
    assert code == 1 and lines == [
        "annie_quant/judge/rules.py:1: there is no module annie_quant.judge.gone"
    ]


def test_a_cycle_of_modules_is_reported(package):
    folder = package(
        bench__a="from annie_quant.bench.b import x\n",
        bench__b="from annie_quant.bench.c import x\n",
        bench__c="from annie_quant.bench import a\n",
        bench__d="from annie_quant.bench import a\n",
    )
    code, lines = check("check_imports.py", folder)
    assert code == 1 and len(lines) == 3 and all("import each other" in line for line in lines)


def test_imports_for_type_checking_are_ignored(package):
    text = "from typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n    from annie_quant.report import build\n"
    assert check("check_imports.py", package(judge__rules=text, report="")) == (0, [])

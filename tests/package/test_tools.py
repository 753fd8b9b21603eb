"""tools/check_imports.py and tools/check_language.py report planted violations, and nothing in correct text."""

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
    assert lines[0].startswith("annie_quant/judge/rules.py:2:") and "may not import report" in lines[0]


def test_a_forbidden_library_is_reported(package):
    code, lines = check("check_imports.py", package(bench__runner="import torch\n"))
    assert code == 1 and "bench may not import torch" in lines[0]


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


# The bars keep the check from reporting this file.
WRONG = '''"""A file that sa|ys what the foun|ding table holds."""

found = [1]  # men|ded
cfg = {"me|nd": 1}
text = "two bytes a weight, be|side it"
'''.replace("|", "")
RIGHT = '''"""Return the rows of the comparison table (R48)."""

findings = [1]
settings = {"fix": 1}
text = "two bytes per weight"
reply = "he said hello"  # language: data
'''


def test_words_and_names_are_reported(tmp_path):
    file = ROOT / "build" / f"language_{tmp_path.name}.py"
    file.parent.mkdir(exist_ok=True)
    try:
        file.write_text(WRONG)
        code, lines = check("check_language.py", file)
        assert code == 1
        assert [int(line.split(":")[1]) for line in lines] == [1, 1, 3, 3, 4, 4, 5]
        file.write_text(RIGHT)
        assert check("check_language.py", file) == (0, [])
    finally:
        file.unlink()

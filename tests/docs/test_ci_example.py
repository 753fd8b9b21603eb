"""The GitHub Actions example: valid YAML, whose commands exist and whose tests pass and fail as they should."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from bench_cases import folder_of
from command_line import options_of
from paths import ROOT

FOLDER = ROOT / "examples" / "ci"


def test_the_workflow_is_valid_and_its_commands_exist():
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    workflow = yaml.safe_load((FOLDER / "benchmark.yml").read_text())
    steps = workflow["jobs"]["benchmark"]["steps"]
    scripts = "\n".join(step.get("run", "") for step in steps).replace("\\\n", " ")
    used = re.findall(r"annie-quant ([a-z]+)([^\n|]*)", scripts)
    assert {name for name, _ in used} == {"bench", "report"}
    for name, rest in used:
        known = set(options_of(name))
        assert set(re.findall(r"(?<!\S)--[a-z-]+", rest.split("#")[0])) <= known
    assert all("uses" in step or "run" in step for step in steps)
    assert "test_served_model.py" in scripts and (FOLDER / "test_served_model.py").is_file()


def outcome(run, baseline):
    words = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(FOLDER),
        "-c",
        os.devnull,
    ]
    words += [
        "--annie-run",
        str(run),
        "--annie-baseline",
        str(baseline),
        "-k",
        "significant",
        str(FOLDER / "test_served_model.py"),
    ]
    done = subprocess.run(
        words,
        capture_output=True,
        text=True,
        timeout=120,
        cwd=FOLDER,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    return done.returncode, done.stdout


def test_the_gate_passes_without_a_loss_and_fails_on_one(tmp_path):
    release, equal, slower = (
        folder_of(tmp_path / name, shift) for name, shift in (("r", 1.0), ("e", 1.001), ("s", 1.3))
    )
    code, text = outcome(equal, release)
    assert code == 0, text
    code, text = outcome(slower, release)
    assert code == 1 and "ttft_content_ms" in text, text

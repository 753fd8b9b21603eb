"""Groups of tests that a run leaves out (tests/helpers/run_groups.py), and the list of `make test-quick`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import run_groups
from paths import HELPERS, ROOT, TESTS

CONFTEST = f"""
import sys
sys.path.insert(0, {str(HELPERS)!r})
import run_groups
run_groups.has_gpu = lambda: GPU
def pytest_addoption(parser):
    run_groups.add_options(parser)
def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: x")
    run_groups.register(config)
"""
GPU_TESTS = """
import pytest
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPU == 0, reason="needs a CUDA GPU")]
@pytest.mark.parametrize("n", range(5))
def test_gpu(n):
    pass
"""


def run(folder: Path, *arguments: str, gpu: bool = False) -> str:
    (folder / "conftest.py").write_text(CONFTEST.replace("GPU", str(gpu)))
    (folder / "test_gpu.py").write_text(GPU_TESTS.replace("GPU == 0", str(not gpu)))
    (folder / "test_cpu.py").write_text("def test_cpu():\n    pass\n")
    env = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-ra",
        "-p",
        "xdist.plugin",
        "-p",
        "no:cacheprovider",
        *arguments,
    ]
    return subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, check=False
    ).stdout


@pytest.mark.parametrize("workers", ["0", "2"])
def test_without_a_gpu_the_group_is_one_line(tmp_path, workers):
    printed = run(tmp_path, "-n", workers)
    assert (
        "5 GPU tests not run: no CUDA device here; where one is: python -m pytest -m gpu" in printed
    )
    assert "1 passed" in printed and "SKIPPED" not in printed


def test_with_a_gpu_they_run(tmp_path):
    assert "6 passed" in run(tmp_path, gpu=True)


def test_selected_alone_each_is_skipped_with_its_reason(tmp_path):
    printed = run(tmp_path, "test_gpu.py")
    assert "5 skipped" in printed and "needs a CUDA GPU" in printed and "not run" not in printed


def test_every_test_that_needs_a_gpu_has_the_marker():
    """A file whose tests are skipped because there is no GPU is in the group."""
    for file in TESTS.rglob("test_*.py"):
        text = file.read_text()
        if (
            "needs a CUDA GPU" in text.replace("need a CUDA GPU", "needs a CUDA GPU")
            and file.name != Path(__file__).name
        ):
            assert "pytest.mark.gpu" in text, file.name


def test_quick_runs_only_the_listed_files(tmp_path, monkeypatch):
    group = run_groups.QuickGroup({"a/test_x.py": 1.0}, tmp_path)
    assert group.pytest_ignore_collect(tmp_path / "a/test_x.py") is None
    assert group.pytest_ignore_collect(tmp_path / "a/test_y.py") is True
    assert group.pytest_ignore_collect(tmp_path / "a") is None


def test_the_quick_list_is_short_and_covers_the_packages():
    """Two cores and 90 s are 180 processor seconds; a third of them is for starting and collecting."""
    files = run_groups.listed_files()
    assert all((ROOT / file).is_file() for file in files) and sum(files.values()) <= 120
    covered = {file.split("/")[1] for file in files}
    packages = {f.parent.name for f in TESTS.glob("*/test_*.py")}
    slow = {"assets", "offline", "integration", "quantize", "fuzzing"}  # torch, models, servers
    assert packages - covered <= slow


def test_parallel_runs_start_with_the_files_that_take_longest(tmp_path):
    """The file of one test is run before that of three, which pytest-xdist's own order begins with."""
    (tmp_path / "test_many.py").write_text(
        "import pytest\n@pytest.mark.parametrize('n', range(3))\ndef test_x(n): pass\n"
    )
    (tmp_path / "test_slow.py").write_text("def test_x(): pass\n")
    (tmp_path / "conftest.py").write_text(
        f"import sys\nsys.path.insert(0, {str(HELPERS)!r})\nimport pathlib, run_groups\n"
        "def pytest_configure(config):\n    if hasattr(config, 'workerinput'):\n"
        "        order = run_groups.LongestFirst({'test_slow.py': 9.0}, pathlib.Path(__file__).parent)\n"
        "        config.pluginmanager.register(order)\n"
    )
    flags = [
        "-v",
        "-n",
        "1",
        "--dist",
        "loadfile",
        "--no-loadscope-reorder",
        "-p",
        "xdist.plugin",
        "-p",
        "no:cacheprovider",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *flags], cwd=tmp_path, capture_output=True, text=True, check=True,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )  # fmt: skip
    assert (
        next(line for line in done.stdout.splitlines() if "PASSED" in line).split()[-1]
        == "test_slow.py::test_x"
    )


def test_one_worker_runs_all_files_that_import_modelopt(tmp_path):
    for name in "abcdef":
        (tmp_path / f"test_{name}.py").write_text(
            f"def test_x(): pass\n{'# modelopt.torch' if name in 'bdf' else ''}"
        )
    printed = run(tmp_path, "-vv", "-n", "3", "--dist", "loadfile")
    ran = {
        file: worker for worker, file in re.findall(r"\[(gw\d)\].* PASSED (test_\w+)\.py", printed)
    }
    assert len(ran) == 7 and ran["test_b"] == ran["test_d"] == ran["test_f"]


def test_the_listed_slow_files_are_there_and_make_orders_by_them():
    assert all((ROOT / file).is_file() for file in run_groups.listed_files(run_groups.SLOW_FILES))
    assert "--no-loadscope-reorder" in (ROOT / "Makefile").read_text()

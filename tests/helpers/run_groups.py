"""Groups of tests that a run leaves out as a whole, with one line in the summary: GPU tests without a GPU, all but quick files.

gpu       tests with the marker `gpu`. Without a CUDA device they are deselected, unless nothing else was selected or -m names the
          marker: then each is skipped with its own reason.
--quick   only the files of tests/quick.txt (`make test-quick`); the others are not even imported.

--cpu-times FILE (with -n 0) writes the processor seconds of each test file with its child processes, as tests/quick.txt has them.
Parallel runs start with the files that take longest (tests/slow.txt), so that no worker is left with one of them at the end;
pytest-xdist's own order, by the number of tests, puts files of few and long tests last. One worker runs all files that import
ModelOpt, which takes four seconds of the processor in each.
"""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
QUICK_FILES, SLOW_FILES = ROOT / "tests/quick.txt", ROOT / "tests/slow.txt"
MODELOPT = re.compile(r"modelopt\.torch|modelopt_backend|import .*\b(simulated|dequantized)\b")
HOW = "python -m pytest -m gpu"


def has_gpu() -> bool:
    """Return whether a CUDA device can be used, by our kernels or by torch."""
    try:
        from annie_quant import gemm

        if gemm.device_count():
            return True
    except Exception:
        pass  # annie_quant._gemm is not built, or the driver is missing
    return "torch" in sys.modules and sys.modules["torch"].cuda.is_available()


def listed_files(listing: Path = QUICK_FILES) -> dict[str, float]:
    """Return the listed files, relative to the repository, with the seconds that each was measured to take."""
    rows = (
        line.split()
        for line in listing.read_text().splitlines()
        if line and not line.startswith("#")
    )
    return {path: float(seconds) for seconds, path in rows}


class GpuGroup:
    """Deselects GPU tests where there is no GPU, and reports their number; pytest-xdist's workers send it to the controller."""

    def __init__(self) -> None:
        self.left_out = 0

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        group = [item for item in items if item.get_closest_marker("gpu")]
        named = re.search(r"\bgpu\b", str(config.option.markexpr))
        if not group or len(group) == len(items) or named or has_gpu():
            return
        chosen = set(map(id, group))
        items[:] = [item for item in items if id(item) not in chosen]
        config.hook.pytest_deselected(items=group)
        self.left_out = len(group)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["gpu_tests"] = self.left_out

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        self.left_out = max(self.left_out, getattr(node, "workeroutput", {}).get("gpu_tests", 0))

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self.left_out:
            terminalreporter.write_line(
                f"{self.left_out} GPU tests not run: no CUDA device here; where one is: {HOW}"
            )


class QuickGroup:
    """Collects only the files of tests/quick.txt."""

    def __init__(self, files: dict[str, float], root: Path = ROOT) -> None:
        self.files = {root / file for file in files}
        self.ignored: set[Path] = set()

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        if collection_path.suffix == ".py" and collection_path not in self.files:
            self.ignored.add(collection_path)
            return True
        return None

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        terminalreporter.write_line(
            f"quick: {len(self.files)} files (tests/quick.txt); all tests: make test"
        )


class LongestFirst:
    """Orders the tests of pytest-xdist's workers by their files' seconds; files without a measurement keep their order, last."""

    def __init__(self, seconds: dict[str, float], root: Path = ROOT) -> None:
        self.seconds = {root / file: value for file, value in seconds.items()}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items.sort(key=lambda item: -self.seconds.get(item.path, 0.0))


class ModelOptTogether:
    """Gives the files that import ModelOpt to one of pytest-xdist's workers, as if they were one file."""

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Any) -> Any:
        if config.getoption("dist") != "loadfile":
            return None
        from xdist.scheduler import LoadFileScheduling

        @functools.cache
        def imports_modelopt(file: str) -> bool:
            return bool(MODELOPT.search((config.rootpath / file).read_text()))

        class Scheduling(LoadFileScheduling):
            def _split_scope(self, nodeid: str) -> str:
                file = super()._split_scope(nodeid)
                return "ModelOpt" if imports_modelopt(file) else file

        return Scheduling(config, log)


class CpuTimes:
    """Measures the processor time of each file's tests, which depends less than the wall time on what else runs on the machine."""

    def __init__(self, output: Path) -> None:
        self.output = output
        self.seconds: dict[str, float] = {}

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        start = sum(os.times()[:4])
        yield
        file = item.location[0]
        self.seconds[file] = self.seconds.get(file, 0.0) + sum(os.times()[:4]) - start

    def pytest_sessionfinish(self) -> None:
        lines = [f"{seconds:6.2f} {file}\n" for file, seconds in sorted(self.seconds.items())]
        self.output.write_text("".join(lines))


def add_options(parser: pytest.Parser) -> None:
    parser.addoption(
        "--quick", action="store_true", help="Only the files of tests/quick.txt (make test-quick)."
    )
    parser.addoption(
        "--cpu-times", metavar="FILE", help="Write the processor seconds of each test file."
    )


def register(config: pytest.Config) -> None:
    config.pluginmanager.register(GpuGroup(), "gpu_group")
    if config.getoption("--quick"):
        config.pluginmanager.register(QuickGroup(listed_files()), "quick_group")
    config.pluginmanager.register(ModelOptTogether(), "modelopt_together")
    if hasattr(config, "workerinput"):
        config.pluginmanager.register(
            LongestFirst(listed_files() | listed_files(SLOW_FILES)), "longest_first"
        )
    if output := config.getoption("--cpu-times"):
        config.pluginmanager.register(CpuTimes(Path(output)), "cpu_times")

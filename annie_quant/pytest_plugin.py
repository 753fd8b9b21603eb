"""A pytest plug-in (entry point pytest11): a user's CI asserts gates and latency of a run against a stored one.

    pytest --annie-run runs/today --annie-baseline runs/release

    @pytest.mark.annie_gate("tool_call", backend="nvfp4")     fails where that gate of the run did not pass
    def test_tools(annie_run): ...

    def test_manners(annie_run): annie_run.assert_gates("nvfp4")
    def test_speed(annie_run, annie_baseline): annie_run.assert_no_loss(annie_baseline, least_loss=0.05)

Without --annie-run such tests are skipped with that reason. Importing this costs nothing: the package is loaded when a
run is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest


class Run:
    """A finished run directory of `annie-quant bench`."""

    def __init__(self, folder: Path) -> None:
        from annie_quant.errors import UsageError
        from annie_quant.files import read_json

        self.folder = Path(folder)
        try:
            self.served: Mapping[str, Any] = read_json(self.folder / "bench.json")["aggregates"]["served"]
        except (OSError, KeyError, ValueError) as error:
            raise UsageError(
                f"{folder} holds no finished benchmark ({error})", "annie-quant bench ... --output " + str(folder)
            ) from None

    def gate(self, name: str, backend: str | None = None) -> Mapping[str, Any]:
        """A gate's row: passes, n, low, high, verdict. `backend` may be left out where the run has one."""
        gates = self._side(backend)["gates"]
        assert name in gates, f"{self.folder}: the gate {name!r} was not judged; there are {', '.join(gates)}"
        return gates[name]

    def assert_gates(self, backend: str | None = None, *names: str) -> None:
        """Every deciding gate (or those named) passed."""
        gates = self._side(backend)["gates"]
        wanted = names or [name for name, row in gates.items() if not row["advisory"]]
        bad = [
            f"{row['title']}: {row['verdict']}, {row['passes']} of {row['n']} (95 % {row['low']:.3f} to {row['high']:.3f})"
            for row in (self.gate(name, backend) for name in wanted)
            if row["verdict"] != "pass"
        ]
        assert not bad, "; ".join(bad)

    def metric(self, workload: str, name: str, backend: str | None = None) -> Mapping[str, Any]:
        """A metric's p50, p90, p99, mean, low, high, n: run.metric("greeting", "ttft_content_ms")["p90"]."""
        found = self._side(backend)["workloads"].get(workload, {}).get(name)
        assert found, f"{self.folder}: {workload} has no {name}"
        return found

    def assert_no_loss(self, baseline: Run, least_loss: float = 0.02) -> None:
        """Nothing got worse for sure against `baseline` by more than `least_loss` (a share), and no gate was lost."""
        from annie_quant import bench

        lost = bench.losses(bench.regression(baseline.folder, self.folder, least_loss))
        assert not lost, "; ".join(lost)

    def _side(self, backend: str | None) -> Mapping[str, Any]:
        if backend is None:
            assert len(self.served) == 1, f"{self.folder} has several backends, name one of {', '.join(self.served)}"
            return next(iter(self.served.values()))
        assert backend in self.served, f"{self.folder} has no backend {backend!r}, but {', '.join(self.served)}"
        return self.served[backend]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("annie_quant")
    group.addoption("--annie-run", metavar="DIR", help="run directory of annie-quant bench whose gates are asserted")
    group.addoption("--annie-baseline", metavar="DIR", help="stored run directory that the run is compared with")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "annie_gate(name, backend=None): the run's gate must have passed")


@pytest.fixture(scope="session")
def annie_run(request: pytest.FixtureRequest) -> Run:
    return _run(request, "--annie-run")


@pytest.fixture(scope="session")
def annie_baseline(request: pytest.FixtureRequest) -> Run:
    return _run(request, "--annie-baseline")


def _run(request: pytest.FixtureRequest, option: str) -> Run:
    return _read(request.config, option)


def _read(config: pytest.Config, option: str) -> Run:
    folder = config.getoption(option)
    if folder is None:
        pytest.skip(f"no run directory was given ({option} DIR)")
    return Run(Path(folder))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    """In the call, not in a fixture: a gate that did not pass is the test's failure, not an error of its setting-up."""
    for mark in item.iter_markers("annie_gate"):
        _read(item.config, "--annie-run").assert_gates(mark.kwargs.get("backend"), *mark.args)

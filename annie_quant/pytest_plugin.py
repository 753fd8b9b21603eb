"""A pytest plug-in (entry point pytest11): tests that assert the gates and the latency of a benchmark.

    pytest --annie-run runs/today --annie-baseline runs/release

    @pytest.mark.annie_gate("tool_call", backend="nvfp4")     fails where that gate of the run did not pass
    def test_tools(annie_run): ...

    def test_gates(annie_run): annie_run.assert_gates("nvfp4")
    def test_speed(annie_run, annie_baseline): annie_run.assert_no_loss(annie_baseline, least_loss=0.05)

--annie-candidate, --annie-reference and --annie-incumbent NAME judge the run with these roles, as `annie-quant report` does.
Without --annie-run such tests are skipped. Importing this module is cheap: the package is loaded when a run is read.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest

if TYPE_CHECKING:
    from annie_quant.core.untrusted import JsonObject
    from annie_quant.documents import ServedSide

_ROLES = ("candidate", "reference", "incumbent")


class AssertedRun:
    """A finished run directory of `annie-quant bench`.

    candidate, reference, incumbent: sides, instead of the run's roles.
    """

    def __init__(
        self,
        folder: Path,
        candidate: str | None = None,
        reference: str | None = None,
        incumbent: str | None = None,
    ) -> None:
        from annie_quant import documents

        self.folder = Path(folder)
        stated = documents.Roles(candidate=candidate, reference=reference, incumbent=incumbent)
        if stated.names:
            from annie_quant.report.recheck import judge_again

            self.aggregates = judge_again(self.folder, stated).aggregates
        else:
            self.aggregates = documents.read_bench(self.folder).aggregates
        self.served = self.aggregates.served

    def gate(self, name: str, backend: str | None = None) -> JsonObject:
        """Return a gate's passes, n, low, high, verdict, ... `backend` may be omitted where the run has one."""
        gates = self._side(backend).gates
        assert name in gates, (
            f"{self.folder}: gate {name!r} was not judged; it has {', '.join(gates)}"
        )
        return msgspec.structs.asdict(gates[name])

    def assert_gates(self, backend: str | None = None, *names: str) -> None:
        """Assert that the backend keeps every deciding gate (or the named ones) of the run's reference, on the same prompts.

        Without names the run's decision is asserted, as the exit code of `annie-quant bench` has it: also all gates together,
        speed limits, and other arithmetics that the run has of this model. In a run without a reference a gate passes by its
        absolute requirement. An undecided gate fails the assertion.
        """
        from annie_quant.judge import decision
        from annie_quant.judge.decision import wording

        if backend is None and not names:
            backend = decision.roles_of(self.aggregates).candidate
        self._side(backend)
        if not names:
            chosen = decision.candidate_decision(self.aggregates, backend)
            assert chosen is not None and chosen.judged.gates, f"{self.folder}: no gate was judged"
            open_or_lost = [
                wording.reason(gate) for gate in chosen.judged.gates if gate.verdict != "keeps"
            ]
            open_or_lost += [f.message for f in chosen.confounds if f.severity == "confound"]
            assert not open_or_lost, "; ".join(open_or_lost)
            return
        failed = [
            f"{r['title']}: {r['verdict']}, {r['passes']} of {r['n']} (95 % {r['low']:.3f} to {r['high']:.3f}; {r['rule']})"
            for r in (self.gate(name, backend) for name in names)
            if r["verdict"] != "pass"
        ]
        assert not failed, "; ".join(failed)

    def metric(self, workload: str, name: str, backend: str | None = None) -> JsonObject:
        """Return a metric's p50, p90, p99, mean, low, high, n: run.metric("greeting", "ttft_content_ms")["p90"]."""
        workloads = self._side(backend).workloads
        summary = getattr(workloads.get(workload), name, None)
        assert isinstance(summary, msgspec.Struct), (
            f"{self.folder}: workload {workload} has no metric {name}"
        )
        return msgspec.structs.asdict(summary)

    def assert_no_loss(self, baseline: AssertedRun, least_loss: float = 0.02) -> None:
        """Assert that no metric got significantly worse than in `baseline`, and that no gate was lost.

        least_loss: the smallest loss that counts, a share of the metric's median.
        """
        from annie_quant import bench

        lost = bench.losses(bench.regression(baseline.folder, self.folder, least_loss))
        assert not lost, "; ".join(lost)

    def _side(self, backend: str | None) -> ServedSide:
        if backend is None:
            assert len(self.served) == 1, (
                f"{self.folder} has several backends, name one of {', '.join(self.served)}"
            )
            return next(iter(self.served.values()))
        assert backend in self.served, (
            f"{self.folder} has no backend {backend!r}, it has {', '.join(self.served)}"
        )
        return self.served[backend]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("annie_quant")
    group.addoption(
        "--annie-run",
        metavar="DIR",
        help="run directory of annie-quant bench whose gates are asserted",
    )
    group.addoption(
        "--annie-baseline", metavar="DIR", help="stored run directory that the run is compared with"
    )
    for role in _ROLES:
        group.addoption(
            f"--annie-{role}", metavar="NAME", help=f"the run's {role}, instead of the stored one"
        )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "annie_gate(name, backend=None): the run's gate must have passed"
    )


@pytest.fixture(scope="session")
def annie_run(request: pytest.FixtureRequest) -> AssertedRun:
    return _read(request.config, "--annie-run")


@pytest.fixture(scope="session")
def annie_baseline(request: pytest.FixtureRequest) -> AssertedRun:
    return _read(request.config, "--annie-baseline")


def _read(config: pytest.Config, option: str) -> AssertedRun:
    folder = config.getoption(option)
    if folder is None:
        pytest.skip(f"no run directory was given ({option} DIR)")
    roles = {role: config.getoption(f"--annie-{role}") for role in _ROLES}
    return AssertedRun(Path(folder), **(roles if option == "--annie-run" else {}))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    """Check marked gates in the call, not in a fixture: a gate that did not pass is a failure, not a setup error."""
    for mark in item.iter_markers("annie_gate"):
        _read(item.config, "--annie-run").assert_gates(mark.kwargs.get("backend"), *mark.args)

"""Gates and speed of the run that examples/ci/benchmark.yml measured: pytest --annie-run DIR --annie-baseline DIR."""

import pytest


@pytest.mark.annie_gate("tool_call", backend="candidate")
def test_tool_calls():
    pass


def test_all_gates(annie_run):
    annie_run.assert_gates("candidate")


def test_no_significant_loss(annie_run, annie_baseline):
    annie_run.assert_no_loss(annie_baseline, least_loss=0.05)

"""The pytest plug-in, run in a separate pytest as a user's CI runs it."""

from __future__ import annotations

import json

import numpy  # noqa: F401 - pytester forgets modules that a test was the first to load, and NumPy loads only once
import pytest
import scipy.stats  # noqa: F401
from bench_cases import folder_of

pytest_plugins = ["pytester"]

CHECKS = """
import pytest

@pytest.mark.annie_gate("non_empty")
def test_gate():
    pass

def test_gates(annie_run):
    annie_run.assert_gates("a")

def test_metric(annie_run):
    assert annie_run.metric("w", "ttft_content_ms")["p50"] < 130

def test_speed(annie_run, annie_baseline):
    annie_run.assert_no_loss(annie_baseline)

def test_wrong_name(annie_run):
    with pytest.raises(AssertionError, match="no backend 'b'"):
        annie_run.assert_gates("b")
"""


@pytest.fixture
def check(pytester, monkeypatch):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makepyfile(CHECKS)

    def run(*arguments):
        return pytester.runpytest_subprocess(
            "-p", "annie_quant.pytest_plugin", "--strict-markers", "-rs", *arguments
        )

    return run


def stored(where, shift, leaks=0):
    folder = folder_of(where, shift, leaks)
    if not leaks:
        rows = [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]
        assert all(row.get("checks") for row in rows), "the fixture's rows must have been judged"
    return folder


def test_a_passing_run(check, tmp_path):
    before, after = stored(tmp_path / "before", 1.0), stored(tmp_path / "after", 1.0001)
    check(f"--annie-run={after}", f"--annie-baseline={before}").assert_outcomes(passed=5)


def test_a_slower_run_and_a_lost_gate_fail_with_their_figures(check, tmp_path):
    before, after = stored(tmp_path / "before", 1.0), stored(tmp_path / "after", 1.2, leaks=6)
    result = check(f"--annie-run={after}", f"--annie-baseline={before}")
    result.assert_outcomes(passed=1, failed=4)
    result.stdout.fnmatch_lines(
        ["*non-empty: fail, 24 of 30*", "*worse: a w ttft_content_ms*", "*gate lost: a non_empty*"]
    )


def test_without_a_run_the_skip_has_a_reason(check):
    result = check()
    result.assert_outcomes(skipped=5)
    result.stdout.fnmatch_lines(["*no run directory was given (--annie-run DIR)*"])


def test_a_folder_without_a_run_is_a_one_line_error(check, tmp_path):
    result = check(f"--annie-run={tmp_path}", "-k", "metric")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*holds no finished benchmark*"])

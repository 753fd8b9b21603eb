"""For every test: OpenMP threads that sleep when idle, as the command line has them, before torch is loaded; and the signals of
Ctrl-C and of a closed terminal as a terminal has them, because a shell starts background jobs with SIGINT ignored, nohup ignores
SIGHUP, and the processes of the tests inherit that.
Groups of tests that a run leaves out: tests/helpers/run_groups.py.

Hypothesis draws the same inputs in every run, so a run that fails fails for a change; new inputs are for `make test-thorough`.

pytest-xdist's workers share the processors: with two workers that have two threads each on two cores, the threads of such small
models mostly wait for each other. One test of quantize/test_awq.py takes 33 s of processor time with two threads and 22 with one
(2026-11-22, a crowded machine, n = 1)."""

import contextlib
import gc
import os
import signal
import sys

import pytest
import randomised
import run_groups

# Also where PYTHONDONTWRITEBYTECODE is set: else each worker and each of the hundreds of processes compiles the package again,
# which takes 12 s of the processor per worker.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
randomised.load_profile()
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
if workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0")):
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // workers)))
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    with contextlib.suppress(ValueError):  # not the main thread
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers():
    """One worker more than processors for `-n auto`: some tests wait for servers and time limits (in tests/bench 86 of 119 s)."""
    return (
        None if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ else len(os.sched_getaffinity(0)) + 1
    )


def pytest_addoption(parser):
    run_groups.add_options(parser)


def pytest_configure(config):
    run_groups.register(config)


def pytest_collection():
    """No garbage collection while 5,000 tests, torch and transformers are created, which all stay, and none of them later."""
    gc.disable()


def pytest_collection_finish():
    gc.freeze()
    gc.enable()

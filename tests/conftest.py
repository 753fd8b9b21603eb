"""For every test: OpenMP threads that sleep when idle, as the command line has them, before torch is loaded; and Ctrl-C's signal
as a terminal has it, because a shell starts background jobs with SIGINT ignored and the processes of the tests inherit that.
Groups of tests that a run leaves out: tests/helpers/run_groups.py."""

import contextlib
import os
import signal

import run_groups

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    with contextlib.suppress(ValueError):  # not the main thread
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser):
    run_groups.add_options(parser)


def pytest_configure(config):
    run_groups.register(config)

"""For every test: OpenMP threads that sleep when idle, as the command line has them, before torch is loaded; and Ctrl-C's signal
as a terminal has it, because a shell starts background jobs with SIGINT ignored and the processes of the tests inherit that."""

import contextlib
import os
import signal

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    with contextlib.suppress(ValueError):  # not the main thread
        signal.signal(signal.SIGINT, signal.default_int_handler)

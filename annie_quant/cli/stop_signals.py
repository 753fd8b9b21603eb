"""Signals that ask a command to stop: SIGINT, SIGTERM (systemd, docker, kill) and SIGHUP (a closed terminal).

Each raises in the main thread, so that servers, temporary files and locks are cleaned up as after Ctrl-C.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import sys
import threading
from typing import NoReturn


class Stopped(KeyboardInterrupt):
    """A signal other than SIGINT asked this process to stop. All code treats it as Ctrl-C."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def end_process(self) -> NoReturn:
        """Stop servers, then end by the same signal: systemd and docker count that as a clean stop, an exit code not."""
        logging.shutdown()
        atexit._run_exitfuncs()  # a signal's default action does not run them
        sys.stdout.flush()
        sys.stderr.flush()
        signal.signal(self.number, signal.SIG_DFL)
        os.kill(os.getpid(), self.number)
        os._exit(128 + self.number)


def stop_signals_raise() -> None:
    """Install the handlers. Does nothing outside the main thread, where Python allows none.

    A shell without job control starts background commands with SIGINT ignored; they would then ignore `kill -INT` as
    well, so it is handled again. SIGHUP stays ignored under nohup.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, _raise)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        signal.signal(signal.SIGHUP, _raise)


def _raise(number: int, _: object) -> NoReturn:
    signal.signal(number, signal.SIG_IGN)  # a second one must not interrupt the cleaning up
    raise Stopped(number)

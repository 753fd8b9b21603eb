"""What reaches a command from outside: a full disk, too little memory, permissions; signals; messages of libraries.

A stop signal (SIGINT, SIGTERM of systemd, docker and kill, SIGHUP of a closed terminal) raises in the main thread, so that
servers, temporary files and locks are cleaned up as after Ctrl-C. Log records and warnings of libraries, which may quote a file,
are cleaned before they reach a terminal.
"""

from __future__ import annotations

import atexit
import errno
import logging
import os
import resource
import signal
import sys
import threading
import warnings
from typing import NoReturn

from annie_quant.core import files
from annie_quant.core.text import printable

# errno values, and texts that libraries use in exceptions of their own types.
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG), ("No space left on device",)
MEMORY = (
    (errno.ENOMEM,),
    ("allocate memory", "out of memory", "bad_alloc", "start new thread", "failed to map segment"),
)


def describe(error: Exception) -> tuple[str, str] | None:
    """Return (message, hint) for an error of the system: disk, memory, permissions. None for any other error."""
    if _is_caused_by(error, *DISK_FULL):
        return (
            "the disk is full; finished work is saved",
            "free some space, then run the same command again",
        )
    # Under ulimit -v libraries cannot be loaded either. oneDNN's message does not mention memory.
    limited = resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY
    not_loaded = limited and (
        isinstance(error, (ImportError, SystemError))
        or _is_caused_by(error, (), ("could not create a primitive",))
    )
    if isinstance(error, MemoryError) or not_loaded or _is_caused_by(error, *MEMORY):
        return (
            "there is not enough memory; finished work is saved",
            "stop other programs, or raise ulimit -v, and run the same command again",
        )
    if isinstance(
        error, EOFError
    ):  # Python 3.11 and earlier keep a compiled module that a full disk has cut
        return (
            f"a file ends too early ({error}); finished work is saved",
            "free some space, delete the package's __pycache__ folders, and run the same command again",
        )
    if isinstance(error, RecursionError):
        return (
            "a file or an answer is nested too deeply",
            "restore the file; set ANNIE_QUANT_TRACEBACK=1 for the place",
        )
    if not isinstance(error, OSError):
        return None
    where = f"{error.filename}: " if error.filename else ""
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS) and error.filename:
        message = f"{where}{error.strerror}{files.owner(error.filename)}"
        return message, "choose another --output, or fix the permissions"
    return f"{where}{error.strerror or error}", "set ANNIE_QUANT_TRACEBACK=1 for the traceback"


def _is_caused_by(
    error: BaseException | None, numbers: tuple[int, ...], texts: tuple[str, ...]
) -> bool:
    """Whether the error, or one in its chain of causes, has one of these errno values or texts."""
    while error is not None:
        if getattr(error, "errno", None) in numbers or any(text in str(error) for text in texts):
            return True
        error = error.__cause__ or error.__context__
    return False


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


MAX_MESSAGE = 2000


class CleanRecord(logging.LogRecord):
    """A log record whose text is printable."""

    def getMessage(self) -> str:
        return printable(super().getMessage(), MAX_MESSAGE, lines=True)


def clean_library_messages() -> None:
    """Clean everything that is logged or warned about in this process from now on."""
    logging.setLogRecordFactory(CleanRecord)
    warnings.formatwarning = _format


def _format(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    line: str | None = None,
) -> str:
    return f"{category.__name__}: {printable(str(message), MAX_MESSAGE)}\n"

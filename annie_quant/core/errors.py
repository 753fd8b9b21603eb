"""Errors that a user meets: one line, the next command, and an exit code."""

from __future__ import annotations

import importlib
from types import ModuleType

from annie_quant.core.text import printable

MAX_MESSAGE_CHARACTERS = 2000  # characters
EXIT_CODES = {
    0: "success",
    1: "a gate failed, or a check found a fault",
    2: "usage: the command line or a file given to it is invalid",
    3: "environment: something is missing on this machine, or a checkpoint cannot be used",
    4: "server: it did not start, did not become ready, or stopped answering",
    130: "interrupted; the same command resumes",
}


class AnnieError(Exception):
    """An expected error.

    `message` is one printable line; `hint` is the next command to run, or what to change.
    """

    exit_code = 1

    def __init__(self, message: str, hint: str = "") -> None:
        # Both may quote a file or a server.
        self.message = printable(message, MAX_MESSAGE_CHARACTERS)
        self.hint = printable(hint, MAX_MESSAGE_CHARACTERS, lines=True)
        super().__init__(self.message)


class UsageError(AnnieError):
    """The call is not valid: a bad option, a pattern that matches nothing."""

    exit_code = 2


class EnvironmentFault(AnnieError):
    """Something is missing on this machine: a package, a compiler, a GPU, disk space, a file."""

    exit_code = 3


class DiskFull(EnvironmentFault):
    """The disk has too little space for an output.

    No strategy can avoid this, so a search stops at it.
    """


class CheckpointError(EnvironmentFault):
    """A model folder cannot be used.

    The message names the file, the tensor, what was expected and what was got.
    """


class ServerError(AnnieError):
    """A server did not start, did not become ready, or stopped answering."""

    exit_code = 4


def need(module: str, extra: str) -> ModuleType:
    """Import an optional package and return it.

    Raises EnvironmentFault that names the extra which installs it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        message = f"{error.name or module} is needed here and is not installed"
        raise EnvironmentFault(message, f'pip install "annie-quant[{extra}]"') from error
    except ImportError as error:
        message = f"{module} is installed and cannot be loaded ({error})"
        raise EnvironmentFault(message, f"free some memory, or reinstall {module}") from error

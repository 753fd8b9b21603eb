"""What can go wrong, as a user meets it: one clear line, the next command, and an exit code.

Exit codes: 0 pass, 1 a gate failed or a fault was found, 2 usage, 3 environment, 4 server, 130 interrupted.
"""

from __future__ import annotations

from typing import Any


class AnnieError(Exception):
    """An expected fault. `hint` is the next command to run, or what to change."""

    exit_code = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(AnnieError):
    """The call asks for something that cannot be: a bad option, a pattern that matches nothing."""

    exit_code = 2


class EnvironmentFault(AnnieError):
    """Something is missing here: a package, a compiler, a GPU, disk, a file."""

    exit_code = 3


class NoRoom(EnvironmentFault):
    """The disk cannot hold what is to be written: of no strategy's making, so that nothing goes on without it."""


class CheckpointError(EnvironmentFault):
    """A model folder that cannot be used: which file, which tensor, what was seen, what was expected."""


class ServerError(AnnieError):
    """A server did not start, did not become ready, or stopped answering."""

    exit_code = 4


def need(module: str, extra: str) -> Any:
    """Import an optional package where it is used, or say which extra brings it."""
    import importlib

    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise EnvironmentFault(
            f"{error.name or module} is needed here and is not installed", f'pip install "annie-quant[{extra}]"'
        ) from error
    except ImportError as error:
        raise EnvironmentFault(
            f"{module} is installed and cannot be loaded ({error})",
            f'free some memory, or install it anew: pip install --force-reinstall "annie-quant[{extra}]"',
        ) from error

"""annie-quant in this process: its own process costs half a second of imports, and ten with torch and transformers.

The commands, their error lines and exit codes are those of `python -m annie_quant`, which tests/package/test_installation.py,
cli/test_commands.py and security/test_remote_code.py start as a process.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from unittest import mock

import cyclopts

from annie_quant import cli

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Tee(io.TextIOWrapper):
    """A text stream that also writes to a second one."""

    def __init__(self, both: io.StringIO) -> None:
        super().__init__(io.BytesIO(), encoding="utf-8", write_through=True)
        self.both = both

    def write(self, text: str) -> int:
        self.both.write(text)
        return super().write(text)

    def text(self) -> str:
        self.flush()
        return self.buffer.getvalue().decode()  # type: ignore[attr-defined]


@contextlib.contextmanager
def isolation(
    stdin: str = "", env: Mapping[str, str] | None = None
) -> Iterator[tuple[Tee, Tee, io.StringIO]]:
    """Replace the standard streams; yields stdout, stderr, and what was written to both, in order."""
    both = io.StringIO()
    stdout, stderr = Tee(both), Tee(both)
    source = io.TextIOWrapper(io.BytesIO(stdin.encode()), encoding="utf-8")
    with (
        mock.patch.object(sys, "stdin", source),
        contextlib.redirect_stdout(stdout),
        contextlib.redirect_stderr(stderr),
        mock.patch.dict(os.environ, {"COLUMNS": "80", **(env or {})}),
    ):
        yield stdout, stderr, both


@dataclass(frozen=True)
class Result:
    """What a command did. exception: its error, which `cli.main` prints as one line."""

    exit_code: int
    stdout: str
    stderr: str
    output: str
    exception: BaseException | None = None


def options_of(command: str) -> dict[str, cyclopts.Argument]:
    """Return the options of a command by name."""
    arguments = cli.app[command].assemble_argument_collection(parse_docstring=True)
    return {
        name: argument
        for argument in arguments
        for name in argument.names
        if name.startswith("--") and not name.startswith("--empty-")
    }


class CliRunner:
    """Runs commands without the error lines of `cli.main`, so that a test sees the exception."""

    def invoke(
        self,
        app: cyclopts.App,
        words: Sequence[str],
        input: str = "",
        catch_exceptions: bool = True,
    ) -> Result:
        code: object = 0
        exception: BaseException | None = None
        with isolation(input) as (stdout, stderr, both):
            try:
                app(list(words), exit_on_error=False, print_error=False)
            except SystemExit as exit_:
                code = exit_.code
                exception = exit_ if code else None
            except cyclopts.CycloptsError as error:
                print(error, file=sys.stderr)
                code = 2
                exception = error
            except Exception as error:
                if not catch_exceptions:
                    raise
                code = 1
                exception = error
        return Result(
            int(code or 0),
            stdout.text(),
            stderr.text(),
            both.getvalue(),
            exception,  # type: ignore[call-overload]
        )


def annie_quant(
    *words: object, env: Mapping[str, str] | None = None, stdin: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run a command and return its exit code, stdout and stderr.

    env: variables that differ.  stdin: what its questions read.
    """
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    factory, formatwarning = logging.getLogRecordFactory(), warnings.formatwarning
    argv = ["annie-quant", *map(str, words)]
    code: object = 0
    try:
        with (
            isolation(stdin, env) as (stdout, stderr, _),
            mock.patch.object(sys, "argv", argv),
        ):
            try:
                cli.main()
            except SystemExit as exit_:
                code = exit_.code
    finally:
        logging.setLogRecordFactory(factory)
        warnings.formatwarning = formatwarning
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return subprocess.CompletedProcess(argv, int(code or 0), stdout.text(), stderr.text())  # type: ignore[call-overload]

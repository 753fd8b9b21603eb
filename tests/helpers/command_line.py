"""annie-quant in this process: its own process costs half a second of imports, and ten with torch and transformers.

The commands, their error lines and exit codes are those of `python -m annie_quant`, which tests/package/test_installation.py,
cli/test_commands.py and security/test_remote_code.py start as a process.
"""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
import warnings
from collections.abc import Mapping
from unittest import mock

from click.testing import CliRunner

from annie_quant import cli

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


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
            CliRunner().isolation(stdin, env) as (stdout, stderr, _),
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
    texts = (stream.getvalue().decode().replace("\r\n", "\n") for stream in (stdout, stderr))
    return subprocess.CompletedProcess(argv, int(code or 0), *texts)  # type: ignore[call-overload]

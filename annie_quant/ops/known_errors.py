"""Known errors of serving runtimes, recognised in a server's log and reported with their fix (R20), and its start phases.

assets/known_errors.json has both: [pattern, cause, fix] and [pattern, title]; patterns ignore case. Errors of SM121's kernels
are in annie_quant/gemm/known_failures.py.
"""

from __future__ import annotations

import re

import msgspec

from annie_quant.core.files import ASSETS
from annie_quant.gemm.known_failures import KnownFailure, find_failure

PARSER_FLAGS = "--reasoning-parser qwen3 --enable-auto-tool-choice --tool-call-parser qwen3_coder"


class KnownErrors(msgspec.Struct):
    """phases: (pattern of a line of the log, title), in their order."""

    errors: list[KnownFailure]
    phases: list[tuple[str, str]]


KNOWN = msgspec.json.decode((ASSETS / "known_errors.json").read_bytes(), type=KnownErrors)


def find_error(log: str) -> KnownFailure | None:
    """Return the known error of the first line that has one, or None."""
    failures = (find_failure(line, KNOWN.errors) or find_failure(line) for line in log.splitlines())
    return next(filter(None, failures), None)


def phase(log: str) -> str:
    """Return the phase of a starting server from the newest line of its log that shows one."""
    for line in reversed(log.splitlines()[-400:]):
        for pattern, title in reversed(KNOWN.phases):
            if re.search(pattern, line, re.IGNORECASE):
                return title
    return "starting"

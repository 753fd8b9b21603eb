"""Checks of this machine: what is missing for which stage, and the one command that fixes it. Nothing is changed.

examine()                          the machine: installation, GPU, containers
examine(model=folder)              also a checkpoint before it is served
examine(log=file)                  also a server's log against the known errors
fix_plan(findings)                 the commands alone, faults first
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from annie_quant.core.errors import UsageError
from annie_quant.ops import machine_checks
from annie_quant.ops.model_checks import Finding, Probe, check_model, fault, ok

__all__ = ["Finding", "Probe", "examine", "fix_plan"]


def examine(
    model: str | os.PathLike | None = None, log: str | os.PathLike | None = None, probe: Probe | None = None
) -> list[Finding]:
    """Run all checks, in the order in which a run needs them. Raises UsageError for a log that cannot be read."""
    probe = probe or Probe()
    findings = [f for check in machine_checks.CHECKS for f in check(probe)]
    if model is not None:
        findings += check_model(Path(model))
    if log is not None:
        findings.append(check_log(Path(log)))
    return findings


def check_log(path: Path) -> Finding:
    """Compare a server's log with the known errors."""
    from annie_quant.ops import known_errors, server

    try:
        text = path.read_text(errors="replace")
    except OSError as error:
        raise UsageError(f"{path}: {str(error.strerror).lower()}", "pass a server's log file") from None
    known = known_errors.find_error(text)
    if known:
        return fault("server log", server.cause_line(path), known.cause, known.fix)
    return ok("server log", f"no known error; the server's phase: {known_errors.phase(text)}")


def fix_plan(findings: Iterable[Finding]) -> list[str]:
    """Return the commands that fix the findings, faults first, each once."""
    rows = [f for f in findings if f.fix and f.level != "ok"]
    return list(dict.fromkeys(f.fix for level in ("fault", "note") for f in rows if f.level == level))

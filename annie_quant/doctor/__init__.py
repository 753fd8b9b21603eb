"""What this machine has, what is missing for which stage, and the one command that mends each.

    examine()                          the machine: installation, GPU, containers
    examine(model=folder)              and a checkpoint before it is served
    examine(log=file)                  and a server's log against the known errors
    fix_plan(findings)                 the commands alone, faults first

A finding: {"level": "ok|note|fault", "check", "seen", "why", "mend"}. A note limits something; a fault stops the work.
Nothing is changed.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from annie_quant.doctor import containers, gpu, machine
from annie_quant.doctor.model import check_model
from annie_quant.doctor.probe import Finding, Probe, finding
from annie_quant.errors import UsageError

__all__ = ["Finding", "Probe", "examine", "fix_plan"]


def examine(
    model: str | os.PathLike | None = None, log: str | os.PathLike | None = None, probe: Probe | None = None
) -> list[Finding]:
    """Every check, in the order in which a run would meet them. Raises UsageError for a log that cannot be read."""
    probe = probe or Probe()
    found = [one for check in (*machine.CHECKS, *gpu.CHECKS, *containers.CHECKS) for one in check(probe)]
    if model is not None:
        found += check_model(Path(model))
    if log is not None:
        found += check_log(Path(log))
    return found


def check_log(path: Path) -> list[Finding]:
    from annie_quant.serve import known_errors, server

    try:
        text = path.read_text(errors="replace")
    except OSError as error:
        raise UsageError(f"{path}: {str(error.strerror).lower()}", "give a server's log file") from None
    known = known_errors.recognise(text)
    if known:
        return [finding("fault", "server log", server.telling_line(path), *known)]
    return [finding("ok", "server log", f"no known error; it stands at: {known_errors.phase(text)}")]


def fix_plan(findings: Iterable[Finding]) -> list[str]:
    """The commands that mend what was found, faults first, each once."""
    rows = [f for f in findings if f["mend"] and f["level"] != "ok"]
    return list(dict.fromkeys(f["mend"] for level in ("fault", "note") for f in rows if f["level"] == level))

"""What `annie-quant doctor` asks of a machine, in one class that tests replace, and the result of one check."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from annie_quant.core import host

Level = Literal["ok", "note", "fault"]


@dataclass(frozen=True)
class CheckResult:
    """The result of one check.

    level    "ok"; "note": limits something; "fault": stops the work
    check    what was checked
    message  what is there
    why      why it matters
    fix      the command or change that fixes it
    """

    level: Level
    check: str
    message: str
    why: str = ""
    fix: str = ""


def ok(check: str, message: str) -> CheckResult:
    return CheckResult("ok", check, message)


def note(check: str, message: str, why: str = "", fix: str = "") -> CheckResult:
    return CheckResult("note", check, message, why, fix)


def fault(check: str, message: str, why: str = "", fix: str = "") -> CheckResult:
    return CheckResult("fault", check, message, why, fix)


@dataclass(frozen=True)
class Output:
    """Output of a program. code: its exit code; 127 if it is not installed, 124 if it did not end in time."""

    code: int
    text: str

    @property
    def first_line(self) -> str:
        return self.text.splitlines()[0] if self.text else ""


class Probe:
    """The real machine."""

    def run(self, *command: str, timeout_s: float = 20.0) -> Output:
        if self.which(command[0]) is None:
            return Output(127, "")
        try:
            process = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
        except subprocess.TimeoutExpired:
            return Output(124, f"no answer in {timeout_s:g} s")
        except OSError as error:
            return Output(126, str(error))
        output = process.stdout if process.returncode == 0 else process.stderr or process.stdout
        return Output(process.returncode, output.strip())

    def which(self, program: str) -> str | None:
        return shutil.which(program)

    def memory(self) -> host.Memory | None:
        return host.memory()

    def machine(self) -> str:
        return platform.machine()

    def python(self) -> tuple[int, ...]:
        return tuple(sys.version_info[:3])

    def in_venv(self) -> bool:
        return sys.prefix != sys.base_prefix

    def externally_managed(self) -> bool:
        """Whether the system's Python refuses pip (PEP 668)."""
        return any(Path(sys.base_prefix).glob("lib/python3*/EXTERNALLY-MANAGED"))

    def installed(self, module: str) -> bool:
        return importlib.util.find_spec(module) is not None

    def version(self, distribution: str) -> str | None:
        return host.package_version(distribution)

    def disk_free(self, path: str = ".") -> int:
        return shutil.disk_usage(path).free

    def writable(self, path: Path) -> bool:
        return os.access(path, os.W_OK)

    def env(self, name: str) -> str | None:
        return os.environ.get(name)

    def torch_cuda_version(self) -> str | None:
        """Return the CUDA version of torch's build. It runs in another process: importing torch costs seconds and memory."""
        answer = self.run(sys.executable, "-c", "import torch; print(torch.version.cuda or '')", timeout_s=60)
        return answer.text or None if answer.code == 0 else None

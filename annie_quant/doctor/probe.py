"""What a check may ask of a machine, in one place, so that tests put a Spark's or a container's answers there instead."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

Finding = dict[str, str]


def finding(level: str, check: str, seen: str, why: str = "", mend: str = "") -> Finding:
    """level: "ok", "note" (limits something) or "fault" (stops the work)."""
    return {"level": level, "check": check, "seen": seen, "why": why, "mend": mend}


@dataclass(frozen=True)
class Answer:
    """code: the program's exit code; 127 where it is not installed, 124 where it did not answer in time."""

    code: int
    text: str


class Probe:
    """The real machine."""

    def run(self, *command: str, timeout_s: float = 20.0) -> Answer:
        if self.which(command[0]) is None:
            return Answer(127, "")
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
        except subprocess.TimeoutExpired:
            return Answer(124, f"no answer in {timeout_s:g} s")
        except OSError as error:
            return Answer(126, str(error))
        return Answer(done.returncode, (done.stdout if done.returncode == 0 else done.stderr or done.stdout).strip())

    def which(self, program: str) -> str | None:
        return shutil.which(program)

    def read(self, path: str) -> str | None:
        try:
            return Path(path).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None

    def machine(self) -> str:
        return platform.machine()

    def python(self) -> tuple[int, ...]:
        return tuple(sys.version_info[:3])

    def in_venv(self) -> bool:
        return sys.prefix != sys.base_prefix

    def managed(self) -> bool:
        """PEP 668: the system's Python refuses pip."""
        return any(Path(sys.base_prefix).glob("lib/python3*/EXTERNALLY-MANAGED"))

    def installed(self, module: str) -> bool:
        return importlib.util.find_spec(module) is not None

    def version(self, distribution: str) -> str | None:
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            return None

    def disk_free(self, path: str = ".") -> int:
        return shutil.disk_usage(path).free

    def writable(self, path: Path) -> bool:
        return os.access(path, os.W_OK)

    def env(self, name: str) -> str | None:
        return os.environ.get(name)

    def cuda_build(self) -> str | None:
        """torch's own CUDA version, asked in another process: importing torch here would cost seconds and memory."""
        done = self.run(sys.executable, "-c", "import torch; print(torch.version.cuda or '')", timeout_s=60)
        return done.text or None if done.code == 0 else None

"""Where a benchmark ran: machine, versions, GPU; nothing secret, no paths."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import time
from importlib import metadata
from pathlib import Path
from typing import Any

_PACKAGES = ("annie-quant", "numpy", "scipy", "xllamacpp", "vllm", "sglang", "transformers", "torch", "nvidia-modelopt")
_GPU_FIELDS = "name,driver_version,compute_cap,clocks.sm,clocks.mem,power.limit"


def environment() -> dict[str, Any]:
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "system": f"{platform.system()} {platform.release()}",
        "machine": platform.machine(),
        "python": platform.python_version(),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "load_average": [round(x, 2) for x in os.getloadavg()],
        "memory_total_bytes": meminfo().get("MemTotal"),
        "memory_available_bytes": meminfo().get("MemAvailable"),
        "packages": {name: version for name in _PACKAGES if (version := _version(name))},
        "gpus": _gpus(),
    }


def load_per_core() -> float:
    """The last minute's load average over the cores that this process may use."""
    return round(os.getloadavg()[0] / len(os.sched_getaffinity(0)), 2)


def meminfo() -> dict[str, int]:
    """/proc/meminfo in bytes; empty where there is none."""
    try:
        return parse_meminfo(Path("/proc/meminfo").read_text(encoding="ascii"))
    except OSError:
        return {}


def parse_meminfo(text: str) -> dict[str, int]:
    """The lines of /proc/meminfo that are sizes, in bytes."""
    fields = (line.split() for line in text.splitlines())
    return {f[0].rstrip(":"): int(f[1]) * 1024 for f in fields if len(f) == 3 and f[1].isdigit()}


def _cpu() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or None
    names = [line.split(":", 1)[1].strip() for line in lines if line.lower().startswith(("model name", "hardware"))]
    return names[0] if names else platform.processor() or None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _gpus() -> list[dict[str, str]]:
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", f"--query-gpu={_GPU_FIELDS}", "--format=csv,noheader"]
    try:
        out = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    names = _GPU_FIELDS.split(",")
    return [dict(zip(names, (cell.strip() for cell in line.split(",")), strict=False)) for line in out.splitlines()]

"""What this machine has, what is missing for which stage, and the one command that mends each.

A finding: {"level": "ok|note|fault", "check", "seen", "why", "mend"}. A note limits something; a fault stops the work.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import psutil

EXTRAS = {
    "quantize": ("torch", "transformers", "modelopt", "accelerate", "gguf"),
    "serve": ("xllamacpp", "gguf"),
    "plots": ("matplotlib",),
}
DISTRIBUTIONS = {"modelopt": "nvidia-modelopt"}


def examine() -> list[dict[str, str]]:
    """Every check, in the order in which a run would meet them. Runs anywhere; nothing is changed."""
    checks = (
        check_python,
        check_modules,
        check_extras,
        check_gpu,
        check_memory,
        check_disk,
        check_ownership,
        check_token,
    )
    return [finding for check in checks for finding in check()]


def finding(level: str, check: str, seen: str, why: str = "", mend: str = "") -> dict[str, str]:
    return {"level": level, "check": check, "seen": seen, "why": why, "mend": mend}


def check_python() -> list[dict[str, str]]:
    seen = f"Python {platform.python_version()} on {platform.machine()} {platform.system()}"
    found = [finding("ok" if sys.version_info >= (3, 10) else "fault", "python", seen)]
    managed = list(Path(sys.base_prefix).glob("lib/python3*/EXTERNALLY-MANAGED"))
    if managed and sys.prefix == sys.base_prefix:
        found.append(
            finding(
                "note",
                "environment",
                "the system's Python, which refuses pip (PEP 668)",
                "pip install fails here",
                "python3 -m venv .venv && . .venv/bin/activate",
            )
        )
    return found


def check_modules() -> list[dict[str, str]]:
    """The three C modules: a missing one names what its build wants."""
    wants = {
        "_nvfp4": ("fault", "nothing works without the codec", "pip install --force-reinstall annie-quant"),
        "_stream": (
            "fault",
            "no timing without it",
            "apt-get install libcurl4-openssl-dev, then reinstall annie-quant",
        ),
        "_gemm": (
            "note",
            "no GPU kernels; all else works",
            "install CUDA 13 (nvcc on the PATH), then reinstall annie-quant",
        ),
    }
    found = []
    for name, (level, why, mend) in wants.items():
        if importlib.util.find_spec(f"annie_quant.{name}") is None:
            found.append(finding(level, name, "not built", why, mend))
        else:
            found.append(finding("ok", name, "built"))
    return found


def check_extras() -> list[dict[str, str]]:
    found = []
    for extra, modules in EXTRAS.items():
        versions, missing = [], []
        for module in modules:
            if importlib.util.find_spec(module) is None:
                missing.append(module)
            else:
                versions.append(f"{module} {importlib.metadata.version(DISTRIBUTIONS.get(module, module))}")
        if missing:
            found.append(
                finding(
                    "note",
                    f"extra {extra}",
                    f"missing: {', '.join(missing)}",
                    f"`{extra}` stages will refuse",
                    f'pip install "annie-quant[{extra}]"',
                )
            )
        else:
            found.append(finding("ok", f"extra {extra}", ", ".join(versions)))
    return found


def check_gpu() -> list[dict[str, str]]:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return [
            finding(
                "note",
                "gpu",
                "no nvidia-smi, so no NVIDIA GPU to use",
                "quantizing, auditing, evaluating and the embedded servers run on the CPU",
            )
        ]
    query = [tool, "--query-gpu=name,compute_cap,driver_version", "--format=csv,noheader"]
    try:
        out = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (subprocess.SubprocessError, OSError) as error:
        return [finding("fault", "gpu", f"nvidia-smi fails: {error}", "the driver does not answer", "nvidia-smi")]
    found = []
    for line in out.splitlines():
        name, capability, driver = (part.strip() for part in line.split(",")[:3])
        found.append(finding("ok", "gpu", f"{name}, compute capability {capability}, driver {driver}"))
        if capability.startswith("12.") and int(driver.split(".")[0]) < 580:
            found.append(
                finding(
                    "fault",
                    "driver",
                    f"driver {driver} is older than CUDA 13's (580)",
                    "SM 12.x needs CUDA 13",
                    "update the NVIDIA driver to 580 or newer",
                )
            )
    return found


def check_memory() -> list[dict[str, str]]:
    memory = psutil.virtual_memory()
    seen = f"{memory.available / 2**30:.1f} GiB available of {memory.total / 2**30:.1f}"
    if memory.available < 2 * 2**30:
        return [
            finding(
                "note",
                "memory",
                seen,
                "even the embedded line wants 2 GiB",
                "stop other servers; on a Spark free the page cache: sync; echo 3 | sudo tee /proc/sys/vm/drop_caches",
            )
        ]
    return [finding("ok", "memory", seen)]


def check_disk() -> list[dict[str, str]]:
    free = shutil.disk_usage(".").free
    seen = f"{free / 1e9:.0f} GB free here"
    if free < 2e9:
        return [finding("fault", "disk", seen, "a run directory and its models want 2 GB at least", "free some disk")]
    return [finding("ok", "disk", seen)]


def check_ownership() -> list[dict[str, str]]:
    """Folders that a container left behind as root."""
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    found = []
    for folder in (Path("runs"), Path("data"), home):
        if folder.exists() and not os.access(folder, os.W_OK):
            found.append(
                finding(
                    "fault",
                    "ownership",
                    f"{folder} cannot be written by you",
                    "containers run as root leave such folders",
                    f"sudo chown -R $(id -u):$(id -g) {folder}",
                )
            )
    return found


def check_token() -> list[dict[str, str]]:
    if (
        os.environ.get("HF_TOKEN")
        or (Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser() / "token").is_file()
    ):
        return [finding("ok", "hub token", "present")]
    return [finding("note", "hub token", "none", "only needed to publish or to load a private model", "hf auth login")]

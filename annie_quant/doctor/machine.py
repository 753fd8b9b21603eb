"""The machine and this installation: Python, the three C modules, extras, memory, disk, ownership, token."""

from __future__ import annotations

from pathlib import Path

from annie_quant.doctor.probe import Finding, Probe, finding
from annie_quant.host import parse_meminfo
from annie_quant.native import BUILDS

EXTRAS = {
    "quantize": ("torch", "transformers", "modelopt", "accelerate", "gguf"),
    "serve": ("xllamacpp", "gguf"),
    "plots": ("matplotlib",),
}
DISTRIBUTIONS = {"modelopt": "nvidia-modelopt"}
MACHINES = ("x86_64", "aarch64")
LEAST_MEMORY, LEAST_DISK, LARGE_CACHE = 2 << 30, 2_000_000_000, 0.4


def check_python(probe: Probe) -> list[Finding]:
    version, machine = probe.python(), probe.machine()
    seen = f"Python {'.'.join(map(str, version))} on {machine}"
    found = [finding("ok", "python", seen)]
    if version < (3, 10):
        found = [finding("fault", "python", seen, "3.10 is the oldest that works", "install Python 3.10 or newer")]
    if machine not in MACHINES:
        found.append(finding("note", "processor", machine, "the codec runs its portable form there, not a fast one"))
    if probe.managed() and not probe.in_venv():
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


def check_modules(probe: Probe) -> list[Finding]:
    """The three C modules: a missing one names what its build wants. Without _gemm everything but the GPU kernels works."""
    return [
        finding("ok", name, "built")
        if probe.installed(f"annie_quant.{name}")
        else finding("note" if name == "_gemm" else "fault", name, "not built", build.without, build.mend)
        for name, build in BUILDS.items()
    ]


def check_extras(probe: Probe) -> list[Finding]:
    found = []
    for extra, modules in EXTRAS.items():
        missing = [module for module in modules if not probe.installed(module)]
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
            versions = [f"{m} {probe.version(DISTRIBUTIONS.get(m, m)) or ''}".strip() for m in modules]
            found.append(finding("ok", f"extra {extra}", ", ".join(versions)))
    return found


def check_memory(probe: Probe) -> list[Finding]:
    """MemAvailable, and the page cache, which on unified memory stands in the way of large allocations."""
    memory = parse_meminfo(probe.read("/proc/meminfo") or "")
    if not {"MemTotal", "MemAvailable"} <= memory.keys():
        return [finding("note", "memory", "/proc/meminfo cannot be read")]
    total, available, cached = memory["MemTotal"], memory["MemAvailable"], memory.get("Cached", 0)
    seen = f"{available / 2**30:.1f} GiB available of {total / 2**30:.1f}"
    if available < LEAST_MEMORY:
        return [finding("note", "memory", seen, "even the embedded line wants 2 GiB", "stop other servers")]
    found = [finding("ok", "memory", seen)]
    unified = "GB10" in (probe.run("nvidia-smi", "--query-gpu=name", "--format=csv,noheader").text or "")
    if unified and cached > LARGE_CACHE * total:
        found.append(
            finding(
                "note",
                "page cache",
                f"{cached / 2**30:.0f} GiB of the unified memory hold cached files",
                "a server that asks for most of the memory at once may be killed although the cache could go",
                "sync; echo 3 | sudo tee /proc/sys/vm/drop_caches",
            )
        )
    return found


def check_disk(probe: Probe) -> list[Finding]:
    free = probe.disk_free()
    seen = f"{free / 1e9:.0f} GB free here"
    if free < LEAST_DISK:
        return [finding("fault", "disk", seen, "a run directory and its models want 2 GB at least", "free some disk")]
    return [finding("ok", "disk", seen)]


def _hub(probe: Probe) -> Path:
    return Path(probe.env("HF_HOME") or "~/.cache/huggingface").expanduser()


def check_ownership(probe: Probe) -> list[Finding]:
    """Folders that a container left behind as root."""
    folders = (Path("runs"), Path("data"), Path("models"), _hub(probe), Path("~/.cache/vllm").expanduser())
    return [
        finding(
            "fault",
            "ownership",
            f"{folder} cannot be written by you",
            "containers run as root leave such folders",
            f"sudo chown -R $(id -u):$(id -g) {folder}",
        )
        for folder in folders
        if folder.exists() and not probe.writable(folder)
    ]


def check_token(probe: Probe) -> list[Finding]:
    if probe.env("HF_TOKEN") or (_hub(probe) / "token").is_file():
        return [finding("ok", "hub token", "present")]
    return [finding("note", "hub token", "none", "only needed to publish or to load a private model", "hf auth login")]


CHECKS = (check_python, check_modules, check_extras, check_memory, check_disk, check_ownership, check_token)

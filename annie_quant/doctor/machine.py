"""Checks of the machine and this installation: Python, the C modules, extras, memory, disk, file ownership, Hub token."""

from __future__ import annotations

from pathlib import Path

from annie_quant.doctor.probe import Finding, Probe, fault, note, ok
from annie_quant.host import smi_command
from annie_quant.native import BUILDS

EXTRAS = {
    "quantize": ("torch", "transformers", "modelopt", "accelerate", "gguf"),
    "serve": ("xllamacpp", "gguf"),
    "plots": ("matplotlib",),
}
DISTRIBUTIONS = {"modelopt": "nvidia-modelopt"}
MACHINES = ("x86_64", "aarch64")
MIN_MEMORY_BYTES, MIN_DISK_BYTES, LARGE_CACHE_SHARE = 2_000_000_000, 2_000_000_000, 0.4


def check_python(probe: Probe) -> list[Finding]:
    version, machine = probe.python(), probe.machine()
    message = f"Python {'.'.join(map(str, version))} on {machine}"
    if version < (3, 10):
        findings = [fault("python", message, "the oldest supported version is 3.10", "install Python 3.10 or newer")]
    else:
        findings = [ok("python", message)]
    if machine not in MACHINES:
        findings.append(note("processor", machine, "the codec uses its portable form there, which is slower"))
    if probe.externally_managed() and not probe.in_venv():
        findings.append(
            note(
                "environment",
                "the system's Python, which refuses pip (PEP 668)",
                "pip install fails here",
                "python3 -m venv .venv && . .venv/bin/activate",
            )
        )
    return findings


def check_modules(probe: Probe) -> list[Finding]:
    """The three C modules. Without _gemm only the GPU kernels are missing."""
    return [
        ok(name, "built")
        if probe.installed(f"annie_quant.{name}")
        else Finding("note" if name == "_gemm" else "fault", name, "not built", build.without, build.fix)
        for name, build in BUILDS.items()
    ]


def check_extras(probe: Probe) -> list[Finding]:
    findings = []
    for extra, modules in EXTRAS.items():
        missing = [module for module in modules if not probe.installed(module)]
        if missing:
            message, why = f"missing: {', '.join(missing)}", f"stages that need `{extra}` will not run"
            findings.append(note(f"extra {extra}", message, why, f'pip install "annie-quant[{extra}]"'))
        else:
            versions = [f"{m} {probe.version(DISTRIBUTIONS.get(m, m)) or ''}".strip() for m in modules]
            findings.append(ok(f"extra {extra}", ", ".join(versions)))
    return findings


def check_memory(probe: Probe) -> list[Finding]:
    """Available memory, and the page cache, which on unified memory can block large allocations."""
    memory = probe.memory()
    if memory is None:
        return [note("memory", "the system does not report its memory")]
    message = f"{memory.available_bytes / 1e9:.1f} GB available of {memory.total_bytes / 1e9:.1f}"
    if memory.available_bytes < MIN_MEMORY_BYTES:
        return [note("memory", message, "even the embedded model needs 2 GB", "stop other servers")]
    findings = [ok("memory", message)]
    unified = "GB10" in probe.run(*smi_command("gpu", ["name"])).text
    if unified and memory.cached_bytes > LARGE_CACHE_SHARE * memory.total_bytes:
        findings.append(
            note(
                "page cache",
                f"{memory.cached_bytes / 1e9:.0f} GB of the unified memory hold cached files",
                "a server that allocates most of the memory at once may be killed although the cache could be freed",
                "sync; echo 3 | sudo tee /proc/sys/vm/drop_caches",
            )
        )
    return findings


def check_disk(probe: Probe) -> list[Finding]:
    free = probe.disk_free()
    message = f"{free / 1e9:.0f} GB free here"
    if free < MIN_DISK_BYTES:
        return [fault("disk", message, "a run directory and its models need at least 2 GB", "free some disk space")]
    return [ok("disk", message)]


def check_ownership(probe: Probe) -> list[Finding]:
    """Folders that a container created as root."""
    folders = (Path("runs"), Path("data"), Path("models"), _hub_folder(probe), Path("~/.cache/vllm").expanduser())
    return [
        fault(
            "ownership",
            f"{folder} is not writable for this user",
            "containers that run as root create such folders",
            f"sudo chown -R $(id -u):$(id -g) {folder}",
        )
        for folder in folders
        if folder.exists() and not probe.writable(folder)
    ]


def check_token(probe: Probe) -> list[Finding]:
    if probe.env("HF_TOKEN") or (_hub_folder(probe) / "token").is_file():
        return [ok("hub token", "present")]
    return [note("hub token", "none", "needed only to publish or to load a private model", "hf auth login")]


def _hub_folder(probe: Probe) -> Path:
    return Path(probe.env("HF_HOME") or "~/.cache/huggingface").expanduser()


CHECKS = (check_python, check_modules, check_extras, check_memory, check_disk, check_ownership, check_token)

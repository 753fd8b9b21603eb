"""Checks of this machine: what is missing for which stage, and the one command that fixes it. Nothing is changed.

examine()              installation, memory, disk, file owners, GPU, containers
examine(log)           also a server's log, compared with the known errors
fix_plan(findings)     the commands alone, faults first
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import msgspec

from annie_quant.core import host
from annie_quant.core.errors import UsageError
from annie_quant.core.host import smi_command, smi_rows
from annie_quant.core.native import BUILDS
from annie_quant.core.progress import SILENT, Progress
from annie_quant.documents import salvage_line
from annie_quant.models.server_parsers import parser_hint
from annie_quant.ops import known_faults

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


ok = partial(CheckResult, "ok")
note = partial(CheckResult, "note")
fault = partial(CheckResult, "fault")


@dataclass(frozen=True)
class Output:
    """Output of a program. code: its exit code; 127 if it is not installed, 124 if it did not end in time."""

    code: int
    text: str

    @property
    def first_line(self) -> str:
        return self.text.splitlines()[0] if self.text else ""


WHY_SLOW = "speeds that are measured now are not this machine's"


class Probe:
    """What the checks ask of the machine: this one, which tests replace."""

    def run(self, *command: str, timeout_s: float = 20.0) -> Output:
        if self.which(command[0]) is None:
            return Output(127, "")
        try:
            process = subprocess.run(
                command, capture_output=True, text=True, timeout=timeout_s, check=False
            )
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

    def gpu_product(self) -> tuple[float, host.GpuState] | None:
        """Return the bytes per second that our kernel's product reads, and the GPU's state after it; None where it cannot run."""
        from annie_quant.bench import machine

        timer = machine.new_probe(on_gpu=True)
        if not isinstance(timer, machine.GpuProbe):
            return None
        read_bytes_s = timer.read_bytes_s(timer.time_ms())
        return read_bytes_s, host.machine_state()

    def machine(self) -> str:
        return platform.machine()

    def python(self) -> tuple[int, ...]:
        return tuple(sys.version_info[:3])

    def in_venv(self) -> bool:
        return sys.prefix != sys.base_prefix

    def externally_managed(self) -> bool:
        """Return whether the system's Python refuses pip (PEP 668)."""
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
        answer = self.run(
            sys.executable, "-c", "import torch; print(torch.version.cuda or '')", timeout_s=60
        )
        return answer.text or None if answer.code == 0 else None


def examine(
    log: Path | None = None, probe: Probe | None = None, progress: Progress = SILENT
) -> list[CheckResult]:
    """Run all checks, in the order in which a run needs them. Raises UsageError for a log that cannot be read."""
    probe = probe or Probe()
    findings: list[CheckResult] = []
    for done, (title, check) in enumerate(CHECKS.items()):
        progress.update(done, len(CHECKS), title)
        findings += check(probe)
    if log is not None:
        findings.append(check_log(log))
    return findings


def check_log(path: Path) -> CheckResult:
    """Compare a server's log with the known errors."""
    from annie_quant.ops import server

    try:
        text = path.read_text(errors="replace")
    except OSError as error:
        raise UsageError(
            f"{path}: {str(error.strerror).lower()}", "pass a server's log file"
        ) from None
    known = known_faults.find_error(text)
    if known:
        return fault("server log", server.cause_line(path), known.cause, known.fix)
    return ok("server log", f"no known error; the server's phase: {known_faults.phase(text)}")


def fix_plan(findings: Iterable[CheckResult]) -> list[str]:
    """Return the commands that fix the findings, faults first, each once."""
    rows = [f for f in findings if f.fix and f.level != "ok"]
    rows.sort(key=lambda finding: finding.level != "fault")
    return list(dict.fromkeys(finding.fix for finding in rows))


# ---- the machine

EXTRAS = {
    "quantize": ("torch", "transformers", "modelopt", "accelerate", "gguf"),
    "serve": ("xllamacpp", "gguf"),
    "plots": ("matplotlib",),
}
DISTRIBUTIONS = {"modelopt": "nvidia-modelopt"}
MACHINES = ("x86_64", "aarch64")
MIN_MEMORY_BYTES = 2_000_000_000
MIN_DISK_BYTES = 2_000_000_000
LARGE_CACHE_SHARE = 0.4


def check_python(probe: Probe) -> list[CheckResult]:
    version = probe.python()
    machine = probe.machine()
    message = f"Python {'.'.join(map(str, version))} on {machine}"
    if version < (3, 10):
        findings = [
            fault(
                "python",
                message,
                "the oldest supported version is 3.10",
                "install Python 3.10 or newer",
            )
        ]
    else:
        findings = [ok("python", message)]
    if machine not in MACHINES:
        findings.append(
            note("processor", machine, "the codec uses its portable form there, which is slower")
        )
    if probe.externally_managed() and not probe.in_venv():
        message = "the system's Python, which refuses pip (PEP 668)"
        fix = "python3 -m venv .venv && . .venv/bin/activate"
        findings.append(note("environment", message, "pip install fails here", fix))
    return findings


def check_modules(probe: Probe) -> list[CheckResult]:
    """Check the three C modules. Without _gemm only the GPU kernels are missing."""
    findings = []
    for name, build in BUILDS.items():
        if probe.installed(f"annie_quant.{name}"):
            findings.append(ok(name, "built"))
        elif name == "_gemm":
            findings.append(note(name, "not built", build.without, build.fix))
        else:
            findings.append(fault(name, "not built", build.without, build.fix))
    return findings


def check_extras(probe: Probe) -> list[CheckResult]:
    findings = []
    for extra, modules in EXTRAS.items():
        missing = [module for module in modules if not probe.installed(module)]
        if missing:
            message = f"missing: {', '.join(missing)}"
            why = f"stages that need `{extra}` will not run"
            findings.append(
                note(f"extra {extra}", message, why, f'pip install "annie-quant[{extra}]"')
            )
        else:
            versions = [
                f"{m} {probe.version(DISTRIBUTIONS.get(m, m)) or ''}".strip() for m in modules
            ]
            findings.append(ok(f"extra {extra}", ", ".join(versions)))
    return findings


def check_memory(probe: Probe) -> list[CheckResult]:
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
        message = f"{memory.cached_bytes / 1e9:.0f} GB of the unified memory hold cached files"
        why = "a server that allocates most of the memory at once may be killed although the cache could be freed"
        findings.append(
            note("page cache", message, why, "sync; echo 3 | sudo tee /proc/sys/vm/drop_caches")
        )
    return findings


def check_disk(probe: Probe) -> list[CheckResult]:
    free = probe.disk_free()
    message = f"{free / 1e9:.0f} GB free here"
    if free < MIN_DISK_BYTES:
        return [
            fault(
                "disk",
                message,
                "a run directory and its models need at least 2 GB",
                "free some disk space",
            )
        ]
    return [ok("disk", message)]


def check_ownership(probe: Probe) -> list[CheckResult]:
    """Folders that a container created as root."""
    folders = (
        Path("runs"),
        Path("data"),
        Path("models"),
        _hub_folder(probe),
        Path("~/.cache/vllm").expanduser(),
    )
    why = "containers that run as root create such folders"
    fix = "sudo chown -R $(id -u):$(id -g)"
    return [
        fault("ownership", f"{folder} is not writable for this user", why, f"{fix} {folder}")
        for folder in folders
        if folder.exists() and not probe.writable(folder)
    ]


def check_token(probe: Probe) -> list[CheckResult]:
    if probe.env("HF_TOKEN") or (_hub_folder(probe) / "token").is_file():
        return [ok("hub token", "present")]
    return [
        note(
            "hub token",
            "none",
            "needed only to publish or to load a private model",
            "hf auth login",
        )
    ]


def _hub_folder(probe: Probe) -> Path:
    return Path(probe.env("HF_HOME") or "~/.cache/huggingface").expanduser()


CUDA_13_DRIVER = 580
MIN_CAPABILITY = (9, 0)
GPU_FIELDS = ("name", "compute_cap", "driver_version")
PROCESS_FIELDS = ("pid", "process_name", "used_memory")


def check_gpu(probe: Probe) -> list[CheckResult]:
    answer = probe.run(*smi_command("gpu", GPU_FIELDS))
    if answer.code == 127:
        why = "quantizing, auditing, evaluating and the embedded servers run on the CPU"
        unchecked = (
            "sm_121 code, FP4 and grouped products, shared memory, versions with a fault on a GPU"
        )
        return [
            note("gpu", f"no nvidia-smi, so no usable NVIDIA GPU; not checked: {unchecked}", why)
        ]
    if answer.code != 0:
        message = f"nvidia-smi fails: {answer.first_line or f'exit code {answer.code}'}"
        return [
            fault(
                "gpu",
                message,
                "the driver does not respond",
                "reboot, or reinstall the NVIDIA driver",
            )
        ]
    findings = []
    for gpu in smi_rows(answer.text, GPU_FIELDS):
        capability = gpu["compute_cap"]
        driver = gpu["driver_version"]
        findings.append(
            ok("gpu", f"{gpu['name']}, compute capability {capability}, driver {driver}")
        )
        if capability.startswith("12.") and (_major(driver) or CUDA_13_DRIVER) < CUDA_13_DRIVER:
            message = f"driver {driver} is older than CUDA 13's"
            fix = f"update the NVIDIA driver to {CUDA_13_DRIVER} or newer"
            findings.append(
                fault("driver", f"{message} ({CUDA_13_DRIVER})", "SM 12.x needs CUDA 13", fix)
            )
        numbers = tuple(int(x) for x in capability.split(".") if x.isdigit())
        if numbers and numbers < MIN_CAPABILITY:
            why = "this package's kernels need 9.0 or newer"
            findings.append(note("kernels", f"compute capability {capability}", why))
    return [
        *findings,
        _check_processes(probe),
        _check_nvcc(probe),
        *_check_torch(probe),
        *_check_kernels(probe),
    ]


def gpu_capability(probe: Probe) -> str:
    """Return the first GPU's compute capability, as "12.1"; "" without a GPU."""
    answer = probe.run(*smi_command("gpu", GPU_FIELDS))
    rows = smi_rows(answer.text, GPU_FIELDS) if answer.code == 0 else []
    return rows[0]["compute_cap"] if rows else ""


def check_versions(probe: Probe) -> list[CheckResult]:
    """Compare what is installed with the list of versions that have a known fault on this GPU."""
    installed = {row.package: probe.version(row.package) for row in known_faults.bad_versions()}
    versions = [(name, version) for name, version in installed.items() if version]
    return notes_on(known_faults.faults_of(versions, gpu_capability(probe)))


def notes_on(found: Iterable[tuple[str, known_faults.KnownBad]]) -> list[CheckResult]:
    """Return the findings for versions with a known fault."""
    return [
        note(
            "known versions",
            f"{row.package} {version}: {row.effect}",
            f"{row.source}, {row.date}",
            row.fix,
        )
        for version, row in found
    ]


def _check_processes(probe: Probe) -> CheckResult:
    answer = probe.run(*smi_command("compute-apps", PROCESS_FIELDS))
    processes = smi_rows(answer.text, PROCESS_FIELDS) if answer.code == 0 else []
    if not processes:
        return ok("gpu processes", "none")
    names = "; ".join(", ".join(p.values()) for p in processes[:3])
    why = "they use memory and disturb every timing"
    return note(
        "gpu processes", f"{len(processes)}: {names}", why, "stop them before serving or measuring"
    )


def _check_nvcc(probe: Probe) -> CheckResult:
    answer = probe.run("nvcc", "--version")
    if answer.code == 127:
        return note("nvcc", "not installed", "needed only to build the GPU kernels from source")
    release = next(
        (part for part in answer.text.replace(",", " ").split() if part.startswith("V")), ""
    )
    if (_major(release[1:]) or 13) < 13:
        why = "CUDA before 13 cannot build for sm_121a"
        return note("nvcc", release, why, "install CUDA 13 and put its nvcc first on the PATH")
    return ok("nvcc", release or "responds")


def _check_torch(probe: Probe) -> list[CheckResult]:
    if not probe.installed("torch"):
        return []
    version = probe.torch_cuda_version()
    if version is None:
        why = "quantizing and evaluating would run on the CPU"
        return [
            note(
                "torch",
                "a build without CUDA on a machine with a GPU",
                why,
                "install torch for cu130",
            )
        ]
    if (_major(version) or 13) < 13:
        why = "wheels before cu130 have no machine code for GB10"
        return [
            note(
                "torch",
                f"built for CUDA {version}",
                why,
                "install torch for cu130 (not needed for other GPUs)",
            )
        ]
    return [ok("torch", f"built for CUDA {version}")]


def _check_kernels(probe: Probe) -> list[CheckResult]:
    """Run this package's own kernels in another process, because a driver fault ends the process."""
    if not probe.installed("annie_quant._gemm"):
        return []
    answer = probe.run(sys.executable, "-m", "annie_quant", "validate-gpu", "--json", timeout_s=120)
    if answer.code == 0:
        return [ok("NVFP4 kernels", "right on this GPU")]
    if answer.code == 3:
        return [note("NVFP4 kernels", "cannot run here", answer.first_line)]
    why = "a wrong kernel gives plausible but wrong answers"
    return [
        fault("NVFP4 kernels", "wrong on this GPU", why, "annie-quant validate-gpu --stack all")
    ]


def _major(version: str) -> int | None:
    """Return the first number of a dotted version, or None."""
    first = version.split(".")[0]
    return int(first) if first.isdigit() else None


class DockerInfo(msgspec.Struct, rename="pascal"):
    """`docker info`."""

    server_version: str | None = None
    runtimes: dict[str, object] | None = None


def check_docker(probe: Probe) -> list[CheckResult]:
    if probe.which("docker") is None:
        why = "vLLM and SGLang recipes run in containers; llama.cpp and the recipe `cpu` do not"
        return [note("docker", "not installed", why, "https://docs.docker.com/engine/install")]
    answer = probe.run("docker", "info", "--format", "{{json .}}")
    if answer.code != 0:
        if "permission denied" in answer.text.lower():
            fix = "sudo usermod -aG docker $USER, then log in again"
            return [fault("docker", "this user may not use docker", "recipes would need sudo", fix)]
        message = (answer.first_line or "no answer")[:160]
        return [
            note("docker", message, "no container can be started", "sudo systemctl start docker")
        ]
    try:
        info = salvage_line(DockerInfo, answer.text.encode())
    except (ValueError, msgspec.MsgspecError):
        info = DockerInfo()
    findings = [ok("docker", info.server_version or "responds")]
    if probe.which("nvidia-smi") and "nvidia" not in (info.runtimes or ()):
        fix = "sudo nvidia-ctk runtime configure --runtime=docker && sudo systemctl restart docker"
        why = "containers would not have the GPU"
        findings.append(fault("docker's NVIDIA runtime", "not configured", why, fix))
    return [*findings, *_check_servers(probe)]


WHY_NO_REASONING = (
    "right for a model that does not think; the thinking of any other model is in its answers"
)


def _check_servers(probe: Probe) -> list[CheckResult]:
    """Check running vLLM and SGLang containers: without a parser, tool calls fail with HTTP 400 or are returned as text."""
    answer = probe.run(
        "docker", "ps", "--no-trunc", "--format", "{{.Names}}\t{{.Image}}\t{{.Command}}"
    )
    findings = []
    for line in answer.text.splitlines() if answer.code == 0 else ():
        name, image, command = [*line.split("\t"), "", ""][:3]
        if not any(server in image for server in ("vllm", "sglang")):
            continue
        runtime = "vllm" if "vllm" in image else "sglang"
        flags = ["--tool-call-parser"]
        flags += ["--enable-auto-tool-choice"] if runtime == "vllm" else []
        missing = [flag for flag in flags if flag not in command]
        if missing:
            message = f"the server {name} runs without {', '.join(missing)}"
            why = "tool calls fail with HTTP 400 or are in the text: a fault of the server, not of the model"
            findings.append(fault("parsers", message, why, parser_hint(runtime)))
        else:
            findings.append(ok("parsers", f"the server {name} has a parser of tool calls"))
        if "--reasoning-parser" not in command:
            message = f"the server {name} runs without --reasoning-parser"
            findings.append(note("parsers", message, WHY_NO_REASONING))
    return findings


def check_speed(probe: Probe) -> list[CheckResult]:
    """Compare a fixed product, the clock and its limits with a healthy GPU's."""
    from annie_quant.checkpoint.decode_speed import healthy_device, is_unhealthy

    gpu = probe.run(*smi_command("gpu", ["name"]))
    what = "clock, its limits and a fixed product"
    if gpu.code != 0 or not gpu.text:
        return [note("speed", f"{what}: not checked, there is no GPU here")]
    measured = probe.gpu_product()
    if measured is None:
        return [note("speed", f"{what}: not checked, our kernel does not run here")]
    read_bytes_s, (clock_mhz, _, limit) = measured
    clock = f", {clock_mhz:.0f} MHz" if clock_mhz else ""
    message = f"a fixed product reads {read_bytes_s / 1e9:,.0f} GB/s{clock}"
    if limit:
        return [note("speed", f"{message}; the driver limits the clock: {limit}", WHY_SLOW)]
    healthy = healthy_device(gpu.first_line)
    if healthy is None:
        return [note("speed", f"{message}; healthy values of {gpu.first_line} are not known")]
    if is_unhealthy(healthy, read_bytes_s, clock_mhz):
        share = read_bytes_s / healthy.read_bytes_s
        message += f", {share:.0%} of a healthy {healthy.name}"
        return [note("speed", message, WHY_SLOW, "stop other programs; else remove the power")]
    return [ok("speed", message)]


CHECKS = {
    "Python": check_python,
    "C modules": check_modules,
    "extras": check_extras,
    "memory": check_memory,
    "disk": check_disk,
    "file owners": check_ownership,
    "hub token": check_token,
    "GPU, its kernels and torch": check_gpu,
    "speed": check_speed,
    "versions with known faults": check_versions,
    "containers": check_docker,
}

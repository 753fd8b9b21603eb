"""Checks of the GPU: compute capability, driver, CUDA 13, torch's build, other processes, and this package's kernels."""

from __future__ import annotations

import sys

from annie_quant.doctor.probe import Finding, Probe, fault, note, ok
from annie_quant.host import smi_command, smi_rows

CUDA_13_DRIVER = 580
MIN_CAPABILITY = (8, 0)
GPU_FIELDS = ("name", "compute_cap", "driver_version")
PROCESS_FIELDS = ("pid", "process_name", "used_memory")


def check_gpu(probe: Probe) -> list[Finding]:
    answer = probe.run(*smi_command("gpu", GPU_FIELDS))
    if answer.code == 127:
        why = "quantizing, auditing, evaluating and the embedded servers run on the CPU"
        return [note("gpu", "no nvidia-smi, so no usable NVIDIA GPU", why)]
    if answer.code != 0:
        message = f"nvidia-smi fails: {answer.first_line or f'exit code {answer.code}'}"
        return [fault("gpu", message, "the driver does not respond", "reboot, or reinstall the NVIDIA driver")]
    findings = []
    for gpu in smi_rows(answer.text, GPU_FIELDS):
        capability, driver = gpu["compute_cap"], gpu["driver_version"]
        findings.append(ok("gpu", f"{gpu['name']}, compute capability {capability}, driver {driver}"))
        if capability.startswith("12.") and (_major(driver) or CUDA_13_DRIVER) < CUDA_13_DRIVER:
            findings.append(
                fault(
                    "driver",
                    f"driver {driver} is older than CUDA 13's ({CUDA_13_DRIVER})",
                    "SM 12.x needs CUDA 13",
                    f"update the NVIDIA driver to {CUDA_13_DRIVER} or newer",
                )
            )
        numbers = tuple(int(x) for x in capability.split(".") if x.isdigit())
        if numbers and numbers < MIN_CAPABILITY:
            why = "this package's kernels need 8.0 or newer"
            findings.append(note("kernels", f"compute capability {capability}", why))
    return [*findings, _check_processes(probe), _check_nvcc(probe), *_check_torch(probe), *_check_kernels(probe)]


def _check_processes(probe: Probe) -> Finding:
    answer = probe.run(*smi_command("compute-apps", PROCESS_FIELDS))
    processes = smi_rows(answer.text, PROCESS_FIELDS) if answer.code == 0 else []
    if not processes:
        return ok("gpu processes", "none")
    names = "; ".join(", ".join(p.values()) for p in processes[:3])
    why = "they use memory and disturb every timing"
    return note("gpu processes", f"{len(processes)}: {names}", why, "stop them before serving or measuring")


def _check_nvcc(probe: Probe) -> Finding:
    answer = probe.run("nvcc", "--version")
    if answer.code == 127:
        return note("nvcc", "not installed", "needed only to build the GPU kernels from source")
    release = next((part for part in answer.text.replace(",", " ").split() if part.startswith("V")), "")
    if (_major(release[1:]) or 13) < 13:
        why = "CUDA before 13 cannot build for sm_121a"
        return note("nvcc", release, why, "install CUDA 13 and put its nvcc first on the PATH")
    return ok("nvcc", release or "responds")


def _check_torch(probe: Probe) -> list[Finding]:
    if not probe.installed("torch"):
        return []
    version = probe.torch_cuda_version()
    if version is None:
        why = "quantizing and evaluating would run on the CPU"
        return [note("torch", "a build without CUDA on a machine with a GPU", why, "install torch for cu130")]
    if (_major(version) or 13) < 13:
        why = "wheels before cu130 have no machine code for GB10"
        return [note("torch", f"built for CUDA {version}", why, "install torch for cu130 (not needed for other GPUs)")]
    return [ok("torch", f"built for CUDA {version}")]


def _check_kernels(probe: Probe) -> list[Finding]:
    """Run this package's own kernels in another process, because a driver fault ends the process."""
    if not probe.installed("annie_quant._gemm"):
        return []
    answer = probe.run(sys.executable, "-m", "annie_quant", "validate-gpu", "--json", timeout_s=120)
    if answer.code == 0:
        return [ok("NVFP4 kernels", "right on this GPU")]
    if answer.code == 3:
        return [note("NVFP4 kernels", "cannot run here", answer.first_line)]
    why = "a wrong kernel gives plausible but wrong answers"
    return [fault("NVFP4 kernels", "wrong on this GPU", why, "annie-quant validate-gpu --stack all")]


def _major(version: str) -> int | None:
    """Return the first number of a dotted version, or None."""
    first = version.split(".")[0]
    return int(first) if first.isdigit() else None


CHECKS = (check_gpu,)

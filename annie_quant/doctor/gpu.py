"""The GPU: compute capability, driver, CUDA 13, torch's build, who else uses it, and whether our kernels run on it."""

from __future__ import annotations

from annie_quant.doctor.probe import Finding, Probe, finding

DRIVER_OF_CUDA_13 = 580
LEAST_CAPABILITY = (8, 0)


def check_gpu(probe: Probe) -> list[Finding]:
    asked = probe.run("nvidia-smi", "--query-gpu=name,compute_cap,driver_version", "--format=csv,noheader")
    if asked.code == 127:
        why = "quantizing, auditing, evaluating and the embedded servers run on the CPU"
        return [finding("note", "gpu", "no nvidia-smi, so no NVIDIA GPU to use", why)]
    if asked.code != 0:
        seen = f"nvidia-smi fails: {asked.text.splitlines()[0] if asked.text else f'exit code {asked.code}'}"
        return [finding("fault", "gpu", seen, "the driver does not answer", "reboot, or reinstall the NVIDIA driver")]
    found = []
    for line in asked.text.splitlines():
        name, capability, driver = ([part.strip() for part in line.split(",")] + ["", ""])[:3]
        found.append(finding("ok", "gpu", f"{name}, compute capability {capability}, driver {driver}"))
        major = driver.split(".")[0]
        if capability.startswith("12.") and major.isdigit() and int(major) < DRIVER_OF_CUDA_13:
            found.append(
                finding(
                    "fault",
                    "driver",
                    f"driver {driver} is older than CUDA 13's ({DRIVER_OF_CUDA_13})",
                    "SM 12.x needs CUDA 13",
                    f"update the NVIDIA driver to {DRIVER_OF_CUDA_13} or newer",
                )
            )
        numbers = tuple(int(x) for x in capability.split(".") if x.isdigit())
        if numbers and numbers < LEAST_CAPABILITY:
            found.append(
                finding("note", "kernels", f"compute capability {capability}", "our kernels want 8.0 or newer")
            )
    return [*found, *_others(probe), *_toolkit(probe), *_torch(probe), *_kernels(probe)]


def _others(probe: Probe) -> list[Finding]:
    """Other processes on the GPU: they take memory and spoil every timing."""
    asked = probe.run("nvidia-smi", "--query-compute-apps=pid,process_name,used_memory", "--format=csv,noheader")
    apps = [line.strip() for line in asked.text.splitlines() if line.strip()] if asked.code == 0 else []
    if not apps:
        return [finding("ok", "gpu processes", "none")]
    return [
        finding(
            "note",
            "gpu processes",
            f"{len(apps)} use the GPU: {'; '.join(apps[:3])}",
            "they take memory, and their work shows in every timing",
            "stop them before serving or measuring",
        )
    ]


def _toolkit(probe: Probe) -> list[Finding]:
    asked = probe.run("nvcc", "--version")
    if asked.code == 127:
        return [finding("note", "nvcc", "not installed", "only needed to build the GPU kernels from source")]
    release = next((part for part in asked.text.replace(",", " ").split() if part.startswith("V")), "")
    if release.startswith("V") and release[1:].split(".")[0].isdigit() and int(release[1:].split(".")[0]) < 13:
        why = "CUDA before 13 knows no sm_121a"
        return [finding("note", "nvcc", release, why, "install CUDA 13 and put its nvcc first on the PATH")]
    return [finding("ok", "nvcc", release or "answers")]


def _torch(probe: Probe) -> list[Finding]:
    if not probe.installed("torch"):
        return []
    built = probe.cuda_build()
    if built is None:
        return [
            finding(
                "note",
                "torch",
                "a build without CUDA beside a GPU",
                "quantizing and evaluating would run on the CPU",
                "install torch for cu130",
            )
        ]
    if built.split(".")[0].isdigit() and int(built.split(".")[0]) < 13:
        why = "wheels before cu130 carry no machine code for GB10"
        return [
            finding(
                "note", "torch", f"built for CUDA {built}", why, "install torch for cu130 (on other GPUs all is well)"
            )
        ]
    return [finding("ok", "torch", f"built for CUDA {built}")]


def _kernels(probe: Probe) -> list[Finding]:
    """One product of our own kernels, in another process: a driver fault there cannot take this one along."""
    if not probe.installed("annie_quant._gemm"):
        return []
    import sys

    asked = probe.run(sys.executable, "-m", "annie_quant.cli", "validate-gpu", "--json", timeout_s=120)
    if asked.code == 0:
        return [finding("ok", "NVFP4 kernels", "right on this GPU")]
    if asked.code == 3:
        return [finding("note", "NVFP4 kernels", "cannot run here", asked.text.splitlines()[0] if asked.text else "")]
    why = "a wrong kernel answers plausibly and wrongly"
    return [finding("fault", "NVFP4 kernels", "wrong on this GPU", why, "annie-quant validate-gpu --stack all")]


CHECKS = (check_gpu,)

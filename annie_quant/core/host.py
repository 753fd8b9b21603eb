"""Facts about this machine: processors, memory, processes, GPUs, package versions; no secrets and no paths of users.

Memory and processes come from psutil, the description of GPUs from nvidia-smi, and what is sampled
during a run from NVML.
"""

from __future__ import annotations

import contextlib
import ipaddress
import itertools
import os
import platform
import re
import subprocess
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import psutil

_PACKAGES = (
    "annie-quant",
    "numpy",
    "scipy",
    "xllamacpp",
    "vllm",
    "sglang",
    "transformers",
    "torch",
    "nvidia-modelopt",
)
_GPU_FIELDS = ("name", "driver_version", "compute_cap", "clocks.sm", "clocks.mem", "power.limit")


@dataclass(frozen=True)
class Memory:
    """Memory of the whole machine. On a DGX Spark it is unified, so the GPU's share is in it."""

    total_bytes: int
    available_bytes: int
    cached_bytes: int

    @property
    def used_bytes(self) -> int:
        return self.total_bytes - self.available_bytes


class Environment(msgspec.Struct, kw_only=True):
    """The machine and the versions of a run."""

    time: str = ""
    system: str = ""
    machine: str = ""
    python: str = ""
    cpu: str | None = None
    cores: int = 0
    load_average: list[float] = []
    memory_total_bytes: int | None = None
    memory_available_bytes: int | None = None
    packages: dict[str, str] = {}
    gpus: list[dict[str, str]] = []


def environment() -> Environment:
    """Return the description of this machine that a run stores (run.json, `environment`)."""
    total = memory()
    return Environment(
        time=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        system=f"{platform.system()} {platform.release()}",
        machine=platform.machine(),
        python=platform.python_version(),
        cpu=cpu_name(),
        cores=cores(),
        load_average=[round(x, 2) for x in os.getloadavg()],
        memory_total_bytes=total.total_bytes if total else None,
        memory_available_bytes=total.available_bytes if total else None,
        packages={name: version for name in _PACKAGES if (version := package_version(name))},
        gpus=gpus(),
    )


def cores() -> int:
    """Return the number of processors that this process may use."""
    return len(os.sched_getaffinity(0))


def load_per_core() -> float:
    """Return the load average of the last minute per usable processor."""
    return round(os.getloadavg()[0] / cores(), 2)


def memory() -> Memory | None:
    """Return the machine's memory, or None if the system does not report it."""
    try:
        figures = psutil.virtual_memory()
    except (OSError, RuntimeError):
        return None
    return Memory(figures.total, figures.available, getattr(figures, "cached", 0))


def process_tree(pid: int) -> list[int]:
    """Return a process and all its descendants; empty if it has ended."""
    try:
        return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    except psutil.Error:
        return []


def listening_pid(port: int) -> int | None:
    """Return the process that listens on a TCP port of this machine, where this user may see it."""
    try:
        connections = psutil.net_connections("tcp")
    except (psutil.Error, OSError):
        return None
    for connection in connections:
        if connection.status != psutil.CONN_LISTEN or not connection.laddr:
            continue
        if connection.laddr.port == port and connection.pid:
            return connection.pid
    return None


def resident_bytes(pids: Iterable[int]) -> int | None:
    """Return the resident memory of processes, or None if all have ended."""
    sizes = []
    for pid in pids:
        try:
            sizes.append(psutil.Process(pid).memory_info().rss)
        except psutil.Error:
            continue
    return sum(sizes) if sizes else None


def cpu_name() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or None
    for line in lines:
        if line.lower().startswith(("model name", "hardware")):
            return line.split(":", 1)[1].strip()
    return platform.processor() or None


def package_version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def version_key(version: str) -> tuple[int, ...]:
    """Return the first three numbers of a version or build (b9123); what follows, as in 0.28.1rc1.dev43, does not count."""
    release = re.split(r"[a-zA-Z+]", version.lstrip("bv"))[0]
    return (*map(int, re.findall(r"\d{1,6}", release)[:3]), 0, 0, 0)[:3]


# GPUs


@cache
def nvml_devices() -> tuple[ModuleType | None, list[object]]:
    """Return (the module pynvml, one handle per GPU); (None, []) without the package, a driver or a GPU."""
    try:
        import pynvml

        pynvml.nvmlInit()
        return pynvml, [
            pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())
        ]
    except Exception:  # the package, its library and the driver each raise their own types
        return None, []


def shares_memory() -> bool:
    """Return whether a GPU of this machine uses the system's memory, as on a DGX Spark: NVML reports none of its own."""
    nvml, devices = nvml_devices()
    return any(_nvml_value(nvml, "nvmlDeviceGetMemoryInfo", device) is None for device in devices)


def gpus() -> list[dict[str, str]]:
    """Return one dict per GPU, with nvidia-smi's names and formats: {"name": "NVIDIA GB10", "clocks.sm": "2418 MHz", ...}."""
    command = smi_command("gpu", _GPU_FIELDS)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return smi_rows(done.stdout, _GPU_FIELDS)


def _nvml_value(nvml: ModuleType | None, function: str, *arguments: object) -> Any:
    """Return what an NVML function reports; None where this GPU or this version of pynvml does not have it."""
    assert nvml is not None
    try:
        return getattr(nvml, function)(*arguments)
    except (nvml.NVMLError, AttributeError):
        return None


def gpu_process_bytes() -> dict[int, int]:
    """Return the GPU memory per process that computes on a GPU, {pid: bytes}.

    Processes without a figure are left out.
    """
    nvml, devices = nvml_devices()
    sizes: Counter[int] = Counter()
    for device in devices:
        for process in _nvml_value(nvml, "nvmlDeviceGetComputeRunningProcesses", device) or ():
            if process.usedGpuMemory is not None:
                sizes[process.pid] += process.usedGpuMemory
    return dict(sizes)


def smi_command(query: str, fields: Iterable[str]) -> list[str]:
    """Return the nvidia-smi command that prints `fields` of `query` ("gpu" or "compute-apps"), one line per item."""
    return ["nvidia-smi", f"--query-{query}={','.join(fields)}", "--format=csv,noheader"]


def smi_rows(output: str, fields: Iterable[str]) -> list[dict[str, str]]:
    """Parse the output of `smi_command`. Missing values are empty."""
    names = list(fields)
    rows = []
    for line in filter(str.strip, output.splitlines()):
        cells = [cell.strip() for cell in line.split(",")]
        rows.append(dict(itertools.zip_longest(names, cells[: len(names)], fillvalue="")))
    return rows


# Clocks and temperature

_LIMITS = {  # nvmlClocksEventReasons*; 1 is idle, 2 a user's setting
    0x04: "software power cap",
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}


GpuState = tuple[float | None, float | None, str | None]


def machine_state() -> GpuState:
    """Return (clock in MHz, temperature in °C, what limits the clock) of the hottest GPU, or of the processor without one.

    Each is None where it is not reported; a virtual machine reports none of them.
    """
    nvml, devices = nvml_devices()
    states = [_gpu_state(nvml, device) for device in devices]
    if states:
        return max(states, key=lambda state: state[1] or 0.0)
    return _cpu_clock(), _cpu_temperature_c(), None


def _limits(reasons: int) -> str | None:
    return ", ".join(text for bit, text in _LIMITS.items() if reasons & bit) or None


def _gpu_state(nvml: ModuleType | None, device: object) -> GpuState:
    reasons = _nvml_value(nvml, "nvmlDeviceGetCurrentClocksEventReasons", device)
    if reasons is None:  # the name in older versions of pynvml
        reasons = _nvml_value(nvml, "nvmlDeviceGetCurrentClocksThrottleReasons", device) or 0
    clock = _nvml_value(nvml, "nvmlDeviceGetClockInfo", device, 1)  # NVML_CLOCK_SM
    heat = _nvml_value(nvml, "nvmlDeviceGetTemperature", device, 0)  # NVML_TEMPERATURE_GPU
    return (
        None if clock is None else float(clock),
        None if heat is None else float(heat),
        _limits(reasons),
    )


def _cpu_clock() -> float | None:
    """Return the mean of the current clocks of all processors, in MHz; None where the kernel does not scale them."""
    clocks = []
    for path in Path("/sys/devices/system/cpu").glob("cpu[0-9]*/cpufreq/scaling_cur_freq"):
        with contextlib.suppress(OSError, ValueError):
            clocks.append(int(path.read_text()) / 1e3)
    return round(sum(clocks) / len(clocks), 1) if clocks else None


def _cpu_temperature_c() -> float | None:
    try:
        sensors = psutil.sensors_temperatures()
    except (AttributeError, OSError, RuntimeError):  # not on this system
        return None
    all_sensors = itertools.chain.from_iterable(sensors.values())
    return max((float(sensor.current or 0) for sensor in all_sensors), default=0.0) or None


def is_local(host: str) -> bool:
    """Return whether only this machine reaches an address or host name."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host.lower() == "localhost"

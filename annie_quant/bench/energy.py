"""Energy that the GPUs of this machine take while a server answers, where NVML counts it (mJ since the driver's start).

The whole GPU is counted, idle power and other work included; a machine without NVML or without that counter has none.
"""

from __future__ import annotations

from typing import Any


class Meter:
    """`read()` before and after: the difference is joules. None where nothing can be read."""

    def __init__(self) -> None:
        self._nvml: Any = None
        self._devices: list[Any] = []
        try:
            import pynvml

            pynvml.nvmlInit()
            self._nvml = pynvml
            self._devices = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        except Exception:  # no package, no driver, no GPU: each has an error class of its own
            self._devices = []

    def read(self) -> float | None:
        """Joules since the driver's start, over all GPUs that count them."""
        total = None
        for device in self._devices:
            try:
                total = (total or 0.0) + self._nvml.nvmlDeviceGetTotalEnergyConsumption(device) / 1e3
            except self._nvml.NVMLError:
                continue
        return total

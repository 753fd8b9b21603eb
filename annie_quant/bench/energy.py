"""GPU energy while a server answers, from NVML's counters (millijoules since the driver was loaded).

The whole GPU is counted, including idle power and other work. Machines without NVML or without the counter have no figure.
"""

from __future__ import annotations

from typing import Any


class EnergyMeter:
    """Reads the counters of all GPUs; the difference of two readings is the energy between them."""

    def __init__(self) -> None:
        self._nvml: Any = None
        self._devices: list[Any] = []
        try:
            import pynvml

            pynvml.nvmlInit()
            self._nvml = pynvml
            self._devices = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        except Exception:  # no package, no driver or no GPU: each raises a class of its own
            self._devices = []

    def read(self) -> float | None:
        """Return joules since the driver was loaded, over all GPUs that count them; None where none does."""
        total = None
        for device in self._devices:
            try:
                total = (total or 0.0) + self._nvml.nvmlDeviceGetTotalEnergyConsumption(device) / 1e3
            except self._nvml.NVMLError:
                continue
        return total

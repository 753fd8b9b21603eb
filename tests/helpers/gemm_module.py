"""annie_quant._gemm where it is built, devices to plan for without one, and how many CUDA devices there are."""

from __future__ import annotations

from types import ModuleType

import pytest

from annie_quant import gemm
from annie_quant.core.errors import EnvironmentFault
from annie_quant.gemm.arrays import native


def find_module() -> ModuleType | None:
    try:
        return native()
    except EnvironmentFault:
        return None


def count_devices() -> int:
    try:
        return gemm.device_count()
    except Exception:
        return 0


module = find_module()
needs_module = pytest.mark.skipif(
    module is None, reason="annie_quant._gemm is not built here (it needs nvcc)"
)

# sms, shared memory per block, compute capability, wgmma, native FP4
DEVICES = {
    "H200": (132, 232448, 9, True, False),
    "GB10": (48, 101376, 12, False, True),
    "B200": (148, 232448, 10, False, False),
}
A100 = (108, 166912, 8, False, False)  # before clusters: refused

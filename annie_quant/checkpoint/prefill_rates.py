"""Measure how fast a GPU multiplies a prompt in each format, for the predicted time to the first token.

A kernel that this GPU or this torch does not have is left out with the reason. W4A16 is measured by
our kernel, the others by torch's libraries; a server's own kernels may differ.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from annie_quant.core.errors import AnnieError, need

if TYPE_CHECKING:
    from torch import Tensor

_TOKENS = 2048
_SHAPE = (12288, 4096)  # a 9B's gate and up projections, one of them
_GROUP = 16
SECONDS = 3.0  # of each measurement
FAILURES = (AnnieError, RuntimeError, NotImplementedError, AttributeError, TypeError, ValueError)


def fastest_call_s(work: Callable[[], object], wait: Callable[[], object]) -> float:
    """Return the seconds of the fastest call. wait: returns when the work has ended."""
    end = time.monotonic() + SECONDS
    least = math.inf
    work()
    wait()
    while time.monotonic() < end:
        start = time.perf_counter()
        work()
        wait()
        least = min(least, time.perf_counter() - start)
    return least


def measure_prefill() -> tuple[dict[str, float], dict[str, str]]:
    """Return kernel → TFLOP/s, and kernel → why it was not measured, of this machine's GPU."""
    torch = need("torch", "quantize")
    rates: dict[str, float] = {}
    missing: dict[str, str] = {}
    for kernel, prepare in KERNELS.items():
        try:
            seconds = fastest_call_s(prepare(), torch.cuda.synchronize)
        except FAILURES as error:
            missing[kernel] = str(error).partition("\n")[0][:120] or type(error).__name__
        else:
            rates[kernel] = round(2 * _SHAPE[0] * _SHAPE[1] * _TOKENS / seconds / 1e12, 3)
    return rates, missing


def _inputs() -> Tensor:
    torch = need("torch", "quantize")
    return torch.randn(_TOKENS, _SHAPE[1], dtype=torch.bfloat16, device="cuda")


def _bf16() -> Callable[[], object]:
    torch = need("torch", "quantize")
    x = _inputs()
    weight = torch.randn(*_SHAPE, dtype=torch.bfloat16, device="cuda")
    return lambda: x @ weight.t()


def _fp8() -> Callable[[], object]:
    """Return the product with scales per token and row, and the rounding of its inputs."""
    torch = need("torch", "quantize")
    x = _inputs()
    kind = torch.float8_e4m3fn
    weight = torch.randn(*_SHAPE, device="cuda").to(kind).t()
    rows = torch.ones(1, _SHAPE[0], device="cuda")

    def product() -> Tensor:
        scales = x.abs().amax(-1, keepdim=True).float() / 448
        rounded = (x / scales).to(kind)
        return torch._scaled_mm(rounded, weight, scales, rows, out_dtype=torch.bfloat16)

    return product


def _w4a16() -> Callable[[], object]:
    torch = need("torch", "quantize")
    from annie_quant.gemm.oracle import random_weight
    from annie_quant.gemm.torch_op import prepare, product

    codes, scales = (torch.from_numpy(array).cuda() for array in random_weight(*_SHAPE, 0))
    packed = prepare(codes, scales.view(torch.float8_e4m3fn), 0.01)
    x = _inputs()
    return lambda: product(x, packed.packed, packed.tensor_scale, packed.n)


def _w4a4() -> Callable[[], object]:
    """Return the product alone: a server rounds the inputs in the norm or activation before it."""
    torch = need("torch", "quantize")
    capability = torch.cuda.get_device_capability()
    if capability < (10, 0):
        raise NotImplementedError(f"SM{capability[0]}{capability[1]} has no FP4 units")
    kind = torch.float4_e2m1fn_x2

    def operand(rows: int) -> tuple[Tensor, Tensor]:
        codes = torch.randint(0, 256, (rows, _SHAPE[1] // 2), dtype=torch.uint8, device="cuda")
        scales = torch.ones(rows * _SHAPE[1] // _GROUP, device="cuda").to(torch.float8_e4m3fn)
        return codes.view(kind), scales

    x, x_scales = operand(_TOKENS)
    weight, scales = operand(_SHAPE[0])
    return lambda: torch._scaled_mm(x, weight.t(), x_scales, scales, out_dtype=torch.bfloat16)


KERNELS: dict[str, Callable[[], Callable[[], object]]] = {
    "bf16": _bf16,
    "fp8": _fp8,
    "w4a16": _w4a16,
    "w4a4": _w4a4,
}

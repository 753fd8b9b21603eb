"""The rates of a machine: measured here in about a second, or those of a DGX Spark.

The rates of a CPU are per processor second, so that other processes change them little: a crowded machine takes longer than
estimated.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from annie_quant import nvfp4
from annie_quant.checkpoint import decode_speed


@dataclass(frozen=True)
class Rates:
    """A machine.

    flop_s: operations per second of a large matmul in bf16
    float32_flop_s: in float32
    cpu_flop_s: in float32 on the CPU
    copy: bytes that a copy in the device's memory reads and writes per second
    encode: bytes of bf16 rounded to NVFP4 per second
    memory: free bytes
    description: one line
    """

    flop_s: float
    float32_flop_s: float
    cpu_flop_s: float
    copy: float
    encode: float
    memory: float
    description: str

    @property
    def on_cpu(self) -> bool:
        return self.float32_flop_s == self.cpu_flop_s


# The matmul and the memory were measured on a GB10 (tests/perf/gemm.md), the codec on two x86 cores.
SPARK_RATES = Rates(
    91e12,
    20e12,
    5e11,
    decode_speed.DEVICES["gb10"].read_bytes_s,
    12e9,
    119e9,
    "DGX Spark: 91 bf16 TFLOP/s and 232 GB/s measured; 119 GB free, 20 float32 TFLOP/s, codec 12 GB/s and CPU 0.5 TFLOP/s assumed",
)


def measure_rates() -> Rates:
    """Measure this machine's rates in about a second: matmul, a copy, the codec, the free memory."""
    import ml_dtypes
    import numpy as np
    import torch

    from annie_quant.quantize.backend import device_kind, free_memory_bytes

    threads = torch.get_num_threads()
    device = device_kind()
    memory = free_memory_bytes()

    def matmul(device: str, dtype: torch.dtype) -> float:
        size = 8192 if device == "cuda" else 1024
        a = torch.randn(size, size, device=device, dtype=dtype)
        return 2 * size**3 / fastest_seconds(lambda: a @ a, device)

    w = (
        np.random.default_rng(0)
        .standard_normal((1024, 2048), np.float32)
        .astype(ml_dtypes.bfloat16)
    )
    source = torch.zeros(1 << 24, device=device)
    target = torch.ones_like(source)
    torch.set_num_threads(1)
    try:
        float32 = cpu = matmul("cpu", torch.float32) * threads
        flop_s = matmul("cpu", torch.bfloat16) * threads
        copy = 2 * source.nbytes / fastest_seconds(lambda: target.copy_(source), device)
        encode = w.nbytes / fastest_seconds(lambda: nvfp4.pack(w), "cpu") * threads
    finally:
        torch.set_num_threads(threads)
    if device == "cuda":
        flop_s = matmul(device, torch.bfloat16)
        float32 = matmul(device, torch.float32)
    description = (
        f"measured here on {device}: matmul {flop_s / 1e12:,.2f} TFLOP/s (float32 {float32 / 1e12:,.2f}), "
        f"memory {copy / 1e9:,.0f} GB/s, codec {encode / 1e9:,.1f} GB/s"
    )
    return Rates(flop_s, float32, cpu, copy, encode, memory, description)


def fastest_seconds(work: Callable[[], object], device: str) -> float:
    """Return the seconds of the fastest of a few runs, on a CPU processor seconds of all threads.

    A GPU that other processes use, too, shows its rate in few of many short runs.
    """
    least = math.inf
    for _ in range(3 if device == "cpu" else 20):
        start = clock(device)
        work()
        least = min(least, clock(device) - start)
    return max(least, 1e-9)


def clock(device: str) -> float:
    """Return the processor time of this process, or the time after all work of the GPU."""
    if device == "cpu":
        return time.process_time()
    import torch

    torch.cuda.synchronize()
    return time.perf_counter()

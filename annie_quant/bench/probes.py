"""A fixed product of an NVFP4 matrix and a vector, which is timed between the requests of a benchmark.

On a GPU our W4A16 kernel computes it, from memory and in a CUDA graph of about GRAPH_MS: longer than the slice of time after which
a GPU turns to another process, so that such a process shows in each graph.
"""

from __future__ import annotations

import contextlib
import timeit

import numpy as np

from annie_quant import nvfp4
from annie_quant.core.errors import AnnieError
from annie_quant.gemm.arrays import DeviceArray, native, to_device
from annie_quant.gemm.ops import Weight, w4a16

CPU_SHAPE = (2048, 4096)  # 4.7 MB
GPU_SHAPE = (16384, 8192)  # 75 MB: more than the caches of a GB10 (24 MB) and of an H100 (50 MB)
REPEATS = 5  # of a sample, which is the fastest one: a process that takes the core for a moment is not a state
GRAPH_MS, MOST_PRODUCTS = 10.0, 4096


def new_probe(on_gpu: bool) -> GpuProbe | CpuProbe:
    """Return a probe of the GPU, or of the processor where our kernel cannot run."""
    if on_gpu:
        with contextlib.suppress(AnnieError, RuntimeError):
            return GpuProbe()
    return CpuProbe()


def _weight(shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Return codes and block scales of a matrix, uint8."""
    codes = np.arange(shape[0] * shape[1] // 2, dtype=np.uint32).astype(np.uint8).reshape(shape[0], -1)
    return codes, np.full((shape[0], shape[1] // 16), 0x38, np.uint8)


class CpuProbe:
    """The codec's product on one core. name: the same on machines whose times can be compared."""

    def __init__(self) -> None:
        codes, scales = _weight(CPU_SHAPE)
        self._weight = nvfp4.Tensor(codes, scales.view(nvfp4.E4M3), np.float32(1), CPU_SHAPE, 16)
        self._x = np.ones((1, CPU_SHAPE[1]), np.float32)
        self.name = f"NVFP4 product {CPU_SHAPE[0]} x {CPU_SHAPE[1]} on the processor"
        self.time_ms()

    def time_ms(self) -> float:
        """Return the time of one product."""
        return 1e3 * min(timeit.repeat(lambda: nvfp4.gemv(self._x, self._weight), number=1, repeat=REPEATS))


class GpuProbe:
    """Our kernel's product on the current GPU. It holds 75 MB there, besides the process's context."""

    def __init__(self) -> None:
        codes, scales = _weight(GPU_SHAPE)
        self._weight = Weight(to_device(codes), to_device(scales), 1.0)
        self._x = to_device(np.ones((1, GPU_SHAPE[1]), np.float16))
        self._out = DeviceArray((1, GPU_SHAPE[0]), "float16")
        self._workspace = DeviceArray((max(1, self._weight.workspace_bytes(1)),), "uint8")
        self._stream = native().stream_new()
        self._products, self._graph = 1, self._captured(1)
        self._products = max(1, min(MOST_PRODUCTS, round(GRAPH_MS / self.time_ms())))
        native().graph_free(self._graph)
        self._graph = self._captured(self._products)
        self.name = f"NVFP4 product {GPU_SHAPE[0]} x {GPU_SHAPE[1]} on the GPU"

    def _captured(self, products: int) -> int:
        native().capture_begin(self._stream)
        for _ in range(products):
            w4a16(self._x, self._weight, self._out, workspace=self._workspace, stream=self._stream)
        graph: int = native().capture_end(self._stream)
        return graph

    def time_ms(self) -> float:
        """Return the time of one product. Raises RuntimeError where the GPU fails."""
        return min(native().graph_time(self._graph, self._stream) for _ in range(REPEATS)) / self._products

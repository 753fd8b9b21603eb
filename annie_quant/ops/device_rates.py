"""Measure how fast this machine decodes: reachable bandwidth, and the cost of launches (annie-quant doctor --measure).

On a GPU by our W4A16 kernel with one token and a copy, in CUDA graphs as servers launch them; on a CPU by the codec's product and
a copy. Weights rotate, so that they come from memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from itertools import cycle
from pathlib import Path

import numpy as np

from annie_quant import nvfp4
from annie_quant.checkpoint import decode_speed
from annie_quant.core.errors import need
from annie_quant.core.host import gpus
from annie_quant.core.progress import SILENT, Progress
from annie_quant.documents import Device, write

SHAPE = (16384, 8192)  # 75 MB in NVFP4
COPIES = 8
TINY = (256, 256)
LAUNCHES = 16  # kernels of a decoder layer: two norms, four to six products, rotary embedding, cache, attention, gates (assumed)
SECONDS = 3.0  # of each measurement


def measure_device(path: Path | None = None, progress: Progress = SILENT) -> Device:
    """Measure this machine and write its device file. path: by default where predictions look for it."""
    progress.message(f"measuring {decode_speed.machine_name()}: reads, copies and launches, {3 * SECONDS:.0f} seconds")
    read, copied, launch = measure_gpu() if gpus() else measure_cpu()
    device = Device(
        name=decode_speed.machine_name(),
        read_bytes_s=max(read, copied),
        layer_s=LAUNCHES * launch,
        source=f"doctor --measure, {time.strftime('%Y-%m-%d')}: product {read / 1e9:.4g} GB/s, copy {copied / 1e9:.4g} GB/s, "
        f"launch {launch * 1e6:.3g} us x {LAUNCHES}",
    )
    path = path or decode_speed.device_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path, device)
    return device


def random_weight(shape: tuple[int, int], seed: int) -> nvfp4.Tensor:
    """Return an NVFP4 weight of random codes."""
    random = np.random.default_rng(seed)
    codes = random.integers(0, 256, (shape[0], shape[1] // 2), np.uint8)
    scales = random.integers(0x20, 0x50, (shape[0], shape[1] // 16), np.uint8).view(nvfp4.E4M3)
    return nvfp4.Tensor(codes, scales, np.float32(0.01), shape, 16)


def fastest(work: Callable[[], object], wait: Callable[[], object] = lambda: None) -> float:
    """Return the seconds of the fastest call. wait: returns when the work has ended."""
    end, least = time.monotonic() + SECONDS, float("inf")
    work()
    wait()
    while time.monotonic() < end:
        start = time.perf_counter()
        work()
        wait()
        least = min(least, time.perf_counter() - start)
    return least


def measure_cpu() -> tuple[float, float, float]:
    """Return bytes per second of products and of copies (read and written), and the seconds of a small product."""
    weights = [random_weight(SHAPE, i) for i in range(COPIES)]
    x, turn, target = np.ones((1, SHAPE[1]), np.float32), cycle(weights), np.empty_like(weights[0].codes)
    read = SHAPE[0] * SHAPE[1] * 9 / 16 / fastest(lambda: nvfp4.gemv(x, next(turn)))
    copied = 2 * target.nbytes / fastest(lambda: np.copyto(target, next(turn).codes))
    small, one = random_weight(TINY, 0), np.ones((1, TINY[1]), np.float32)
    return read, copied, fastest(lambda: nvfp4.gemv(one, small))


def measure_gpu() -> tuple[float, float, float]:
    """Return the same of a GPU, with its kernels in CUDA graphs."""
    torch = need("torch", "quantize")
    from annie_quant.gemm.torch_op import prepare, product

    def on_gpu(shape: tuple[int, int], seed: int) -> Callable[[], object]:
        weight = random_weight(shape, seed)
        codes, scales = (torch.from_numpy(a.view(np.uint8)).cuda() for a in (weight.codes, weight.block_scale))
        packed = prepare(codes, scales.view(torch.float8_e4m3fn), 0.01)
        x = torch.ones(1, shape[1], dtype=torch.bfloat16, device="cuda")
        return lambda: product(x, packed.packed, packed.tensor_scale, packed.n)

    def seconds(calls: list[Callable[[], object]]) -> float:
        """Return the seconds of one of the calls."""
        graph = torch.cuda.CUDAGraph()
        for call in calls:
            call()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        return fastest(graph.replay, torch.cuda.synchronize) / len(calls)

    read = SHAPE[0] * SHAPE[1] * 9 / 16 / seconds([on_gpu(SHAPE, i) for i in range(COPIES)])
    source, target = (torch.zeros(1 << 30, dtype=torch.uint8, device="cuda") for _ in range(2))
    copied = 2 * source.nbytes / seconds([partial(target.copy_, source)])
    return read, copied, seconds([on_gpu(TINY, 0)] * (20 * LAUNCHES))

"""Products from four threads on one stream and on four streams, each compared bit for bit with one that the oracle confirmed.

    PYTHONPATH=. python3 tests/sanitize/threads_gemm.py [--products 100000]

The plans need a workspace: a kernel writes the permuted activations there, the next one reads them. As a negative control
all launches of the stream get one workspace, as in version 0.1: that must give wrong results. Needs a Hopper GPU.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time

import ml_dtypes
import numpy as np

import annie_quant.gemm as gemm
from annie_quant.gemm.arrays import View, native

M, N, K, BATCH = 32, 512, 1024, 100
# Two and three kernels per product, tiles of 16 to 128 tokens, different numbers of stages.
PLANS = (
    gemm.WgmmaPlan(32, 256, 2, 1, 2, 0, 1),
    gemm.WgmmaPlan(64, 256, 6, 1, 4, 2, 1),
    gemm.WgmmaPlan(16, 192, 6, 1, 7, 0, 1),
    gemm.WgmmaPlan(128, 256, 4, 1, 3, 2, 1),
)


def expected_results(weight: gemm.Weight, dense: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return (activations, result) per plan; each result is checked with the float64 oracle."""
    cases = []
    for i, plan in enumerate(PLANS):
        x = np.random.default_rng(i).standard_normal((M, K)).astype(ml_dtypes.bfloat16)
        result = gemm.w4a16(
            gemm.to_device(x), weight, gemm.DeviceArray((M, N), "float32"), plan=plan
        ).host()
        exact, magnitude = gemm.oracle.linear(x, dense)
        if gemm.oracle.worst(result, exact, gemm.oracle.bound(exact, magnitude, K, "float32")) > 1:
            sys.exit(f"{plan}: the result is outside the oracle's bound")
        cases.append((x, result))
    return cases


def multiply(
    products: int, streams: int, shared_workspace: bool, weight: gemm.Weight, cases: list
) -> int:
    """Return the number of wrong products of four threads."""
    module = native()
    handles = [module.stream_new() for _ in range(streams)]
    size = max(weight.workspace_bytes(M, plan) for plan in PLANS)
    workspace = gemm.DeviceArray((size,), "uint8") if shared_workspace else None
    start, wrong, errors = threading.Barrier(len(PLANS)), [0] * len(PLANS), []

    def work(i: int) -> None:
        x, expected = gemm.to_device(cases[i][0]), cases[i][1]
        outs = gemm.DeviceArray((BATCH, M, N), "float32")
        slices = [part(outs, j) for j in range(BATCH)]
        stream = handles[i % streams]
        start.wait()
        try:
            for _ in range(products // len(PLANS) // BATCH):
                for out in slices:
                    gemm.w4a16(x, weight, out, plan=PLANS[i], stream=stream, workspace=workspace)
                outs.stream = stream
                wrong[i] += int((outs.host() != expected).any(axis=(1, 2)).sum())
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(PLANS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for handle in handles:
        module.stream_sync(handle)
        module.stream_free(handle)
    if errors:
        raise errors[0]
    return sum(wrong)


def part(whole: gemm.DeviceArray, index: int) -> View:
    """Return one product's output in a larger array."""
    shape, size = whole.shape[1:], whole.nbytes // whole.shape[0]
    return View(whole.ptr + index * size, shape, (shape[1], 1), whole.dtype, whole.device, whole)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--products", type=int, default=100_000)
    args = parser.parse_args()
    codes, scales = gemm.oracle.random_weight(N, K, 0)
    weight = gemm.Weight(gemm.to_device(codes), gemm.to_device(scales), 0.0173)
    cases = expected_results(weight, gemm.oracle.dequantize(codes, scales, 0.0173))
    failed = False
    for streams, shared in ((1, False), (4, False), (1, True)):
        begin = time.perf_counter()
        wrong = multiply(args.products, streams, shared, weight, cases)
        seconds = time.perf_counter() - begin
        name = f"{len(PLANS)} threads on {streams} stream{'s' if streams > 1 else ''}"
        if shared:
            name += ", one workspace for the stream (version 0.1)"
        bad = (wrong > 0) != shared
        failed |= bad
        print(
            f"{name}: {wrong} of {args.products} products wrong, {seconds:.1f} s{'  FAILED' if bad else ''}",
            flush=True,
        )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

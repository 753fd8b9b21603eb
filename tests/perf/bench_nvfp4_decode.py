"""One token's product with an NVFP4 weight on this CPU: ours (float32 activations, exact) and llama.cpp's (8-bit activations).

    python tests/perf/bench_nvfp4_decode.py [--threads 1] [--rounds 40]

llama.cpp is ggml inside xllamacpp: its matrix product of one token, with type NVFP4 and with Q4_K. Both NVFP4 forms have 0.5625
bytes per weight. Weights rotate, so that they come from memory; calls are interleaved, and the figure is the minimum: other work
on the machine only adds. Also one read of the same bytes (a sum over 64-bit words), which no product can be faster than.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from annie_quant.offline import codec

SHAPES = ((12288, 4096), (4096, 12288), (4096, 4096))
GGML_F32, GGML_Q4_K, GGML_NVFP4 = 0, 12, 40
COPIES = 4


class InitParams(ctypes.Structure):
    """ggml_init_params."""

    _fields_ = [
        ("mem_size", ctypes.c_size_t),
        ("mem_buffer", ctypes.c_void_p),
        ("no_alloc", ctypes.c_bool),
    ]


def ggml() -> ctypes.CDLL:
    spec = importlib.util.find_spec("xllamacpp")
    assert spec is not None and spec.origin is not None
    library = ctypes.CDLL(str(next(Path(spec.origin).parent.glob("xllamacpp*.so"))))
    for name in (
        "ggml_init",
        "ggml_new_tensor_2d",
        "ggml_mul_mat",
        "ggml_new_graph",
        "ggml_get_data",
    ):
        getattr(library, name).restype = ctypes.c_void_p
    library.ggml_nbytes.restype = ctypes.c_size_t
    library.ggml_init.argtypes = [InitParams]
    return library


def llama_calls(
    library: ctypes.CDLL, kind: int, n: int, k: int, threads: int
) -> tuple[list[Callable[[], Any]], int]:
    """Return one call per copy of a random weight, and a weight's bytes."""
    context = ctypes.c_void_p(
        library.ggml_init(InitParams(COPIES * n * k + (64 << 20), None, False))
    )
    random = np.random.default_rng(0)
    calls, size = [], 0
    for _ in range(COPIES):
        weight = ctypes.c_void_p(
            library.ggml_new_tensor_2d(context, kind, ctypes.c_int64(k), ctypes.c_int64(n))
        )
        x = ctypes.c_void_p(
            library.ggml_new_tensor_2d(context, GGML_F32, ctypes.c_int64(k), ctypes.c_int64(1))
        )
        size = library.ggml_nbytes(weight)
        values = np.frombuffer(
            (ctypes.c_uint8 * size).from_address(library.ggml_get_data(weight)), np.uint8
        )
        values[:] = random.integers(
            0x20, 0x50, size, dtype=np.uint8
        )  # finite scales in all three kinds of blocks
        ones = (ctypes.c_float * k).from_address(library.ggml_get_data(x))
        np.frombuffer(ones, np.float32)[:] = random.standard_normal(k, np.float32)
        graph = ctypes.c_void_p(library.ggml_new_graph(context))
        library.ggml_build_forward_expand(
            graph, ctypes.c_void_p(library.ggml_mul_mat(context, weight, x))
        )
        calls.append(
            lambda graph=graph: library.ggml_graph_compute_with_ctx(context, graph, threads)
        )
    return calls, size


def our_calls(n: int, k: int) -> list[Callable[[], Any]]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, k, generator=generator)
    calls = []
    for _ in range(COPIES):
        codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, generator=generator)
        scales = torch.randint(
            0x20, 0x50, (n, k // 16), dtype=torch.uint8, generator=generator
        ).view(torch.float8_e4m3fn)
        calls.append(
            lambda c=codes, s=scales: codec.packed_matmul(x, c, s, 0.01, 16, divides=False)
        )
    return calls


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=40)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    library = ggml()
    for n, k in SHAPES:
        calls = {"ours": our_calls(n, k)}
        calls["llama.cpp NVFP4"], size = llama_calls(library, GGML_NVFP4, n, k, args.threads)
        calls["llama.cpp Q4_K"], other = llama_calls(library, GGML_Q4_K, n, k, args.threads)
        words = [np.random.default_rng(i).integers(0, 1 << 62, size // 8) for i in range(COPIES)]
        calls["read"] = [lambda w=w: w.sum() for w in words]
        best = dict.fromkeys(calls, float("inf"))
        for number in range(args.rounds):
            for name, several in calls.items():
                begin = time.perf_counter()
                several[number % COPIES]()
                best[name] = min(best[name], 1e3 * (time.perf_counter() - begin))
        assert size == n * k * 9 // 16
        line = ", ".join(f"{name} {ms:.2f} ms" for name, ms in best.items())
        print(
            f"{n}x{k}, {size / 1e6:.1f} MB (Q4_K {other / 1e6:.1f}), {args.threads} threads: {line}",
            flush=True,
        )


if __name__ == "__main__":
    main()

"""Speed of the codec compared with current programs, in one run on one machine.

    python tests/perf/bench_codec.py [--size 4096] [--repeats 7] [--json]

Every line: our time, the peer and its time, the ratio and the target, bytes moved per second and their share of the bandwidth of
a non-temporal copy. Ours is the best of `repeats` or of 0.8 s, a peer's the best of 5 or of 0.8 s. Results are compared before
anything is timed. Ours writes into existing arrays, except in the lines "fresh output", where it allocates them as ModelOpt
always does.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np

from annie_quant import kquant, nvfp4


def best(call: Callable[[], object], repeats: int) -> float:
    """Return the seconds of the fastest of at least `repeats` runs and 0.8 s: other work only adds time, in bursts."""
    fastest, count, end = float("inf"), 0, time.perf_counter() + 0.8
    while count < repeats or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        fastest = min(fastest, time.perf_counter() - start)
        count += 1
    return fastest


def copy_bandwidth(repeats: int) -> float:
    """Return bytes per second, read and written, of a nearly non-temporal copy by the codec's threads: unpacking to float32,
    which reads 0.56 bytes per element and writes 4, bypassing the caches. libc's memcpy does not scale to two threads.
    """
    t = nvfp4.pack(np.ones((4096, 4096), ml_dtypes.bfloat16))
    out = np.empty((4096, 4096), np.float32)
    nvfp4.unpack(t, "float32", out=out)
    return (out.nbytes + t.nbytes) / best(lambda: nvfp4.unpack(t, "float32", out=out), repeats)


def read_bandwidth(repeats: int) -> float:
    """Return bytes per second of reading alone: the amax of 128 MB, more than any cache holds."""
    w = np.ones((8192, 8192), ml_dtypes.bfloat16)
    return w.nbytes / best(lambda: nvfp4.amax(w), repeats)


def nvfp4_lines(size: int, repeats: int) -> list[dict]:
    import torch
    from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor

    torch.set_num_threads(nvfp4.threads())
    w = (
        np.random.default_rng(0).standard_normal((size, size), np.float32) * np.float32(0.02)
    ).astype(ml_dtypes.bfloat16)
    wt = torch.from_numpy(w.view(np.int16)).view(torch.bfloat16)
    scale = nvfp4.tensor_scale(nvfp4.amax(w))
    st = torch.tensor(scale)
    q, s, s2 = NVFP4QTensor.quantize(wt, 16, None, st)
    t = nvfp4.pack(w, tensor_scale=scale)
    assert (t.codes == q._quantized_data.numpy()).all() and (
        t.block_scale.view(np.uint8) == s.view(torch.uint8).numpy()
    ).all()
    modelopt_s = best(lambda: NVFP4QTensor.quantize(wt, 16, None, st), 5)
    whole = best(lambda: NVFP4QTensor.quantize(wt, 16), 5)
    back = best(
        lambda: q.dequantize(torch.bfloat16, scale=s, double_scale=s2, block_sizes={-1: 16}), 5
    )
    out = nvfp4.unpack(t)
    moved = w.nbytes + t.nbytes
    rows = [
        (
            "pack, tensor scale given",
            lambda: nvfp4.pack(w, tensor_scale=scale, out=t),
            modelopt_s,
            250,
            moved,
        ),
        ("amax + pack", lambda: nvfp4.pack(w, out=t), whole, 180, moved + w.nbytes),
        ("pack, fresh output", lambda: nvfp4.pack(w, tensor_scale=scale), modelopt_s, None, moved),
        ("unpack to bfloat16", lambda: nvfp4.unpack(t, out=out), back, 100, moved),
        ("unpack, fresh output", lambda: nvfp4.unpack(t), back, None, moved),
        (
            "full sweep, exact",
            lambda: nvfp4.pack(w, tensor_scale=scale, scale="sweep", out=t),
            modelopt_s,
            25,
            moved,
        ),
        (
            "four-over-six",
            lambda: nvfp4.pack(w, tensor_scale=scale, scale="four_over_six", out=t),
            modelopt_s,
            60,
            moved,
        ),
    ]
    return [
        line(name, best(call, repeats), "ModelOpt on the CPU", peer, target, bytes_moved)
        for name, call, peer, target, bytes_moved in rows
    ]


def llama_library() -> ctypes.CDLL | None:
    """Load llama.cpp from xllamacpp; None if it is not installed, then its encoders are not measured."""
    result = importlib.util.find_spec("xllamacpp")
    if result is None or result.origin is None:
        return None
    library = ctypes.CDLL(str(sorted(Path(result.origin).parent.glob("xllamacpp*.so"))[0]))
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    return library


def kquant_lines(repeats: int) -> list[dict]:
    import gguf

    library = llama_library()
    w = np.random.default_rng(0).standard_normal((512, 4096), np.float32) * np.float32(0.02)
    lines = []
    threads = nvfp4.threads()
    for kind in ("Q4_K", "Q5_K", "Q6_K"):
        raw = kquant.quantize(w, kind)
        if library:
            theirs = np.empty_like(raw)

            def llama(
                library: ctypes.CDLL = library, kind: str = kind, theirs: np.ndarray = theirs
            ) -> None:
                library.ggml_quantize_chunk(
                    kquant.BLOCKS[kind].ggml_type, ctypes.c_void_p(w.ctypes.data), ctypes.c_void_p(theirs.ctypes.data),
                    ctypes.c_int64(0), ctypes.c_int64(w.shape[0]), ctypes.c_int64(w.shape[1]), None,
                )  # fmt: skip

            llama()
            assert (raw == theirs).all()
            nvfp4.set_threads(1)
            ours = best(lambda kind=kind: kquant.quantize(w, kind), repeats)
            nvfp4.set_threads(threads)
            lines.append(
                line(
                    f"{kind} encode, 1 thread",
                    ours,
                    "llama.cpp's quantizer, 1 thread",
                    best(llama, 3),
                    3,
                    w.nbytes,
                )
            )
        number = getattr(gguf.GGMLQuantizationType, kind)
        out = np.empty_like(w)
        assert (gguf.quants.dequantize(raw, number) == kquant.dequantize(raw, kind, out)).all()
        ours = best(lambda raw=raw, kind=kind, out=out: kquant.dequantize(raw, kind, out), repeats)
        peer = best(lambda raw=raw, number=number: gguf.quants.dequantize(raw, number), 3)
        lines.append(line(f"{kind} decode", ours, "gguf-py", peer, 20, w.nbytes + raw.nbytes))
    return lines


def scaling_line(size: int, repeats: int) -> dict:
    w = (
        np.random.default_rng(1)
        .standard_normal((size, size), np.float32)
        .astype(ml_dtypes.bfloat16)
    )
    t = nvfp4.pack(w)
    threads, seconds = nvfp4.threads(), {}
    for count in (1, 2):
        nvfp4.set_threads(count)
        seconds[count] = best(
            lambda: nvfp4.pack(w, tensor_scale=0.01, scale="sweep", out=t), repeats
        )
    nvfp4.set_threads(threads)
    return line("sweep, 2 threads", seconds[2], "ours, 1 thread", seconds[1], 1.8, w.nbytes)


def line(
    name: str, ours_s: float, peer: str, peer_s: float, target: float | None, size_bytes: int
) -> dict:
    return {
        "what": name, "ours_ms": ours_s * 1e3, "peer": peer, "peer_ms": peer_s * 1e3, "ratio": peer_s / ours_s,
        "target": target, "gb_s": size_bytes / ours_s / 1e9,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--size", type=int, default=4096, help="rows and columns of the bfloat16 weight"
    )
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    copy, read = copy_bandwidth(arguments.repeats) / 1e9, read_bandwidth(arguments.repeats) / 1e9
    lines = [
        *nvfp4_lines(arguments.size, arguments.repeats),
        *kquant_lines(arguments.repeats),
        scaling_line(arguments.size, arguments.repeats),
    ]
    if arguments.json:
        print(
            json.dumps(
                {
                    "variant": nvfp4.variant(),
                    "threads": nvfp4.threads(),
                    "copy_gb_s": copy,
                    "read_gb_s": read,
                    "lines": lines,
                }
            )
        )
        return
    print(
        f"{platform.machine()}, variant {nvfp4.variant()}, {nvfp4.threads()} threads, "
        f"non-temporal stream {copy:.1f} GB/s, reading alone {read:.1f} GB/s"
    )
    print(
        f"{'':26} {'ours':>9} {'peer':>10} {'ratio':>7} {'target':>7} {'GB/s':>6} {'share':>6}  peer"
    )
    for row in lines:
        target = f"{row['target']:g}x" if row["target"] else ""
        print(
            f"{row['what']:26} {row['ours_ms']:6.2f} ms {row['peer_ms']:7.1f} ms {row['ratio']:6.1f}x {target:>7} "
            f"{row['gb_s']:6.1f} {row['gb_s'] / copy:6.0%}  {row['peer']}"
        )


if __name__ == "__main__":
    main()

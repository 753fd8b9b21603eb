"""annie-quant validate-gpu: is NVFP4 arithmetic right on this machine, this driver, this build, and how fast could
it be.

`validate` returns one dict: device, paths, checks (name, ok, detail), bench (ceilings, times, roofline shares, decode
ceiling), stack. Every check compares with the float64 oracle, or with ModelOpt's encoding in NumPy; every negative
control is a planted fault that must be seen. Without a GPU it raises EnvironmentFault (exit 3).
"""

from __future__ import annotations

import platform
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from annie_quant.gemm import oracle
from annie_quant.gemm.arrays import DeviceArray, native, need_device, to_device
from annie_quant.gemm.ops import Weight, fake_quant, fp4_native, pack, unpack, w4a4, w4a16

SHAPES = {  # Qwen3.5-9B and 27B linears, [N, K]
    "9B gate_up": (24576, 4096),
    "9B down": (4096, 12288),
    "9B in_proj_qkv": (8192, 4096),
    "9B o_proj": (4096, 4096),
    "9B lm_head": (248320, 4096),
    "27B gate": (17408, 5120),
    "27B down": (5120, 17408),
}
TOKENS = (1, 4, 8, 16, 64, 256)
# bytes that one token reads, Qwen3.5-9B, KV cache ignored
DECODE_BYTES = {"all linears NVFP4, head too": 4.46e9, "linears NVFP4, head bf16": 5.93e9, "MLP only": 8.93e9}
Check = tuple[str, bool, str]


def validate(bench: bool = False, stack: str | None = None) -> dict[str, Any]:
    """Everything above; `bench` adds speeds, `stack` (torch, vllm, flashinfer, all) other people's kernels."""
    need_device()
    info = native().device_info(0)
    has_native = fp4_native()
    found: dict[str, Any] = {
        "device": {
            "name": info["name"],
            "compute_capability": f"{info['major']}.{info['minor']}",
            **{k: v for k, v in info.items() if k not in ("name", "major", "minor")},
            "host": platform.machine(),
        },
        "paths": {
            "w4a16": "mma.sync m16n8k16 bf16/f16, weights decoded in registers"
            + ("; wgmma for more than 16 tokens, and for fewer where it is faster" if info["major"] == 9 else ""),
            "w4a4": "native mma.sync mxf4nvf4 m16n8k64" if has_native else "emulated (no sm_12x code runs here)",
        },
        "checks": [],
    }
    for part in (_pairs, lambda: _w4a16(info["major"] == 9), _repeats, _codec, lambda: _w4a4(has_native), _controls):
        found["checks"] += [{"name": name, "ok": bool(ok), "detail": detail} for name, ok, detail in part()]
    found["ok"] = all(c["ok"] for c in found["checks"])
    if bench:
        found["bench"] = measure(info)
    if stack:
        from annie_quant.gemm.stack_check import examine

        found["stack"] = examine(stack)
        found["ok"] = found["ok"] and not found["stack"]["wrong"]
    return found


def _case(m: int, n: int, k: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray, float]:
    from ml_dtypes import bfloat16

    codes, scales = oracle.random_weight(n, k, seed)
    x = (np.random.default_rng(seed + 1).standard_normal((m, k)) * 2).astype(bfloat16)
    return x, codes, scales, 0.0173


def _poisoned(m: int, n: int) -> DeviceArray:
    return DeviceArray((m, n), "float32").fill(0xFF)


def _error(
    x: np.ndarray, codes: np.ndarray, scales: np.ndarray, ts: float, fault: str | None = None, **more: Any
) -> float:
    weight = Weight(to_device(codes), to_device(scales), ts, fault=fault)
    out = w4a16(to_device(x), weight, _poisoned(x.shape[0], codes.shape[0]), **more).host()
    exact, magnitude = oracle.linear(x, oracle.dequantize(codes, scales, ts))
    return oracle.worst(out, exact, oracle.bound(exact, magnitude, x.shape[1], "float32"))


def _pairs() -> Iterator[Check]:
    """Every code times every scale: row = scale byte, column = code; each output is one product."""
    from ml_dtypes import bfloat16

    scales = np.arange(127, dtype=np.uint8).repeat(1).reshape(127, 1)
    low = np.arange(0, 16, 2, dtype=np.uint8)
    codes = np.tile(low | (low + 1) << 4, (127, 1))
    want = oracle.dequantize(codes, scales)
    weight = Weight(to_device(codes), to_device(scales), 1.0)
    out = w4a16(to_device(np.eye(16).astype(bfloat16)), weight, _poisoned(16, 127)).host()
    bad = int((out != want.T).sum())
    yield "all 16 x 127 (code, scale) pairs exact", bad == 0, f"{bad} of {want.size} differ"


def _w4a16(hopper: bool) -> Iterator[Check]:
    for m, n, k in (
        (1, 272, 768),
        (8, 4096, 4096),
        (16, 150, 1040),
        (17, 128, 192),
        (64, 2048, 2064),
        (257, 528, 1024),
    ):
        for path in (("skinny",) if m <= 16 else ()) + ("tiled",) + (("wgmma",) if hopper else ()):
            worst = _error(*_case(m, n, k, m), path=path)
            yield f"W4A16 {path} M={m} N={n} K={k}", worst <= 1, f"{worst:.3f} of the fp32 bound"


def _repeats() -> Iterator[Check]:
    for m in (1, 16, 64):
        x, codes, scales, ts = _case(m, 2048, 4096)
        weight, xd = Weight(to_device(codes), to_device(scales), ts), to_device(x)
        runs = [w4a16(xd, weight, _poisoned(m, 2048)).host() for _ in range(5)]
        same = all((r == runs[0]).all() for r in runs)
        yield f"W4A16 M={m} repeats to the bit", same, "5 runs"


def _w4a4(has_native: bool) -> Iterator[Check]:
    for m, n, k in ((1, 64, 64), (33, 150, 80), (128, 256, 1040)):
        a, sa = oracle.random_weight(m, k, 5)
        w, sw = oracle.random_weight(n, k, 6)
        given = [to_device(v) for v in (a, sa, w, sw)]
        left, right = oracle.dequantize(a, sa), oracle.dequantize(w, sw)
        exact, magnitude = left @ right.T, np.abs(left) @ np.abs(right).T
        limit = oracle.bound(exact, magnitude, k // 16, "float32")
        for mode in ("emulated", "native") if has_native else ("emulated",):
            out = w4a4(given[0], given[1], 1.0, given[2], given[3], 1.0, _poisoned(m, n), mode=mode).host()
            worst = oracle.worst(out, exact, limit)
            yield f"W4A4 {mode} M={m} N={n} K={k}", worst <= 1, f"{worst:.3f} of the fp32 bound"


def _codec() -> Iterator[Check]:
    """GPU bytes against the C codec where it is built here."""
    try:
        from annie_quant import nvfp4
    except ImportError:
        yield (
            "GPU pack, unpack and fake quant against the C codec",
            True,
            "not compared: annie_quant._nvfp4 is not built here",
        )
        return
    x = np.random.default_rng(3).standard_normal((64, 1024)).astype(np.float32)
    x[:8] = np.random.default_rng(4).choice([0.25, 0.75, 1.25, 2.5, 5.0, 6.0, 0.0], (8, 1024))
    ts = float(np.float32(np.abs(x).max()) / np.float32(2688))
    want = nvfp4.pack(x, tensor_scale=ts)
    codes, scales = pack(to_device(x), ts)
    same = (codes.host() == want.codes).all() and (
        scales.host().view(np.uint8) == want.block_scale.view(np.uint8)
    ).all()
    yield "GPU pack equals the C codec", bool(same), "64 x 1024, ties included"
    back = unpack(codes, scales, ts, "float32").host()
    yield "GPU unpack equals the C codec", bool((back == nvfp4.unpack(want, dtype="float32")).all()), "float32"
    fake = fake_quant(to_device(x), ts).host()
    yield "GPU fake quant equals the C codec", bool((fake == nvfp4.fake_quant(x, tensor_scale=ts)).all()), "float32"


def _controls() -> Iterator[Check]:
    for fault in ("nibbles", "scales", "fragment", "lane"):
        worst = _error(*_case(3, 64, 256), fault=fault)
        yield f"negative control W4A16 {fault}", worst > 1, f"planted fault seen at {worst:.0f} times the bound"
    a, sa = oracle.random_weight(16, 128, 7)
    w, sw = oracle.random_weight(64, 128, 8)
    given = [to_device(v) for v in (a, sa, w, sw)]
    exact = oracle.dequantize(a, sa) @ oracle.dequantize(w, sw).T
    magnitude = np.abs(oracle.dequantize(a, sa)) @ np.abs(oracle.dequantize(w, sw)).T
    for fault in ("nibbles", "scales", "fragment", "lane"):
        out = w4a4(given[0], given[1], 1.0, given[2], given[3], 1.0, _poisoned(16, 64), fault=fault).host()
        worst = oracle.worst(out, exact, oracle.bound(exact, magnitude, 8, "float32"))
        yield f"negative control W4A4 {fault}", worst > 1, f"planted fault seen at {worst:.0f} times the bound"


def timed_us(launches: Sequence[Callable[[int], None]], repeats: int = 20) -> float:
    """Microseconds of one launch: the launches (each given the stream) as one CUDA graph, median of `repeats`
    replays.
    """
    module = native()
    stream = module.stream_new()
    graph = None
    try:
        for launch in launches:
            launch(stream)
        module.stream_sync(stream)
        module.capture_begin(stream)
        for launch in launches:
            launch(stream)
        graph = module.capture_end(stream)
        module.graph_time(graph, stream)
        return statistics.median(module.graph_time(graph, stream) for _ in range(repeats)) * 1000 / len(launches)
    finally:
        if graph is not None:
            module.graph_free(graph)
        module.stream_free(stream)


def _launch(x: DeviceArray, weight: Weight, out: DeviceArray, stream: int) -> None:
    w4a16(x, weight, out, stream=stream)


def measure(info: dict[str, Any], shapes: dict[str, tuple[int, int]] | None = None) -> dict[str, Any]:
    """Ceilings and W4A16 times, cold L2 by rotating weights; shares are of the read ceiling measured here."""
    module = native()
    cold = max(4 * info["l2_bytes"], 128 << 20)
    big, other, sink = (DeviceArray((size,), "uint8").fill(1) for size in (2 * cold, 2 * cold, 64))
    copy = timed_us([lambda s: module.copy(other.ptr, big.ptr, big.nbytes, s)] * 4)
    read = timed_us([lambda s: module.read(big.ptr, big.nbytes, sink.ptr, info["sms"], s)] * 4)
    found: dict[str, Any] = {
        "copy_bytes_per_s": 2 * big.nbytes / copy * 1e6,
        "read_bytes_per_s": big.nbytes / read * 1e6,
        "times": [],
    }
    for name, (n, k) in (shapes or SHAPES).items():
        size = n * k * 9 // 16
        codes, scales = DeviceArray((n, k // 2), "uint8").fill(0x5A), DeviceArray((n, k // 16), "uint8").fill(0x38)
        copies = [Weight(codes, scales, 1.0) for _ in range(max(2, -(-cold // size)))]
        for m in TOKENS:
            x, out = DeviceArray((m, k), "bfloat16").fill(0x3C), DeviceArray((m, n), "bfloat16")
            launches = [partial(_launch, x, copies[i % len(copies)], out) for i in range(max(20, len(copies)))]
            us = timed_us(launches)
            share = size / us * 1e6 / found["read_bytes_per_s"]
            found["times"].append({"name": name, "n": n, "k": k, "m": m, "us": us, "roofline_share": share})
    found["decode_tok_s_ceiling"] = {name: found["read_bytes_per_s"] / size for name, size in DECODE_BYTES.items()}
    return found

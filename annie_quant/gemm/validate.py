"""Validation of NVFP4 arithmetic on this machine, driver and build.

Every check compares with the float64 oracle or with the C codec. Every negative control plants a
fault that the comparison must find. Without a GPU, EnvironmentFault (exit code 3).
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from annie_quant.gemm import oracle
from annie_quant.gemm.arrays import DeviceArray, native, need_device, to_device
from annie_quant.gemm.ops import Weight, fake_quant, fp4_native, w4a4, w4a16
from annie_quant.gemm.stack_check import StackResult

if TYPE_CHECKING:
    from annie_quant.core.untrusted import JsonObject

PLANTED_FAULTS = ("nibbles", "scales", "fragment", "lane")
# [M, N, K]: padded and whole rows and columns, few and many tokens
W4A16_SHAPES = (
    (1, 272, 768),
    (8, 4096, 4096),
    (16, 150, 1040),
    (17, 128, 192),
    (64, 2048, 2064),
    (257, 528, 1024),
)


@dataclass(frozen=True)
class KernelCheck:
    """One comparison.

    ok: None where it could not be made here. detail: the measured error, or what differs.
    """

    name: str
    ok: bool | None
    detail: str


@dataclass
class Validation:
    """Result of `validate`.

    ok: every check was made and passed, and no backend of the serving stack was wrong.
    """

    device: JsonObject
    paths: dict[str, str]
    checks: list[KernelCheck] = field(default_factory=list)
    stack: StackResult | None = None

    @property
    def ok(self) -> bool:
        return all(c.ok for c in self.checks) and not (self.stack is not None and self.stack.wrong)

    def to_dict(self) -> JsonObject:
        """Return the JSON document; `stack` only if it was checked."""
        return {k: v for k, v in asdict(self).items() if v is not None} | {"ok": self.ok}


def validate(stack: str | None = None) -> Validation:
    """Check all kernels on GPU 0.

    stack: also those of an installed serving stack: torch, vllm, flashinfer or all.
    """
    need_device()
    info = native().device_info(0)
    capability = f"{info['major']}.{info['minor']}"
    has_native = fp4_native()
    hopper = info["major"] == 9
    named = {k: v for k, v in info.items() if k not in ("name", "major", "minor")}
    paths = {
        "w4a16": "mma.sync m16n8k16 bf16/f16, weights decoded in registers",
        "w4a4": "emulated (no sm_12x code runs here)",
        "sm_12x": machine_code(native().ARCHS, capability)[1],
    }
    if hopper:
        paths["w4a16"] += "; wgmma for more than 16 tokens, and for fewer where it is faster"
    if has_native:
        paths["w4a4"] = "native mma.sync mxf4nvf4 m16n8k64"
    result = Validation(
        device={
            "name": info["name"],
            "compute_capability": capability,
            **named,
            "host": platform.machine(),
        },
        paths=paths,
    )
    for checks in (
        _pairs(),
        _w4a16(hopper),
        _repeats(),
        _codec(),
        _w4a4(has_native),
        _controls(),
        device_checks(info),
    ):
        result.checks += checks
    if stack:
        from annie_quant.gemm.stack_check import examine

        result.stack = examine(stack)
    return result


def _case(
    m: int, n: int, k: int, seed: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray, float]:
    from ml_dtypes import bfloat16

    codes, scales = oracle.random_weight(n, k, seed)
    x = (np.random.default_rng(seed + 1).standard_normal((m, k)) * 2).astype(bfloat16)
    return x, codes, scales, 0.0173


def _poisoned(m: int, n: int) -> DeviceArray:
    return DeviceArray((m, n), "float32").fill(0xFF)


def _error(
    x: np.ndarray,
    codes: np.ndarray,
    scales: np.ndarray,
    ts: float,
    path: str = "auto",
    fault: str | None = None,
) -> float:
    weight = Weight(to_device(codes), to_device(scales), ts, fault=fault)
    out = w4a16(to_device(x), weight, _poisoned(x.shape[0], codes.shape[0]), path=path).host()
    exact, magnitude = oracle.linear(x, oracle.dequantize(codes, scales, ts))
    return oracle.worst(out, exact, oracle.bound(exact, magnitude, x.shape[1], "float32"))


def _pairs() -> Iterator[KernelCheck]:
    """All codes times all scales: row = scale byte, column = code; each output is one product."""
    from ml_dtypes import bfloat16

    scales = np.arange(127, dtype=np.uint8)[:, None]
    low = np.arange(0, 16, 2, dtype=np.uint8)
    codes = np.tile(low | (low + 1) << 4, (127, 1))
    expected = oracle.dequantize(codes, scales)
    weight = Weight(to_device(codes), to_device(scales), 1.0)
    out = w4a16(to_device(np.eye(16).astype(bfloat16)), weight, _poisoned(16, 127)).host()
    bad = int((out != expected.T).sum())
    yield KernelCheck(
        "all 16 x 127 (code, scale) pairs exact", bad == 0, f"{bad} of {expected.size} differ"
    )


def _w4a16(hopper: bool) -> Iterator[KernelCheck]:
    for m, n, k in W4A16_SHAPES:
        paths = ["tiled"]
        if m <= 16:
            paths.append("skinny")
        if hopper:
            paths.append("wgmma")
        for path in paths:
            worst = _error(*_case(m, n, k, m), path=path)
            yield KernelCheck(
                f"W4A16 {path} M={m} N={n} K={k}", worst <= 1, f"{worst:.3f} of the fp32 bound"
            )


def _repeats() -> Iterator[KernelCheck]:
    for m in (1, 16, 64):
        x, codes, scales, ts = _case(m, 2048, 4096)
        weight = Weight(to_device(codes), to_device(scales), ts)
        xd = to_device(x)
        runs = [w4a16(xd, weight, _poisoned(m, 2048)).host() for _ in range(5)]
        same = all(bool((r == runs[0]).all()) for r in runs)
        yield KernelCheck(f"W4A16 M={m} repeats to the bit", same, "5 runs")


def _w4a4_error(m: int, n: int, k: int, mode: str = "auto", fault: str | None = None) -> float:
    a, sa = oracle.random_weight(m, k, 5)
    w, sw = oracle.random_weight(n, k, 6)
    operands = to_device(a), to_device(sa), 1.0, to_device(w), to_device(sw), 1.0
    out = w4a4(*operands, _poisoned(m, n), mode=mode, fault=fault).host()
    exact, magnitude = oracle.linear(oracle.dequantize(a, sa), oracle.dequantize(w, sw))
    return oracle.worst(out, exact, oracle.bound(exact, magnitude, k // 16, "float32"))


def _w4a4(has_native: bool) -> Iterator[KernelCheck]:
    for m, n, k in ((1, 64, 64), (33, 150, 80), (128, 256, 1040)):
        for mode in ("emulated", "native") if has_native else ("emulated",):
            worst = _w4a4_error(m, n, k, mode)
            yield KernelCheck(
                f"W4A4 {mode} M={m} N={n} K={k}", worst <= 1, f"{worst:.3f} of the fp32 bound"
            )


def _codec() -> Iterator[KernelCheck]:
    """Compare the GPU's values with the C codec, if that is built here."""
    try:
        from annie_quant import nvfp4
    except ImportError:
        skipped = "not compared: annie_quant._nvfp4 is not built here (python setup.py build_ext --inplace)"
        yield KernelCheck("GPU fake quant equals the C codec", None, skipped)
        return
    x = np.random.default_rng(3).standard_normal((64, 1024)).astype(np.float32)
    x[:8] = np.random.default_rng(4).choice([0.25, 0.75, 1.25, 2.5, 5.0, 6.0, 0.0], (8, 1024))
    ts = float(np.float32(np.abs(x).max()) / np.float32(2688))
    fake = fake_quant(to_device(x), ts).host()
    same = bool((fake == nvfp4.fake_quant(x, tensor_scale=ts)).all())
    yield KernelCheck(
        "GPU fake quant equals the C codec", same, "64 x 1024 of float32, including ties"
    )


def _controls() -> Iterator[KernelCheck]:
    """Negative controls: each planted fault must exceed the error bound."""

    def control(kernel: str, fault: str, worst: float) -> KernelCheck:
        detail = f"planted fault found at {worst:.0f} times the bound"
        return KernelCheck(f"negative control {kernel} {fault}", worst > 1, detail)

    for fault in PLANTED_FAULTS:
        yield control("W4A16", fault, _error(*_case(3, 64, 256), fault=fault))
        yield control("W4A4", fault, _w4a4_error(16, 64, 128, fault=fault))


def machine_code(architectures: str, capability: str) -> tuple[bool | None, str]:
    """Return whether the module has native FP4 code for a GPU of SM12x, and in words.

    None on other GPUs, which cannot run it.

    architectures: of _gemm.ARCHS; capability: of the GPU, as "12.1".
    """
    built = [a for a in architectures.split(",") if a.startswith("12")]
    listed = f"built for {', '.join(built) or 'no SM12x'}"
    if not capability.startswith("12."):
        return None, f"{listed}; not run: this GPU is {capability}"
    exact = capability.replace(".", "")
    return any(a.startswith((exact, "120f")) for a in built), listed


def device_checks(info: Mapping[str, int | str]) -> Iterator[KernelCheck]:
    """Check that a GPU of SM12x has machine code. info: of _gemm.device_info."""
    module = native()
    capability = f"{info['major']}.{info['minor']}"
    present, detail = machine_code(module.ARCHS, capability)
    if present is not None:
        has_native = module.limits()[4]
        yield KernelCheck(f"machine code for {capability}", present and has_native, detail)

"""The GEMM and codec operations. All arguments are checked here before a kernel is launched.

Shapes: activations x [M, K], weights [N, K], out [M, N]. The number format is defined in annie_quant.nvfp4.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from annie_quant.errors import EnvironmentFault, UsageError
from annie_quant.gemm.arrays import CODES, DeviceArray, View, native, need_device, stream_of, view

GROUP = 16
PATHS = {"auto": 0, "skinny": 1, "tiled": 2, "wgmma": 3}
FAULTS = {None: 0, "nibbles": 1, "scales": 2, "fragment": 3, "lane": 4}
_NO_BAD = 0x7FFFFFFFFFFFFFFF


def _positive(value: float, name: str) -> float:
    value = float(value)
    if not (math.isfinite(value) and value > 0):
        raise UsageError(f"{name} is {value}; a finite positive number is expected", "annie-quant audit DIR --repair")
    return value


def _same_device(views: dict[str, View]) -> int:
    devices = {name: v.device for name, v in views.items()}
    if len(set(devices.values())) > 1:
        raise UsageError("the arrays are on different devices: " + ", ".join(f"{n} on {d}" for n, d in devices.items()))
    return next(iter(devices.values()))


def _matrix(
    array: Any, name: str, dtypes: tuple[str, ...], shape: tuple[int | None, int | None], align: int = 16
) -> View:
    v = view(array, name)
    if v.dtype not in dtypes:
        raise UsageError(f"{name} has dtype {v.dtype}; expected {' or '.join(dtypes)}")
    if len(v.shape) != 2 or any(w is not None and w != s for w, s in zip(shape, v.shape, strict=True)):
        expected = ", ".join("any" if s is None else str(s) for s in shape)
        raise UsageError(f"{name} has shape {list(v.shape)}; expected [{expected}]")
    if v.ptr % align:
        raise UsageError(f"{name} starts at an address that is not a multiple of {align} bytes", f"{name}.clone()")
    return v


def _codes_and_scales(codes: Any, block_scale: Any, name: str) -> tuple[View, View, int, int]:
    c = _matrix(codes, f"{name}codes", ("uint8",), (None, None))
    n, k = c.shape[0], c.shape[1] * 2
    if k == 0 or n == 0 or k % GROUP:
        raise UsageError(f"{name}codes has shape {list(c.shape)}, K = {k}; K must be a positive multiple of {GROUP}")
    s = _matrix(block_scale, f"{name}block_scale", ("uint8", "float8_e4m3fn"), (n, k // GROUP), align=4)
    for v, what in ((c, "codes"), (s, "block_scale")):
        if not v.contiguous:
            raise UsageError(
                f"{name}{what} is not contiguous (strides {list(v.strides)})", f"{name}{what}.contiguous()"
            )
    return c, s, n, k


class _CurrentDevice:
    """Context manager: make a device current, then restore the previous one."""

    def __init__(self, device: int) -> None:
        self.device = device

    def __enter__(self) -> None:
        self.previous = native().use_device(self.device)

    def __exit__(self, *unused: object) -> None:
        if self.previous != self.device:
            native().use_device(self.previous)


class Plan(NamedTuple):
    """How a W4A16 product is launched: aq_plan in csrc/gemm/gemm.h. workspace_bytes: device memory of one launch."""

    path: int
    width: int
    split: int
    stages: int
    blocks: int
    smem: int
    stream_k_tiles: int
    rows: int
    permuted: int
    workspace_bytes: int


class Weight:
    """An NVFP4 weight, repacked once for the W4A16 kernels (0.5625 bytes per weight, rows padded to 32, columns to 128).

    codes: uint8 [N, K/2]; block_scale: float8_e4m3fn or uint8 [N, K/16], linear (not swizzled); tensor_scale: float; all
    as in a checkpoint. UsageError: a NaN or negative scale byte, with its position. Waits for the repack to finish.
    """

    def __init__(
        self, codes: Any, block_scale: Any, tensor_scale: float, *, stream: int | None = None, fault: str | None = None
    ) -> None:
        need_device()
        c, s, self.n, self.k = _codes_and_scales(codes, block_scale, "")
        self.tensor_scale = _positive(tensor_scale, "tensor_scale")
        self.device = _same_device({"codes": c, "block_scale": s})
        module, stream = native(), stream_of((codes, block_scale), stream)
        self.packed = DeviceArray((module.packed_bytes(self.n, self.k),), "uint8", self.device)
        bad = DeviceArray((8,), "uint8", self.device)
        with _CurrentDevice(self.device):
            module.fill(bad.ptr, 0xFF, 8, stream)
            module.repack(c.ptr, s.ptr, self.packed.ptr, self.n, self.k, bad.ptr, FAULTS[fault], stream)
            module.stream_sync(stream)
        first = int.from_bytes(bad.host().tobytes(), "little")
        if first <= _NO_BAD:
            row, block = divmod(first, self.k // GROUP)
            raise UsageError(
                f"block_scale is NaN or negative at row {row}, block {block}", "annie-quant audit DIR --repair"
            )
        self._plans: dict[tuple[int, str], Plan] = {}

    def plan(self, m: int, path: str = "auto") -> Plan:
        """Return the launch plan for M tokens."""
        key = (m, path)
        if key not in self._plans:
            module = native()
            try:
                with _CurrentDevice(self.device):
                    self._plans[key] = Plan(*module.plan(m, self.n, self.k, PATHS[path]))
            except module.CudaError as error:
                raise UsageError(f"W4A16 of M={m}, N={self.n}, K={self.k} by path {path!r}: {error.args[0]}") from error
        return self._plans[key]


_workspaces: dict[tuple[int, int], list[DeviceArray]] = {}


def _workspace(size: int, device: int, stream: int) -> DeviceArray:
    """Return memory for the launches of one stream, which never overlap.

    It grows by doubling. Smaller buffers are not freed, because a captured graph may point at them.
    """
    buffers = _workspaces.setdefault((device, stream), [])
    if not buffers or buffers[-1].nbytes < size:
        buffers.append(DeviceArray((1 << (size - 1).bit_length(),), "uint8", device))
    return buffers[-1]


def w4a16(
    x: Any,
    weight: Weight,
    out: Any = None,
    *,
    path: str = "auto",
    pdl: bool = False,
    plan: Plan | None = None,
    workspace: Any = None,
    stream: int | None = None,
) -> Any:
    """Launch out[M, N] = x[M, K] @ W[N, K].T: bf16 or fp16 x, exact products, fp32 accumulation, one rounding at the end.

    out        float32, float16 or bfloat16 [M, N], contiguous; None: a new DeviceArray of x's dtype
    path       auto, skinny, tiled or wgmma
    pdl        allow the launch to overlap the end of the previous kernel (from sm_90; that kernel must not write the weight)
    plan       from Weight.plan; None: chosen for M
    workspace  uint8 memory of plan.workspace_bytes that belongs to this launch until it ends; None: one buffer per stream,
               so that graphs captured on one stream must not run at the same time
    stream     None: torch's current stream for torch tensors, else the default stream

    Returns `out` without waiting for the kernel.
    """
    xv = _matrix(x, "x", ("bfloat16", "float16"), (None, weight.k))
    m = xv.shape[0]
    if path not in PATHS:
        raise UsageError(f"path is {path!r}; expected one of {', '.join(PATHS)}")
    if xv.strides[1] != 1 or (m > 1 and (xv.strides[0] % 8 or xv.strides[0] < weight.k)):
        raise UsageError(
            f"x has strides {list(xv.strides)}; rows must be contiguous and a multiple of 8 apart", "x.contiguous()"
        )
    if out is None:
        out = DeviceArray((m, weight.n), xv.dtype, xv.device)
    ov = _matrix(out, "out", tuple(CODES), (m, weight.n), align=4)
    if not ov.contiguous:
        raise UsageError(f"out is not contiguous (strides {list(ov.strides)})", "out.contiguous()")
    packed = view(weight.packed, "weight")
    device = _same_device({"x": xv, "weight": packed, "out": ov})
    if m == 0:
        return out
    plan, on = plan or weight.plan(m, path), stream_of((x, out), stream)
    ldx, workspace_ptr, size = xv.strides[0] if m > 1 else weight.k, 0, plan.workspace_bytes
    if size:
        ws = view(workspace if workspace is not None else _workspace(size, device, on), "workspace")
        if ws.dtype != "uint8" or math.prod(ws.shape) < size or not ws.contiguous or ws.ptr % 16:
            raise UsageError(
                f"workspace is {ws.dtype} {list(ws.shape)}; expected at least {size} contiguous bytes of uint8"
            )
        workspace_ptr = ws.ptr
    with _CurrentDevice(device):
        native().w4a16(
            xv.ptr,
            ldx,
            packed.ptr,
            weight.tensor_scale,
            ov.ptr,
            workspace_ptr,
            m,
            weight.n,
            weight.k,
            CODES[xv.dtype],
            CODES[ov.dtype],
            plan,
            int(pdl),
            on,
        )
    return out


def fp4_native() -> bool:
    """Whether the code for the current device has the native FP4 instruction (sm_120a, sm_121a)."""
    need_device()
    return native().fp4_native()


def w4a4(
    a_codes: Any,
    a_scale: Any,
    a_tensor_scale: float,
    w_codes: Any,
    w_scale: Any,
    w_tensor_scale: float,
    out: Any = None,
    *,
    mode: str = "auto",
    fault: str | None = None,
    stream: int | None = None,
) -> Any:
    """Launch out[M, N] = A[M, K] @ W[N, K].T with both operands in NVFP4 (linear scales).

    mode: "native" needs sm_120a or sm_121a code; "emulated" is the same kernel with that one instruction replaced and
    runs on any GPU; "auto" is native where possible.
    """
    need_device()
    a, sa, m, k = _codes_and_scales(a_codes, a_scale, "a_")
    w, sw, n, kw = _codes_and_scales(w_codes, w_scale, "w_")
    if k != kw:
        raise UsageError(f"a_codes has K = {k} and w_codes has K = {kw}; they must be equal")
    alpha = _positive(a_tensor_scale, "a_tensor_scale") * _positive(w_tensor_scale, "w_tensor_scale")
    if mode not in ("auto", "native", "emulated"):
        raise UsageError(f"mode is {mode!r}; expected auto, native or emulated")
    if out is None:
        out = DeviceArray((m, n), "bfloat16", a.device)
    ov = _matrix(out, "out", tuple(CODES), (m, n), align=4)
    if not ov.contiguous:
        raise UsageError(f"out is not contiguous (strides {list(ov.strides)})", "out.contiguous()")
    device = _same_device({"a_codes": a, "a_scale": sa, "w_codes": w, "w_scale": sw, "out": ov})
    with _CurrentDevice(device):
        use_native = fp4_native() if mode != "emulated" else False
        if mode == "native" and not use_native:
            raise EnvironmentFault(
                "this GPU has no native FP4 instruction (sm_120a or sm_121a code)", 'mode="emulated"'
            )
        native().w4a4(
            a.ptr,
            sa.ptr,
            w.ptr,
            sw.ptr,
            alpha,
            ov.ptr,
            m,
            n,
            k,
            CODES[ov.dtype],
            1 if use_native else 2,
            FAULTS[fault],
            stream_of((a_codes, w_codes, out), stream),
        )
    return out


def _blocks(x: Any, name: str) -> tuple[View, int]:
    v = view(x, name)
    if v.dtype not in CODES:
        raise UsageError(f"{name} has dtype {v.dtype}; expected {', '.join(CODES)}")
    if not v.shape or v.shape[-1] == 0 or v.shape[-1] % GROUP:
        raise UsageError(f"{name} has shape {list(v.shape)}; the last dimension must be a positive multiple of {GROUP}")
    if not v.contiguous or v.ptr % 16:
        raise UsageError(f"{name} must be contiguous and start at a multiple of 16 bytes", f"{name}.contiguous()")
    return v, math.prod(v.shape) // GROUP


def pack(x: Any, tensor_scale: float, *, stream: int | None = None) -> tuple[DeviceArray, DeviceArray]:
    """Return (codes uint8 [..., K/2], block_scale float8_e4m3fn [..., K/16]) of x [..., K].

    The bytes are those of aq.nvfp4.pack with scale="amax".
    """
    need_device()
    v, blocks = _blocks(x, "x")
    scale = _positive(tensor_scale, "tensor_scale")
    codes = DeviceArray((*v.shape[:-1], v.shape[-1] // 2), "uint8", v.device)
    scales = DeviceArray((*v.shape[:-1], v.shape[-1] // GROUP), "float8_e4m3fn", v.device)
    if blocks:
        with _CurrentDevice(v.device):
            native().pack(v.ptr, CODES[v.dtype], blocks, scale, codes.ptr, scales.ptr, stream_of((x,), stream))
    return codes, scales


def unpack(
    codes: Any, block_scale: Any, tensor_scale: float, dtype: str = "bfloat16", *, stream: int | None = None
) -> DeviceArray:
    """Return [N, K] of `dtype` from codes uint8 [N, K/2] and scales [N, K/16]; the bytes are those of aq.nvfp4.unpack."""
    need_device()
    if dtype not in CODES:
        raise UsageError(f"dtype is {dtype!r}; expected one of {', '.join(CODES)}")
    c, s, n, k = _codes_and_scales(codes, block_scale, "")
    scale, device = _positive(tensor_scale, "tensor_scale"), _same_device({"codes": c, "block_scale": s})
    out = DeviceArray((n, k), dtype, device)
    with _CurrentDevice(device):
        native().unpack(c.ptr, s.ptr, n * k // GROUP, scale, out.ptr, CODES[dtype], stream_of((codes,), stream))
    return out


def fake_quant(x: Any, tensor_scale: float, out: Any = None, *, stream: int | None = None) -> Any:
    """Quantize and dequantize x [..., K] per 16 columns in its own dtype: ModelOpt's dynamic activation op, to the bit."""
    need_device()
    v, blocks = _blocks(x, "x")
    scale = _positive(tensor_scale, "tensor_scale")
    if out is None:
        out = DeviceArray(v.shape, v.dtype, v.device)
    o, _ = _blocks(out, "out")
    if (o.shape, o.dtype) != (v.shape, v.dtype):
        raise UsageError(f"out is {o.dtype} {list(o.shape)}; expected {v.dtype} {list(v.shape)}")
    device = _same_device({"x": v, "out": o})
    if blocks:
        with _CurrentDevice(device):
            native().fake_quant(v.ptr, CODES[v.dtype], blocks, scale, o.ptr, stream_of((x, out), stream))
    return out

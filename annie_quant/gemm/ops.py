"""The GEMM and codec operations. All arguments are checked here before a kernel is launched.

Shapes: activations x [M, K], weights [N, K], out [M, N]. The number format is defined in
    annie_quant.nvfp4.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NoReturn, TypeVar

import numpy as np

from annie_quant.core.errors import EnvironmentFault, UsageError
from annie_quant.gemm.arrays import (
    CODES,
    CudaArray,
    CurrentDevice,
    DeviceArray,
    View,
    launch_stream,
    native,
    need_device,
    view,
)
from annie_quant.gemm.plans import PATHS, TYPES, Plan, path_of

if TYPE_CHECKING:
    import torch

Out = TypeVar("Out", DeviceArray, View, "torch.Tensor")
GROUP = 16
FAULT_NUMBERS = {None: 0, "nibbles": 1, "scales": 2, "fragment": 3, "lane": 4}
MODES = {"auto": 0, "native": 1, "emulated": 2}
# as AQ_GEMM_* in csrc/gemm/gemm.h
_BAD_PLAN = -3
_NO_NATIVE = -2


def _positive(value: float, name: str) -> float:
    with np.errstate(over="ignore"):
        result = float(np.float32(value))  # what the kernels get
    if not (math.isfinite(result) and result > 0):
        raise UsageError(
            f"{name} is {value}; a finite positive float32 number is expected",
            "annie-quant audit DIR --repair",
        )
    return result


def _same_device(views: dict[str, View]) -> int:
    devices = {name: v.device for name, v in views.items()}
    if len(set(devices.values())) > 1:
        raise UsageError(
            "the arrays are on different devices: "
            + ", ".join(f"{n} on {d}" for n, d in devices.items())
        )
    return next(iter(devices.values()))


def _disjoint(written: dict[str, View], read: dict[str, View]) -> None:
    """Raise UsageError if an array that a kernel writes shares a byte with another operand."""
    for name, v in written.items():
        for other, w in {**written, **read}.items():
            if other != name and v.span[0] < w.span[1] and w.span[0] < v.span[1]:
                raise UsageError(f"{name} and {other} overlap in memory", "use separate arrays")


def _matrix(
    array: CudaArray,
    name: str,
    dtypes: tuple[str, ...],
    shape: tuple[int | None, int | None],
    align: int = 16,
) -> View:
    v = view(array, name)
    if v.dtype not in dtypes:
        raise UsageError(f"{name} has dtype {v.dtype}; expected {' or '.join(dtypes)}")
    if len(v.shape) != 2 or any(
        w is not None and w != s for w, s in zip(shape, v.shape, strict=True)
    ):
        expected = ", ".join("any" if s is None else str(s) for s in shape)
        raise UsageError(f"{name} has shape {list(v.shape)}; expected [{expected}]")
    if v.ptr % align:
        raise UsageError(
            f"{name} starts at an address that is not a multiple of {align} bytes",
            f"{name}.clone()",
        )
    return v


def _codes_and_scales(
    codes: CudaArray, block_scale: CudaArray, name: str
) -> tuple[View, View, int, int]:
    c = _matrix(codes, f"{name}codes", ("uint8",), (None, None))
    n = c.shape[0]
    k = c.shape[1] * 2
    if k == 0 or n == 0 or k % GROUP:
        raise UsageError(
            f"{name}codes has shape {list(c.shape)}, K = {k}; K must be a positive multiple of {GROUP}"
        )
    s = _matrix(block_scale, f"{name}block_scale", ("uint8", "float8_e4m3fn"), (n, k // GROUP), 4)
    return _contiguous(c, f"{name}codes"), _contiguous(s, f"{name}block_scale"), n, k


def _contiguous(v: View, name: str) -> View:
    if not v.contiguous:
        raise UsageError(
            f"{name} is not contiguous (strides {list(v.strides)})", f"{name}.contiguous()"
        )
    return v


def _wrote(out: CudaArray, stream: int) -> None:
    """Record that the last write to `out` is on this stream."""
    if isinstance(out, DeviceArray):
        out.stream = stream


class Weight:
    """An NVFP4 weight, repacked once for the W4A16 kernels.

    It has 0.5625 bytes per weight, with rows padded to 32 and columns to 128.

    codes: uint8 [N, K/2]; block_scale: float8_e4m3fn or uint8 [N, K/16], linear (not swizzled);
        tensor_scale: float; all
    as in a checkpoint. memory: uint8 of _gemm.packed_bytes(N, K) on their device for the result;
    None: its own. UsageError: a NaN or negative scale byte, with its position. Waits for the repack
    to finish.
    """

    def __init__(
        self,
        codes: CudaArray,
        block_scale: CudaArray,
        tensor_scale: float,
        *,
        memory: CudaArray | None = None,
        stream: int | None = None,
        fault: str | None = None,
    ) -> None:
        need_device()
        c, s, self.n, self.k = _codes_and_scales(codes, block_scale, "")
        self.tensor_scale = _positive(tensor_scale, "tensor_scale")
        self.device = _same_device({"codes": c, "block_scale": s})
        module = native()
        on = launch_stream((c, s), stream)
        size = module.packed_bytes(self.n, self.k)
        self.packed = DeviceArray((size,), "uint8", self.device) if memory is None else memory
        to = view(self.packed, "memory")
        if (to.dtype, to.shape, to.device, to.ptr % 16) != ("uint8", (size,), self.device, 0):
            raise UsageError(
                f"memory is {to.dtype} {list(to.shape)} on {to.device}; expected {size} aligned bytes"
            )
        _disjoint({"memory": to}, {"codes": c, "block_scale": s})
        with CurrentDevice(self.device):
            bad = module.repack(c.ptr, s.ptr, to.ptr, self.n, self.k, FAULT_NUMBERS[fault], on)
        if bad is not None:
            row, block = divmod(bad[1], self.k // GROUP)
            raise UsageError(
                f"block_scale is NaN or negative at row {row}, block {block}",
                "annie-quant audit DIR --repair",
            )
        self._plans: dict[tuple[int, str], Plan] = {}

    def plan(self, m: int, path: str = "auto") -> Plan:
        """Return the launch plan for M tokens. UsageError: no kernel of this path fits the shape."""
        key = (m, path)
        if key not in self._plans:
            module = native()
            try:
                with CurrentDevice(self.device):
                    name, fields = module.plan(m, self.n, self.k, path)
            except module.CudaError as error:
                raise UsageError(
                    f"W4A16 of M={m}, N={self.n}, K={self.k} by path {path!r}: {error.args[0]}"
                ) from error
            self._plans[key] = TYPES[name](*fields)
        return self._plans[key]

    def workspace_bytes(self, m: int, plan: Plan | None = None) -> int:
        """Return the device memory that a product of M tokens needs while it runs.

        plan: None for the one chosen for M.
        """
        plan = plan or self.plan(m)
        try:
            with CurrentDevice(self.device):
                return native().plan_needs(m, self.n, self.k, path_of(plan), tuple(plan))[1]
        except ValueError as error:
            _refuse_plan(plan, m, self, error)


def _refuse_plan(plan: Plan, m: int, weight: Weight, problem: Exception) -> NoReturn:
    raise UsageError(
        f"plan {plan} for M={m}, N={weight.n}, K={weight.k}: {problem}", "Weight.plan(m)"
    ) from problem


def w4a16(
    x: CudaArray,
    weight: Weight,
    out: Out | None = None,
    *,
    path: str = "auto",
    pdl: bool = False,
    plan: Plan | None = None,
    workspace: CudaArray | None = None,
    stream: int | None = None,
) -> Out | DeviceArray:
    """Launch out[M, N] = x[M, K] @ W[N, K].T.

    bf16 or fp16 x, exact products, fp32 accumulation, one rounding at the end.

    out        float32, float16 or bfloat16 [M, N], contiguous; None: a new DeviceArray of x's dtype
    path       auto, skinny, tiled or wgmma
    pdl        allow the launch to overlap the end of the previous kernel (from sm_90; that kernel must not write the weight)
    plan       from Weight.plan, or a variant of it; None: chosen for M
    workspace  uint8 memory of Weight.workspace_bytes that belongs to this launch until it ends; None: allocated and freed in
               the order of the stream. Threads can use one stream at the same time.
    stream     None: torch's current stream for torch tensors, else the stream of the first array that announces one, else
               the default stream. The launch waits for the streams of the other arrays.

    Returns `out` without waiting for the kernel. The first call can be captured in a CUDA graph.
    UsageError: arrays or a plan that do not fit the product.
    """
    xv = _matrix(x, "x", ("bfloat16", "float16"), (None, weight.k))
    m = xv.shape[0]
    if path not in PATHS:
        raise UsageError(f"path is {path!r}; expected one of {', '.join(PATHS)}")
    if xv.strides[1] != 1 or (m > 1 and (xv.strides[0] % 8 or xv.strides[0] < weight.k)):
        raise UsageError(
            f"x has strides {list(xv.strides)}; rows must be contiguous and a multiple of 8 apart",
            "x.contiguous()",
        )
    result = DeviceArray((m, weight.n), xv.dtype, xv.device) if out is None else out
    ov = _contiguous(_matrix(result, "out", tuple(CODES), (m, weight.n), 4), "out")
    packed = view(weight.packed, "weight")
    device = _same_device({"x": xv, "weight": packed, "out": ov})
    if m == 0:
        return result
    plan = plan or weight.plan(m, path)
    views = [xv, ov]
    written = {"out": ov}
    memory = 0
    size = 0
    if workspace is not None:
        ws = _workspace(workspace)
        views.append(ws)
        written["workspace"] = ws
        memory = ws.ptr
        size = math.prod(ws.shape)
    _disjoint(written, {"x": xv, "weight": packed})
    on = launch_stream(views, stream)
    module = native()
    try:
        with CurrentDevice(device):
            module.w4a16(
                xv.ptr,
                xv.strides[0] if m > 1 else weight.k,
                packed.ptr,
                weight.tensor_scale,
                ov.ptr,
                memory,
                size,
                m,
                weight.n,
                weight.k,
                CODES[xv.dtype],
                CODES[ov.dtype],
                path_of(plan),
                tuple(plan),
                int(pdl),
                on,
            )
    except module.CudaError as error:
        if error.args[1] == _BAD_PLAN:
            weight.workspace_bytes(m, plan)  # raises with what is wrong
        raise
    _wrote(result, on)
    return result


def _workspace(workspace: CudaArray) -> View:
    v = view(workspace, "workspace")
    if v.dtype != "uint8" or not v.contiguous or v.ptr % 16:
        raise UsageError(
            f"workspace is {v.dtype} {list(v.shape)}; expected contiguous, aligned uint8 memory"
        )
    return v


def fp4_native() -> bool:
    """Return whether the current device's code has the native FP4 instruction (SM12x)."""
    need_device()
    return native().limits()[4]


def w4a4(
    a_codes: CudaArray,
    a_scale: CudaArray,
    a_tensor_scale: float,
    w_codes: CudaArray,
    w_scale: CudaArray,
    w_tensor_scale: float,
    out: Out | None = None,
    *,
    mode: str = "auto",
    fault: str | None = None,
    stream: int | None = None,
) -> Out | DeviceArray:
    """Launch out[M, N] = A[M, K] @ W[N, K].T with both operands in NVFP4 (linear scales).

    mode: "native" needs sm_120a or sm_121a code; "emulated" is the same kernel with that one
        instruction replaced and
    runs on any GPU; "auto" is native where possible. Returns `out` without waiting for the kernel.
    """
    need_device()
    a, sa, m, k = _codes_and_scales(a_codes, a_scale, "a_")
    w, sw, n, kw = _codes_and_scales(w_codes, w_scale, "w_")
    if k != kw:
        raise UsageError(f"a_codes has K = {k} and w_codes has K = {kw}; they must be equal")
    alpha = _positive(a_tensor_scale, "a_tensor_scale") * _positive(
        w_tensor_scale, "w_tensor_scale"
    )
    if mode not in MODES:
        raise UsageError(f"mode is {mode!r}; expected auto, native or emulated")
    result = DeviceArray((m, n), "bfloat16", a.device) if out is None else out
    ov = _contiguous(_matrix(result, "out", tuple(CODES), (m, n), 4), "out")
    device = _same_device({"a_codes": a, "a_scale": sa, "w_codes": w, "w_scale": sw, "out": ov})
    _disjoint({"out": ov}, {"a_codes": a, "a_scale": sa, "w_codes": w, "w_scale": sw})
    on = launch_stream((a, sa, w, sw, ov), stream)
    module = native()
    out_type = CODES[ov.dtype]
    try:
        with CurrentDevice(device):
            module.w4a4(
                a.ptr,
                sa.ptr,
                w.ptr,
                sw.ptr,
                alpha,
                ov.ptr,
                m,
                n,
                k,
                out_type,
                MODES[mode],
                FAULT_NUMBERS[fault],
                on,
            )
    except module.CudaError as error:
        if error.args[1] == _NO_NATIVE:
            raise EnvironmentFault(error.args[0], 'mode="emulated"') from error
        raise
    _wrote(result, on)
    return result


def _blocks(x: CudaArray, name: str) -> tuple[View, int]:
    v = view(x, name)
    if v.dtype not in CODES:
        raise UsageError(f"{name} has dtype {v.dtype}; expected {', '.join(CODES)}")
    if not v.shape or v.shape[-1] == 0 or v.shape[-1] % GROUP:
        raise UsageError(
            f"{name} has shape {list(v.shape)}; the last dimension must be a positive multiple of {GROUP}"
        )
    if not v.contiguous or v.ptr % 16:
        raise UsageError(
            f"{name} must be contiguous and start at a multiple of 16 bytes", f"{name}.contiguous()"
        )
    return v, math.prod(v.shape) // GROUP


def fake_quant(
    x: CudaArray, tensor_scale: float, out: Out | None = None, *, stream: int | None = None
) -> Out | DeviceArray:
    """Quantize and dequantize x [..., K] per 16 columns in its own dtype.

    ModelOpt's dynamic activation op, to the bit.
    """
    need_device()
    v, blocks = _blocks(x, "x")
    scale = _positive(tensor_scale, "tensor_scale")
    result = DeviceArray(v.shape, v.dtype, v.device) if out is None else out
    o, _ = _blocks(result, "out")
    if (o.shape, o.dtype) != (v.shape, v.dtype):
        raise UsageError(f"out is {o.dtype} {list(o.shape)}; expected {v.dtype} {list(v.shape)}")
    device = _same_device({"x": v, "out": o})
    if o.ptr != v.ptr:  # in place, each thread reads its block before it writes it
        _disjoint({"out": o}, {"x": v})
    if blocks:
        on = launch_stream((v, o), stream)
        with CurrentDevice(device):
            native().fake_quant(v.ptr, CODES[v.dtype], blocks, scale, o.ptr, on)
        _wrote(result, on)
    return result

"""The GEMM and codec operations. All arguments are checked here before a kernel is launched.

Shapes: activations x [M, K], weights [N, K], out [M, N]. The number format is defined in
    annie_quant.nvfp4.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, TypeVar

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
from annie_quant.gemm.plans import TYPES, Plan, path_of

if TYPE_CHECKING:
    import torch

Out = TypeVar("Out", DeviceArray, View, "torch.Tensor")
_GROUP = 16
FAULT_NUMBERS = {None: 0, "nibbles": 1, "scales": 2, "fragment": 3, "lane": 4}
MODES = {"auto": 0, "native": 1, "emulated": 2}
# as AQ_GEMM_* in csrc/gemm/gemm.h
_BAD_PLAN = -3
_NO_NATIVE = -2
_FLOATS = tuple(CODES)


def _positive(value: float, name: str) -> float:
    with np.errstate(over="ignore"):
        result = float(np.float32(value))  # what the kernels get
    if not 0 < result < math.inf:
        raise UsageError(
            f"{name} is {value}; a finite positive float32 number is expected",
            "annie-quant audit DIR --repair",
        )
    return result


def _operand(
    array: CudaArray,
    name: str,
    dtypes: tuple[str, ...],
    shape: tuple[int | None, ...] | None,
    align: int = 16,
    any_strides: bool = False,
) -> View:
    """Return an array as a kernel needs it.

    shape: None for any; in it None for any size.
    """
    v = view(array, name)
    if v.dtype not in dtypes:
        raise UsageError(f"{name} has dtype {v.dtype}; expected {' or '.join(dtypes)}")
    if shape is not None and not _shape_fits(v.shape, shape):
        sizes = ", ".join("any" if size is None else str(size) for size in shape)
        raise UsageError(f"{name} has shape {list(v.shape)}; expected [{sizes}]")
    if not (any_strides or v.contiguous):
        raise UsageError(
            f"{name} is not contiguous (strides {list(v.strides)})", f"{name}.contiguous()"
        )
    if v.ptr % align:
        raise UsageError(
            f"{name} starts at an address that is not a multiple of {align} bytes",
            f"{name}.clone()",
        )
    return v


def _shape_fits(shape: tuple[int, ...], expected: tuple[int | None, ...]) -> bool:
    if len(shape) != len(expected):
        return False
    return all(want in (None, size) for size, want in zip(shape, expected, strict=True))


def _codes_and_scales(
    codes: CudaArray, block_scale: CudaArray, name: str
) -> tuple[View, View, int, int]:
    c = _operand(codes, f"{name}codes", ("uint8",), (None, None))
    n, bytes_of_row = c.shape
    k = bytes_of_row * 2
    if k == 0 or n == 0 or k % _GROUP:
        raise UsageError(
            f"{name}codes has shape {list(c.shape)}, K = {k}; K must be a positive multiple of {_GROUP}"
        )
    dtypes = ("uint8", "float8_e4m3fn")
    s = _operand(block_scale, f"{name}block_scale", dtypes, (n, k // _GROUP), align=4)
    return c, s, n, k


def _shared_device(written: dict[str, View], read: dict[str, View]) -> int:
    """Return the device of all operands.

    UsageError: there are several, or an array that a kernel writes shares a byte with another one.
    """
    operands = {**written, **read}
    devices = {v.device for v in operands.values()}
    if len(devices) > 1:
        places = ", ".join(f"{name} on {v.device}" for name, v in operands.items())
        raise UsageError(f"the arrays are on different devices: {places}")
    for name, v in written.items():
        for other, w in operands.items():
            if other != name and v.ptr < w.end and w.ptr < v.end:
                raise UsageError(f"{name} and {other} overlap in memory", "use separate arrays")
    return devices.pop()


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
    None: its own. UsageError: a block scale that is NaN or negative, with its position. Waits for the repack
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
        module = native()
        size = module.packed_bytes(self.n, self.k)
        self.packed = DeviceArray((size,), "uint8", c.device) if memory is None else memory
        to = _operand(self.packed, "memory", ("uint8",), (size,))
        self.device = _shared_device({"memory": to}, {"codes": c, "block_scale": s})
        on = launch_stream((c, s), stream)
        with CurrentDevice(self.device):
            bad = module.repack(c.ptr, s.ptr, to.ptr, self.n, self.k, FAULT_NUMBERS[fault], on)
        if bad is not None:
            row, block = divmod(bad[1], self.k // _GROUP)
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
            except (module.CudaError, ValueError) as error:
                raise UsageError(
                    f"W4A16 of M={m}, N={self.n}, K={self.k} by path {path!r}: {error.args[0]}"
                ) from error
            self._plans[key] = TYPES[name](*fields)
        return self._plans[key]

    def workspace_bytes(self, m: int, plan: Plan | None = None) -> int:
        """Return the device memory that a product of M tokens needs while it runs.

        plan: None for the one chosen for M. UsageError: what is wrong with it.
        """
        plan = plan or self.plan(m)
        try:
            with CurrentDevice(self.device):
                return native().plan_needs(m, self.n, self.k, path_of(plan), tuple(plan))[1]
        except ValueError as error:
            raise UsageError(
                f"plan {plan} for M={m}, N={self.n}, K={self.k}: {error}", "Weight.plan(m)"
            ) from error


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
    xv = _operand(x, "x", ("bfloat16", "float16"), (None, weight.k), any_strides=True)
    m = xv.shape[0]
    row_stride, column_stride = xv.strides
    if column_stride != 1 or (m > 1 and (row_stride % 8 or row_stride < weight.k)):
        raise UsageError(
            f"x has strides {list(xv.strides)}; rows must be contiguous and a multiple of 8 apart",
            "x.contiguous()",
        )
    result = DeviceArray((m, weight.n), xv.dtype, xv.device) if out is None else out
    ov = _operand(result, "out", _FLOATS, (m, weight.n), align=4)
    written: dict[str, View] = {"out": ov}
    if workspace is not None:
        written["workspace"] = _operand(workspace, "workspace", ("uint8",), (None,))
    packed = view(weight.packed, "weight")
    device = _shared_device(written, {"x": xv, "weight": packed})
    if m == 0:
        return result
    plan = plan or weight.plan(m, path)
    on = launch_stream([xv, *written.values()], stream)
    memory = written.get("workspace")
    module = native()
    try:
        with CurrentDevice(device):
            module.w4a16(
                xv.ptr,
                row_stride if m > 1 else weight.k,
                packed.ptr,
                weight.tensor_scale,
                ov.ptr,
                memory.ptr if memory else 0,
                memory.shape[0] if memory else 0,
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
    ov = _operand(result, "out", _FLOATS, (m, n), align=4)
    device = _shared_device({"out": ov}, {"a_codes": a, "a_scale": sa, "w_codes": w, "w_scale": sw})
    on = launch_stream((a, sa, w, sw, ov), stream)
    module = native()
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
                CODES[ov.dtype],
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


def fake_quant(
    x: CudaArray, tensor_scale: float, out: Out | None = None, *, stream: int | None = None
) -> Out | DeviceArray:
    """Quantize and dequantize x [..., K] per 16 columns in its own dtype.

    ModelOpt's dynamic activation op, to the bit.
    """
    need_device()
    v = _operand(x, "x", _FLOATS, None)
    if not v.shape or v.shape[-1] == 0 or v.shape[-1] % _GROUP:
        raise UsageError(
            f"x has shape {list(v.shape)}; the last dimension must be a positive multiple of {_GROUP}"
        )
    scale = _positive(tensor_scale, "tensor_scale")
    result = DeviceArray(v.shape, v.dtype, v.device) if out is None else out
    o = _operand(result, "out", (v.dtype,), v.shape)
    in_place = o.ptr == v.ptr  # then each thread reads its block before it writes it
    device = _shared_device({"out": o}, {} if in_place else {"x": v})
    blocks = math.prod(v.shape) // _GROUP
    if blocks:
        on = launch_stream((v, o), stream)
        with CurrentDevice(device):
            native().fake_quant(v.ptr, CODES[v.dtype], blocks, scale, o.ptr, on)
        _wrote(result, on)
    return result

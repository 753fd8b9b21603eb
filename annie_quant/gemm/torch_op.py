"""The W4A16 product as a torch operator, for torch.compile and CUDA graphs: torch.ops.annie_quant.nvfp4_linear.

    handle = aq.gemm.torch_op.prepare(codes, block_scale, tensor_scale)    # repacked once
    aq.gemm.torch_op.register()
    out = torch.ops.annie_quant.nvfp4_linear(x, handle.packed, handle.n, handle.k, handle.tensor_scale)

The repacked weight is an ordinary uint8 tensor, so it is moved, saved and freed like any buffer of a module.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from annie_quant.errors import need
from annie_quant.gemm.arrays import native
from annie_quant.gemm.ops import Weight, w4a16
from annie_quant.gemm.plans import Plan


class Prepared(NamedTuple):
    """A repacked weight [n, k]. packed: torch uint8 tensor on the GPU."""

    packed: Any
    n: int
    k: int
    tensor_scale: float


class _TorchWeight(Weight):
    """A Weight over a packed tensor that torch owns."""

    def __init__(self, packed: Any, n: int, k: int, tensor_scale: float) -> None:
        self.n, self.k, self.tensor_scale, self.packed = n, k, tensor_scale, packed
        self.device = packed.device.index
        self._plans = _plans(n, k, self.device)


@functools.cache
def _plans(n: int, k: int, device: int) -> dict[tuple[int, str], Plan]:
    return {}


def prepare(codes: Any, block_scale: Any, tensor_scale: float) -> Prepared:
    """Repack a checkpoint's weight (CUDA tensors: uint8 [N, K/2], float8_e4m3fn [N, K/16]) into a torch uint8 tensor."""
    torch = need("torch", "quantize")
    weight = Weight(codes, block_scale, tensor_scale)
    packed = torch.empty(weight.packed.nbytes, dtype=torch.uint8, device=codes.device)
    stream = torch.cuda.current_stream(codes.device).cuda_stream  # earlier users of this memory are on it
    native().copy(packed.data_ptr(), weight.packed.ptr, weight.packed.nbytes, stream)
    native().stream_sync(stream)
    return Prepared(packed, weight.n, weight.k, weight.tensor_scale)


@functools.cache
def register() -> Any:
    """Define the operator once and return it."""
    torch = need("torch", "quantize")

    schema = "(Tensor x, Tensor packed, int n, int k, float tensor_scale) -> Tensor"

    @torch.library.custom_op("annie_quant::nvfp4_linear", mutates_args=(), device_types="cuda", schema=schema)
    def nvfp4_linear(x: Any, packed: Any, n: int, k: int, tensor_scale: float) -> Any:
        rows = x.reshape(-1, k)
        if rows.data_ptr() % 16 or rows.stride(-1) != 1:
            rows = rows.contiguous()
        out = torch.empty((rows.shape[0], n), dtype=x.dtype, device=x.device)
        weight = _TorchWeight(packed, n, k, tensor_scale)
        size = weight.workspace_bytes(rows.shape[0]) if rows.shape[0] else 0
        workspace = torch.empty(size, dtype=torch.uint8, device=x.device) if size else None
        w4a16(rows, weight, out, workspace=workspace)
        return out.reshape(*x.shape[:-1], n)

    @nvfp4_linear.register_fake
    def _(x: Any, packed: Any, n: int, k: int, tensor_scale: float) -> Any:
        return x.new_empty((*x.shape[:-1], n))

    return nvfp4_linear

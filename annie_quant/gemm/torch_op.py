"""The W4A16 product as a torch operator, for torch.compile, CUDA graphs and servers.

torch.ops.annie_quant.nvfp4_linear.

    weight = aq.gemm.torch_op.prepare(codes, block_scale, tensor_scale)    # repacked once
    aq.gemm.torch_op.register()
    out = torch.ops.annie_quant.nvfp4_linear(x, *weight)

The repacked weight is an ordinary uint8 tensor, so it is moved, saved and freed like any buffer of
a module. The tensor scale is a tensor on the CPU: it is read without waiting for the GPU, and
compiled graphs do not hold its value, so that layers of one shape share their compiled code and a
graph from a cache serves another checkpoint.

On a GPU with programmatic dependent launch (from sm_90), a product reads the packed weight before
the previous kernel of the stream has ended. That kernel must not write the weight; one more kernel,
or torch.cuda.synchronize(), between the two is enough.

A call launches on torch's current stream, finds its plan in C, and takes output and workspace from
torch's allocator, so it can be captured in a CUDA graph. Rows of x that a kernel cannot read
(strides, alignment) are copied first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from annie_quant.core.errors import UsageError, need
from annie_quant.gemm.arrays import CODES, CurrentDevice, native
from annie_quant.gemm.ops import Weight

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_libraries: list[torch.library.Library] = []  # the operator exists as long as its library

F16 = CODES["float16"]
BF16 = CODES["bfloat16"]
Operator = Callable[..., "Tensor | None"]
LINEAR_SCHEMA = "(Tensor x, Tensor packed, Tensor tensor_scale, int n) -> Tensor"


class Prepared(NamedTuple):
    """A repacked weight [n, k].

    packed: uint8 tensor on the GPU; tensor_scale: float32 [] on the CPU.
    """

    packed: Tensor
    tensor_scale: Tensor
    n: int


def prepare(
    codes: Tensor, block_scale: Tensor, tensor_scale: float, *, fault: str | None = None
) -> Prepared:
    """Repack a checkpoint's weight into a torch uint8 tensor.

    The weight is two CUDA tensors, uint8 [N, K/2] and float8_e4m3fn [N, K/16].

    fault: as in gemm.ops.Weight, for negative controls
    """
    torch = need("torch", "quantize")
    size = native().packed_bytes(codes.shape[0], codes.shape[1] * 2)
    memory = torch.empty(size, dtype=torch.uint8, device=codes.device)
    weight = Weight(codes, block_scale, tensor_scale, memory=memory, fault=fault)
    return Prepared(
        memory, torch.tensor(weight.tensor_scale, dtype=torch.float32, device="cpu"), weight.n
    )


def check_operand(
    name: str,
    tensor: Tensor,
    dtype: torch.dtype,
    device: torch.device,
    size: int | None = None,
    align: int = 16,
) -> None:
    """Raise UsageError unless a kernel can read a tensor.

    Its dtype, device and number of elements, contiguous and aligned.
    """
    well_formed = tensor.dtype is dtype and tensor.device == device and tensor.is_contiguous()
    if (
        not well_formed
        or tensor.data_ptr() % align
        or (size is not None and tensor.numel() != size)
    ):
        many = "" if size is None else f"{size} elements of "
        raise UsageError(
            f"{name} is {tensor.dtype} {list(tensor.shape)} with strides {list(tensor.stride())} on {tensor.device}; expected "
            f"{many}contiguous {dtype} at a multiple of {align} bytes on {device}"
        )


def product(x: Tensor, packed: Tensor, tensor_scale: Tensor, n: int) -> Tensor:
    """Return x [..., K] times the transpose of the packed weight [n, K].

    The result is [..., n] in x's dtype (bfloat16 or float16).
    """
    import torch

    module = native()
    device = packed.device.index
    k = x.shape[-1]
    kind = None
    if x.dtype is torch.bfloat16:
        kind = BF16
    elif x.dtype is torch.float16:
        kind = F16
    if kind is None or x.device != packed.device or not x.is_cuda:
        raise UsageError(
            f"x is {x.dtype} on {x.device}, packed on {packed.device}; expected float16 or bfloat16 on one GPU"
        )
    check_operand("packed", packed, torch.uint8, x.device)
    rows = x if x.dim() == 2 else x.reshape(-1, k)
    m = rows.shape[0]
    ldx = rows.stride(0)
    if m == 1:
        ldx = k
    if rows.stride(1) != 1 or ldx % 8 or ldx < k or rows.data_ptr() % 16:
        rows, ldx = rows.clone(memory_format=torch.contiguous_format), k
    out = torch.empty((*x.shape[:-1], n), dtype=x.dtype, device=x.device)
    if m == 0:
        return out
    with CurrentDevice(None if torch._C._cuda_getDevice() == device else device):
        size = module.linear_workspace(m, n, k)
        workspace = torch.empty(size, dtype=torch.uint8, device=x.device) if size else None
        module.linear(
            rows.data_ptr(),
            ldx,
            packed.data_ptr(),
            packed.numel(),
            tensor_scale.item(),
            out.data_ptr(),
            0 if workspace is None else workspace.data_ptr(),
            size,
            m,
            n,
            k,
            kind,
            torch._C._cuda_getCurrentRawStream(device),
        )
    return out


def fake(x: Tensor, packed: Tensor, tensor_scale: Tensor, n: int) -> Tensor:
    """Return an empty result of the right shape and dtype, for tracing."""
    return x.new_empty((*x.shape[:-1], n))


def define(name: str, schema: str, product: Operator, fake: Operator) -> Operator:
    """Define the operator annie_quant::name for CUDA devices and return it; call it once."""
    torch = need("torch", "quantize")
    # Not torch.library.custom_op: its wrappers take longer than the launch.
    library = torch.library.Library("annie_quant", "FRAGMENT")
    library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    library.impl(name, product, "CUDA")
    torch.library.register_fake(f"annie_quant::{name}", fake, lib=library)
    _libraries.append(library)
    return getattr(torch.ops.annie_quant, name)


@functools.cache
def register() -> Operator:
    """Define the operator once and return it."""
    return define("nvfp4_linear", LINEAR_SCHEMA, product, fake)

"""How x W^T is computed from packed weights: our CUDA kernels, a product with packed weights on a CPU, else blocks of
rows that are dequantized, multiplied and dropped.

While a gradient is wanted, what is kept for the way back is the layer, not its dequantized weights.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn

from annie_quant.hf import codec

BLOCK_BYTES = 8 << 20  # dequantized weights alive at a time on a CPU
BLOCK_BYTES_GPU = 1 << 28
FEW_ROWS = 4  # of x: up to here a product with packed weights is faster than dequantizing them (tests/perf/runtime.md)


class Packed(Protocol):
    """What a product asks of an NVFP4 layer [N, K]; NVFP4Linear is one. prepared: its weights for our CUDA kernels."""

    in_features: int
    out_features: int
    group: int
    prepared: Any

    @property
    def bias(self) -> torch.Tensor | None: ...

    @property
    def codes(self) -> torch.Tensor: ...

    @property
    def block_scale(self) -> torch.Tensor: ...

    def scalars(self) -> Any: ...

    def rows(self, start: int, stop: int, dtype: torch.dtype) -> torch.Tensor: ...


def linear(layer: Packed, x: torch.Tensor) -> torch.Tensor:
    """x [..., K] → [..., N] in x's dtype, bias included."""
    if torch.is_grad_enabled() and x.requires_grad:
        y = WithGradient.apply(x, layer)
        return y if layer.bias is None else y + layer.bias
    return forward(layer, x, layer.bias)


def forward(layer: Packed, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    if layer.prepared is not None and x.dtype in (torch.bfloat16, torch.float16):
        y = torch.ops.annie_quant.nvfp4_linear(x, *layer.prepared)
        return y if bias is None else y + bias
    if x.device.type == "cpu" and x.numel() <= FEW_ROWS * layer.in_features and not torch.compiler.is_compiling():
        tensor_scale, divisor, _ = layer.scalars()
        scale = tensor_scale if divisor is None else divisor
        y = codec.product(x, layer.codes, layer.block_scale, scale, layer.group, divisor is not None)
        return y if bias is None else y + bias
    spans = blocks(layer, x)
    if len(spans) == 1:
        return nn.functional.linear(x, layer.rows(*spans[0], x.dtype), bias)
    y = torch.cat([nn.functional.linear(x, layer.rows(*span, x.dtype)) for span in spans], -1)
    return y if bias is None else y + bias


def blocks(layer: Packed, x: torch.Tensor) -> list[tuple[int, int]]:
    """Spans of output rows whose dequantized weights are small enough to be alive at once."""
    most = BLOCK_BYTES if x.device.type == "cpu" else BLOCK_BYTES_GPU
    step = max(1, most // (layer.in_features * x.element_size()))
    return [(i, min(i + step, layer.out_features)) for i in range(0, layer.out_features, step)]


class WithGradient(torch.autograd.Function):
    """The same product, with dx = dy W on the way back; the packed weights themselves hold still."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: Packed) -> torch.Tensor:
        ctx.layer = layer
        return forward(layer, x, None)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (dy,), layer = grads, ctx.layer
        dx = None
        for start, stop in blocks(layer, dy):
            part = dy[..., start:stop] @ layer.rows(start, stop, dy.dtype)
            dx = part if dx is None else dx + part
        assert dx is not None
        return dx, None


def on_kernels(layer: Packed) -> bool:
    """Whether our CUDA kernels can take this layer."""
    return layer.codes.device.type == "cuda" and layer.group == 16 and codec.kernels()


def repacked(layer: Packed) -> Any:
    """The layer's weights as torch.ops.annie_quant.nvfp4_linear takes them, besides the checkpoint's own tensors."""
    from annie_quant.gemm import torch_op

    torch_op.register()
    return torch_op.prepare(layer.codes, layer.block_scale, layer.scalars().tensor_scale)

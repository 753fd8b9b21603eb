"""x W^T from packed weights: by our CUDA kernels, by a product on packed weights on a CPU, else block by block of rows that
are dequantized, multiplied and freed.

For the gradient the layer is saved, not its dequantized weights.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from annie_quant.gemm import torch_op
from annie_quant.offline import codec

if TYPE_CHECKING:
    from annie_quant.offline.nvfp4_linear import NVFP4Linear

BLOCK_BYTES = 8 << 20  # dequantized weights in memory at one time, on a CPU
BLOCK_BYTES_GPU = 1 << 28
FEW_ROWS = 4  # of x: up to here a product on packed weights is faster than dequantizing them (tests/perf/runtime.md)


def linear(layer: NVFP4Linear, x: torch.Tensor) -> torch.Tensor:
    """Return x [..., K] times the layer's weights plus its bias, [..., N] in x's dtype."""
    if torch.is_grad_enabled() and x.requires_grad:
        y = WithGradient.apply(x, layer)
        return y if layer.bias is None else y + layer.bias
    return forward(layer, x, layer.bias)


def forward(layer: NVFP4Linear, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Linear without a gradient."""
    if layer.prepared is not None and x.dtype in (torch.bfloat16, torch.float16):
        y = torch.ops.annie_quant.nvfp4_linear(x, *layer.prepared)
        return y if bias is None else y + bias
    if x.device.type == "cpu" and x.numel() <= FEW_ROWS * layer.in_features and not torch.compiler.is_compiling():
        tensor_scale, divisor, _ = layer.scalars()
        scale = tensor_scale if divisor is None else divisor
        y = codec.packed_matmul(x, layer.codes, layer.block_scale, scale, layer.group, divisor is not None)
        return y if bias is None else y + bias
    spans = row_spans(layer, x)
    if len(spans) == 1:
        return nn.functional.linear(x, layer.rows(*spans[0], x.dtype), bias)
    y = torch.cat([nn.functional.linear(x, layer.rows(*span, x.dtype)) for span in spans], -1)
    return y if bias is None else y + bias


def reordered(layer: NVFP4Linear, x: torch.Tensor) -> torch.Tensor:
    """Return the layer's product summed in the order of NVFP4Linear.reorder: the same numbers, another order."""
    order = layer.permutation
    x = x if order is None else x[..., order]
    order = None if layer.dense is not None else order  # they are in that order already
    whole = layer.dense is not None or layer.operands is not None
    spans = [] if whole else row_spans(layer, x)
    blocks = [layer.weights(x.dtype)] if whole else (layer.rows(*span, x.dtype) for span in spans)
    products = [sum_of_parts(x, w if order is None else w[:, order], layer.parts) for w in blocks]
    y = products[0] if len(products) == 1 else torch.cat(products, -1)
    return y if layer.bias is None else y + layer.bias


def sum_of_parts(x: torch.Tensor, weight: torch.Tensor, parts: int) -> torch.Tensor:
    """Return x W^T [..., N] as the sum of the products of `parts` parts of K."""
    if parts == 1:
        return nn.functional.linear(x, weight)
    total, *rest = map(nn.functional.linear, x.tensor_split(parts, -1), weight.tensor_split(parts, -1))
    for product in rest:
        total += product
    return total


def row_spans(layer: NVFP4Linear, x: torch.Tensor) -> list[tuple[int, int]]:
    """Return spans (start, stop) of output rows whose dequantized weights fit into BLOCK_BYTES."""
    limit = BLOCK_BYTES if x.device.type == "cpu" else BLOCK_BYTES_GPU
    step = max(1, limit // (layer.in_features * x.element_size()))
    return [(i, min(i + step, layer.out_features)) for i in range(0, layer.out_features, step)]


class WithGradient(torch.autograd.Function):
    """The same product with the gradient dx = dy W; the packed weights get no gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: NVFP4Linear) -> torch.Tensor:
        ctx.layer = layer
        return forward(layer, x, None)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (dy,), layer = grads, ctx.layer
        parts = (dy[..., start:stop] @ layer.rows(start, stop, dy.dtype) for start, stop in row_spans(layer, dy))
        dx = next(parts)
        for part in parts:
            dx = dx + part
        return dx, None


def can_use_kernels(layer: NVFP4Linear) -> bool:
    """Return whether our CUDA kernels can compute this layer."""
    return layer.codes.device.type == "cuda" and layer.group == 16 and codec.has_kernels()


def repack(layer: NVFP4Linear) -> torch_op.Prepared:
    """Return the layer's weights as torch.ops.annie_quant.nvfp4_linear reads them, a copy of the checkpoint's tensors."""
    torch_op.register()
    return torch_op.prepare(layer.codes, layer.block_scale, layer.scalars().tensor_scale)

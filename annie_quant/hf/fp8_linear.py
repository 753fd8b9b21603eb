"""FP8Linear: the FP8 (E4M3) linears of a checkpoint of mixed precision.

W = value * weight_scale. Where the checkpoint has an input_scale, x is rounded to E4M3 and back under it, whatever the
numerics of the NVFP4 linears beside: kernels for FP8 linears multiply FP8 by FP8 on every GPU that has them. Weights
stay 8 bits in memory and are dequantized for each product.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn

from annie_quant.hf.base_linear import HeldLinear

LARGEST = 448.0


class FP8Linear(HeldLinear):
    """Parameters that hold still: weight float8_e4m3fn [N, K], weight_scale float32 of one number or one a row,
    input_scale float32 or none."""

    HELD: ClassVar[tuple[str, ...]] = ("weight", "weight_scale", "input_scale")

    weight_scale: nn.Parameter
    input_scale: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        scale_shape: tuple[int, ...] = (),
        input_shape: tuple[int, ...] | None = None,
        scale_dtype: torch.dtype = torch.float32,
        bias: bool = False,
        dtype=None,
        device=None,
    ) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = in_features, out_features
        kinds = {
            "weight": ((out_features, in_features), torch.float8_e4m3fn),
            "weight_scale": (scale_shape, scale_dtype),
            "input_scale": (input_shape, torch.float32),
            "bias": ((out_features,) if bias else None, dtype or torch.bfloat16),
        }
        for name, (shape, kind) in kinds.items():
            empty = None if shape is None else torch.empty(shape, dtype=kind, device=device)
            self.register_parameter(name, None if empty is None else nn.Parameter(empty, requires_grad=False))

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        """The weights, [N, K] in `dtype`."""
        scale = self.weight_scale.float()
        return (self.weight.float() * (scale.reshape(-1, 1) if scale.numel() > 1 else scale.reshape(()))).to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.input_scale is not None:
            rounded = fake_quant(x.detach(), self.input_scale)
            x = x + (rounded - x).detach() if x.requires_grad else rounded
        return nn.functional.linear(x, self.dense(x.dtype), self.bias)

    def extra_repr(self) -> str:
        return f"in={self.in_features}, out={self.out_features}, activations={self.input_scale is not None}"


def fake_quant(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """x rounded to E4M3 and back under one scale: e4m3(clamp(x / scale, ±448)) * scale in float32, x's dtype out."""
    scale = scale.float().reshape(())
    return ((x.float() / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).float() * scale).to(x.dtype)

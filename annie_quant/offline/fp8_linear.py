"""Linears with a checkpoint's own tensors: their base class, and the FP8 (E4M3) linears FP8Linear and BlockFP8Linear.

FP8Linear: W = value * weight_scale. If the checkpoint has an input_scale, x is rounded to E4M3 and back with it; if its settings
ask for scales per token (compressed-tensors' FP8_DYNAMIC), with each token's own. Both apply under all numerics of the NVFP4
linears: kernels for FP8 linears multiply FP8 by FP8 on every GPU that supports it. Weights stay 8 bits in memory and are
dequantized in each forward.

BlockFP8Linear has a scale per block of the weight, as Qwen and DeepSeek publish it, and rounds each token's activations with a
scale per block of columns (transformers, integrations/finegrained_fp8.py; vLLM, per_token_group_quant_fp8).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import nn

from annie_quant.offline.codec import MAX_E4M3, fake_quant_fp8

SMALLEST_TOKEN_SCALE = 1 / (MAX_E4M3 * 512)
SMALLEST_AMAX = 1e-10  # of a token's activations in a block of columns: vLLM's lower bound


class FixedDtypeLinear(nn.Linear):
    """A linear layer with parameters whose dtype is part of a storage format.

    .to() and .half() move the parameters named in FIXED_DTYPE (some may be None) to another device and cast only the
    others, such as the bias.
    """

    FIXED_DTYPE: ClassVar[tuple[str, ...]] = ()

    def __init__(self, in_features: int, out_features: int) -> None:
        nn.Module.__init__(self)  # nn.Linear's own would create a float weight
        self.in_features, self.out_features = in_features, out_features

    def add_parameter(
        self, name: str, shape: tuple[int, ...] | None, dtype: torch.dtype, device: torch.device | str | None
    ) -> None:
        """Register an uninitialized parameter without gradient; None for shape None."""
        empty = None if shape is None else torch.empty(shape, dtype=dtype, device=device)
        self.register_parameter(name, None if empty is None else nn.Parameter(empty, requires_grad=False))

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> FixedDtypeLinear:
        before = {name: p.data for name in self.FIXED_DTYPE if (p := getattr(self, name)) is not None}
        super()._apply(fn, recurse)
        for name, data in before.items():
            parameter = getattr(self, name)
            if parameter.dtype != data.dtype:
                setattr(self, name, nn.Parameter(data.to(parameter.device), requires_grad=False))
        return self


class FP8Linear(FixedDtypeLinear):
    """Parameters: weight float8_e4m3fn [N, K]; weight_scale float32, one value or one per row; input_scale float32 or None."""

    SCALE: ClassVar[str] = "weight_scale"
    FIXED_DTYPE: ClassVar[tuple[str, ...]] = ("weight", SCALE, "input_scale")

    input_scale: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        scale_shape: tuple[int, ...] = (),
        input_shape: tuple[int, ...] | None = None,
        per_token: bool = False,
        scale_dtype: torch.dtype = torch.float32,
        bias: bool = False,
        dtype: torch.dtype | None = None,
        device: str | torch.device | None = None,
    ) -> None:
        super().__init__(in_features, out_features)
        self.per_token = per_token
        self.add_parameter("weight", (out_features, in_features), torch.float8_e4m3fn, device)
        self.add_parameter(self.SCALE, scale_shape, scale_dtype, device)
        self.add_parameter("input_scale", input_shape, torch.float32, device)
        self.add_parameter("bias", (out_features,) if bias else None, dtype or torch.bfloat16, device)

    def scales(self) -> list[nn.Parameter]:
        """Return the stored scales."""
        return [s for s in (getattr(self, self.SCALE), self.input_scale) if s is not None]

    def weight_scales(self) -> torch.Tensor:
        """Return the multipliers of the weight, float32, of a shape that broadcasts to [N, K]."""
        scale = self.scales()[0].float()
        return scale.reshape(-1, 1) if scale.numel() > 1 else scale.reshape(())

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the weights [N, K] in `dtype`."""
        return (self.weight.float() * self.weight_scales()).to(dtype)

    def rounded(self, x: torch.Tensor) -> torch.Tensor:
        """Return inputs as the checkpoint defines them."""
        scale = token_scales(x) if self.per_token else self.input_scale
        return x if scale is None else fake_quant_fp8(x, scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rounded = self.rounded(x.detach())
        x = x + (rounded - x).detach() if x.requires_grad else rounded
        return nn.functional.linear(x, self.dequantized(x.dtype), self.bias)


class BlockFP8Linear(FP8Linear):
    """Parameters: weight float8_e4m3fn [N, K]; weight_scale_inv [ceil(N / rows), ceil(K / columns)], a multiplier."""

    SCALE = "weight_scale_inv"
    FIXED_DTYPE = ("weight", SCALE)

    def __init__(self, in_features: int, out_features: int, *, block: tuple[int, int], **options: Any) -> None:
        size_of_block = (min(block[0], out_features), min(block[1], in_features))
        grid = (-(-out_features // size_of_block[0]), -(-in_features // size_of_block[1]))
        super().__init__(in_features, out_features, scale_shape=grid, **options)
        self.block = size_of_block

    def weight_scales(self) -> torch.Tensor:
        scale = self.scales()[0].float()
        for axis, size in enumerate(self.block):
            scale = scale.repeat_interleave(size, axis)
        return scale[: self.out_features, : self.in_features]

    def rounded(self, x: torch.Tensor) -> torch.Tensor:
        columns = self.block[1]
        values = nn.functional.pad(x, (0, -x.shape[-1] % columns)).unflatten(-1, (-1, columns))
        scale = values.float().abs().amax(-1, keepdim=True).clamp_min(SMALLEST_AMAX) / MAX_E4M3
        return fake_quant_fp8(values, scale).flatten(-2)[..., : x.shape[-1]]


class NamedBlockFP8Linear(BlockFP8Linear):
    """The same with compressed-tensors' name of the scales (llm-compressor's FP8_BLOCK)."""

    SCALE = "weight_scale"
    FIXED_DTYPE = ("weight", SCALE)


def token_scales(x: torch.Tensor) -> torch.Tensor:
    """Return amax / 448 of each token [..., 1], with the lower bound of vLLM's kernel (csrc/quantization, per-token FP8)."""
    return (x.float().abs().amax(-1, keepdim=True) / MAX_E4M3).clamp_min(SMALLEST_TOKEN_SCALE)

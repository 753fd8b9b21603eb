"""Round torch tensors to a format and back: what a served linear computes. For searches and training.

NVFP4 is rounded by the codec, on a GPU by its form in torch operations (checked against the codec by
tests/offline/test_linear.py).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from annie_quant import nvfp4
from annie_quant.checkpoint.dialects.modelopt import LARGEST_E4M3, LARGEST_NVFP4
from annie_quant.offline import codec
from annie_quant.offline.fp8_linear import token_scales

InputHook = Callable[[torch.nn.Module, tuple[torch.Tensor, ...]], tuple[torch.Tensor, ...]]


def nvfp4_weight(
    weight: torch.Tensor, tensor_scale: float, scale: nvfp4.Scale = "amax", importance: np.ndarray | None = None
) -> torch.Tensor:
    """Return a weight [N, K] rounded to NVFP4 and back, same dtype and device.

    scale, importance: as for nvfp4.pack. Other scales than "amax" are searched on the CPU.
    """
    if weight.device.type == "cuda" and scale == "amax":
        return codec.fake_quant_torch(weight, tensor_scale)
    packed = nvfp4.pack(codec.to_numpy(weight.cpu()), tensor_scale=tensor_scale, scale=scale, importance=importance)
    name = str(weight.dtype).removeprefix("torch.")
    return codec.to_torch(nvfp4.unpack(packed, name)).to(weight.device)


def nvfp4_input(x: torch.Tensor, amax: float) -> torch.Tensor:
    """Return activations as a W4A4 kernel sees them, under input_scale = amax / 2688."""
    return codec.fake_quant(x, amax / LARGEST_NVFP4)


def fp8(x: torch.Tensor, amax: float) -> torch.Tensor:
    """Return x rounded to E4M3 and back under one multiplier, amax / 448."""
    scale = torch.tensor(amax, dtype=torch.float32) / LARGEST_E4M3
    return codec.fake_quant_fp8(x, scale.to(x.device))


def fp8_rows(weight: torch.Tensor) -> torch.Tensor:
    """Return a weight [N, K] rounded to E4M3 and back under a multiplier per row, amax / 448."""
    amax = weight.float().abs().amax(-1, keepdim=True)
    return codec.fake_quant_fp8(weight, torch.where(amax > 0, amax / LARGEST_E4M3, 1.0))


def fp8_tokens(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Round a linear's input to E4M3 and back under a multiplier per token: a forward pre-hook."""
    return (codec.fake_quant_fp8(args[0], token_scales(args[0])), *args[1:])


def input_hook(rounder: Callable[[torch.Tensor, float], torch.Tensor], amax: float) -> InputHook:
    """Return a forward pre-hook that rounds a linear's input. rounder: nvfp4_input or fp8."""

    def before(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return (rounder(args[0], amax), *args[1:])

    return before

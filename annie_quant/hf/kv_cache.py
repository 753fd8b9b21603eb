"""Rounding of keys and values as a quantized KV cache stores them, for evaluation: dtypes, "fp8" and "nvfp4".

"fp8" divides by the checkpoint's k_scale and v_scale (buffers; 1.0 without them), saturates at 448 and rounds
to E4M3. "nvfp4" rounds blocks of 16 values of a head to E2M1 with an E4M3 scale each, under the same scales taken as tensor
scales, or under 1.0. Values are rounded when they are read, which is the same as when they are stored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from annie_quant.hf import codec, fp8_linear

FP8, NVFP4 = "fp8", "nvfp4"
Rounding = Callable[[Any, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def rounding(kind: str) -> Rounding:
    """Return f(attention module, keys, values) → both as the cache holds them, in their own dtype."""
    if kind == "float32":
        return lambda module, key, value: (key, value)
    if kind not in (FP8, NVFP4):
        dtype = getattr(torch, kind)
        return lambda module, key, value: (key.to(dtype).to(key.dtype), value.to(dtype).to(value.dtype))

    def rounded(module: Any, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return round_one(key, scale_of(module, "k_scale"), kind), round_one(value, scale_of(module, "v_scale"), kind)

    return rounded


def scale_of(module: Any, name: str) -> torch.Tensor:
    """Return the scale of an attention module or of its projection (compressed-tensors and ModelOpt), or 1.0."""
    scales = [getattr(child, name) for child in (module, *module.children()) if hasattr(child, name)]
    return scales[0].float() if scales else torch.ones(())


def round_one(x: torch.Tensor, scale: torch.Tensor, kind: str) -> torch.Tensor:
    scale = scale.to(x.device)
    if kind == FP8:
        return fp8_linear.fake_quant(x, scale)
    return codec.fake_quant(x.contiguous(), float(scale))

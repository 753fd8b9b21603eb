"""Rounding to a format and back, for searches and training: what a served linear computes, in torch tensors.

No arithmetic of its own for NVFP4: the codec does it (on a GPU its form in torch ops, held to the codec by
tests/hf/test_linear.py).
"""

from __future__ import annotations

from typing import Any

from annie_quant import nvfp4
from annie_quant.errors import need
from annie_quant.hf import codec

LARGEST_NVFP4 = 6 * 448.0
LARGEST_E4M3 = 448.0


def nvfp4_weight(weight: Any, tensor_scale: float, scale: nvfp4.Scale = "amax", importance: Any = None) -> Any:
    """[N, K] rounded to NVFP4 and back, same dtype and device. Searched scales and importance run on the CPU."""
    if weight.device.type == "cuda" and scale == "amax":
        return codec.fake_quant_torch(weight, tensor_scale)
    packed = nvfp4.pack(codec.to_numpy(weight.cpu()), tensor_scale=tensor_scale, scale=scale, importance=importance)
    name = str(weight.dtype).removeprefix("torch.")
    return codec.to_torch(nvfp4.unpack(packed, name)).to(weight.device)


def nvfp4_input(x: Any, amax: float) -> Any:
    """Activations as a W4A4 kernel sees them, under input_scale = amax / 2688."""
    return codec.fake_quant(x, amax / LARGEST_NVFP4)


def fp8(x: Any, amax: float) -> Any:
    """Rounded to E4M3 under one multiplier, amax / 448, and back."""
    torch = need("torch", "quantize")
    scale = torch.tensor(amax, dtype=torch.float32) / LARGEST_E4M3
    codes = (x.float() / scale.to(x.device)).clamp(-LARGEST_E4M3, LARGEST_E4M3).to(torch.float8_e4m3fn)
    return (codes.float() * scale.to(x.device)).to(x.dtype)

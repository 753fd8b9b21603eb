"""The formats in which servers round activations, each as a function x -> x rounded and back, and those of a KV cache.

A KV cache in "fp8" divides by the checkpoint's k_scale and v_scale (buffers; 1.0 without them), saturates at 448 and rounds
to E4M3. "nvfp4" rounds blocks of 16 values of a head to E2M1 with an E4M3 scale each, under the same scales taken as tensor
scales, or under 1.0. Values are rounded when they are read, which is the same as when they are stored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from annie_quant.hf import codec, fp8_linear

QK8_0 = 32  # values per block of ggml's Q8_0
QK_NVFP4 = 16
SCALE_OFFSETS = (0, -1, 1, -2, 2)  # neighbours of amax's scale code that llama.cpp tries, in its order
MAX_CODE = 0x7E  # E4M3's largest finite value, 448


def q8_0(x: torch.Tensor) -> torch.Tensor:
    """Round x [..., K] to ggml's Q8_0 and back: per block of 32 a float16 scale amax / 127 and 8-bit integers.

    Source: quantize_row_q8_0 of ggml-cpu, to which llama.cpp rounds the activations of NVFP4 products on CPUs. Integers are
    computed with the float32 scale, ties to even as its SIMD forms do. K must be a multiple of 32.
    """
    blocks = x.float().reshape(*x.shape[:-1], -1, QK8_0)
    amax = blocks.abs().amax(-1, keepdim=True)
    integers = (blocks * torch.where(amax > 0, 127 / amax, 0.0)).round()
    return (integers * (amax / 127).half().float()).reshape(x.shape).to(x.dtype)


def nvfp4_searched(x: torch.Tensor) -> torch.Tensor:
    """Round x [..., K] to NVFP4 as llama.cpp's native Blackwell kernel does, and back.

    Per block of 16 the E4M3 scale of amax / 6 and its four neighbours are tried, and the one with the smallest squared error is
    used; there is no tensor scale. Source: quantize_mmq_nvfp4 of ggml-cuda (ggml-org/llama.cpp #22196).
    """
    blocks = x.float().reshape(*x.shape[:-1], -1, QK_NVFP4)
    amax = blocks.abs().amax(-1, keepdim=True)
    first = (amax / 6).clamp(max=codec.MAX_E4M3).to(torch.float8_e4m3fn).view(torch.uint8).int()
    best, best_error = torch.zeros_like(blocks), torch.full_like(amax, torch.inf)
    for offset in SCALE_OFFSETS:
        code = first + offset
        valid = (code >= 0) & (code <= MAX_CODE)
        scale = code.clamp(0, MAX_CODE).to(torch.uint8).view(torch.float8_e4m3fn).float()
        candidate = to_e2m1(blocks / torch.where(scale > 0, scale, 1.0)) * scale
        error = (candidate - blocks).square().sum(-1, keepdim=True)
        better = valid & (error < best_error)
        best, best_error = torch.where(better, candidate, best), torch.where(better, error, best_error)
    return best.reshape(x.shape).to(x.dtype)


def to_e2m1(x: torch.Tensor) -> torch.Tensor:
    """Return the nearest values of E2M1, ties to the even code, clamped to ±6."""
    magnitude = x.abs()
    index = sum(magnitude > m if i % 2 == 0 else magnitude >= m for i, m in enumerate(codec.MIDPOINTS))
    values = torch.tensor(codec.E2M1[:8], dtype=x.dtype, device=x.device)[index]
    return torch.copysign(values, x)


FP8, NVFP4 = "fp8", "nvfp4"
Rounding = Callable[[Any, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def cache_rounding(kind: str) -> Rounding:
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

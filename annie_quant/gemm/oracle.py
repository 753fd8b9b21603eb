"""The CPU oracle: NVFP4 products in float64, and the error bound of a correct kernel.

Written from the format definition alone (tables, NumPy and torch). It shares no code with the
kernels or the C codec.

Bounds. W4A16 multiplies e2m1*e4m3 (exact in bf16) by bf16 or fp16 activations. Each product is
exact in fp32, so the only errors are K - 1 additions in fp32 (in any order: relative 2^-24 of the
partial sums, and tensor cores may
truncate: 2^-23), the tensor scale (2^-24) and the rounding to the output type: |kernel - oracle| <=
    (K + 8) 2^-23 S +
ulp, S = sum |x||w|. Tensor cores align the addends of a group to the largest one before adding; the
same bound covers that. W4A4: each 16-column term is exact, K/16 additions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from annie_quant.gemm.grouped import PreparedExperts
    from annie_quant.gemm.torch_op import Prepared

MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float64)
_GROUP = 16


def e2m1(codes: np.ndarray) -> np.ndarray:
    """Return float64 [..., 2 n] of packed codes uint8 [..., n]; the low nibble is the even column."""
    codes = np.asarray(codes)
    nibbles = np.stack([codes & 15, codes >> 4], axis=-1).reshape(*codes.shape[:-1], -1)
    return np.where(nibbles & 8, -1.0, 1.0) * MAGNITUDES[nibbles & 7]


def e4m3(scales: np.ndarray) -> np.ndarray:
    """Return E4M3FN bytes (uint8 or float8_e4m3fn) as float64; 0x7F and 0xFF are NaN."""
    b = np.ascontiguousarray(scales).view(np.uint8).astype(np.int64)
    e = b >> 3 & 15
    m = b & 7
    value = np.where(e > 0, (8 + m) * 2.0 ** (e - 10), m * 2.0**-9)
    value = np.where((e == 15) & (m == 7), np.nan, value)
    return np.where(b & 128, -value, value)


def dequantize(codes: np.ndarray, block_scale: np.ndarray, tensor_scale: float = 1.0) -> np.ndarray:
    """Return e2m1 * e4m3 * tensor_scale as float64 [N, K], which is exact."""
    return (
        e2m1(codes)
        * np.repeat(e4m3(block_scale), _GROUP, axis=-1)
        * float(np.float32(tensor_scale))
    )


def linear(x: np.ndarray, weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (x @ weight.T, |x| @ |weight|.T) in float64."""
    x = np.asarray(x).astype(np.float64)
    return x @ weight.T, np.abs(x) @ np.abs(weight).T


def _ulp(value: np.ndarray, dtype: str) -> np.ndarray:
    """Return one unit in the last place of `dtype` at |value|.

    Half for rounding, half for a sum across a tie.
    """
    bits, lowest = {"float32": (23, -149), "float16": (10, -24), "bfloat16": (7, -133)}[dtype]
    exponent = np.frexp(np.maximum(np.abs(value), 2.0**-200))[1] - 1
    return 2.0 ** np.maximum(exponent - bits, lowest)


def bound(exact: np.ndarray, magnitude: np.ndarray, additions: int, dtype: str) -> np.ndarray:
    """Return the largest |kernel - exact| per element that fp32 accumulation allows."""
    error = (additions + 8) * 2.0**-23 * magnitude
    return error + _ulp(np.abs(exact) + error, dtype)


def worst(result: np.ndarray, exact: np.ndarray, limit: np.ndarray) -> float:
    """Return max |result - exact| / limit. Above 1 the result is wrong; NaN counts as infinite."""
    ratio = np.abs(np.asarray(result).astype(np.float64) - exact) / np.maximum(limit, 2.0**-300)
    return float(np.where(np.isnan(ratio), np.inf, ratio).max(initial=0.0))


def random_weight(n: int, k: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return codes uint8 [n, k/2] and a wide range of scales uint8 [n, k/16]."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (n, k // 2), dtype=np.uint8), rng.integers(
        0x20, 0x50, (n, k // _GROUP), dtype=np.uint8
    )


# ---- the W4A16 operators on this device
#
# A server calls these when it loads a model, with the checkpoint's own weights, before it uses the
# kernels. A swapped nibble or a neighbouring scale exceeds the bound.

Align = Callable[["Tensor", int], "tuple[Tensor, Tensor, Tensor]"]

CHECKED_TOKENS = (
    1,
    3,
    9,
    17,
    64,
    150,
)  # each kernel and each of its tile sizes for few tokens, and sizes between them
EXPERT_TOKENS = (1, 19, 150)  # pairs of a mixture: few per expert
PER_EXPERT = (8, 30)  # and several: each of the few-token kernel's tile sizes
SPAN = 1 << 23  # weights that are dequantized at a time
MANTISSA = {"torch.bfloat16": 7, "torch.float16": 10}


def dequantize_in_torch(codes: Tensor, block_scale: Tensor, tensor_scale: float) -> Tensor:
    """Return float64 [N, K] of codes uint8 [N, K/2] and scales float8_e4m3fn [N, K/16]."""
    import torch

    table = torch.tensor([*MAGNITUDES, *-MAGNITUDES], dtype=torch.float64, device=codes.device)
    nibbles = torch.stack((codes & 15, codes >> 4), -1).flatten(1)
    scales = block_scale.view(torch.float8_e4m3fn).float().double() * tensor_scale
    return table[nibbles.int()] * scales.repeat_interleave(_GROUP, 1)


def error_in_bounds(result: Tensor, x: Tensor, w: Tensor) -> float:
    """Return the largest error of result = x @ w.T in units of its bound; above 1 it is wrong.

    The bound allows float32 sums of K products and one rounding to the result's dtype. w: float64.
    """
    import torch

    inputs = x.double()
    exact = inputs @ w.t()
    limit = (w.shape[1] + 8) * 2.0**-23 * (inputs.abs() @ w.abs().t())
    largest = (exact.abs() + limit).clamp_min(2.0**-100)
    limit += torch.exp2(torch.floor(torch.log2(largest)) - MANTISSA[str(result.dtype)])
    ratios = (result.double() - exact).abs() / limit
    return ratios.nan_to_num(nan=float("inf")).max().item()


def worst_error(
    weight: Prepared, codes: Tensor, block_scale: Tensor, tensor_scale: float, dtype: torch.dtype
) -> float:
    """Return the largest error of torch.ops.annie_quant.nvfp4_linear in units of its bound.

    Above 1 it is wrong.

    weight: codes, block_scale and tensor_scale, repacked; dtype: of x, torch.bfloat16 or
        torch.float16
    """
    import torch

    n, half = codes.shape
    k = 2 * half
    x = _activations(max(CHECKED_TOKENS), n, k, dtype, codes.device)
    results = {m: torch.ops.annie_quant.nvfp4_linear(x[:m], *weight) for m in CHECKED_TOKENS}
    worst = 0.0
    step = max(1, SPAN // k)
    for start in range(0, n, step):
        span = slice(start, start + step)
        w = dequantize_in_torch(codes[span], block_scale[span], tensor_scale)
        for m, result in results.items():
            worst = max(worst, error_in_bounds(result[:, span], x[:m], w))
    return worst


def worst_experts_error(
    weights: PreparedExperts,
    codes: Tensor,
    block_scale: Tensor,
    tensor_scales: Tensor,
    dtype: torch.dtype,
    top_k: int,
    align: Align,
) -> float:
    """Return the largest error of torch.ops.annie_quant.nvfp4_experts_out in units of its bound.

    Above 1 it is wrong.

    weights: codes [experts, N, K/2], block_scale and tensor_scales, repacked
    top_k: pairs that read the same row of x
    align: (experts of the pairs int32 [tokens, top_k], tokens per tile) -> what the operator takes,
        as the caller will make it
    """
    import torch

    from annie_quant.gemm import grouped

    experts, n, half = codes.shape
    k = 2 * half
    counts = [*EXPERT_TOKENS, *(mean * experts for mean in PER_EXPERT)]
    runs = []
    for tokens in counts:
        rows = -(-tokens // top_k)
        x = _activations(rows, n, k, dtype, codes.device)
        chances = _activations(rows, n, experts, torch.float32, codes.device)
        chosen = chances.topk(top_k).indices.int()
        tile = grouped.plan_tokens(rows * top_k, experts, top_k, n, k, codes.device.index)
        out = torch.full((rows * top_k, n), float("nan"), dtype=dtype, device=codes.device)
        torch.ops.annie_quant.nvfp4_experts_out(
            out, x, *weights[:2], *align(chosen, tile), top_k, tile
        )
        runs.append((x.repeat_interleave(top_k, 0), chosen.flatten(), out))
    worst = 0.0
    for expert in range(experts):
        factor = float(tensor_scales[expert])
        w = dequantize_in_torch(codes[expert], block_scale[expert], factor)
        for x, experts_of_pairs, out in runs:
            mine = experts_of_pairs == expert
            if mine.any():
                worst = max(worst, error_in_bounds(out[mine], x[mine], w))
    return worst


def _activations(
    rows: int, seed: int, columns: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return normal numbers [rows, columns], the same for the same arguments."""
    import torch

    generator = torch.Generator(device).manual_seed(seed * 31 + columns)
    return torch.randn(rows, columns, generator=generator, device=device).to(dtype)

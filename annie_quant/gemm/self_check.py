"""Check that the W4A16 operators compute a weight's products on this device, against the dequantized product in float64.

A server calls this when it loads a model, with the checkpoint's own weights, before it uses the kernels. The bound is that of
gemm.oracle, which a swapped nibble or a neighbouring scale exceeds; the decoding here uses torch and the format's tables alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from annie_quant.gemm.oracle import GROUP, MAGNITUDES
from annie_quant.gemm.torch_op import Prepared

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from annie_quant.gemm.grouped import PreparedExperts

Align = Callable[["Tensor", int], "tuple[Tensor, Tensor, Tensor]"]

TOKENS = (1, 3, 9, 17, 64, 150)  # each kernel and each of its tile sizes for few tokens, and sizes between them
EXPERT_TOKENS = (1, 19, 150)  # pairs of a mixture: few per expert
PER_EXPERT = (8, 30)  # and several: each of the few-token kernel's tile sizes
SPAN = 1 << 23  # weights that are dequantized at a time
MANTISSA = {"torch.bfloat16": 7, "torch.float16": 10}


def dequantize(codes: Tensor, block_scale: Tensor, tensor_scale: float) -> Tensor:
    """Return float64 [N, K] of codes uint8 [N, K/2] and scales float8_e4m3fn [N, K/16]."""
    import torch

    table = torch.tensor([*MAGNITUDES, *-MAGNITUDES], dtype=torch.float64, device=codes.device)
    nibbles = torch.stack((codes & 15, codes >> 4), -1).flatten(1)
    scales = block_scale.view(torch.float8_e4m3fn).float().double() * tensor_scale
    return table[nibbles.int()] * scales.repeat_interleave(GROUP, 1)


def ratio_to_bound(result: Tensor, exact: Tensor, magnitude: Tensor, k: int, dtype: torch.dtype) -> float:
    """Return the largest |result - exact| in units of what float32 sums of K products and one rounding to dtype allow."""
    import torch

    limit = (k + 8) * 2.0**-23 * magnitude
    largest = (exact.abs() + limit).clamp_min(2.0**-100)
    limit = limit + torch.exp2(torch.floor(torch.log2(largest)) - MANTISSA[str(dtype)])
    return float(torch.nan_to_num((result.double() - exact).abs() / limit, nan=float("inf")).max().item())


def worst_error(weight: Prepared, codes: Tensor, block_scale: Tensor, tensor_scale: float, dtype: torch.dtype) -> float:
    """Return the largest error of torch.ops.annie_quant.nvfp4_linear in units of its bound: above 1 it is wrong.

    weight: codes, block_scale and tensor_scale, repacked; dtype: of x, torch.bfloat16 or torch.float16
    """
    import torch

    n, k, device = codes.shape[0], codes.shape[1] * 2, codes.device
    generator = torch.Generator(device).manual_seed(n * 31 + k)
    x = torch.randn(max(TOKENS), k, generator=generator, device=device).to(dtype)
    results = {m: torch.ops.annie_quant.nvfp4_linear(x[:m], *weight) for m in TOKENS}
    inputs = x.double()
    sizes = inputs.abs()
    worst = 0.0
    step = max(1, SPAN // k)
    for start in range(0, n, step):
        span = slice(start, start + step)
        w = dequantize(codes[span], block_scale[span], tensor_scale)
        exact, magnitude = inputs @ w.t(), sizes @ w.abs().t()
        worst = max(
            worst, *(ratio_to_bound(r[:, span], exact[:m], magnitude[:m], k, dtype) for m, r in results.items())
        )
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
    """Return the largest error of torch.ops.annie_quant.nvfp4_experts_out in units of its bound: above 1 it is wrong.

    weights: codes [experts, N, K/2], block_scale and tensor_scales, repacked
    top_k: pairs that read the same row of x
    align: (experts of the pairs int32 [tokens, top_k], tokens per tile) -> what the operator takes, as the caller will make it
    """
    import torch

    from annie_quant.gemm import grouped

    (experts, n, half), device = codes.shape, codes.device
    k = 2 * half
    generator = torch.Generator(device).manual_seed(n * 31 + k)
    runs = []
    for tokens in (*EXPERT_TOKENS, *(mean * experts for mean in PER_EXPERT)):
        rows = -(-tokens // top_k) if top_k > 1 else tokens
        x = torch.randn(rows, k, generator=generator, device=device).to(dtype)
        chosen = torch.rand(rows, experts, generator=generator, device=device).topk(top_k).indices.int()
        out = torch.full((rows * top_k, n), float("nan"), dtype=dtype, device=device)
        tile = grouped.plan_tokens(rows * top_k, experts, top_k, n, k, device.index)
        torch.ops.annie_quant.nvfp4_experts_out(out, x, *weights[:2], *align(chosen, tile), top_k, tile)
        runs.append((x.double().repeat_interleave(top_k, 0), chosen.flatten(), out))
    worst = 0.0
    for expert in range(experts):
        mine = [(x[of == expert], out[of == expert]) for x, of, out in runs]
        x, out = (torch.cat(part) for part in zip(*mine, strict=True))
        if len(x):
            w = dequantize(codes[expert], block_scale[expert], float(tensor_scales[expert]))
            worst = max(worst, ratio_to_bound(out, x @ w.t(), x.abs() @ w.abs().t(), k, dtype))
    return worst

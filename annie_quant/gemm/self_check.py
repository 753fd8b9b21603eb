"""Whether the W4A16 operator computes a weight's product on this device: compared with the dequantized product in float64.

A server calls this when it loads a model, with the checkpoint's own weights, before it uses the kernels. The bound is that of
gemm.oracle, which a swapped nibble or a neighbouring scale exceeds; the decoding here uses torch and the format's tables alone.
"""

from __future__ import annotations

from typing import Any

from annie_quant.gemm.oracle import GROUP, MAGNITUDES
from annie_quant.gemm.torch_op import Prepared

TOKENS = (1, 3, 9, 17, 64, 150)  # each kernel and each of its tile sizes for few tokens, and sizes between them
SPAN = 1 << 23  # weights that are dequantized at a time
MANTISSA = {"torch.bfloat16": 7, "torch.float16": 10}


def dequantize(codes: Any, block_scale: Any, tensor_scale: float) -> Any:
    """Return float64 [N, K] of codes uint8 [N, K/2] and scales float8_e4m3fn [N, K/16]."""
    import torch

    table = torch.tensor([*MAGNITUDES, *-MAGNITUDES], dtype=torch.float64, device=codes.device)
    nibbles = torch.stack((codes & 15, codes >> 4), -1).flatten(1)
    scales = block_scale.view(torch.float8_e4m3fn).float().double() * tensor_scale
    return table[nibbles.int()] * scales.repeat_interleave(GROUP, 1)


def worst_error(weight: Prepared, codes: Any, block_scale: Any, tensor_scale: float, dtype: Any) -> float:
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
        limit = (k + 8) * 2.0**-23 * magnitude
        largest = (exact.abs() + limit).clamp_min(2.0**-100)
        limit = limit + torch.exp2(torch.floor(torch.log2(largest)) - MANTISSA[str(dtype)])
        for m, result in results.items():
            ratio = (result[:, span].double() - exact[:m]).abs() / limit[:m]
            worst = max(worst, torch.nan_to_num(ratio, nan=float("inf")).max().item())
    return worst

"""The product that vLLM's linears and experts on a CPU are computed with (vllm_plugin, vllm_cpu)."""

from __future__ import annotations

from typing import Any

GROUP = 16


def multiply(x: Any, codes: Any, block_scale: Any, tensor_scale: float, input_scale: float) -> Any:
    """Multiply x [..., K] by the transpose of packed weights [N, K]. Returns [..., N] in x's dtype.

    Both sides are exact, sums are float32, and each sum is rounded once, for any number of rows: the arithmetic of CUTLASS's and
    Marlin's kernels. (Rounding dequantized values to bfloat16 first would make an answer depend on the batch that it is in.)

    input_scale: tensor scale that x is rounded with; 0: x is not rounded
    """
    import torch

    from annie_quant.hf import codec, matmul

    rows = x.reshape(-1, x.shape[-1]).float().contiguous()
    if input_scale:
        rows = codec.fake_quant_eager(rows, input_scale, GROUP)
    n, k = codes.shape[0], rows.shape[1]
    if rows.shape[0] <= matmul.FEW_ROWS:
        y = codec.packed_matmul(rows, codes, block_scale, tensor_scale, GROUP, divides=False)
    else:
        step = max(1, matmul.BLOCK_BYTES // (k * rows.element_size()))
        spans = [slice(i, i + step) for i in range(0, n, step)]
        parts = (codec.dequantize(codes[s], block_scale[s], tensor_scale, GROUP, rows.dtype) for s in spans)
        y = torch.cat([rows @ part.t() for part in parts], -1)
    return y.reshape(*x.shape[:-1], n).to(x.dtype)

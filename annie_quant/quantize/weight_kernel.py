"""A weight with learned rounding in one launch on a GPU, and the gradients of its offsets and multipliers in another, in Triton.

The arithmetic of learned_rounding.LearnedWeight: a program holds BLOCKS blocks of 16 values. In torch operations the weight reads
and writes each value some twenty times, which takes longer than the layer's matrix products. Importing this module needs Triton,
which torch for CUDA brings.
"""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl

from annie_quant.quantize.block_kernel import e2m1, e4m3_code, e4m3_value

BLOCKS = 64  # of one program


@triton.jit
def rounded(base, offset, scale, multiplier):
    """E2M1 values, what they were rounded from, the distance between codes, the block scale, and the scale before rounding."""
    raw = scale * multiplier
    chosen = e4m3_value(e4m3_code(tl.minimum(tl.maximum(raw, 0.001953125), 448.0)))
    size = tl.abs(base)
    unit = tl.where(size < 2, 0.5, tl.where(size < 4, 1.0, 2.0))
    scaled = base * tl.div_rn(scale, chosen)[:, None] + offset * unit
    return e2m1(scaled), scaled, unit, chosen, raw


@triton.jit
def weight_forward(base, offset, scale, multiplier, out, blocks, tensor_scale, size: tl.constexpr):
    block = (tl.program_id(0) * size + tl.arange(0, size)).to(tl.int64)
    live = block < blocks
    at = block[:, None] * 16 + tl.arange(0, 16)[None, :]
    s, m = tl.load(scale + block, mask=live, other=1.0), tl.load(multiplier + block, mask=live, other=1.0)
    b, v = tl.load(base + at, mask=live[:, None], other=0.0), tl.load(offset + at, mask=live[:, None], other=0.0)
    codes, _scaled, _unit, chosen, _raw = rounded(b, v, s, m)
    tl.store(out + at, (codes * (chosen * tensor_scale)[:, None]).to(out.dtype.element_ty), mask=live[:, None])


@triton.jit
def weight_backward(
    base, offset, scale, multiplier, slope, offset_slope, multiplier_slope, blocks, tensor_scale, size: tl.constexpr
):
    block = (tl.program_id(0) * size + tl.arange(0, size)).to(tl.int64)
    live = block < blocks
    at = block[:, None] * 16 + tl.arange(0, 16)[None, :]
    s, m = tl.load(scale + block, mask=live, other=1.0), tl.load(multiplier + block, mask=live, other=1.0)
    b, v = tl.load(base + at, mask=live[:, None], other=0.0), tl.load(offset + at, mask=live[:, None], other=0.0)
    codes, scaled, unit, chosen, raw = rounded(b, v, s, m)
    back = tl.load(slope + at, mask=live[:, None], other=0.0).to(tl.float32)
    of_scaled = tl.where(tl.abs(scaled) <= 6.0, back * (chosen * tensor_scale)[:, None], 0.0)
    tl.store(offset_slope + at, of_scaled * unit, mask=live[:, None])
    of_scale = tl.sum(back * codes, 1) * tensor_scale - tl.sum(of_scaled * b, 1) * s / (chosen * chosen)
    inside = (raw >= 0.001953125) & (raw <= 448.0)
    tl.store(multiplier_slope + block, tl.where(inside, of_scale * s, 0.0), mask=live)


class FusedWeight(torch.autograd.Function):
    """The weight [N, K] in `dtype`, of base and offset [N, K/16, 16], scale and multiplier [N, K/16], all float32.

    Gradients reach the offset and the multiplier.
    """

    @staticmethod
    def forward(ctx, base, offset, scale, multiplier, tensor_scale, dtype):
        ctx.save_for_backward(base, offset, scale, multiplier)
        ctx.tensor_scale = tensor_scale
        rows, columns = base.shape[0], base.shape[1] * base.shape[2]
        out, blocks = torch.empty(rows, columns, dtype=dtype, device=base.device), scale.numel()
        weight_forward[(triton.cdiv(blocks, BLOCKS),)](
            base, offset, scale, multiplier, out, blocks, tensor_scale, size=BLOCKS, enable_fp_fusion=False
        )
        return out

    @staticmethod
    def backward(ctx, slope):
        base, offset, scale, multiplier = ctx.saved_tensors
        offset_slope, multiplier_slope, blocks = torch.empty_like(offset), torch.empty_like(multiplier), scale.numel()
        weight_backward[(triton.cdiv(blocks, BLOCKS),)](
            base, offset, scale, multiplier, slope.contiguous(), offset_slope, multiplier_slope, blocks,
            ctx.tensor_scale, size=BLOCKS, enable_fp_fusion=False,
        )  # fmt: skip
        return None, offset_slope, None, multiplier_slope, None, None

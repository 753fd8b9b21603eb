"""One block column of column_sweep.sweep in a single launch on a GPU: every candidate scale is tried, and the best one is kept.

The arithmetic of column_sweep.round_block, and the choice of the scale, in Triton: a program holds 32 rows of a block of 16 columns
in registers and tries the candidates one after the other. In torch operations a block column takes some 300 launches. Importing
this module needs Triton, which torch for CUDA brings.
"""

# mypy: ignore-errors

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from annie_quant.quantize.column_sweep import Sweep

ROWS = 32  # of one program, one per thread
TO_INTEGER = tl.constexpr(
    12582912.0
)  # 1.5 * 2^23: adding and subtracting it rounds to the nearest integer, ties to even


@triton.jit
def e2m1(x):
    """column_sweep.e2m1."""
    a = tl.minimum(tl.abs(x), 8.0)
    fine = ((a * 2 + TO_INTEGER) - TO_INTEGER) * 0.5
    whole = (a + TO_INTEGER) - TO_INTEGER
    coarse = ((a * 0.5 + TO_INTEGER) - TO_INTEGER) * 2
    nearest = tl.minimum(tl.where(a < 2, fine, tl.where(a < 4, whole, coarse)), 6.0)
    return tl.where(x < 0, -nearest, nearest)


@triton.jit
def e4m3_code(x):
    """Return the code of the nearest E4M3 value, ties to even, for x of 2^-9 to 448."""
    bits = x.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960
    small = ((x * 512 + TO_INTEGER) - TO_INTEGER).to(tl.int32)
    return tl.where(x < 0.015625, small, normal)


@triton.jit
def e4m3_value(code):
    """Return the value of an E4M3 code of 1 to 126."""
    normal = ((((code >> 3) + 120) << 23) | ((code & 7) << 20)).to(tl.float32, bitcast=True)
    return tl.where(code < 8, code.to(tl.float32) * 0.001953125, normal)


@triton.jit
def round_block(
    w, upper, tensor_scale, errors, codes, chosen, steps, loss, start, rows, w_stride, errors_stride, upper_stride, low,
    count: tl.constexpr, rows_of_program: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * rows_of_program + tl.arange(0, rows_of_program)).to(tl.int64)
    live = row < rows
    column = tl.arange(0, 16)
    at = row[:, None] * w_stride + start + column[None, :]
    block = tl.load(w + at, mask=live[:, None], other=0.0)
    scale = tl.load(tensor_scale + row, mask=live, other=1.0)
    corner = upper + start * upper_stride + start
    top = tl.div_rn(tl.max(tl.abs(block), 1), scale * 6.0)
    nearest = e4m3_code(tl.minimum(tl.maximum(top, 0.001953125), 448.0))
    least = tl.full((rows_of_program,), float("inf"), tl.float32)
    best_code = nearest
    best_step = e4m3_value(nearest) * scale
    best_q = tl.zeros((rows_of_program, 16), tl.float32)
    best_error = tl.zeros((rows_of_program, 16), tl.float32)
    for candidate in range(0, count):
        code = tl.minimum(tl.maximum(nearest + low + candidate, 1), 126)
        step = e4m3_value(code) * scale
        work = block
        q_all = tl.zeros((rows_of_program, 16), tl.float32)
        error_all = tl.zeros((rows_of_program, 16), tl.float32)
        total = tl.zeros((rows_of_program,), tl.float32)
        for i in range(16):
            here = column == i
            x = tl.sum(tl.where(here[None, :], work, 0.0), 1)
            q = e2m1(tl.div_rn(x, step))
            error = tl.div_rn(x - q * step, tl.load(corner + i * upper_stride + i))
            total += error * error
            factors = tl.load(corner + i * upper_stride + column)
            work = tl.where((column > i)[None, :], work - factors[None, :] * error[:, None], work)
            q_all = tl.where(here[None, :], q[:, None], q_all)
            error_all = tl.where(here[None, :], error[:, None], error_all)
        better = total < least
        least = tl.where(better, total, least)
        best_code = tl.where(better, code, best_code)
        best_step = tl.where(better, step, best_step)
        best_q = tl.where(better[:, None], q_all, best_q)
        best_error = tl.where(better[:, None], error_all, best_error)
    tl.store(codes + at, best_q, mask=live[:, None])
    tl.store(errors + row[:, None] * errors_stride + column[None, :], best_error, mask=live[:, None])
    tl.store(chosen + row, best_code.to(tl.uint8), mask=live)
    tl.store(steps + row, best_step, mask=live)
    tl.store(loss + row, tl.load(loss + row, mask=live, other=0.0) + least.to(tl.float64), mask=live)


def round_column(state: Sweep, start: int, errors: torch.Tensor) -> None:
    """Round columns start .. start + 15. errors: float32 [N, 16], of any row stride, written."""
    w, index, candidates = state.w, start // 16, state.candidates
    outputs = (errors, state.codes, state.chosen[index], state.steps[index], state.loss)
    strides = (w.stride(0), errors.stride(0), state.upper.stride(0))
    round_block[(triton.cdiv(len(w), ROWS),)](
        w, state.upper, state.tensor_scale, *outputs, start, len(w), *strides, candidates.start,
        count=len(candidates), rows_of_program=ROWS, num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip

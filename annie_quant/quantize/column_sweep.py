"""GPTQ in torch, on a CPU or a GPU: block scales are chosen inside the sweep, and the columns may be in activation order.

Each block of a row is rounded once per candidate scale, with the corrections inside the block, and the candidate with the least
loss is kept. The loss is GPTQ's own objective: the squared output error that remains after the best continuous correction of all
later columns (local-Hessian scales inside GPTQ: PiSO, arXiv 2606.10890). Activation order is by falling diagonal of the Hessian:
`order="blocks"` keeps the columns of a block together, so that scales are still chosen in the sweep; `order="columns"` chooses all
scales first and then orders single columns. Groups and scales keep their place in storage.

`round_columns` of gptq_solver.py is the C loop for natural order and the codec's own scale rules.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from annie_quant import nvfp4
from annie_quant.offline import codec
from annie_quant.quantize.gptq_solver import DAMPING, FactorError, check_usable, inverse_factor, with_damping

GROUP = 16
WINDOW = 128  # columns between two updates of everything to their right
MAX_E2M1 = 6.0
E4M3_CODES = 126  # positive finite codes of E4M3: 1 (2^-9) to 126 (448)
# Codes relative to that of the block's largest magnitude. The optimum is within -3 .. +7 (ScaleSweep, arXiv 2606.07618).
NEAR_CODES = tuple(range(-4, 9))
ALL_CODES = tuple(range(1 - E4M3_CODES, E4M3_CODES))
CANDIDATE_BYTES = 256 << 20  # of one block column's candidates in memory
ORDERS = ("natural", "blocks", "columns")


@dataclass(frozen=True)
class Rounded:
    """A rounded weight [N, K]. codes: E2M1 values, float32 [N, K].  scale_codes: uint8 [N, K/16].  step: float32 [N, K/16], the
    block scale times the tensor scale.  values: float32 [N, K].  loss: float64 [N], GPTQ's objective per row.
    start: float32 [N, K], what each value was rounded from, with all corrections.
    """

    codes: torch.Tensor
    scale_codes: torch.Tensor
    step: torch.Tensor
    values: torch.Tensor
    loss: torch.Tensor
    start: torch.Tensor

    def rows(self, part: slice) -> Rounded:
        """Return some of the rows."""
        return Rounded(
            self.codes[part],
            self.scale_codes[part],
            self.step[part],
            self.values[part],
            self.loss[part],
            self.start[part],
        )

    def packed(self, tensor_scale: float) -> nvfp4.Tensor:
        """Return the codec's tensor."""
        return pack(self.codes, self.scale_codes, tensor_scale)


def pack(codes: torch.Tensor, scale_codes: torch.Tensor, tensor_scale: float) -> nvfp4.Tensor:
    """Return the codec's tensor of E2M1 values [N, K] and E4M3 codes uint8 [N, K/16]."""
    magnitude = codes.abs()
    table = torch.tensor(codec.E2M1[:8], device=codes.device)
    nibble = torch.bucketize(magnitude, table) + 8 * (codes < 0)
    pairs = (nibble[:, 0::2] + 16 * nibble[:, 1::2]).to(torch.uint8)
    scales = codec.to_numpy(scale_codes.cpu().contiguous().view(torch.float8_e4m3fn))
    return nvfp4.Tensor(pairs.cpu().numpy(), scales, np.float32(tensor_scale), tuple(codes.shape), GROUP)


def e2m1(x: torch.Tensor) -> torch.Tensor:
    """Return the nearest E2M1 value, ties to the even code, as the codec rounds; larger magnitudes become 6."""
    a = x.abs()
    fine, coarse = (a * 2).round() / 2, (a / 2).round() * 2
    nearest = torch.where(a < 2, fine, torch.where(a < 4, a.round(), coarse)).clamp_max(MAX_E2M1)
    return torch.copysign(nearest, x)


@functools.cache  # one table per device: a sweep reads it once per block column
def e4m3_steps(device: torch.device | str) -> torch.Tensor:
    """Return the value of every positive finite E4M3 code, float32 [127]; code 0 has that of code 1, so it divides nothing by 0."""
    codes = torch.arange(E4M3_CODES + 1, dtype=torch.uint8, device=device)
    codes[0] = 1
    return codes.view(torch.float8_e4m3fn).float()


def amax_codes(blocks: torch.Tensor, tensor_scale: torch.Tensor) -> torch.Tensor:
    """Return the E4M3 codes that plain rounding chooses, int64 [N, B], for blocks [N, B, 16] and tensor scales [N]."""
    scale = blocks.abs().amax(-1) / (MAX_E2M1 * tensor_scale)[:, None]
    return scale.clamp(2.0**-9, 448.0).to(torch.float8_e4m3fn).view(torch.uint8).long()


def order_of(diagonal: torch.Tensor, order: str) -> torch.Tensor:
    """Return the columns in the order in which they are rounded, int64 [K]."""
    columns = torch.arange(len(diagonal), device=diagonal.device)
    if order == "natural":
        return columns
    if order == "columns":
        return torch.argsort(diagonal, descending=True, stable=True)
    blocks = diagonal.view(-1, GROUP)
    first = torch.argsort(blocks.sum(-1), descending=True, stable=True)
    inside = torch.argsort(blocks, dim=-1, descending=True, stable=True)
    return (first[:, None] * GROUP + inside[first]).reshape(-1)


def live_hessian(hessian: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Return a copy of the Hessian whose dead columns have the mean of the others on the diagonal, and that mean."""
    base = hessian.clone()
    diagonal = base.diagonal()
    live = diagonal > 0
    mean = float(diagonal[live].mean())
    diagonal[~live] = mean
    return base, mean


def corrected(weight: torch.Tensor, hessian: torch.Tensor, cross: torch.Tensor, damping: float) -> torch.Tensor:
    """Return the weight [N, K] from which GPTQ starts so that its outputs on rounded inputs are those of the true inputs.

    hessian: X~^T X~ of the inputs X~ that the linear gets.  cross: X~^T X with the true inputs X, both float32 [K, K] with the same
    token weights.  The result W' has the least |X W^T - X~ W'^T|^2 + damping |W - W'|^2, the damping relative to the mean of the
    Hessian's diagonal; GPTQ of W' under the Hessian then minimises |X W^T - X~ Q^T|^2 (Qronos, arXiv 2505.11695; GPTAQ).
    Raises FactorError as upper_factor does.
    """
    if not bool(cross.isfinite().all()):
        raise FactorError("its inputs hold NaN or inf")
    check_usable(hessian)
    # W' = W + W (G - H)^T (H + damping)^-1: without a difference of the inputs nothing is solved, or rounded.
    difference = (cross - hessian) @ weight.float().T
    solution = with_damping(*live_hessian(hessian), damping, partial(torch.cholesky_solve, difference))
    return weight.float() + solution.T


def upper_factor(hessian: torch.Tensor, damping: float = DAMPING) -> torch.Tensor:
    """Return the upper Cholesky factor of the inverse of the damped Hessian, float32 [K, K].

    Raises FactorError where no damping of ATTEMPTS, each ten times the last one, makes it factorable.
    """
    check_usable(hessian)
    return with_damping(*live_hessian(hessian), damping, inverse_factor)


def sweep(
    weight: torch.Tensor,
    hessian: torch.Tensor,
    tensor_scale: torch.Tensor,
    damping: float = DAMPING,
    order: str = "blocks",
    candidates: Sequence[int] = NEAR_CODES,
) -> Rounded:
    """Round a weight [N, K] under a Hessian float32 [K, K].

    tensor_scale: float32 [N], one per row, so that linears which read the same input are rounded together.
    candidates: codes relative to that of the block's largest magnitude; (0,) takes that one.
    Columns whose inputs were always 0 are rounded to nearest. Raises FactorError as upper_factor does.
    """
    w = weight.float().clone()
    permutation = order_of(hessian.diagonal(), order)
    if order == "columns":
        return sweep_columns(w, hessian, tensor_scale, damping, permutation, candidates)
    upper = upper_factor(hessian[permutation][:, permutation], damping)
    w = w[:, permutation].contiguous()
    rows, columns = w.shape
    result = Columns(
        w.new_empty(rows, columns),
        w.new_empty(columns // GROUP, rows),
        torch.empty(columns // GROUP, rows, dtype=torch.uint8, device=w.device),
        torch.zeros(rows, dtype=torch.float64, device=w.device),
    )
    without_gaps = list(candidates) == list(range(candidates[0], candidates[-1] + 1))
    one_launch = w.device.type == "cuda" and without_gaps and has_triton()
    round_one = round_column_in_one_launch if one_launch else round_column
    upper = upper.contiguous() if one_launch else upper
    for first in range(0, columns, WINDOW):
        last = min(first + WINDOW, columns)
        errors = w.new_empty(rows, last - first)
        for start in range(first, last, GROUP):
            end = start + GROUP
            here = errors[:, start - first : end - first]
            round_one(w, upper, tensor_scale, start, candidates, here, result)
            if end < last:
                w[:, end:last] -= here @ upper[start:end, end:last]
        if last < columns:
            w[:, last:] -= errors @ upper[first:last, last:]
    inverse = torch.argsort(permutation)
    blocks = torch.argsort(permutation.view(-1, GROUP)[:, 0] // GROUP)
    codes, step = result.codes[:, inverse], result.steps[blocks].T.contiguous()
    chosen = result.chosen[blocks].T.contiguous()
    return Rounded(codes, chosen, step, dequantized(codes, step), result.loss, w[:, inverse])


@dataclass(frozen=True)
class Columns:
    """What a sweep writes, in its own order of columns. codes: E2M1 values [N, K].  steps: [K/16, N].  chosen: E4M3 codes, uint8
    [K/16, N].  loss: float64 [N].
    """

    codes: torch.Tensor
    steps: torch.Tensor
    chosen: torch.Tensor
    loss: torch.Tensor


def round_column(
    w: torch.Tensor,
    upper: torch.Tensor,
    tensor_scale: torch.Tensor,
    start: int,
    candidates: Sequence[int],
    errors: torch.Tensor,
    result: Columns,
) -> None:
    """Round columns start .. start + 15 of w [N, K] with the best of the candidates; w then holds what they were rounded from.

    errors: float32 [N, 16], written.
    """
    end, index = start + GROUP, start // GROUP
    corner, table = upper[start:end, start:end], e4m3_steps(w.device)
    relative = torch.tensor(candidates, device=w.device)
    tile = max(1, CANDIDATE_BYTES // (4 * GROUP * len(candidates)))
    for top in range(0, len(w), tile):
        part = slice(top, min(len(w), top + tile))
        block = w[part, start:end]
        nearest = amax_codes(block[:, None], tensor_scale[part]).T
        tried = (nearest + relative[:, None]).clamp(1, E4M3_CODES)
        step = table[tried] * tensor_scale[part]
        q, error, total, work = round_block(block, corner, step)
        best = total.argmin(0)
        at = best[None, None, :].expand(GROUP, 1, -1)
        result.codes[part, start:end] = q.gather(1, at)[:, 0].T
        w[part, start:end] = work.gather(1, at)[:, 0].T
        errors[part] = error.gather(1, at)[:, 0].T
        result.steps[index, part] = step.gather(0, best[None])[0]
        result.chosen[index, part] = tried.gather(0, best[None])[0].to(torch.uint8)
        result.loss[part] += total.gather(0, best[None])[0].double()


def round_column_in_one_launch(
    w: torch.Tensor,
    upper: torch.Tensor,
    tensor_scale: torch.Tensor,
    start: int,
    candidates: Sequence[int],
    errors: torch.Tensor,
    result: Columns,
) -> None:
    """round_column on a GPU, for candidates without gaps."""
    from annie_quant.quantize import block_kernel

    tried, index = range(candidates[0], candidates[-1] + 1), start // GROUP
    outputs = (errors, result.codes, result.chosen[index], result.steps[index], result.loss)
    block_kernel.round_column(w, upper, tensor_scale, start, tried, *outputs)


@functools.cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def round_block(
    block: torch.Tensor, corner: torch.Tensor, step: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Round one block [N, 16] with every step [C, N], each column's error corrected in the block's later columns.

    corner: the factor's 16 x 16 part.  Returns E2M1 values and errors [16, C, N], the loss [C, N], and what was
    rounded [16, C, N].
    """
    work = block.T[:, None, :].repeat(1, step.shape[0], 1)
    codes, errors = torch.empty_like(work), torch.empty_like(work)
    total = torch.zeros_like(step)
    for i in range(GROUP):
        codes[i] = e2m1(work[i] / step)
        errors[i] = (work[i] - codes[i] * step) / corner[i, i]
        total.addcmul_(errors[i], errors[i])
        if i + 1 < GROUP:
            work[i + 1 :] -= corner[i, i + 1 :, None, None] * errors[i]
    return codes, errors, total, work


def local_scales(
    weight: torch.Tensor, hessian: torch.Tensor, tensor_scale: torch.Tensor, candidates: Sequence[int] = NEAR_CODES
) -> torch.Tensor:
    """Return the E4M3 codes, int64 [N, K/16], with the least dw^T H_b dw per block, H_b its 16 x 16 part of the Hessian.

    ModelOpt's local-Hessian scales: each block by itself, rounded to nearest.
    """
    rows, columns = weight.shape
    table, relative = e4m3_steps(weight.device), torch.tensor(candidates, device=weight.device)
    chosen = torch.empty(rows, columns // GROUP, dtype=torch.int64, device=weight.device)
    tile = max(1, CANDIDATE_BYTES // (4 * GROUP * len(candidates)))
    for index in range(columns // GROUP):
        at = slice(index * GROUP, (index + 1) * GROUP)
        for top in range(0, rows, tile):
            part = slice(top, min(rows, top + tile))
            block = weight[part, at].float()
            tried = (amax_codes(block[:, None], tensor_scale[part]).T + relative[:, None]).clamp(1, E4M3_CODES)
            step = (table[tried] * tensor_scale[part])[..., None]
            error = e2m1(block / step) * step - block
            loss = ((error @ hessian[at, at]) * error).sum(-1)
            chosen[part, index] = tried.gather(0, loss.argmin(0)[None])[0]
    return chosen


def sweep_columns(
    w: torch.Tensor,
    hessian: torch.Tensor,
    tensor_scale: torch.Tensor,
    damping: float,
    permutation: torch.Tensor,
    candidates: Sequence[int],
) -> Rounded:
    """Round a weight [N, K] column by column in the order of `permutation` [K], under local_scales."""
    scale_codes = local_scales(w, hessian, tensor_scale, candidates)
    step = e4m3_steps(w.device)[scale_codes] * tensor_scale[:, None]
    upper = upper_factor(hessian[permutation][:, permutation], damping)
    wide = step.repeat_interleave(GROUP, 1)[:, permutation].contiguous()
    w = w[:, permutation].contiguous()
    codes, loss = torch.empty_like(w), torch.zeros(len(w), dtype=torch.float64, device=w.device)
    for first in range(0, w.shape[1], WINDOW):
        last = min(first + WINDOW, w.shape[1])
        errors = w.new_empty(len(w), last - first)
        for i in range(first, last):
            codes[:, i] = e2m1(w[:, i] / wide[:, i])
            error = (w[:, i] - codes[:, i] * wide[:, i]) / upper[i, i]
            errors[:, i - first] = error
            loss += error.double().square()
            w[:, i + 1 : last] -= error[:, None] * upper[i, i + 1 : last]
        w[:, last:] -= errors @ upper[first:last, last:]
    inverse = torch.argsort(permutation)
    codes = codes[:, inverse].contiguous()
    return Rounded(codes, scale_codes.to(torch.uint8), step, dequantized(codes, step), loss, w[:, inverse])


def dequantized(codes: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    """Return float32 [N, K] of E2M1 values [N, K] and steps [N, K/16]."""
    return (codes.view(len(codes), -1, GROUP) * step[..., None]).view_as(codes)


def nearest(weight: torch.Tensor, tensor_scale: torch.Tensor) -> Rounded:
    """Round a weight [N, K] to nearest under the scales of the blocks' largest magnitudes. tensor_scale: float32 [N]."""
    w = weight.float()
    scale_codes = amax_codes(w.view(len(w), -1, GROUP), tensor_scale).clamp_min(1)
    step = e4m3_steps(w.device)[scale_codes] * tensor_scale[:, None]
    codes = e2m1((w.view(len(w), -1, GROUP) / step[..., None]).view_as(w))
    values = dequantized(codes, step)
    return Rounded(codes, scale_codes.to(torch.uint8), step, values, (values - w).double().square().sum(-1), w)

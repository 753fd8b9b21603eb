"""GPTQ for one linear: columns are rounded one after the other, and each error is corrected in the columns that follow.

The Hessian of the squared output error is the inputs' weighted second moment X^T W X (Frantar et al. 2022), factored by torch.
The columns are taken in activation order, by falling diagonal of the Hessian. Those of a block stay together, so that its scale
can be chosen when its first column is rounded. Groups and scales keep their place in storage.
`round_columns` is the loop over the columns in C (csrc/nvfp4/gptq.c), which chooses block scales as the codec does.

`sweep` is GPTQ in torch, on a CPU or a GPU, with block scales that are chosen inside the sweep: each block of a row is rounded
once per candidate scale, with corrections inside the block, and the candidate with the least loss is kept. The loss is GPTQ's own
objective: the squared output error that remains after the best continuous correction of all later columns (local-Hessian scales
inside GPTQ: PiSO, arXiv 2606.10890).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

import numpy as np
import torch

from annie_quant import nvfp4
from annie_quant.models.formats import GROUP
from annie_quant.offline import codec
from annie_quant.quantize.backend import has_triton

DAMPING = 0.05  # of the mean of the Hessian's diagonal; in llm-compressor's comparison (#2922) .05 was better than .01
_ATTEMPTS = 12  # factorisations of one Hessian, with ten times the damping each
# Prompts have many more tokens than responses. With a weight of .01, one prompt token in twenty is multiplied.
LEAST_WEIGHT = 0.2


class Sampling:
    """Takes a sample of the tokens with small weights; each sampled token gets the weight of those that it stands for.

    This is systematic sampling: of the tokens whose weight is below `least`, one is taken with the weight `least` each time the sum
    of their weights has grown by `least`. The tokens may come in parts of any size.

    table: weights of all kinds of tokens.
    """

    def __init__(self, table: torch.Tensor, least: float) -> None:
        # total: of the weights below `least` so far
        self.least = least
        self.total = 0.0
        self.needed = bool(((table > 0) & (table < least)).any())

    def __call__(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the weights [n] with which the next n tokens count."""
        if not self.needed or not len(weight):
            return weight
        small = weight < self.least
        sums = self.total + torch.where(small, weight, 0).double().cumsum(0)
        steps = (sums / self.least).floor()
        taken = steps.diff(prepend=steps.new_tensor([self.total / self.least]).floor()) > 0
        self.total = float(sums[-1])
        return torch.where(small, taken * self.least, weight)


@contextlib.contextmanager
def tensor_cores(use: bool) -> Iterator[None]:
    """Let a GPU multiply float32 matrices in TF32, which holds products of bf16 values exactly; sums stay float32."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = use or before
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


class Hessian:
    """Accumulates the weighted second moment of inputs x [n, K], and their largest magnitude.

    table: weight of each kind of token.
    least: of Sampling; 0 takes all tokens.
    fast: multiply on a GPU's tensor cores.
    Tokens with NaN or inf are counted in `not_finite` and left out of both.
    """

    def __init__(self, table: torch.Tensor, least: float = 0.0, fast: bool = False) -> None:
        self.table = table
        self.fast = fast
        self.weight = 0.0
        self.amax = 0.0
        self.not_finite = 0
        self.tokens = 0
        self.sampling = Sampling(table, least)
        self.total: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor, kinds: torch.Tensor) -> None:
        self.tokens += len(x)
        largest = x.abs().amax(-1).float()  # NaN where a token has one
        finite = largest.isfinite()
        if not bool(finite.all()):
            self.not_finite += int((~finite).sum())
            x, kinds, largest = x[finite], kinds[finite], largest[finite]
        if not len(x):
            return
        self.amax = max(self.amax, float(largest.max()))
        weight = self.sampling(self.table[kinds])
        used = weight.nonzero()[:, 0]
        # float32 sums with and without zeros round differently, so each way of rounding keeps its own sum, and its bytes.
        self.weight += float((weight[used] if self.fast else weight).sum())
        if len(used) or not self.fast:
            self.add(x.index_select(0, used), weight[used])

    def add(self, x: torch.Tensor, weight: torch.Tensor) -> None:
        """Add inputs [n, K], each with its weight [n] > 0.

        fast: inputs in bfloat16 that all weigh 1 are multiplied as they are, others in TF32; sums are float32 in both.
        """
        fast = self.fast and x.dtype == torch.bfloat16
        if fast and x.is_cuda and bool((weight == 1).all()):
            product = torch.mm(x.T, x, out_dtype=torch.float32)
            self.total = product if self.total is None else self.total.add_(product)
            return
        rows = x.float() * weight.sqrt()[:, None]
        with tensor_cores(fast):
            self.total = rows.T @ rows if self.total is None else self.total.addmm_(rows.T, rows)

    def mean(self) -> torch.Tensor | None:
        """Return the weighted mean of x x^T, float32 [K, K], or None if no finite input counted."""
        return None if self.total is None else self.total / max(self.weight, 1e-30)

    def unusable(self) -> str:
        """Return why no error can be corrected with it, or ""."""
        if self.not_finite:
            return f"{self.not_finite} of its calibration inputs hold NaN or inf"
        if self.total is None:
            return "all its inputs are 0" if self.tokens else "no calibration input reached it"
        return ""


@dataclass(frozen=True)
class Factor:
    """A factored Hessian.

    upper: upper Cholesky factor of the inverse of the damped Hessian of the ordered columns, float32 [K, K].
    order: columns in the order in which they are rounded, int64 [K] (activation_order).
    """

    upper: np.ndarray
    order: np.ndarray


class FactorError(ValueError):
    """A Hessian that GPTQ cannot use. The message is the reason."""


def factor(hessian: torch.Tensor, damping: float = DAMPING) -> Factor:
    """Factor a Hessian [K, K]. Raises FactorError as upper_factor does."""
    order = activation_order(hessian.diagonal())
    upper = upper_factor(hessian[order[:, None], order], damping)
    return Factor(np.ascontiguousarray(upper.float().cpu().numpy()), order.cpu().numpy())


def activation_order(diagonal: torch.Tensor) -> torch.Tensor:
    """Return the columns in the order in which they are rounded, int64 [K].

    Blocks come by falling sum of the Hessian's diagonal, and the columns inside each by falling diagonal.
    """
    blocks = diagonal.view(-1, GROUP)
    first = torch.argsort(blocks.sum(-1), descending=True, stable=True)
    inside = torch.argsort(blocks, dim=-1, descending=True, stable=True)
    return (first[:, None] * GROUP + inside[first]).reshape(-1)


def upper_factor(hessian: torch.Tensor, damping: float = DAMPING) -> torch.Tensor:
    """Return the upper Cholesky factor of the inverse of a Hessian with damping, relative to its mean, on its diagonal.

    hessian: float32 [K, K]; its diagonal is changed. Columns whose input was always 0 get the mean of the others: they
    correct no other column and are rounded to nearest.
    Where float32 has no such factor, the damping is multiplied by ten, up to _ATTEMPTS times. Raises FactorError where that does
    not help, for NaN and inf, and for inputs that are all 0.
    """
    if not bool(hessian.isfinite().all()):
        raise FactorError("its inputs hold NaN or inf")
    diagonal = hessian.diagonal()
    live = diagonal > 0
    if not bool(live.any()):
        raise FactorError("all its inputs are 0")
    mean = diagonal[live].mean()
    undamped = torch.where(live, diagonal, mean)
    for _ in range(_ATTEMPTS):
        diagonal.copy_(undamped + damping * mean)
        lower, failed = torch.linalg.cholesky_ex(hessian)
        if not int(failed):
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not int(failed):
                return upper
        damping *= 10
    raise FactorError("no damping makes its Hessian factorable")


def round_columns(
    weight: np.ndarray, factor: Factor, tensor_scale: float, scale: nvfp4.Scale = "amax"
) -> tuple[nvfp4.Tensor, np.ndarray]:
    """Return (packed, dequantized float32 [N, K]) of a weight [N, K] in any float dtype.

    A column's error counts by 1 / upper[k, k]^2 in the search for a block's scale, as it does in GPTQ's own objective.
    Raises ValueError where the corrections made a number that is not finite.
    """
    w = weight.take(factor.order, 1).astype(np.float32)
    importance = 1 / np.square(factor.upper.diagonal())
    packed = nvfp4.gptq(w, factor.upper, tensor_scale, scale, importance=importance)
    place = np.argsort(factor.order)
    blocks = np.argsort(factor.order[::GROUP] // GROUP)
    codes = np.stack((packed.codes & 15, packed.codes >> 4), -1).reshape(w.shape).take(place, 1)
    codes = codes[:, ::2] | codes[:, 1::2] << 4
    return replace(packed, codes=codes, block_scale=packed.block_scale.take(blocks, 1)), w.take(
        place, 1
    )


# ---- the sweep in torch

WINDOW_COLUMNS = 128  # columns between two updates of everything to their right
E4M3_CODES = 126  # positive finite codes of E4M3: 1 (2^-9) to 126 (448)
# Codes relative to that of the block's largest magnitude. The optimum is within -3 .. +7 (ScaleSweep, arXiv 2606.07618).
NEAR_CODES = range(-4, 9)
CANDIDATE_BYTES = 256 << 20  # of one block column's candidates in memory


@dataclass(frozen=True)
class Rounded:
    """A rounded weight [N, K].

    codes: E2M1 values, float32 [N, K].
    scale_codes: E4M3 codes of the block scales, uint8 [N, K/16].
    step: block scale times tensor scale, float32 [N, K/16].
    values: the dequantized weight, float32 [N, K].
    loss: GPTQ's objective per row, float64 [N].
    """

    codes: torch.Tensor
    scale_codes: torch.Tensor
    step: torch.Tensor
    values: torch.Tensor
    loss: torch.Tensor

    def rows(self, part: slice) -> Rounded:
        """Return the rows of a slice."""
        return Rounded(*(getattr(self, f.name)[part] for f in fields(self)))

    def packed(self, tensor_scale: float) -> nvfp4.Tensor:
        """Return the codec's tensor."""
        table = torch.tensor(codec.E2M1[:8], device=self.codes.device)
        nibble = torch.bucketize(self.codes.abs(), table) + 8 * (self.codes < 0)
        pairs = (nibble[:, 0::2] + 16 * nibble[:, 1::2]).to(torch.uint8)
        scales = codec.to_numpy(self.scale_codes.cpu().contiguous().view(torch.float8_e4m3fn))
        return nvfp4.Tensor(
            pairs.cpu().numpy(), scales, np.float32(tensor_scale), tuple(self.codes.shape), GROUP
        )


@functools.cache  # one table per device: a sweep reads it once per block column
def e4m3_steps(device: torch.device | str) -> torch.Tensor:
    """Return the value of every positive finite E4M3 code, float32 [127]. Code 0 has that of code 1, to avoid division by 0."""
    codes = torch.arange(E4M3_CODES + 1, dtype=torch.uint8, device=device)
    codes[0] = 1
    return codes.view(torch.float8_e4m3fn).float()


def amax_codes(blocks: torch.Tensor, tensor_scale: torch.Tensor) -> torch.Tensor:
    """Return the E4M3 codes that plain rounding chooses, int64 [N, B], for blocks [N, B, 16] and tensor scales [N]."""
    scale = blocks.abs().amax(-1) / (6 * tensor_scale)[:, None]
    return scale.clamp(2.0**-9, 448.0).to(torch.float8_e4m3fn).view(torch.uint8).long()


@dataclass(frozen=True)
class Sweep:
    """A weight that is rounded column by column, in the order of the sweep.

    w: the weight with all corrections so far, float32 [N, K].
    upper: the Hessian's factor, float32 [K, K]; contiguous on a GPU.
    tensor_scale: float32 [N].
    candidates: codes of a block's scale that are tried, relative to that of its largest magnitude.
    codes: E2M1 values of the rounded columns, float32 [N, K].
    steps: block scale times tensor scale, float32 [K/16, N].
    chosen: E4M3 codes of the block scales, uint8 [K/16, N].
    loss: GPTQ's objective per row, float64 [N].
    """

    w: torch.Tensor
    upper: torch.Tensor
    tensor_scale: torch.Tensor
    candidates: range
    codes: torch.Tensor
    steps: torch.Tensor
    chosen: torch.Tensor
    loss: torch.Tensor

    @classmethod
    def of(
        cls, w: torch.Tensor, upper: torch.Tensor, tensor_scale: torch.Tensor, candidates: range
    ) -> Sweep:
        """Return the sweep of a weight of which no column is rounded yet."""
        rows = w.shape[0]
        blocks = w.shape[1] // GROUP
        chosen = torch.zeros(blocks, rows, dtype=torch.uint8, device=w.device)
        loss = torch.zeros(rows, dtype=torch.float64, device=w.device)
        return cls(
            w,
            upper,
            tensor_scale,
            candidates,
            torch.zeros_like(w),
            w.new_zeros(blocks, rows),
            chosen,
            loss,
        )


def sweep(
    weight: torch.Tensor,
    hessian: torch.Tensor,
    tensor_scale: torch.Tensor,
    damping: float = DAMPING,
    candidates: range = NEAR_CODES,
) -> Rounded:
    """Round a weight [N, K] under a Hessian float32 [K, K].

    tensor_scale: float32 [N], one per row, so that linears which read the same input are rounded together.
    candidates: codes relative to that of the block's largest magnitude; range(1) takes that one.
    Columns whose inputs were always 0 are rounded to nearest. Raises FactorError as upper_factor does.
    """
    permutation = activation_order(hessian.diagonal())
    upper = upper_factor(hessian[permutation[:, None], permutation], damping)
    w = weight.float()[:, permutation].contiguous()
    round_one = round_column
    if w.device.type == "cuda" and has_triton():
        from annie_quant.quantize import triton_kernels

        round_one = triton_kernels.round_column
        upper = (
            upper.contiguous()
        )  # not on a CPU, where another layout changes the rounding of products
    state = Sweep.of(w, upper, tensor_scale, candidates)
    columns = w.shape[1]
    for first in range(0, columns, WINDOW_COLUMNS):
        last = min(first + WINDOW_COLUMNS, columns)
        errors = w.new_empty(len(w), last - first)
        for start in range(first, last, GROUP):
            end = start + GROUP
            here = errors[:, start - first : end - first]
            round_one(state, start, here)
            if end < last:
                w[:, end:last] -= here @ upper[start:end, end:last]
        if last < columns:
            w[:, last:] -= errors @ upper[first:last, last:]
    inverse = torch.argsort(permutation)
    blocks = torch.argsort(permutation.view(-1, GROUP)[:, 0] // GROUP)
    codes = state.codes[:, inverse]
    step = state.steps[blocks].T.contiguous()
    chosen = state.chosen[blocks].T.contiguous()
    return Rounded(codes, chosen, step, dequantized(codes, step), state.loss)


def round_column(state: Sweep, start: int, errors: torch.Tensor) -> None:
    """Round columns start .. start + 15 with the best of the candidates. errors: float32 [N, 16], written."""
    end = start + GROUP
    index = start // GROUP
    w = state.w
    corner = state.upper[start:end, start:end]
    table = e4m3_steps(w.device)
    relative = torch.tensor(state.candidates, device=w.device)
    tile = max(1, CANDIDATE_BYTES // (4 * GROUP * len(state.candidates)))
    for top in range(0, len(w), tile):
        part = slice(top, min(len(w), top + tile))
        block = w[part, start:end]
        tensor_scale = state.tensor_scale[part]
        nearest = amax_codes(block[:, None], tensor_scale).T
        tried = (nearest + relative[:, None]).clamp(1, E4M3_CODES)
        step = table[tried] * tensor_scale
        q, error, total = round_block(block, corner, step)
        best = total.argmin(0)
        at = best[None, None, :].expand(GROUP, 1, -1)
        state.codes[part, start:end] = q.gather(1, at)[:, 0].T
        errors[part] = error.gather(1, at)[:, 0].T
        state.steps[index, part] = step.gather(0, best[None])[0]
        state.chosen[index, part] = tried.gather(0, best[None])[0].to(torch.uint8)
        state.loss[part] += total.gather(0, best[None])[0].double()


def round_block(
    block: torch.Tensor, corner: torch.Tensor, step: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Round one block [N, 16] with every step [C, N], each column's error corrected in the block's later columns.

    corner: the factor's 16 x 16 part.  Returns E2M1 values and errors [16, C, N], and the loss [C, N].
    """
    work = block.T[:, None, :].repeat(1, step.shape[0], 1)
    codes = torch.empty_like(work)
    errors = torch.empty_like(work)
    total = torch.zeros_like(step)
    for i in range(GROUP):
        codes[i] = codec.to_e2m1(work[i] / step)
        errors[i] = (work[i] - codes[i] * step) / corner[i, i]
        total.addcmul_(errors[i], errors[i])
        if i + 1 < GROUP:
            work[i + 1 :] -= corner[i, i + 1 :, None, None] * errors[i]
    return codes, errors, total


def dequantized(codes: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    """Return float32 [N, K] of E2M1 values [N, K] and steps [N, K/16]."""
    return (codes.view(len(codes), -1, GROUP) * step[..., None]).view_as(codes)


def nearest(weight: torch.Tensor, tensor_scale: torch.Tensor) -> Rounded:
    """Round a weight [N, K] to nearest under the scales of the blocks' largest magnitudes. tensor_scale: float32 [N]."""
    w = weight.float()
    scale_codes = amax_codes(w.view(len(w), -1, GROUP), tensor_scale).clamp_min(1)
    step = e4m3_steps(w.device)[scale_codes] * tensor_scale[:, None]
    codes = codec.to_e2m1((w.view(len(w), -1, GROUP) / step[..., None]).view_as(w))
    values = dequantized(codes, step)
    return Rounded(
        codes, scale_codes.to(torch.uint8), step, values, (values - w).double().square().sum(-1)
    )

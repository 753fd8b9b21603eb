"""Learn how a decoder layer's weights are rounded: SignRound on NVFP4, started from GPTQ's result.

Each weight is E2M1(u / s + v) * s, with u the value that GPTQ rounded, s = E4M3(m * block scale) * tensor scale, an offset v and a
block-scale multiplier m. At v = 0 and m = 1 that is GPTQ's result. v and m follow the signs of their gradients (Cheng et al.,
SignRound, arXiv 2309.05516; AutoRound's nvfp.py), the learning rate falls linearly from 1 / steps. The loss is the squared error
of the layer's outputs against the source's outputs for the source's inputs, over the tokens that count, with activations rounded
as a server rounds them. The loss on a part of the text that no step learns from decides which step is kept; the start is one of
them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from annie_quant.quantize import column_sweep
from annie_quant.quantize.backend import device_kind, has_triton, tensor_cores
from annie_quant.quantize.column_sweep import Rounded
from annie_quant.quantize.formats import GROUP
from annie_quant.quantize.two_streams import MAX_CHANGE, StreamRounder, largest_change

BATCH_TOKENS = {"cpu": 2048, "cuda": 8192}  # of one step
JUDGED_BATCHES = 4  # of BATCH_TOKENS, on which steps are compared
HELD_OUT = 4  # one in so many rows of a batch is judged and not learned from, at most
JUDGEMENTS = 5  # comparisons after the start
TRAVEL = 0.5  # how far v and m can move in all
LIMITS = ((-0.5, 0.5), (0.5, 1.5))  # of v and m, the parameters of each weight in this order


class RoundE2M1(torch.autograd.Function):
    """Round to E2M1. Gradients pass as if nothing was rounded, and only inside of [-6, 6]."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x.abs() <= column_sweep.MAX_E2M1)
        return column_sweep.e2m1(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (inside,) = ctx.saved_tensors
        return gradient * inside


def spacing(x: torch.Tensor) -> torch.Tensor:
    """Return the distance between the E2M1 values around |x|: 0.5, 1 or 2."""
    a = x.abs()
    return torch.where(a < 2, 0.5, torch.where(a < 4, 1.0, 2.0))


class LearnedWeight(nn.Module):
    """The rounding of one weight [N, K]: `v` [N, K] in units of the distance between codes, `m` [N, K/16]. dtype: of the weight."""

    def __init__(self, start: Rounded, tensor_scale: float, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.dtype = dtype
        self.rows, self.columns = start.codes.shape
        self.tensor_scale = tensor_scale
        self.start = start.start
        self.scale = start.scale_codes.view(torch.float8_e4m3fn).float()
        # Where the value that was rounded does not give the code again (rounding of the division), the code is the start.
        scaled = self.blocks(start.start) / start.step[..., None]
        settled = column_sweep.e2m1(scaled) == self.blocks(start.codes)
        self.base = torch.where(settled, scaled, self.blocks(start.codes))
        self.unit = spacing(self.base)
        self.v = nn.Parameter(torch.zeros_like(self.base))
        self.m = nn.Parameter(torch.ones_like(self.scale))

    def blocks(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(self.rows, self.columns // GROUP, GROUP)

    def codes_and_scale(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return E2M1 values [N, K/16, 16] and the E4M3 block scale's value [N, K/16]."""
        raw = (self.scale * self.m).clamp(2.0**-9, 448.0)
        scale = raw + (raw.detach().to(torch.float8_e4m3fn).float() - raw.detach())
        scaled = self.base * (self.scale / scale)[..., None] + self.v * self.unit
        return RoundE2M1.apply(scaled), scale

    def forward(self) -> torch.Tensor:
        """Return the weight [N, K]."""
        if self.v.is_cuda and has_triton():
            from annie_quant.quantize.block_kernel import FusedWeight

            fused: torch.Tensor = FusedWeight.apply(
                self.base, self.v, self.scale, self.m, self.tensor_scale, self.dtype
            )
            return fused
        codes, scale = self.codes_and_scale()
        weight = (codes * (scale * self.tensor_scale)[..., None]).view(self.rows, self.columns)
        return weight.to(self.dtype)

    @torch.no_grad()
    def result(self) -> Rounded:
        """Return the weight as it is rounded now."""
        codes, scale = self.codes_and_scale()
        codes = codes.reshape(self.rows, self.columns)
        scale_codes = scale.to(torch.float8_e4m3fn).view(torch.uint8)
        step = scale * self.tensor_scale
        values = column_sweep.dequantized(codes, step)
        return Rounded(codes, scale_codes, step, values, torch.zeros(self.rows, dtype=torch.float64), self.start)


@dataclass(frozen=True)
class Learned:
    """losses: of the start and of each later comparison.  best: index of the one that was kept."""

    losses: list[float]
    best: int


def learn(rounder: StreamRounder, targets: Sequence[torch.Tensor], steps: int, seed: int = 0) -> Learned:
    """Learn the rounding of a layer's linears, experts left out, and keep the best in `rounder`.

    targets: the source's outputs. The same seed gives the same result.
    """
    names = [n for n in rounder.rounded if rounder.layer.experts_of(n) is None]
    dtype = rounder.layer.model.dtype
    weights = {n: LearnedWeight(rounder.rounded[n], rounder.tensor_scales[n], dtype=dtype) for n in names}
    if not names:
        return Learned([], 0)
    text = LayerText(rounder, targets)
    generator = torch.Generator().manual_seed(seed)
    learned = follow_signs(
        list(weights.values()),
        lambda: text.loss(weights, text.draw(generator)),
        lambda: text.judge(weights),
        steps,
        tf32=dtype == torch.bfloat16,
    )
    if learned.best:
        for name, weight in weights.items():
            rounder.set_rounded(name, weight.result())
    return learned


def follow_signs(
    weights: Sequence[LearnedWeight],
    loss: Callable[[], torch.Tensor],
    judge: Callable[[], float],
    steps: int,
    tf32: bool,
) -> Learned:
    """Move the parameters of several weights by the signs of a loss's gradients, and leave them at the best step.

    loss: of one random batch.  judge: loss on a fixed part of the text, for the start and JUDGEMENTS later steps.
    tf32: of a GPU's float32 products in the backward pass.
    """
    parameters = [p for weight in weights for p in weight.parameters()]
    chosen = [p.detach().clone() for p in parameters]
    losses, best = [judge()], 0
    marks = {round(steps * (i + 1) / JUDGEMENTS) for i in range(JUDGEMENTS)}
    for step in range(steps):
        batch_loss = loss()
        with tensor_cores(tf32):
            gradients = torch.autograd.grad(batch_loss, parameters)
        rate = 2 * TRAVEL * (1 - step / steps) / steps  # falls linearly, to TRAVEL in all
        with torch.no_grad():
            for index, (parameter, gradient) in enumerate(zip(parameters, gradients, strict=True)):
                parameter.add_(gradient.sign_(), alpha=-rate).clamp_(*LIMITS[index % len(LIMITS)])
        if step + 1 in marks:
            losses.append(judge())
            if losses[-1] < losses[best]:
                best = len(losses) - 1
                chosen = [p.detach().clone() for p in parameters]
    with torch.no_grad():
        for parameter, value in zip(parameters, chosen, strict=True):
            parameter.copy_(value)
    return Learned(losses, best)


class LayerText:
    """Inputs and targets of a layer, as rows of one sample each."""

    def __init__(self, rounder: StreamRounder, targets: Sequence[torch.Tensor]) -> None:
        self.rounder, self.states, self.targets = rounder, rounder.layer.model.states, targets
        self.kinds = [kinds for _, kinds in rounder.batches(self.states)]
        self.table = torch.cat([rounder.table, rounder.table.new_zeros(1)])  # PADDING is -1, the table's last element
        variance = torch.zeros((), dtype=torch.float64)
        total = 0.0
        for target, kinds in zip(targets, self.kinds, strict=True):
            weight = self.table[kinds]
            used = weight > 0
            variance += (target[used].double().square().mean(-1) * weight[used]).sum().cpu()
            total += float(weight.sum())
        self.variance = max(float(variance) / max(total, 1e-30), 1e-30)
        self.tokens = BATCH_TOKENS[device_kind(rounder.layer.model.device)]
        self.judged = self.fixed(HELD_OUT)
        self.first = [0] * len(self.kinds)  # row of each batch that steps learn from; those before it are judged
        for index, rows in self.judged:
            self.first[index] = len(rows)
        if not self.judged:  # too few rows to hold some out
            self.judged = self.fixed(1)

    def draw(self, generator: torch.Generator) -> tuple[int, torch.Tensor]:
        """Return a random batch, and random rows of it with about BATCH_TOKENS positions."""
        sizes = torch.tensor([float(k[n:].numel()) for k, n in zip(self.kinds, self.first, strict=True)])
        index = int(torch.multinomial(sizes, 1, generator=generator))
        first, (rows, length) = self.first[index], self.kinds[index].shape
        count = max(1, min(rows - first, self.tokens // length))
        return index, first + torch.randperm(rows - first, generator=generator)[:count]

    def error(
        self, weights: dict[str, torch.Tensor], drawn: tuple[int, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the weighted sum over some rows of the tokens' mean squared errors, and the sum of the weights."""
        index, rows = drawn
        rows = rows.to(self.states[index].device)
        state, target, weight = self.states[index][rows], self.targets[index][rows], self.table[self.kinds[index][rows]]
        out = self.rounder.forward_with(weights, state)
        return ((out.float() - target.float()).square().mean(-1) * weight).sum(), weight.sum()

    def loss(self, weights: dict[str, LearnedWeight], drawn: tuple[int, torch.Tensor]) -> torch.Tensor:
        """Return the weighted mean squared error of some rows, relative to the mean square of the targets."""
        error, weight = self.error({n: w() for n, w in weights.items()}, drawn)
        return error / weight.clamp_min(1e-30) / self.variance

    def fixed(self, part: int) -> list[tuple[int, torch.Tensor]]:
        """Return rows on which steps are compared, of batches evenly spread over all: JUDGED_BATCHES steps of text.

        part: at most 1 / part of a batch's rows; batches with fewer rows give none.
        """
        rows = [min(len(k) // part, max(1, self.tokens // k.shape[1])) for k in self.kinds]
        total = sum(n * k.shape[1] for n, k in zip(rows, self.kinds, strict=True))
        stride = max(1, round(total / (JUDGED_BATCHES * self.tokens)))
        return [(i, torch.arange(rows[i])) for i in range(0, len(rows), stride) if rows[i]]

    @torch.no_grad()
    def judge(self, weights: dict[str, LearnedWeight]) -> float:
        """Return the mean loss over the fixed rows, each with its share of the weights; inf for a change of MAX_CHANGE."""
        now = {n: w() for n, w in weights.items()}
        true = [self.rounder.layer.linears[n].weight.float() for n in now]
        if largest_change((w.float() for w in now.values()), true) >= MAX_CHANGE:
            return math.inf
        total = count = 0.0
        for drawn in self.judged:
            error, weight = self.error(now, drawn)
            total += float(error)
            count += float(weight)
        return total / max(count, 1e-30) / self.variance

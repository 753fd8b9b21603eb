"""Distil the source into its rounded copy through the whole model: block scales or the rounding, learned by KL.

Scales: the codes stay what the layers' rounding made them; each block scale is E4M3(m * scale), and m follows the sign of its
gradient (the post-scale of ModelOpt's Dual-LSQ).
Rounding: the scales stay, and an offset per weight follows Adam, as in quantization-aware training. Each offset starts from the
source's weight, moved into the cell of the values that round to its code: so the start is the plan, and codes near a border
change first. From the middle of the cells no code would change for many steps, and larger steps undo the error correction of GPTQ.
The loss is KL(source || rounded) over the tokens that count, with activations rounded where a server rounds them; when the rounding
is learned, not rounded in a share of the steps, so that W4A16 does not pay for W4A4. The source's weights, one dequantized linear
at a time and what is learned are in memory (20 bytes per weight with the rounding); decoder layers are recomputed in the backward
pass. The KL on answers that no step learns from decides which step is chosen; the start is one of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from annie_quant import nvfp4
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.errors import UsageError
from annie_quant.hf import codec
from annie_quant.progress import SILENT, Progress
from annie_quant.quantize import column_sweep, fake_quant, kl_trial
from annie_quant.quantize.calibration_samples import Batch, Sample, TokenWeights, make_batches, padded
from annie_quant.quantize.column_sweep import GROUP, Rounded
from annie_quant.quantize.formats import NVFP4
from annie_quant.quantize.input_stats import weight_table, with_padding
from annie_quant.quantize.layerwise import use_own_delta_rule
from annie_quant.quantize.learned_rounding import HELD_OUT, Learned, LearnedWeight, follow_signs, keep_best
from annie_quant.quantize.plan import Plan

BATCH = 8  # answers per step
ROUNDING_BATCH = 16  # the same, where the rounding is learned
JUDGE = 48  # answers on which steps are compared, and at most one in HELD_OUT
TRAVEL = 0.1  # how far m can move in all
RATE = 0.0006  # of Adam at its top, in distances between codes: 0.004 undoes what the layers' rounding corrected
WARM_UP = 5  # steps
BETAS = (0.9, 0.95)
MARGIN = 0.01  # between a start and its cell's border, relative to the cell
PLAIN_SHARE = 0.33  # of the steps whose activations are not rounded, where the rounding is learned


class DistilledLinear(nn.Module):
    """A linear that computes with the source's weight or, while `rounded` is set, with the learned one."""

    def __init__(
        self, linear: nn.Linear, start: Rounded, tensor_scale: float, input_amax: float, rounding: bool
    ) -> None:
        super().__init__()
        self.source, self.bias = linear.weight.detach(), linear.bias
        self.learned = LearnedWeight(start, tensor_scale, rounding)
        self.input_amax, self.rounded, self.rounds_input = input_amax, True, True
        self.in_features, self.out_features = linear.in_features, linear.out_features

    @property
    def weight(self) -> torch.Tensor:
        return self.source

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.rounded:
            return nn.functional.linear(x, self.source, self.bias)
        if self.input_amax and self.rounds_input:
            x = fake_quant.nvfp4_input(x, self.input_amax)
        return nn.functional.linear(x, self.learned().to(x.dtype), self.bias)


def rounded_of(packed: nvfp4.Tensor, device: torch.device | str, source: torch.Tensor | None = None) -> Rounded:
    """Return a packed weight's codes and scales as tensors. source: what the values were rounded from; default: themselves."""
    values = codec.to_torch(nvfp4.unpack(packed, "float32")).to(device)
    scale_codes = codec.to_torch(np.array(packed.block_scale)).view(torch.uint8).to(device)
    step = scale_codes.view(torch.float8_e4m3fn).float() * float(packed.tensor_scale)
    divisor = torch.where(step > 0, step, 1.0)
    codes = (values.view(len(values), -1, GROUP) / divisor[..., None]).view_as(values)
    codes = column_sweep.e2m1(codes)
    start = values
    if source is not None:
        scaled = source.float().view(len(values), -1, GROUP) / divisor[..., None]
        start = (into_cells(scaled, codes.view_as(scaled)) * divisor[..., None]).view_as(values)
    return Rounded(codes, scale_codes, step, values, torch.zeros(len(values), dtype=torch.float64), start)


def into_cells(values: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Return the nearest numbers to `values` that E2M1 rounds to `codes`, up to MARGIN and of at most 6 in magnitude."""
    middles = torch.tensor(codec.MIDPOINTS, device=codes.device)
    low, high = torch.cat((-middles[:1], middles)), torch.cat((middles, middles.new_tensor([column_sweep.MAX_E2M1])))
    margin = MARGIN * (high - low)
    magnitudes = torch.tensor(codec.E2M1[:8], device=codes.device)
    index = torch.bucketize(codes.abs(), magnitudes)
    sign = torch.where(codes < 0, -1.0, 1.0)
    return sign * torch.minimum(torch.maximum(values * sign, (low + margin)[index]), (high - margin)[index])


class DistilledModel:
    """A model with DistilledLinear instead of the plan's linears."""

    def __init__(self, folder: ModelFolder, plan: Plan, token_weights: TokenWeights, rounding: bool) -> None:
        self.model = kl_trial.load(folder)
        self.device = next(self.model.parameters()).device
        use_own_delta_rule(self.model, str(self.device))
        self.table = with_padding(weight_table(token_weights, self.device))
        self.model.requires_grad_(False)
        inputs = folder.family.largest_of_input(
            {n: plan.amax[n] for n in plan.packed if plan.formats[n] == NVFP4 and n in plan.amax}
        )
        self.linears: dict[str, DistilledLinear] = {}
        for name, packed in plan.packed.items():
            place = folder.family.in_form(name, multimodal=False)
            parent, _, leaf = place.rpartition(".")
            owner = self.model.get_submodule(parent)
            linear: nn.Linear = getattr(owner, leaf)
            start = rounded_of(packed, self.device, linear.weight.detach() if rounding else None)
            distilled = DistilledLinear(linear, start, float(packed.tensor_scale), inputs.get(name, 0.0), rounding)
            setattr(owner, leaf, distilled)
            self.linears[name] = distilled
        # Tensors that a fold changed, and that are not rounded: the parameter, its value in the source and in the plan.
        self.folded: list[tuple[nn.Parameter, torch.Tensor, torch.Tensor]] = []
        for name, array in plan.weights.items():
            parameter = self.model.get_parameter(folder.family.in_form(name, multimodal=False))
            self.folded.append((parameter, parameter.data, codec.to_torch(array).to(parameter)))
        for layer in self.model.get_decoder().layers:
            layer.forward = _recomputed(layer.forward)

    def kl(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the weighted sum of KL(source || rounded) and the sum of the weights."""
        ids, kinds = (torch.from_numpy(array).to(self.device) for array in (batch.ids, batch.kinds))
        weight = self.table[kinds]
        positions = (weight > 0).any(0).nonzero().squeeze(-1)
        weight = weight[:, positions]
        counts = weight > 0

        def log_probabilities(rounded: bool) -> torch.Tensor:
            """Return those of the tokens that count, [n, V]."""
            for linear in self.linears.values():
                linear.rounded = rounded
            for parameter, source, folded in self.folded:
                parameter.data = folded if rounded else source
            out = self.model(input_ids=ids, use_cache=False, logits_to_keep=positions).logits
            return torch.log_softmax(out[counts].float(), -1)

        with torch.no_grad():
            p = log_probabilities(rounded=False)
        q = log_probabilities(rounded=True)
        return ((p.exp() * (p - q)).sum(-1) * weight[counts]).sum(), weight[counts].sum()

    def round_inputs(self, on: bool) -> None:
        """Round the activations as a server does, or not at all."""
        for linear in self.linears.values():
            linear.rounds_input = on

    @torch.no_grad()
    def judge(self, batches: Sequence[Batch]) -> float:
        """Return the mean KL over fixed answers."""
        sums = [self.kl(b) for b in batches]
        return float(sum(float(s) for s, _ in sums) / max(1e-30, sum(float(n) for _, n in sums)))


def follow_adam(
    weights: Sequence[LearnedWeight],
    loss: Callable[[], torch.Tensor],
    judge: Callable[[], float],
    steps: int,
    rate: float,
    report: Callable[[int, float], None],
) -> Learned:
    """Learn the offsets of several weights with Adam, the rate a cosine, and leave them at the best step (see keep_best)."""
    offsets = [weight.v for weight in weights]
    optimizer = torch.optim.Adam(offsets, lr=rate, betas=BETAS)

    def move(step: int) -> None:
        now = rate * min(1.0, (step + 1) / WARM_UP) * (1 + math.cos(math.pi * step / steps)) / 2
        for group in optimizer.param_groups:
            group["lr"] = now
        for offset, gradient in zip(offsets, torch.autograd.grad(loss(), offsets), strict=True):
            offset.grad = gradient
        optimizer.step()
        with torch.no_grad():
            for offset in offsets:
                offset.clamp_(-0.5, 0.5)

    return keep_best(offsets, move, judge, steps, report)


def _recomputed(forward: Any) -> Any:
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return run


def distil(
    folder: ModelFolder,
    plan: Plan,
    samples: Sequence[Sample],
    token_weights: TokenWeights,
    steps: int,
    rounding: bool = False,
    seed: int = 0,
    travel: float = TRAVEL,
    rate: float = RATE,
    progress: Progress = SILENT,
) -> Learned:
    """Learn the block scales of the plan's linears, or with `rounding` their codes, and keep the best in `plan.packed`.

    rate: of Adam, for codes.  travel: of scales.
    """
    if rounding and plan.weights:
        raise UsageError("codes start from the source's weights, which a fold changed", "--set distilled=scales")
    whole = DistilledModel(folder, plan, token_weights, rounding)
    answers = list(kl_trial.spread([s for s in samples if any(token_weights.get(k, 0.0) > 0 for k in s.kinds)]))
    held_out = min(JUDGE, len(answers) // HELD_OUT)
    judged = make_batches(answers[: held_out or JUDGE], 4096)
    answers = answers[held_out:]
    generator = torch.Generator().manual_seed(seed)
    size = ROUNDING_BATCH if rounding else BATCH

    def loss() -> torch.Tensor:
        whole.round_inputs(not rounding or float(torch.rand((), generator=generator)) >= PLAIN_SHARE)
        drawn = torch.randperm(len(answers), generator=generator)[:size].tolist()
        total, count = whole.kl(padded([answers[i] for i in drawn]))
        return total / count

    def judge() -> float:
        whole.round_inputs(True)
        return whole.judge(judged)

    def report(step: int, kl: float) -> None:
        progress.update(step, steps, f"distilling: step {step} of {steps}, KL {kl:.4g}")

    weights = [linear.learned for linear in whole.linears.values()]
    if rounding:
        learned = follow_adam(weights, loss, judge, steps, rate, report)
    else:
        learned = follow_signs(weights, loss, judge, steps, travel, report)
    if learned.best:
        for name, linear in whole.linears.items():
            plan.packed[name] = linear.learned.result().packed(linear.learned.tensor_scale)
    return learned

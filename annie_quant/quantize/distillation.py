"""Distil the source into its rounded copy through the whole model: block scales, and optionally the rounding, learned by KL.

The codes stay what the layers' rounding made them; each block scale is E4M3(m * scale), and m follows the sign of its gradient
(the post-scale of ModelOpt's Dual-LSQ). With `rounding` the codes may also move by one, as in learned_rounding.py. The loss is
KL(source || rounded) over the tokens that count, with activations rounded as a server rounds them. The source's weights, one
dequantized linear at a time and the scales are in memory; decoder layers are recomputed in the backward pass.
The KL on answers that no step learns from decides which step is chosen; the start is one of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from annie_quant import nvfp4
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.hf import codec
from annie_quant.progress import SILENT, Progress
from annie_quant.quantize import column_sweep, fake_quant, kl_trial
from annie_quant.quantize.calibration_samples import Batch, Sample, TokenWeights, make_batches, padded
from annie_quant.quantize.column_sweep import GROUP, Rounded
from annie_quant.quantize.input_stats import weight_table, with_padding
from annie_quant.quantize.learned_rounding import HELD_OUT, Learned, LearnedWeight, follow_signs
from annie_quant.quantize.plan import Plan

BATCH = 8  # answers per step
JUDGE = 48  # answers on which steps are compared, and at most one in HELD_OUT
TRAVEL = 0.1  # how far m can move in all


class DistilledLinear(nn.Module):
    """A linear that computes with the source's weight or, while `rounded` is set, with the learned one."""

    def __init__(
        self, linear: nn.Linear, start: Rounded, tensor_scale: float, input_amax: float, rounding: bool
    ) -> None:
        super().__init__()
        self.source, self.bias = linear.weight.detach(), linear.bias
        self.learned = LearnedWeight(start, tensor_scale, rounding)
        self.input_amax, self.rounded = input_amax, True
        self.in_features, self.out_features = linear.in_features, linear.out_features

    @property
    def weight(self) -> torch.Tensor:
        return self.source

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.rounded:
            return nn.functional.linear(x, self.source, self.bias)
        if self.input_amax:
            x = fake_quant.nvfp4_input(x, self.input_amax)
        return nn.functional.linear(x, self.learned().to(x.dtype), self.bias)


def rounded_of(packed: nvfp4.Tensor, device: torch.device | str) -> Rounded:
    """Return a packed weight's codes and scales as tensors; each value was rounded from itself."""
    values = codec.to_torch(nvfp4.unpack(packed, "float32")).to(device)
    scale_codes = codec.to_torch(np.array(packed.block_scale)).view(torch.uint8).to(device)
    step = scale_codes.view(torch.float8_e4m3fn).float() * float(packed.tensor_scale)
    divisor = torch.where(step > 0, step, 1.0)
    codes = (values.view(len(values), -1, GROUP) / divisor[..., None]).view_as(values)
    codes = column_sweep.e2m1(codes)
    return Rounded(codes, scale_codes, step, values, torch.zeros(len(values), dtype=torch.float64), values)


class DistilledModel:
    """A model with DistilledLinear instead of the plan's linears."""

    def __init__(
        self, folder: ModelFolder, plan: Plan, token_weights: TokenWeights, activations: int, rounding: bool
    ) -> None:
        self.model = kl_trial.load(folder)
        self.device = next(self.model.parameters()).device
        self.table = with_padding(weight_table(token_weights, self.device))
        self.model.requires_grad_(False)
        inputs = folder.family.largest_of_input({n: plan.amax[n] for n in plan.packed if n in plan.amax})
        self.linears: dict[str, DistilledLinear] = {}
        for name, packed in plan.packed.items():
            place = folder.family.in_form(name, multimodal=False)
            parent, _, leaf = place.rpartition(".")
            owner = self.model.get_submodule(parent)
            start, top = rounded_of(packed, self.device), inputs.get(name, 0.0) if activations == 4 else 0.0
            linear = DistilledLinear(getattr(owner, leaf), start, float(packed.tensor_scale), top, rounding)
            setattr(owner, leaf, linear)
            self.linears[name] = linear
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

    @torch.no_grad()
    def judge(self, batches: Sequence[Batch]) -> float:
        """Return the mean KL over fixed answers."""
        sums = [self.kl(b) for b in batches]
        return float(sum(float(s) for s, _ in sums) / max(1e-30, sum(float(n) for _, n in sums)))


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
    activations: int = 4,
    rounding: bool = False,
    seed: int = 0,
    travel: float = TRAVEL,
    progress: Progress = SILENT,
) -> Learned:
    """Learn the block scales of the plan's linears, and the rounding with `rounding`, and keep the best in `plan.packed`."""
    whole = DistilledModel(folder, plan, token_weights, activations, rounding)
    answers = list(kl_trial.spread([s for s in samples if any(token_weights.get(k, 0.0) > 0 for k in s.kinds)]))
    held_out = min(JUDGE, len(answers) // HELD_OUT)
    judged = make_batches(answers[: held_out or JUDGE], 4096)
    answers = answers[held_out:]
    generator = torch.Generator().manual_seed(seed)

    def loss() -> torch.Tensor:
        drawn = torch.randperm(len(answers), generator=generator)[:BATCH].tolist()
        total, count = whole.kl(padded([answers[i] for i in drawn]))
        return total / count

    def report(step: int, kl: float) -> None:
        progress.update(step, steps, f"distilling: step {step} of {steps}, KL {kl:.4g}")

    weights = [linear.learned for linear in whole.linears.values()]
    learned = follow_signs(weights, loss, lambda: whole.judge(judged), steps, travel, report)
    if learned.best:
        for name, linear in whole.linears.items():
            plan.packed[name] = linear.learned.result().packed(linear.learned.tensor_scale)
    return learned

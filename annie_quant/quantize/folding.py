"""Activation-aware scales, searched and folded exactly into the producer of an activation, so that the result is plain NVFP4.

For each foldable activation s is (mean |x|)^alpha, or that divided by (mean |w|)^(1 - alpha). The alpha with the least error of
the linears that read the activation is chosen, with weights and activations rounded as in a W4A4 kernel. Prompts and responses
have the same number of tokens in that error: an input that only prompts have must not become an outlier of all blocks. ModelOpt's
search is similar, but its export folds Qwen3.5's norms wrongly and leaves pre_quant_scale on down_proj and o_proj.
Every layer is verified: with folded, unrounded weights its outputs must be the source's.

The producer of an activation, and how it is scaled, is in the family's description (annie_quant.models).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.core.errors import CheckpointError
from annie_quant.core.progress import Progress
from annie_quant.models import Family, LinearInput
from annie_quant.models.formats import LARGEST_NVFP4, NVFP4
from annie_quant.offline.codec import fake_quant, round_weight, to_numpy
from annie_quant.quantize.calibration_samples import PADDING, PROMPT
from annie_quant.quantize.calibration_text import read_answers
from annie_quant.quantize.formats import choose
from annie_quant.quantize.input_stats import LargestInput
from annie_quant.quantize.layerwise import DecoderLayer, DecoderLayers
from annie_quant.quantize.plan import QuantizationPlan, announce_size
from annie_quant.quantize.shared_text import arrange
from annie_quant.quantize.strategy import Job, StrategyOptions

ALPHAS = tuple(i / 20 for i in range(21))
SAMPLED_TOKENS = 512  # of prompts, and as many of responses, on which a scale is judged
# Least mean input of a column, relative to the mean of all. Weaker columns are 0 for most tokens, and as outliers they would harm
# the others.
WEAKEST = 0.01
MAX_OUTPUT_CHANGE = (
    1e-3  # largest difference of a layer's outputs in float32, relative to the largest output
)
VERIFIED_TOKENS = 512
NORM_DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
}  # types to which a folded norm is rounded
MAX_ROUNDING = 1.25  # an element is not scaled where rounding the norm changes its scale by more than this factor


def folded_model(job: Job[StrategyOptions], progress: Progress) -> QuantizationPlan:
    """Return the plan with all linears in NVFP4 (W4A4), of folded weights that are rounded to nearest."""
    folder = ModelFolder(job.model)
    formats = dict.fromkeys(choose(folder, job.exclude), NVFP4)
    announce_size(folder, formats, progress)
    calibration = read_answers(job, progress)
    text = arrange(calibration.samples)
    model = DecoderLayers(folder, text.batches, progress, "folding")
    plan = QuantizationPlan.of(formats)
    plan.calibration = calibration.use
    for layer in model:
        folded = fold_layer(layer, set(formats), text.counts(model.device))
        plan.tensors |= folded.tensors
        for name in folded.amax.keys() & formats.keys():
            plan.linears[name].input_amax = folded.amax[name]
        for name in folded.tokens.keys() & formats.keys():
            plan.linears[name].tokens = folded.tokens[name]
    return plan


@dataclass
class FoldedLayer:
    """What folding makes of a layer, by full names.

    tensors: tensors that changed, float32.
    amax: largest inputs; no expert that saw no token.
    tokens: first linear of those of an expert that read one input → calibration tokens that it saw.
    """

    tensors: dict[str, np.ndarray]
    amax: dict[str, float]
    tokens: dict[str, int]


class InputSampler(LargestInput):
    """Also keeps inputs of prompt and response tokens, and the mean |x|, in which both kinds of token count the same.

    counts: how many positions of each kind a code stands for, float32 [codes, KINDS].
    totals: numbers of prompt and response positions in the text.
    rows: number of inputs to keep of each kind, evenly spread.
    """

    def __init__(
        self, name: str, counts: torch.Tensor, totals: tuple[float, float], rows: int
    ) -> None:
        super().__init__(name)
        of_prompts = counts[:, PROMPT]
        self.counts_by_kind = (of_prompts, counts.sum(1) - of_prompts)
        self.strides = [max(1.0, total / rows) for total in totals]
        self.counts = [0.0, 0.0]
        self.samples: list[torch.Tensor] = []
        self.magnitudes: list[torch.Tensor | None] = [None, None]

    def __call__(self, x: torch.Tensor, kinds: torch.Tensor | None = None) -> None:
        assert kinds is not None
        super().__call__(x, kinds)
        for part, positions in enumerate(self.counts_by_kind):
            count = positions[kinds]
            # Systematic sampling: one input each time that the positions have grown by a stride.
            sums = self.counts[part] + count.double().cumsum(0)
            steps = (sums / self.strides[part]).ceil()
            first = steps.new_tensor([math.ceil(self.counts[part] / self.strides[part])])
            times = steps.diff(prepend=first).long()
            self.samples.append(x.repeat_interleave(times, 0).float())
            if len(sums):
                self.counts[part] = float(sums[-1])
            magnitude = (x.abs().float() * count[:, None]).sum(0).double()
            before = self.magnitudes[part]
            self.magnitudes[part] = magnitude if before is None else before + magnitude

    def mean(self) -> torch.Tensor:
        """Return the mean |x_k|, float32 [K]."""
        pairs = zip(self.magnitudes, self.counts, strict=True)
        means = [magnitude / count for magnitude, count in pairs if magnitude is not None and count]
        return torch.stack(means).mean(0).float()

    def inputs(self) -> torch.Tensor:
        """Return the kept inputs, float32 [n, K]."""
        return torch.cat(self.samples)


def fold_layer(layer: DecoderLayer, chosen: set[str], counts: torch.Tensor) -> FoldedLayer:
    """Search and fold the scales of a layer. The source layer's outputs become the next layer's inputs.

    chosen: full names of the linears that are quantized.
    counts: how many positions of each kind a code of the text stands for, float32 [codes, KINDS].
    Nothing is folded into routed experts: the router reads the norm before them, too.
    """
    folder = layer.model.folder
    family = layer.model.folder.family
    codes = [torch.from_numpy(b.kinds[b.kinds != PADDING]) for b in layer.model.batches]
    positions = counts.cpu()[torch.cat(codes)].double().sum(0)
    of_prompts = float(positions[PROMPT])
    totals = (of_prompts, float(positions.sum()) - of_prompts)
    samplers = {
        group[0]: InputSampler(f"{layer.name}.{group[0]}", counts, totals, SAMPLED_TOKENS)
        for group in layer.groups()
        if not layer.experts_of(group[0])
    }
    observers = {g[0]: LargestInput(f"{layer.name}.{g[0]}") for g in layer.expert_groups()}
    state = layer.model.states[0][:1, :VERIFIED_TOKENS].float()
    layer.advance({**samplers, **observers})
    before = {n: t.detach().float() for n, t in layer.module.state_dict().items()}
    after = dict(before)
    scales = {}
    for site in family.inputs:
        readers = [r for r in site.linears if f"{layer.name}.{r}" in chosen]
        # Rows that are stored in 16 bits cannot take a scale exactly.
        exact = site.fold == "norm" or f"{layer.name}.{site.producer}" in chosen
        if not site.searched or not readers or not exact:
            continue
        s = search_scale(site, readers, samplers[site.linears[0]], before)
        stored = NORM_DTYPES.get(folder.info(f"{layer.name}.{site.producer}.weight").dtype)
        scales[site.linears[0]] = fold_scale(after, family, site, s, stored)
    if scales:
        verify_fold(layer, state, before, after)
    result = FoldedLayer({}, {}, {})
    for name, tensor in after.items():
        if tensor is not before[name]:
            result.tensors[f"{layer.name}.{name}"] = to_numpy(tensor.cpu())
    for first, observer in observers.items():
        result.tokens[f"{layer.name}.{first}"] = observer.tokens
    for group in layer.groups():
        sampler = samplers.get(group[0])
        if sampler:
            top = sampler.amax(scales.get(group[0]))
        elif observers[group[0]].tokens:
            top = observers[group[0]].amax()
        else:
            continue
        result.amax |= {f"{layer.name}.{name}": top for name in group}
    return result


def search_scale(
    site: LinearInput, readers: list[str], sampler: InputSampler, weights: dict[str, torch.Tensor]
) -> torch.Tensor:
    """Return the scale (of shape_of_scale) with the least squared error over all alphas, with and without the weights' means.

    Alpha 0 without the weights' means leaves everything as it is.
    """
    x = sampler.inputs()
    mean = sampler.mean()
    mean = mean.clamp_min(WEAKEST * float(mean.mean())).clamp_min(1e-8)
    plain = [weights[f"{r}.weight"] for r in readers]
    expected = [x @ w.T for w in plain]
    best = torch.ones_like(mean)
    least = float("inf")
    magnitude = torch.cat(plain).abs().mean(0)
    magnitude = magnitude.clamp_min(WEAKEST * float(magnitude.mean())).clamp_min(1e-8)
    for s in (*(mean**a for a in ALPHAS), *(mean**a / magnitude ** (1 - a) for a in ALPHAS[:-1])):
        s = shape_of_scale(site, s / (s.max() * s.min()).sqrt(), weights[f"{site.producer}.weight"])
        full = s.repeat(x.shape[1] // len(s))
        scaled = [w * full for w in plain]
        tensor_scale = max(float(w.abs().max()) for w in scaled) / LARGEST_NVFP4
        rounded = fake_quant(x / full, sampler.amax(full) / LARGEST_NVFP4)
        error = 0.0
        for w, y in zip(scaled, expected, strict=True):
            error += float((rounded @ round_weight(w, tensor_scale).T - y).square().sum())
        if error < least:
            best = s
            least = error
    return best


def verify_fold(
    layer: DecoderLayer,
    state: torch.Tensor,
    before: dict[str, torch.Tensor],
    after: dict[str, torch.Tensor],
) -> None:
    """Check that the folded layer's outputs for hidden states, in float32, are those of the source's layer."""
    module = layer.module
    model = layer.model
    with torch.inference_mode():
        module.load_state_dict(before, assign=True)
        expected = model.forward(module, state)
        module.load_state_dict(after, assign=True)
        difference = float(
            (model.forward(module, state) - expected).abs().max() / expected.abs().max()
        )
    if not difference <= MAX_OUTPUT_CHANGE:
        raise CheckpointError(
            f"{layer.name}: folding changes its outputs by {difference:.2g}", "report this"
        )


def shape_of_scale(site: LinearInput, s: torch.Tensor, producer: torch.Tensor) -> torch.Tensor:
    """Return s as it can be folded: heads that share a norm's weight get the geometric mean of their scales."""
    return s.reshape(-1, producer.numel()).log().mean(0).exp() if site.per_head else s


def fold_scale(
    weights: dict[str, torch.Tensor],
    family: Family,
    site: LinearInput,
    s: torch.Tensor,
    stored: torch.dtype | None,
) -> torch.Tensor:
    """Fold s (float32, of shape_of_scale) into `weights`, the layer's tensors in float32, in place.

    With x' = x / s from its producer and W' = W diag(s) a linear's result is the same. A norm's weight is stored in 16 bits, so the
    new weight is rounded first, and s becomes what the rounded weight divides by: the stored fold is exact. Linears that read the
    same activation and are not quantized are scaled, too.

    stored: the dtype that a norm is written in, or None where it is not rounded.
    Returns the scale that was folded, [K] of the linears.
    """
    name = f"{site.producer}.weight"
    producer = weights[name]
    if site.fold == "rows":
        weights[name] = producer / s[:, None]
        bias = f"{site.producer}.bias"
        if bias in weights:
            weights[bias] = weights[bias] / s
    else:
        one = 1.0 if family.adds_one(name) else 0.0
        new = (producer + one) / s - one
        new = new if stored is None else new.to(stored).float()
        exact = (producer + one) / (new + one)
        valid = torch.isfinite(exact) & (exact > s / MAX_ROUNDING) & (exact < s * MAX_ROUNDING)
        weights[name] = torch.where(valid, new, producer)
        s = torch.where(valid, exact, torch.ones_like(s))
    for reader in site.linears:
        columns = weights[f"{reader}.weight"].shape[1]
        weights[f"{reader}.weight"] = weights[f"{reader}.weight"] * s.repeat(columns // len(s))
    return s.repeat(weights[f"{site.linears[0]}.weight"].shape[1] // len(s))

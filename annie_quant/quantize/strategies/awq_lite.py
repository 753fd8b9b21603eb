"""awq_lite (the founding strategy A): activation-aware scales, folded exactly, so that plain NVFP4 remains.

For each foldable activation s = (mean |x| over response tokens)^alpha, alpha searched for the least error of the linears
that read it, with weights and activations rounded as a W4A4 kernel does. ModelOpt's own search is the same idea, but
its export folds Qwen3.5's norms wrongly and leaves pre_quant_scale on down_proj and o_proj; see folds.py. Every
layer is proved before it is kept: its outputs with folded, unrounded weights must be the source's.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.errors import CheckpointError, need
from annie_quant.quantize import calibration_samples, fake_quant
from annie_quant.quantize.awq_folding import SITES, Site, fold, shape_of_scale
from annie_quant.quantize.export import NVFP4, Decided, choose, export, say_size
from annie_quant.quantize.input_stats import Gather
from annie_quant.quantize.job import Job, Report
from annie_quant.quantize.layerwise import Layer, See, Walk

NAME = "awq_lite"
SUMMARY = "A: activation-aware scales searched on response tokens and folded exactly into norms; plain NVFP4 W4A4"

ALPHAS = tuple(i / 20 for i in range(21))
SAMPLE = 1024  # response tokens that an alpha is judged on
PROOF = 1e-3  # largest difference of a layer's outputs, float32, against the size of the outputs


def quantize(job: Job, report: Report) -> None:
    folder = ModelFolder(job.model)
    chosen = choose(folder, job)
    say_size(folder, dict.fromkeys(chosen, NVFP4), job, report)
    conversations = calibration_samples.read(job)
    decided = Decided(dict.fromkeys(chosen, NVFP4))
    weights: dict[str, np.ndarray] = {}
    for layer in Walk(folder, calibration_samples.batches(conversations), report, "folding"):
        weights |= fold_layer(layer, folder, set(chosen), decided.amax)
    decided.weights = weights
    export(folder, job, decided)


class Sample(Gather):
    """Also keeps up to SAMPLE response tokens' inputs, evenly over all of them, and mean |x|."""

    def __init__(self, device: str, total: int) -> None:
        super().__init__(calibration_samples.RESPONSE, device)
        self.stride, self.count = max(1, total // SAMPLE), 0
        self.kept: list[Any] = []
        self.sizes: Any = None

    def __call__(self, x: Any, marks: Any) -> None:
        super().__call__(x, marks)
        rows = x[self.table[marks] > 0].float()
        first = -self.count % self.stride
        self.count += len(rows)
        self.kept.append(rows[first :: self.stride].clone())
        sizes = rows.abs().sum(0).double()
        self.sizes = sizes if self.sizes is None else self.sizes + sizes

    def mean(self) -> Any:
        return (self.sizes / max(1, self.count)).float()

    def inputs(self) -> Any:
        return need("torch", "quantize").cat(self.kept)


def fold_layer(layer: Layer, folder: ModelFolder, chosen: set[str], amax: dict[str, float]) -> dict[str, np.ndarray]:
    """The layer's changed tensors by full name; `amax` gets the largest inputs after folding."""
    from annie_quant.hf.codec import to_numpy

    total = sum(int((b.marks > 0).sum()) for b in layer.walk.batches)
    hear = {group[0]: Sample(layer.walk.device, total) for group in layer.groups()}
    see: dict[str, See] = dict(hear)
    state = min(layer.walk.states, key=lambda s: s.numel()).float()
    layer.advance(see)
    before = {n: t.detach().float() for n, t in layer.module.state_dict().items()}
    after, scales = dict(before), {}
    for site in SITES:
        taken = [r for r in site.readers if f"{layer.name}.{r}" in chosen]
        # Rows that are stored in 16 bits cannot take a scale exactly: then down_proj is left without one.
        if not taken or (site.kind == "rows" and f"{layer.name}.mlp.up_proj" not in chosen):
            continue
        s = search(site, taken, hear[site.readers[0]], before)
        stored = None if site.kind == "rows" else as_stored(folder, f"{layer.name}.{site.producer}")
        scales[site.readers[0]] = fold(after, site, s, stored)
    prove(layer, state, before, after)
    for group in layer.groups():
        s = scales.get(group[0])
        for name in group:
            amax[f"{layer.name}.{name}"] = hear[group[0]].amax(s)
    return {f"{layer.name}.{n}": to_numpy(t.cpu()) for n, t in after.items() if t is not before[n]}


def search(site: Site, taken: list[str], sample: Sample, weights: dict[str, Any]) -> Any:
    """The scale (of shape_of_scale) with the least squared error over alpha; alpha 0 is no scale at all."""
    torch = need("torch", "quantize")
    x, mean = sample.inputs(), sample.mean().clamp_min(1e-8)
    own = [weights[f"{r}.weight"] for r in taken]
    wanted = [x @ w.T for w in own]
    best, least = None, float("inf")
    for alpha in ALPHAS:
        s = mean**alpha
        s = shape_of_scale(site, s / (s.max() * s.min()).sqrt(), weights[site.producer])
        full = s.repeat(x.shape[1] // len(s))
        scaled = [w * full for w in own]
        tensor_scale = max(float(w.abs().max()) for w in scaled) / fake_quant.LARGEST_NVFP4
        rounded = fake_quant.nvfp4_input(x / full, sample.amax(full))
        error = 0.0
        for w, y in zip(scaled, wanted, strict=True):
            error += float((rounded @ fake_quant.nvfp4_weight(w, tensor_scale).T - y).square().sum())
        if error < least:
            best, least = s, error
    return torch.ones_like(mean) if best is None else best


def as_stored(folder: ModelFolder, name: str) -> Any:
    torch = need("torch", "quantize")
    return {"BF16": torch.bfloat16, "F16": torch.float16}.get(folder.info(name).dtype)


def prove(layer: Layer, state: Any, before: dict[str, Any], after: dict[str, Any]) -> None:
    """The folded layer's outputs for a batch of hidden states, in float32, are the source layer's."""
    torch = need("torch", "quantize")
    module, walk = layer.module, layer.walk
    with torch.inference_mode():
        module.load_state_dict(before, assign=True)
        wanted = walk.through(module, state)
        module.load_state_dict(after, assign=True)
        difference = float((walk.through(module, state) - wanted).abs().max() / wanted.abs().max())
    if not difference <= PROOF:
        raise CheckpointError(f"{layer.name}: folding changes its outputs by {difference:.2g}", "report this")

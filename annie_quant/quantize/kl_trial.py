"""KL divergence on response tokens between a model and itself with some linears rounded: the harm of a format.

The bf16 model is loaded once, and its logits for the scored answers are kept. A trial rounds some linears' weights and
inputs as a server would, runs the same answers, and restores the model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from annie_quant import nvfp4
from annie_quant.checkpoint.quantized_tensors import LARGEST_NVFP4
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.evaluate.engine import Engine, Row
from annie_quant.hf.loading import load as load_model
from annie_quant.models import Family
from annie_quant.quantize import fake_quant
from annie_quant.quantize.calibration_samples import Sample, TokenWeights
from annie_quant.quantize.formats import FP8, QUANTIZED_INPUTS
from annie_quant.quantize.layerwise import device_and_dtype

LEAST_ANSWERS = 8  # that share a trial's tokens


class Trial:
    """One model, and its own logits as the reference.

    token_weights: how much a token counts, by its kind.
    tokens: of answers, scored at most; every trial is a pass over them, and their logits stay in memory. Longer answers than a
        LEAST_ANSWERS-th of them are cut.
    """

    def __init__(
        self, folder: ModelFolder, samples: Sequence[Sample], token_weights: TokenWeights, tokens: int
    ) -> None:
        self.family, self.model = folder.family, load(folder)
        self.engine = Engine(self.model)
        self.rows: list[Row] = []
        self.weights: list[torch.Tensor] = []
        device, total = next(self.model.parameters()).device, 0
        for sample in spread(samples):
            answer = sample.answer[: max(1, tokens // LEAST_ANSWERS)]
            if total + len(answer) <= tokens:
                total += len(answer)
                kinds = sample.kinds[len(sample.prompt) - 1 :][: len(answer)]
                self.rows.append(Row(sample.prompt, answer))
                self.weights.append(torch.tensor([token_weights.get(k, 0.0) for k in kinds], device=device))
        # float16 halves the memory for large vocabularies; the reference is compared with its own rounded self, too.
        self.reference = {i: torch.log_softmax(logits, -1).half() for i, logits in self.engine.scores(self.rows)}

    def divergence(self) -> float:
        """Return the weighted mean KL(reference || model as it is now), in nats."""
        total = weight = 0.0
        for i, logits in self.engine.scores(self.rows):
            p, q = self.reference[i].float(), torch.log_softmax(logits, -1)
            kl = (p.exp() * (p - q)).sum(-1).clamp_min(0)
            total += float((kl * self.weights[i]).sum())
            weight += float(self.weights[i].sum())
        return total / max(weight, 1e-30)

    def cost(
        self,
        formats: Mapping[str, str],
        amax: Mapping[str, float],
        scale: nvfp4.Scale,
        importance: Mapping[str, np.ndarray],
    ) -> float:
        """Return the divergence with these linears rounded. All keys are the checkpoint's names of linears."""
        with rounded(self.model, self.family, formats, amax, scale, importance):
            return self.divergence()

    def largest_inputs(self, names: Sequence[str]) -> dict[str, float]:
        """Return linear → its largest |input| over the scored answers and their prompts, if it had any."""
        largest: dict[str, float] = {}

        def observe(name: str, module: Any, args: tuple[Any, ...]) -> None:
            if args[0].numel():
                largest[name] = max(largest.get(name, 0.0), float(args[0].detach().abs().max()))

        with contextlib.ExitStack() as hooks, torch.inference_mode():
            for name in names:
                linear = self.model.get_submodule(self.family.in_form(name, multimodal=False))
                hooks.enter_context(linear.register_forward_pre_hook(partial(observe, name)))
            self.divergence()
        return largest

    def cost_of_inputs(self, amax: Mapping[str, float]) -> float:
        """Return the divergence with only inputs rounded, to NVFP4. amax: linear → its largest |input|."""
        with contextlib.ExitStack() as hooks, torch.inference_mode():
            for name, top in self.family.largest_of_input(amax).items():
                linear = self.model.get_submodule(self.family.in_form(name, multimodal=False))
                hooks.enter_context(linear.register_forward_pre_hook(input_hook(fake_quant.nvfp4_input, top)))
            return self.divergence()


def spread(samples: Sequence[Sample]) -> Iterator[Sample]:
    """Yield samples of all categories in turn, so that any number of first ones holds them in equal parts."""
    by_category: dict[str, list[Sample]] = {}
    for sample in samples:
        by_category.setdefault(sample.category, []).append(sample)
    for index in range(max(map(len, by_category.values()))):
        yield from (rows[index] for rows in by_category.values() if index < len(rows))


@contextlib.contextmanager
def rounded(
    model: Any,
    family: Family,
    formats: Mapping[str, str],
    amax: Mapping[str, float],
    scale: nvfp4.Scale,
    importance: Mapping[str, np.ndarray],
) -> Iterator[None]:
    """Round these linears' weights, and where the format quantizes them their inputs; restore the model at the end."""
    linears = {n: model.get_submodule(family.in_form(n, multimodal=False)) for n in formats}
    top = family.largest_of_group({n: float(m.weight.detach().abs().max()) for n, m in linears.items()})
    inputs = family.largest_of_input({n: amax[n] for n, f in formats.items() if f in QUANTIZED_INPUTS})
    undo: list[Callable[[], object]] = []
    try:
        for name, linear in linears.items():
            kind, before = formats[name], linear.weight.data
            if kind == FP8:
                linear.weight.data = fake_quant.fp8(before, top[name])
            else:
                tensor_scale = top[name] / LARGEST_NVFP4
                linear.weight.data = fake_quant.nvfp4_weight(before, tensor_scale, scale, importance.get(name))
            undo.append(partial(setattr, linear.weight, "data", before))
            if name in inputs:
                rounder = fake_quant.fp8 if kind == FP8 else fake_quant.nvfp4_input
                undo.append(linear.register_forward_pre_hook(input_hook(rounder, inputs[name])).remove)
        with torch.inference_mode():
            yield
    finally:
        for restore in undo:
            restore()


def input_hook(rounder: Callable[[Any, float], Any], amax: float) -> Callable[..., tuple[Any, ...]]:
    def before(module: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (rounder(args[0], amax), *args[1:])

    return before


def load(folder: ModelFolder) -> Any:
    """Load the source model: on a GPU where there is one, else on the CPU."""
    device, dtype = device_and_dtype(folder)
    return load_model(folder.path, dtype=dtype, device=device)

"""The largest input of each linear over calibration text, layer by layer, and the largest key and value of each attention.

Linears that read the same input share one measurement.

Routed experts that saw no calibration token get the layer's largest activation scale, which servers use for all experts anyway,
and their weights are rounded without statistics.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from annie_quant import models
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.core.errors import CheckpointError
from annie_quant.core.progress import Progress
from annie_quant.documents import CalibrationUse
from annie_quant.models.formats import LARGEST_E4M3, Format
from annie_quant.offline.loading import load
from annie_quant.quantize.calibration_samples import CalibrationSample
from annie_quant.quantize.calibration_text import read_answers, read_whole_conversations
from annie_quant.quantize.layerwise import DecoderLayers
from annie_quant.quantize.plan import QuantizationPlan, announce_size
from annie_quant.quantize.shared_text import arrange
from annie_quant.quantize.strategy import Job, StrategyOptions

InputStats = tuple[dict[str, float], dict[str, int]]  # `amax` and `tokens` of QuantizationPlan
ENOUGH_TOKENS = 16  # tokens; as many as a block has columns


def coverage_line(tokens: Mapping[str, int]) -> str:
    """Return how many experts saw enough calibration tokens. tokens: of QuantizationPlan."""
    experts = {name.rpartition(".")[0]: count for name, count in tokens.items()}
    unseen = [name for name, count in experts.items() if not count]
    covered = sum(count >= ENOUGH_TOKENS for count in experts.values())
    line = (
        f"expert coverage: {covered} of {len(experts)} experts saw {ENOUGH_TOKENS} tokens or more"
    )
    if not unseen:
        return line
    more = " …" if unseen[3:] else ""
    return f"{line}; {len(unseen)} saw none ({', '.join(unseen[:3])}{more})"


class LargestInput:
    """Observes one input: the largest |x| of each column, from calls with x [n, K] and kinds [n]. name: for messages."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.tokens = 0
        self.largest: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor, kinds: torch.Tensor | None = None) -> None:
        if not len(x):
            return
        self.tokens += len(x)
        top = x.abs().amax(0).float()
        self.largest = top if self.largest is None else torch.maximum(self.largest, top)

    def amax(self, scale: torch.Tensor | None = None) -> float:
        """Return the largest |x|, or |x / scale| for a scale [K]; 0 before any token. Raises CheckpointError for NaN and inf."""
        if self.largest is None:
            return 0.0
        top = float((self.largest if scale is None else self.largest / scale).max())
        if not np.isfinite(top):
            raise CheckpointError(
                f"{self.name}: NaN or inf among its inputs", "annie-quant audit the model"
            )
        return top


def max_calibrated_plan(
    job: Job[StrategyOptions], formats: Mapping[str, Format], progress: Progress
) -> QuantizationPlan:
    """Return the plan with these formats of linears, by the largest weights and inputs over whole conversations.

    This is ModelOpt's max calibration without ModelOpt. Weights, block scales and tensor scales are ModelOpt's bytes (its CPU
    arithmetic). Input scales come from the same text; they differ by the rounding of ModelOpt's bf16 forward pass where layers
    are computed in float32 here (tests/quantize/test_max_calibration.py).
    """
    announce_size(ModelFolder(job.model), formats, progress)
    amax, tokens, use = calibrated(job, list(formats), progress)
    plan = QuantizationPlan.of(formats, amax, tokens, job.scale)
    plan.calibration = use
    return plan


def calibrated(
    job: Job[StrategyOptions], linears: Sequence[str], progress: Progress
) -> tuple[dict[str, float], dict[str, int], CalibrationUse]:
    """Return InputStats of linears over the job's whole conversations, and which conversations were used."""
    folder = ModelFolder(job.model)
    text = read_whole_conversations(job, progress)
    measure = largest_inputs if models.is_known(folder.config) else largest_inputs_of_whole_model
    amax, tokens = measure(folder, linears, text.samples, progress)
    return amax, tokens, text.use


def largest_inputs(
    folder: ModelFolder,
    linears: Iterable[str],
    samples: Sequence[CalibrationSample],
    progress: Progress,
) -> InputStats:
    """Return the largest |input| of linears in the decoder's layers; 0 for an expert that saw no token.

    samples: one per conversation.
    """
    text = arrange(samples)
    model = DecoderLayers(folder, text.batches, progress, "calibrating")
    chosen = set(linears)
    amax: dict[str, float] = {}
    tokens: dict[str, int] = {}
    for layer in model:
        groups = layer.chosen_groups(chosen)
        observers = {g[0]: LargestInput(f"{layer.name}.{g[0]}") for g in groups}
        layer.advance(observers)
        for group in groups:
            observer = observers[group[0]]
            amax |= dict.fromkeys((f"{layer.name}.{name}" for name in group), observer.amax())
            if layer.experts_of(group[0]):
                tokens[observer.name] = observer.tokens
    return amax, tokens


def largest_inputs_of_whole_model(
    folder: ModelFolder,
    linears: Iterable[str],
    samples: Sequence[CalibrationSample],
    progress: Progress,
) -> InputStats:
    """Return the largest |input| of linears of an unknown family: transformers runs the model, one conversation at a time."""
    model = load(
        folder.path, dtype=torch.bfloat16, device="cuda" if torch.cuda.is_available() else "cpu"
    )
    modules: dict[str, Any] = dict(model.named_modules())
    observers = {name: LargestInput(name) for name in linears if name in modules}

    def before(
        observer: LargestInput, module: torch.nn.Module, args: tuple[torch.Tensor, ...]
    ) -> None:
        observer(args[0].reshape(-1, args[0].shape[-1]))

    for name, observer in observers.items():
        modules[name].register_forward_pre_hook(partial(before, observer))
    with torch.inference_mode():
        for number, sample in enumerate(samples, 1):
            # Without the head: the logits of a long row would take more memory than the model.
            model.base_model(torch.tensor([sample.ids], device=model.device), use_cache=False)
            progress.update(
                number, len(samples), f"calibrating: conversation {number} of {len(samples)}"
            )
    return {name: observer.amax() for name, observer in observers.items()}, {}


# ---- the KV cache


def calibrate_kv_cache(
    job: Job[StrategyOptions], plan: QuantizationPlan, progress: Progress
) -> None:
    """Set the plan's scales of keys and values in FP8, by layer, calibrated on the job's conversations.

    A server that stores keys and values in FP8 divides them by k_scale and v_scale first. Without scales in the checkpoint both
    are 1.0, and vLLM cannot calibrate them itself for hybrid models. The scale, amax / 448, is that of ModelOpt 0.47's export.
    """
    text = read_answers(job, progress)
    plan.calibration = plan.calibration or text.use
    for layer, tops in largest_keys_and_values(job.model, text.samples, progress).items():
        for name, top in zip(("keys", "values"), tops, strict=True):
            if not 0 < top < math.inf:
                raise CheckpointError(
                    f"{layer}: its largest {name} are {top}", "annie-quant audit the model"
                )
        plan.kv_scales[layer] = tops[0] / LARGEST_E4M3, tops[1] / LARGEST_E4M3
    every = [scale for pair in plan.kv_scales.values() for scale in pair]
    progress.message(
        f"KV cache in FP8: {len(every)} scales from {min(every):.3g} to {max(every):.3g}"
    )


def largest_keys_and_values(
    model: Path, samples: Sequence[CalibrationSample], progress: Progress
) -> dict[str, tuple[float, float]]:
    """Return layer → the largest |key| and |value| that enter the cache, of every full-attention layer."""
    folder = ModelFolder(model)
    text = arrange(samples)
    layers = DecoderLayers(folder, text.batches, progress, "calibrating the KV cache")
    tops: dict[str, tuple[float, float]] = {}
    for layer in layers:
        keys_and_values: list[torch.Tensor] = []

        def observe(key: torch.Tensor, value: torch.Tensor) -> None:
            largest = torch.stack((key.abs().max(), value.abs().max()))
            keys_and_values.append(largest)  # noqa: B023  the layer ends before the next list

        with layers.observed_keys(observe):
            layer.advance()
        if keys_and_values:
            tops[layer.name] = tuple(torch.stack(keys_and_values).amax(0).tolist())
    return tops

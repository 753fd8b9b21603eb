"""Scales of an FP8 KV cache: calibrated ones, or none for ModelOpt's cast.

A server that stores keys and values in FP8 divides them by k_scale and v_scale first. Without scales in the checkpoint both are
1.0, and vLLM cannot calibrate them itself for hybrid models. Tensor names and the scale, amax / 448, are those of ModelOpt 0.47's
export (modelopt/torch/export/quant_utils.py): k_scale and v_scale of the projections. Its `fp8_cast` stores no scale at all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from annie_quant.checkpoint.dialects.modelopt import LARGEST_E4M3
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.core.errors import CheckpointError, UsageError
from annie_quant.core.progress import Progress

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

    from annie_quant.quantize.calibration_samples import CalibrationSample
    from annie_quant.quantize.strategy import Job, StrategyOptions

NONE, FP8, CAST = "none", "fp8", "fp8_cast"
CHOICES = (NONE, FP8, CAST)
NAME = "annie_quant_kv_amax"  # of the attention function that records keys and values


def check(kind: str) -> str:
    """Return a KV cache's format. Raises UsageError for an unknown one, and for NVFP4 with the reason."""
    if kind == "nvfp4":
        raise UsageError(
            "an NVFP4 KV cache is not exported: with thinking and tools it is known to loop at token 0",
            "--kv-cache fp8 with --calib-data",
        )
    if kind not in CHOICES:
        raise UsageError(f"unknown KV cache {kind!r}", f"choose one of: {', '.join(CHOICES)}")
    return kind


def calibrated_scales(job: Job[StrategyOptions], progress: Progress) -> dict[str, tuple[float, float]]:
    """Return layer → the scales of its keys and values, calibrated on the job's conversations."""
    from annie_quant.quantize.calibration_samples import read_samples

    scales = {}
    for layer, tops in largest(ModelFolder(job.model), read_samples(job), progress).items():
        for name, top in zip(("keys", "values"), tops, strict=True):
            if not 0 < top < math.inf:
                raise CheckpointError(f"{layer}: its largest {name} are {top}", "annie-quant audit the model")
        scales[layer] = tops[0] / LARGEST_E4M3, tops[1] / LARGEST_E4M3
    every = [scale for pair in scales.values() for scale in pair]
    progress.message(f"KV cache in FP8: {len(every)} scales from {min(every):.3g} to {max(every):.3g}")
    return scales


def largest(
    folder: ModelFolder, samples: Sequence[CalibrationSample], progress: Progress
) -> dict[str, tuple[float, float]]:
    """Return layer → the largest |key| and |value| that enter the cache, of every full-attention layer."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    from annie_quant.offline.engine import use_attention
    from annie_quant.quantize.calibration_samples import make_batches
    from annie_quant.quantize.layerwise import DecoderLayers

    layers = DecoderLayers(folder, make_batches(samples), progress, "calibrating the KV cache")
    tops: dict[str, tuple[float, float]] = {}
    current = ""

    def attention(module: Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Any:
        before = tops.get(current, (0.0, 0.0))  # keys are those after the rotary embedding
        tops[current] = (max(before[0], float(key.abs().max())), max(before[1], float(value.abs().max())))
        return sdpa_attention_forward(module, query, key, value, *args, **options)

    ALL_ATTENTION_FUNCTIONS.register(NAME, attention)
    with use_attention(layers.model.config, NAME):
        for layer in layers:
            current = layer.name
            layer.advance()
    return tops

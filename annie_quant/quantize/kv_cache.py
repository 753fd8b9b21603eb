"""Settings and scales of an FP8 KV cache: calibrated scales, or ModelOpt's cast without any.

A server that stores keys and values in FP8 divides them by k_scale and v_scale first. Without scales in the checkpoint both are
1.0, and vLLM cannot calibrate them itself for hybrid models. Tensor names and the scale, amax / 448, are those of ModelOpt 0.47's
export (modelopt/torch/export/quant_utils.py): k_scale and v_scale of the projections. Its `fp8_cast` stores no scale at all.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from annie_quant.checkpoint import writer
from annie_quant.checkpoint.dialects import modelopt
from annie_quant.checkpoint.dialects.modelopt import LARGEST_E4M3
from annie_quant.checkpoint.shards import INDEX, SINGLE, ModelFolder
from annie_quant.core.errors import CheckpointError, UsageError
from annie_quant.core.files import write_json
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


def add(job: Job[StrategyOptions], output: Path, kind: str, progress: Progress) -> None:
    """Add the KV cache's settings, and for "fp8" its calibrated scales, to the finished checkpoint in the folder `output`."""
    if kind == FP8:
        from annie_quant.quantize import calibration_samples

        source = ModelFolder(job.model)
        tops = largest(source, calibration_samples.read_samples(job), progress)
        scales = {}
        for layer, pair in tops.items():
            for module, end, top in zip(source.family.keys_values, ("k_scale", "v_scale"), pair, strict=True):
                if not np.isfinite(top) or top <= 0:
                    raise CheckpointError(
                        f"{layer}.{module}: its largest output is {top}", "annie-quant audit the model"
                    )
                scales[f"{layer}.{module}.{end}"] = np.array(np.float32(top) / np.float32(LARGEST_E4M3), np.float32)
        add_tensors(output, scales)
        values = [float(v) for v in scales.values()]
        progress.message(f"KV cache in FP8: {len(values)} scales from {min(values):.3g} to {max(values):.3g}")
    add_settings(output)


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


def add_tensors(folder: Path, tensors: dict[str, np.ndarray]) -> None:
    """Add small tensors to a checkpoint, as one more shard."""
    shards = sorted({info.file for info in ModelFolder(folder).tensors.values()})
    total = len(shards) + 1
    part = folder / "added"
    writer.write(part, [writer.planned(n, t) for n, t in tensors.items()])
    names = {old: f"model-{i:05d}-of-{total:05d}.safetensors" for i, old in enumerate(shards, 1)}
    weight_map = {n: names[info.file] for n, info in ModelFolder(folder).tensors.items()}
    size_bytes = ModelFolder(folder).weight_bytes + sum(t.nbytes for t in tensors.values())
    last = f"model-{total:05d}-of-{total:05d}.safetensors"
    (folder / INDEX).unlink(missing_ok=True)
    for old, new in names.items():
        (folder / old).rename(folder / new)
    (part / SINGLE).rename(folder / last)
    part.rmdir()
    weight_map |= dict.fromkeys(tensors, last)
    write_json(folder / INDEX, {"metadata": {"total_size": size_bytes}, "weight_map": weight_map})


def add_settings(folder: Path) -> None:
    """Name the FP8 KV cache in config.json and hf_quant_config.json."""
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["kv_cache_scheme"] = modelopt.KV_SCHEME
    write_json(folder / "config.json", config)
    file = folder / modelopt.HF_QUANT_CONFIG
    if file.is_file():
        settings = json.loads(file.read_text())
        settings["quantization"]["kv_cache_quant_algo"] = "FP8"
        write_json(file, settings)

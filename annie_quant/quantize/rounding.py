"""Round every decoder layer of a job's model, and store each finished layer, so that an interrupted run can continue.

    job → samples → batches → per layer: Hessians, columns → plan

gptq and every recipe of best are one Method of this engine (layer_rounder.py).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.core.errors import CheckpointError
from annie_quant.core.progress import Progress
from annie_quant.quantize import shared_text
from annie_quant.quantize.backend import device_and_dtype, device_kind
from annie_quant.quantize.calibration_samples import CalibrationSample, make_batches
from annie_quant.quantize.input_stats import Coverage, one_per_layer
from annie_quant.quantize.layer_rounder import LayerResult, LayerRounder, Method, RoundingTask
from annie_quant.quantize.layer_stages import StagedRounder
from annie_quant.quantize.layerwise import DecoderLayer, DecoderLayers
from annie_quant.quantize.plan import QuantizationPlan
from annie_quant.quantize.shared_text import weight_table
from annie_quant.quantize.strategy import Job, StrategyOptions
from annie_quant.quantize.two_streams import SourceStream, StreamRounder

log = logging.getLogger(__name__)

MAX_BATCH_TOKENS = {"cpu": 16384, "cuda": 32768}  # positions of one forward pass of two streams


def round_model(
    job: Job[StrategyOptions],
    formats: Mapping[str, str],
    samples: Sequence[CalibrationSample],
    method: Method,
    progress: Progress,
    name: str = "layers",
) -> QuantizationPlan:
    """Return the plan with every linear of `formats` rounded.

    name: of the folder inside the job's work folder where finished layers are stored.
    Raises CheckpointError where a linear is in no decoder layer.
    """
    folder = ModelFolder(job.model)
    if outside := [n for n in formats if not folder.family.in_decoder(n)]:
        raise CheckpointError(f"{min(outside)} is in no decoder layer", f"--exclude-layers {min(outside)}")
    plan = QuantizationPlan(dict(formats), scale="amax" if method.plain else job.scale, coverage=Coverage())
    store = job.work_folder() / name
    store.mkdir(exist_ok=True)
    rounder_of: Callable[[DecoderLayer, RoundingTask], LayerRounder]
    if method.two_streams:
        tokens = MAX_BATCH_TOKENS[device_kind(device_and_dtype(folder)[0])]
        model = DecoderLayers(folder, make_batches(samples, tokens))
        table = weight_table(method.token_weights(), model.device)
        rounder_of = partial(StreamRounder, source=SourceStream([s.clone() for s in model.states]))
    else:
        text = shared_text.arrange(samples, share=shared_text.can_share(folder))
        model = DecoderLayers(folder, text.batches)
        table = text.weight_table(method.token_weights(), model.device)
        table = torch.zeros_like(table) if method.plain else table  # then only the largest inputs are needed
        rounder_of = StagedRounder
    task = RoundingTask(plan.formats, table, method, plan.scale)
    begun, fresh, count = time.monotonic(), 0, len(model.model.layers)
    for layer in model:
        left = f", {(time.monotonic() - begun) / fresh * (count - layer.index):,.0f} s left" if fresh else ""
        progress.update(layer.index, count, f"rounding: layer {layer.index + 1} of {count}{left}")
        file, rounder = store / f"layer-{layer.index:04d}.safetensors", rounder_of(layer, task)
        if file.is_file():
            result = LayerResult.load(file)
            rounder.repeat(result)
            begun = time.monotonic()
        else:
            result = rounder.round()
            result.save(file)
            fresh += 1
        for warning in one_per_layer(rounder.warnings):
            log.warning("annie-quant: %s", warning)
        plan.packed |= {f"{layer.name}.{n}": tensor for n, tensor in result.packed.items()}
        plan.amax |= {f"{layer.name}.{n}": value for n, value in result.amax.items()}
        assert plan.coverage is not None
        plan.coverage.add(layer.name, result.tokens)
    return plan

"""Round every decoder layer of a job's model, and store each finished layer, so that an interrupted run can continue.

    job → samples → batches → per layer: Hessians, columns → plan

gptq and every recipe of best are one Method of this engine (layer_rounder.py).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch

from annie_quant import nvfp4
from annie_quant.checkpoint.linears import HEAD, weight_name
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.core.errors import CheckpointError
from annie_quant.core.progress import Progress
from annie_quant.offline.engine import Row
from annie_quant.quantize import calibration_samples
from annie_quant.quantize.backend import device_kind
from annie_quant.quantize.calibration_samples import CalibrationSample, make_batches, weight_table
from annie_quant.quantize.formats import GROUP
from annie_quant.quantize.gptq import FactorError, Hessian, factor, round_columns
from annie_quant.quantize.input_stats import one_per_layer
from annie_quant.quantize.kl_trial import Trial
from annie_quant.quantize.layer_rounder import LayerResult, LayerRounder, Method, RoundingTask, StreamRounder
from annie_quant.quantize.layerwise import DecoderLayer, DecoderLayers
from annie_quant.quantize.plan import QuantizationPlan
from annie_quant.quantize.strategy import Job, StrategyOptions

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
    plan = QuantizationPlan(dict(formats), scale="amax" if method.plain else job.scale)
    store = job.work_folder() / name
    store.mkdir(exist_ok=True)
    rounder_of: Callable[[DecoderLayer, RoundingTask], LayerRounder]
    if method.two_streams:
        model = DecoderLayers(folder, make_batches(samples, MAX_BATCH_TOKENS[device_kind()]))
        table = weight_table(method.token_weights(), model.device)
        rounder_of = partial(StreamRounder, source=list(model.states))
    else:
        text = calibration_samples.arrange(samples, share=calibration_samples.can_share(folder))
        model = DecoderLayers(folder, text.batches)
        table = text.weight_table(method.token_weights(), model.device)
        table = torch.zeros_like(table) if method.plain else table  # then only the largest inputs are needed
        rounder_of = LayerRounder
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
        plan.tokens |= {f"{layer.name}.{n}": count for n, count in result.tokens.items()}
    return plan


def round_head(
    trial: Trial, rows: Sequence[Row], damping: float, scale: nvfp4.Scale, file: Path, progress: Progress
) -> nvfp4.Tensor:
    """Return the head in NVFP4, by GPTQ over the answers' tokens: the only positions whose logits are sampled.

    rows: prompts and answers whose hidden states are its inputs.
    file: with the result of an interrupted run, or written.
    """
    if file.is_file():
        return LayerResult.load(file).packed[HEAD]
    head = trial.linear(HEAD)
    hessian = Hessian(torch.ones(1, device=head.weight.device), fast=head.weight.is_cuda)

    def observe(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        x = args[0].reshape(-1, args[0].shape[-1])
        hessian(x, torch.zeros(len(x), dtype=torch.long, device=x.device))

    handle = head.register_forward_pre_hook(observe)
    try:
        for done, _ in enumerate(trial.engine.scores(rows), 1):
            progress.update(done, len(rows), f"head: inputs of {done} of {len(rows)} answers")
    finally:
        handle.remove()
    name = weight_name(trial.folder, HEAD)
    top = max(float(nvfp4.amax(piece)) for piece in trial.folder.rows(name))
    tensor_scale = float(nvfp4.tensor_scale(top, scale=scale))
    try:
        mean = hessian.mean()
        solution = None if mean is None else factor(mean, damping)
    except FactorError:
        solution = None
    parts = [
        nvfp4.pack(piece, tensor_scale=tensor_scale, scale=scale, group=GROUP)
        if solution is None
        else round_columns(piece, solution, tensor_scale, scale)[0]
        for piece in trial.folder.rows(name)
    ]
    codes, scales = (np.concatenate([getattr(p, field) for p in parts]) for field in ("codes", "block_scale"))
    packed = nvfp4.Tensor(codes, scales, parts[0].tensor_scale, (len(codes), codes.shape[1] * 2), GROUP)
    LayerResult({HEAD: packed}).save(file)
    return packed

"""gptq: the weights' rounding errors are fed back column by column, by the Hessian of the response tokens; W4A4.

A layer at a time: one layer's weights and Hessians in memory, beside the hidden states. What comes after a layer is
calibrated on what the rounded layers before it put out, so later layers make up for earlier ones.
"""

from __future__ import annotations

from typing import Any

from annie_quant import nvfp4
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.errors import CheckpointError, need
from annie_quant.quantize import calibration_samples
from annie_quant.quantize.export import NVFP4, W4A16, Decided, choose, export, say_size, shared
from annie_quant.quantize.gptq_solver import Hessian, factor, round_columns
from annie_quant.quantize.job import Job, Report
from annie_quant.quantize.layerwise import Layer, See, Walk

NAME = "gptq"
SUMMARY = "error feedback column by column under the codec's block scales, Hessian over response tokens; W4A4"
SCALE = "sweep"
# damping: of the Hessian's mean diagonal. prompt: how much a prompt's token counts against a response's. activations:
# 4 (W4A4) or 16 (weights alone).
OPTIONS = {"damping": 0.05, "prompt": 0.0, "activations": 4}


def quantize(job: Job, report: Report) -> None:
    torch = need("torch", "quantize")
    folder = ModelFolder(job.model)
    chosen = choose(folder, job)
    kind = W4A16 if job.options["activations"] == 16 else NVFP4
    decided = Decided(dict.fromkeys(chosen, kind), scale=job.scale)
    say_size(folder, decided.formats, job, report)
    conversations = calibration_samples.read(job)
    by_mark = {**calibration_samples.RESPONSE, calibration_samples.PROMPT: job.options["prompt"]}
    walk = Walk(folder, calibration_samples.batches(conversations), report, "feeding back")
    table = torch.tensor([by_mark[m] for m in range(calibration_samples.END_OF_TURN + 1)], device=walk.device)
    for layer in walk:
        round_layer(layer, set(chosen), table, decided, job)
        layer.advance()
    outside = [n for n in chosen if n not in decided.packed]
    if outside:
        raise CheckpointError(f"{outside[0]} is in no decoder layer", f"--exclude-layers {outside[0]}")
    export(folder, job, decided)


def round_layer(layer: Layer, chosen: set[str], table: Any, decided: Decided, job: Job) -> None:
    """Round the layer's chosen linears, in `decided` and in the layer itself."""
    from annie_quant.hf.codec import to_numpy, to_torch

    groups = [(g, [n for n in g if f"{layer.name}.{n}" in chosen]) for g in layer.groups()]
    hear = {g[0]: Hessian(table) for g, taken in groups if taken}
    see: dict[str, See] = dict(hear)
    layer.run(see)
    tops = {
        f"{layer.name}.{n}": float(layer.linears[n].weight.detach().abs().max()) for _, taken in groups for n in taken
    }
    tops = shared(tops)
    for group, taken in groups:
        if not taken:
            continue
        heard = hear.pop(group[0])
        upper, dead = factor(heard.mean(), job.options["damping"])
        for short in taken:
            name, linear = f"{layer.name}.{short}", layer.linears[short]
            step = float(nvfp4.tensor_scale(tops[name], scale=job.scale))
            packed, rounded = round_columns(to_numpy(linear.weight.float().cpu()), upper, dead, step, job.scale)
            decided.packed[name], decided.amax[name] = packed, heard.amax
            linear.weight.data = to_torch(rounded).to(linear.weight)

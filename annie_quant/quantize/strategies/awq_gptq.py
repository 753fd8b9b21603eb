"""awq_gptq: the recipe of Red Hat's Qwen checkpoints: AWQ folded, then GPTQ, with FP8 where 4 bits cost most.

FP8: attention, DeltaNet, the MLPs of the last eight layers, and the head. NVFP4 by GPTQ after AWQ: the other MLPs and the experts.
The published checkpoints store FP8 weights with a scale per row and round activations per token; here both have one scale, which
every server's ModelOpt loader takes.
"""

from __future__ import annotations

import numpy as np

from annie_quant.checkpoint.linears import all_linears
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.core.progress import Progress
from annie_quant.quantize.formats import FP8, NVFP4, W4A16
from annie_quant.quantize.input_stats import Coverage
from annie_quant.quantize.job import Job
from annie_quant.quantize.plan import Plan, announce_size
from annie_quant.quantize.select import choose, excluded
from annie_quant.quantize.strategies import awq_lite, gptq
from annie_quant.quantize.strategy import ACTIVATIONS, KEPT_INPUTS, SWEEP_TIME, Cost, Option, Strategy

HEAD_FORMATS = {"fp8": FP8, "nvfp4": W4A16}


def quantize(job: Job, progress: Progress) -> None:
    from annie_quant.quantize import calibration_samples, input_stats, layerwise
    from annie_quant.quantize.export import export

    folder = ModelFolder(job.model)
    plan = Plan(formats_of(folder, job), scale=job.scale)
    announce_size(folder, plan.formats, job, progress)
    rounded = {n for n, kind in plan.formats.items() if kind != FP8}
    batches = calibration_samples.make_batches(calibration_samples.read_samples(job))
    model = layerwise.DecoderLayers(folder, batches, progress, "folding and correcting errors")
    table = input_stats.weight_table(calibration_samples.RESPONSE, model.device)
    coverage = Coverage()
    weights: dict[str, np.ndarray] = {}
    for layer in model:
        weights |= awq_lite.fold_layer(layer, set(plan.formats), plan.amax, advance=False)
        gptq.round_layer(layer, rounded, table, plan, job.options["damping"], coverage)
    coverage.report(job.output, progress)
    plan.weights = {n: w for n, w in weights.items() if n.removesuffix(".weight") not in plan.packed}
    heads = [n for n, kind in plan.formats.items() if kind == FP8 and not folder.family.in_decoder(n)]
    plan.amax |= dict.fromkeys(heads, model.largest_output() if heads else 0.0)
    export(folder, job, plan)


def formats_of(folder: ModelFolder, job: Job) -> dict[str, str]:
    """Return the format of every linear that is quantized."""
    layers = folder.text_config["num_hidden_layers"]
    last = {f".layers.{i}." for i in range(layers - job.options["last"], layers)}
    four_bits = W4A16 if job.options["activations"] == 16 else NVFP4
    formats = {}
    for name in choose(folder, job.exclude):
        is_mlp = folder.family.kind_of(name) == "mlp"
        formats[name] = four_bits if is_mlp and not any(part in f".{name}" for part in last) else FP8
    if kind := HEAD_FORMATS.get(job.options["head"]):
        modules = all_linears(folder)
        heads = {n for n in modules if folder.family.kind_of(n) == "head"}
        formats |= dict.fromkeys(heads - excluded(job.exclude, modules), kind)
    return formats


STRATEGY = Strategy(
    name="awq_gptq",
    summary="Red Hat's recipe: AWQ then GPTQ on the MLPs; FP8 attention, DeltaNet, head and last eight MLPs (--set last=8)",
    formats={"mlp": NVFP4, "head": FP8, "attention": FP8, "deltanet": FP8},
    cost=Cost(
        rank=62,
        layerwise=True,
        passes=24,
        encode=20 + SWEEP_TIME,
        column_feedback=True,
        hessians=2,
        kept_inputs=KEPT_INPUTS,
    ),
    quantize=quantize,
    options={
        "last": Option(8, "MLPs of this many last layers are FP8"),
        "head": Option("fp8", "format of the head: fp8, nvfp4 (weights only) or bf16", ("fp8", "nvfp4", "bf16")),
        "damping": Option(0.05, "added to the Hessian's diagonal, relative to its mean"),
        "activations": ACTIVATIONS,
    },
    scale="sweep",
    searched=False,
)

"""gptq: the weights' rounding errors are corrected column by column, by the Hessian over responses and, with less weight, prompts.

One layer at a time: one layer's weights and Hessians are in memory, besides the hidden states. A linear is calibrated on
what the rounded linears before it put out, so later ones correct earlier ones. A linear whose inputs cannot be used is
rounded without correction, with a warning.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from annie_quant import nvfp4
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.core.errors import CheckpointError
from annie_quant.core.progress import Progress
from annie_quant.quantize.formats import NVFP4, W4A16
from annie_quant.quantize.input_stats import Coverage, one_per_layer
from annie_quant.quantize.job import Job
from annie_quant.quantize.plan import Plan, announce_size
from annie_quant.quantize.select import choose
from annie_quant.quantize.strategy import ACTIVATIONS, ALL_NVFP4, KEPT_INPUTS, SWEEP_TIME, Cost, Option, Strategy

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np
    import torch

    from annie_quant.quantize.calibration_samples import Sample, TokenWeights
    from annie_quant.quantize.gptq_solver import Factor, Hessian
    from annie_quant.quantize.layer_stages import Stage
    from annie_quant.quantize.layerwise import DecoderLayer

log = logging.getLogger(__name__)

HESSIAN_BYTES = 6 << 30  # of one layer at a time; 256 experts of 2048 x 512 have 4.6 GB


def quantize(job: Job, progress: Progress) -> None:
    from annie_quant.quantize import calibration_samples
    from annie_quant.quantize.export import export

    folder = ModelFolder(job.model)
    chosen = choose(folder, job.exclude)
    plan = Plan(dict.fromkeys(chosen, W4A16 if job.options["activations"] == 16 else NVFP4), scale=job.scale)
    announce_size(folder, plan.formats, job, progress)
    token_weights = {**calibration_samples.RESPONSE, calibration_samples.PROMPT: job.options["prompt"]}
    samples = calibration_samples.read_samples(job)
    round_model(folder, plan, samples, token_weights, job.options["damping"], job, progress)
    export(folder, job, plan)


def round_model(
    folder: ModelFolder,
    plan: Plan,
    samples: Sequence[Sample],
    token_weights: TokenWeights,
    damping: float | None,
    job: Job,
    progress: Progress,
    fold: bool = False,
) -> None:
    """Round all linears of the plan's formats. damping: None rounds to nearest, without error correction.

    fold: fold activation-aware scales into each layer first. Raises CheckpointError for a linear in no decoder layer.
    """
    import torch

    from annie_quant.quantize import layerwise, shared_text
    from annie_quant.quantize.strategies import awq_lite

    text = shared_text.arrange(samples, share=not fold and shared_text.can_share(folder))
    model = layerwise.DecoderLayers(folder, text.batches, progress, "correcting errors")
    table = text.weight_table(token_weights, model.device)
    if damping is None:  # only largest inputs are needed
        table = torch.zeros_like(table)
    coverage, chosen = Coverage(), set(plan.formats)
    folded: dict[str, np.ndarray] = {}
    for layer in model:
        if fold:
            folded |= awq_lite.fold_layer(layer, chosen, plan.amax, advance=False)
        round_layer(layer, chosen, table, plan, damping, coverage, advance=not layer.last)
    coverage.report(job.output, progress)
    outside = [n for n in chosen if n not in plan.packed]
    if outside:
        raise CheckpointError(f"{min(outside)} is in no decoder layer", f"--exclude-layers {min(outside)}")
    plan.weights = {n: w for n, w in folded.items() if n.removesuffix(".weight") not in plan.packed}


def round_layer(
    layer: DecoderLayer,
    chosen: set[str],
    table: torch.Tensor,
    plan: Plan,
    damping: float | None,
    coverage: Coverage,
    advance: bool = True,
) -> None:
    """Round the layer's chosen linears, in `plan` and in the layer itself, in the order in which they run.

    advance: the rounded layer's outputs become the next layer's inputs.
    """
    from annie_quant.quantize import layer_stages

    every = [[n for n in group if f"{layer.name}.{n}" in chosen] for group in layer.groups()]
    tops = layer.model.folder.family.largest_of_group(
        {f"{layer.name}.{n}": float(layer.linears[n].weight.detach().abs().max()) for group in every for n in group}
    )
    warnings: list[str] = []
    for stage in layer_stages.stages(layer, advance):
        groups = [group for group in every if group and group[0] in stage.linears]
        round_stage(layer, stage, groups, tops, table, plan, damping, coverage, warnings)
    for warning in one_per_layer(warnings):
        log.warning("annie-quant: %s", warning)


def round_stage(
    layer: DecoderLayer,
    stage: Stage,
    groups: Sequence[Sequence[str]],
    tops: Mapping[str, float],
    table: torch.Tensor,
    plan: Plan,
    damping: float | None,
    coverage: Coverage,
    warnings: list[str],
) -> None:
    """Round groups of linears that read one input each. Experts are rounded one at a time.

    tops: the largest magnitude that the tensor scale of each linear is for, by full name.
    """
    from annie_quant.offline.codec import to_numpy, to_torch
    from annie_quant.offline.engine import split_by_size
    from annie_quant.quantize.gptq_solver import LEAST_WEIGHT, Hessian

    rounded: dict[str, torch.Tensor] = {}
    sizes = [4 * layer.linears[group[0]].in_features ** 2 for group in groups]
    for run in split_by_size(sizes, HESSIAN_BYTES):  # each run takes a pass over the text
        hessians = {groups[i][0]: Hessian(table, LEAST_WEIGHT) for i in run}
        stage.observe(dict(hessians))
        for group in (groups[i] for i in run):
            hessian = hessians.pop(group[0])
            names = [f"{layer.name}.{n}" for n in group]
            if layer.experts_of(group[0]):
                coverage.add(layer.name, [group], {group[0]: hessian.tokens})
            unseen = layer.experts_of(group[0]) is not None and not hessian.tokens  # reported by its coverage
            solution = None if unseen or damping is None else solve(hessian, damping, names, warnings)
            for short, name in zip(group, names, strict=True):
                tensor_scale = float(nvfp4.tensor_scale(tops[name], scale=plan.scale))
                weight = to_numpy(layer.linears[short].weight.float().cpu())
                plan.packed[name], values = round_weight(weight, solution, tensor_scale, plan.scale)
                plan.amax[name] = hessian.amax
                rounded[short] = to_torch(values).to(layer.linears[short].weight.dtype)
    for short, tensor in rounded.items():
        layer.linears[short].weight.data = tensor.to(layer.linears[short].weight)


def solve(hessian: Hessian, damping: float, names: Sequence[str], warnings: list[str]) -> Factor | None:
    """Return the factor of a Hessian, or None where its inputs cannot be used. Adds to `warnings`.

    names: of the linears that read the inputs.
    """
    from annie_quant.quantize.gptq_solver import FactorError, factor

    mean = hessian.mean()
    reason = ""
    if hessian.not_finite:
        reason = f"{hessian.not_finite} of its calibration inputs hold NaN or inf"
    elif mean is None:
        reason = "no calibration input reached it"
    else:
        try:
            solution = factor(mean, damping)
        except FactorError as error:
            reason = str(error)
    if reason:
        warnings.append(f"{', '.join(names)}: {reason}; rounded without error correction")
        return None
    if dead := int(solution.dead.sum()):
        total = len(solution.dead)
        warnings.append(
            f"{', '.join(names)}: {dead} of {total} inputs are always 0 in calibration; their weights become 0"
        )
    return solution


def round_weight(
    weight: np.ndarray, solution: Factor | None, tensor_scale: float, scale: nvfp4.Scale
) -> tuple[nvfp4.Tensor, np.ndarray]:
    """Return (packed, dequantized float32 [N, K]); without a solution the weight is rounded as it is."""
    from annie_quant.quantize.gptq_solver import round_columns

    if solution is not None:
        return round_columns(weight, solution, tensor_scale, scale)
    packed = nvfp4.pack(weight, tensor_scale=tensor_scale, scale=scale)
    return packed, nvfp4.unpack(packed, "float32")


STRATEGY = Strategy(
    name="gptq",
    summary="error feedback column by column under the codec's block scales, Hessian over responses and prompts; W4A4",
    formats=ALL_NVFP4,
    cost=Cost(
        rank=50, layerwise=True, passes=1, encode=SWEEP_TIME, column_feedback=True, hessians=2, kept_inputs=KEPT_INPUTS
    ),
    quantize=quantize,
    options={
        "damping": Option(0.05, "added to the Hessian's diagonal, relative to its mean"),
        "prompt": Option(0.1, "weight of a prompt's token relative to a response's"),
        "activations": ACTIVATIONS,
    },
    scale="sweep",
)

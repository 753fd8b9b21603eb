"""gptq: rounding errors are corrected column by column, by the Hessian over responses and, with less weight, prompts."""

from __future__ import annotations

from dataclasses import dataclass

from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.core.progress import Progress
from annie_quant.quantize.formats import choose
from annie_quant.quantize.plan import QuantizationPlan, announce_size
from annie_quant.quantize.strategy import (
    ALL_NVFP4,
    KEPT_INPUTS,
    SWEEP_TIME,
    Cost,
    Job,
    Strategy,
    StrategyOptions,
    activations_option,
    four_bit_format,
    option,
)


@dataclass(frozen=True)
class GptqOptions(StrategyOptions):
    damping: float = option(0.05, "added to the Hessian's diagonal, relative to its mean")
    prompt: float = option(0.1, "weight of a prompt's token relative to a response's")
    activations: str = activations_option()


def plan(job: Job[GptqOptions], progress: Progress) -> QuantizationPlan:
    from annie_quant.quantize.calibration_samples import read_samples
    from annie_quant.quantize.layer_rounder import Method
    from annie_quant.quantize.rounding import round_model

    folder, options = ModelFolder(job.model), job.options
    formats = dict.fromkeys(choose(folder, job.exclude), four_bit_format(options.activations))
    announce_size(folder, formats, progress)
    method = Method(prompt=options.prompt, damping=options.damping)
    return round_model(job, formats, read_samples(job), method, progress)


STRATEGY = Strategy(
    name="gptq",
    summary="error feedback column by column under the codec's block scales, Hessian over responses and prompts; W4A4",
    formats=ALL_NVFP4,
    cost=Cost(
        rank=50, layerwise=True, passes=1, encode=SWEEP_TIME, column_feedback=True, hessians=2, kept_inputs=KEPT_INPUTS
    ),
    plan=plan,
    options=GptqOptions,
    scale="sweep",
)

"""sensitivity: each linear gets the format that its measured divergence allows, under a size budget.

Four-bit groups also quantize their activations while that adds little: in a trial it was activations that broke tool calls, and
only those of a few linears.
"""

from __future__ import annotations

from dataclasses import dataclass

from annie_quant.core.progress import Progress
from annie_quant.quantize.formats import FP8, W4A16
from annie_quant.quantize.plan import QuantizationPlan
from annie_quant.quantize.strategy import SWEEP_TIME, Cost, Job, Strategy, StrategyOptions, option


@dataclass(frozen=True)
class SensitivityOptions(StrategyOptions):
    bits: float = option(
        5.5, "bits per weight of the decoder's linears, those that stay bf16 included; of experts the active ones count"
    )
    inputs: float = option(0.25, "divergence that 4-bit activations may add, relative to that of rounded weights")
    tokens: int = option(1024, "tokens of answers that are scored in each trial")


def plan(job: Job[SensitivityOptions], progress: Progress) -> QuantizationPlan:
    from annie_quant.quantize.calibration_samples import MANNERS, MANNERS_RESPONSE
    from annie_quant.quantize.mixed_formats import FormatSearch, mixed_model

    options = job.options
    search = FormatSearch(
        (W4A16, FP8), options.bits, True, MANNERS, MANNERS_RESPONSE, options.tokens, inputs=options.inputs
    )
    return mixed_model(job, search, progress)


STRATEGY = Strategy(
    name="sensitivity",
    summary="ours: W4A4, W4A16, FP8 or bf16 by measured divergence under a size budget (--set bits=5.5)",
    formats=dict.fromkeys(("mlp", "attention", "deltanet"), SensitivityOptions.bits),
    cost=Cost(rank=70, passes=200, encode=SWEEP_TIME),
    plan=plan,
    options=SensitivityOptions,
    scale="sweep",
)

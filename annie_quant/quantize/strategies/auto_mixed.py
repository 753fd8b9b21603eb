"""auto_mixed (strategy C): NVFP4, FP8 or bf16 for each group of linears, by KL on response tokens.

The budget of ModelOpt's auto_quantize, stated over what may be quantized, with the exact knapsack of `sensitivity`.
"""

from __future__ import annotations

from dataclasses import dataclass

from annie_quant.core.progress import Progress
from annie_quant.quantize.formats import FP8, NVFP4
from annie_quant.quantize.plan import QuantizationPlan
from annie_quant.quantize.strategy import Cost, Job, Strategy, StrategyOptions, option


@dataclass(frozen=True)
class AutoMixedOptions(StrategyOptions):
    bits: float = option(4.8, "bits per weight, over the linears that may be quantized")
    tokens: int = option(4096, "tokens of answers that are scored in each trial")


def plan(job: Job[AutoMixedOptions], progress: Progress) -> QuantizationPlan:
    from annie_quant.quantize.calibration_samples import RESPONSE
    from annie_quant.quantize.mixed_formats import FormatSearch, mixed_model

    return mixed_model(
        job, FormatSearch((NVFP4, FP8), job.options.bits, False, None, RESPONSE, job.options.tokens), progress
    )


STRATEGY = Strategy(
    name="auto_mixed",
    summary="C: NVFP4, FP8 or bf16 by KL on response tokens (--set bits=4.8)",
    formats=dict.fromkeys(("mlp", "attention", "deltanet"), AutoMixedOptions.bits),
    cost=Cost(rank=90, passes=200),
    plan=plan,
    options=AutoMixedOptions,
    conservative=True,
)

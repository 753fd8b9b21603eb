"""awq_lite (strategy A): activation-aware scales, folded exactly into other weights, so that the result is plain NVFP4."""

from __future__ import annotations

from annie_quant.core.progress import Progress
from annie_quant.quantize.plan import QuantizationPlan
from annie_quant.quantize.strategy import ALL_NVFP4, Cost, Job, Strategy, StrategyOptions


def plan(job: Job[StrategyOptions], progress: Progress) -> QuantizationPlan:
    from annie_quant.quantize.folding import folded_model

    return folded_model(job, progress)


STRATEGY = Strategy(
    name="awq_lite",
    summary="A: activation-aware scales, searched and folded exactly into norms; plain NVFP4 W4A4",
    formats=ALL_NVFP4,
    cost=Cost(rank=30, layerwise=True, passes=22, encode=20),
    plan=plan,
)

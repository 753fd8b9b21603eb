"""naive: every linear but the head in NVFP4 W4A4, scales from the largest values. The control that loses manners."""

from __future__ import annotations

from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.core.progress import Progress
from annie_quant.quantize.formats import choose
from annie_quant.quantize.plan import QuantizationPlan
from annie_quant.quantize.strategy import ALL_NVFP4, Cost, Job, Strategy, StrategyOptions


def plan(job: Job[StrategyOptions], progress: Progress) -> QuantizationPlan:
    from annie_quant.quantize.input_stats import max_calibrated

    return max_calibrated(job, choose(ModelFolder(job.model), job.exclude), progress)


STRATEGY = Strategy(
    name="naive",
    summary="ModelOpt's NVFP4_DEFAULT_CFG, max calibration: smallest, loses manners (the control)",
    formats=ALL_NVFP4,
    cost=Cost(rank=10, layerwise=True, passes=1),
    plan=plan,
    any_family=True,
)

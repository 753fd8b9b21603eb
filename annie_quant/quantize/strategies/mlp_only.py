"""mlp_only (strategy B): the MLP in NVFP4 W4A4, attention and DeltaNet stay bf16.

Tool calls are kept where attention keeps its precision. The cost is size: 10.96 GB for a 9B, counted from its shapes.
"""

from __future__ import annotations

from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.core.progress import Progress
from annie_quant.quantize.formats import NVFP4, choose
from annie_quant.quantize.plan import QuantizationPlan
from annie_quant.quantize.strategy import Cost, Job, Strategy, StrategyOptions


def plan(job: Job[StrategyOptions], progress: Progress) -> QuantizationPlan:
    from annie_quant.quantize.input_stats import max_calibrated

    folder = ModelFolder(job.model)
    linears = [n for n in choose(folder, job.exclude) if folder.family.kind_of(n) == "mlp"]
    return max_calibrated(job, linears, progress)


STRATEGY = Strategy(
    name="mlp_only",
    summary="B: ModelOpt's NVFP4_MLP_ONLY_CFG: MLP in NVFP4, attention and DeltaNet stay bf16",
    formats={"mlp": NVFP4},
    cost=Cost(rank=80, layerwise=True, passes=1),
    plan=plan,
    any_family=True,
)

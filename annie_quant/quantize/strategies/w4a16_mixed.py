"""w4a16_mixed (strategy D): MLP and head in NVFP4 weights with 16-bit activations, attention and DeltaNet in FP8.

Upstream's recipe for Qwen3.5: no 4-bit activations; 7.42 GB for a 9B, counted from its shapes.
NVIDIA's recipe for a Spark (`w4a16_nvfp4-fp8_attn-kv_fp8_cast` of ModelOpt 0.47) is this with --scale amax --kv-cache fp8_cast.
"""

from __future__ import annotations

from annie_quant.checkpoint.linears import all_linears
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.core.progress import Progress
from annie_quant.quantize.formats import FP8, W4A16, choose, excluded
from annie_quant.quantize.plan import QuantizationPlan, announce_size
from annie_quant.quantize.strategy import SWEEP_TIME, Cost, Job, Strategy, StrategyOptions


def plan(job: Job[StrategyOptions], progress: Progress) -> QuantizationPlan:
    from annie_quant.quantize.calibration_samples import RESPONSE
    from annie_quant.quantize.input_stats import collect_stats

    folder = ModelFolder(job.model)
    kind_of = folder.family.kind_of
    formats = {n: W4A16 if kind_of(n) == "mlp" else FP8 for n in choose(folder, job.exclude)}
    head = {n for n in all_linears(folder) if kind_of(n) == "head"}
    formats |= dict.fromkeys(head - excluded(job.exclude, all_linears(folder)), W4A16)
    announce_size(folder, formats, progress)
    stats = collect_stats(job, RESPONSE, progress)
    return QuantizationPlan(formats, stats.amax, job.scale, coverage=stats.coverage)


STRATEGY = Strategy(
    name="w4a16_mixed",
    summary="D: MLP and head in NVFP4 W4A16, attention and DeltaNet in FP8: no 4-bit activation anywhere",
    formats={"mlp": W4A16, "head": W4A16, "attention": FP8, "deltanet": FP8},
    cost=Cost(rank=60, layerwise=True, passes=1, encode=SWEEP_TIME),
    plan=plan,
    scale="sweep",
)

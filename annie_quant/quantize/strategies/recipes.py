"""The strategies that are recipes of one engine. `direct` and `best` have their own files.

Each is its formats, and then calibration (input_stats.py), rounding (rounding.py) or formats under a budget (frontier_plan.py).

A to D are the strategies of the original plan. torch is imported when a plan is made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, ClassVar, Literal

from annie_quant.checkpoint import decode_speed
from annie_quant.checkpoint.linears import all_linears
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.core.progress import Progress
from annie_quant.models.formats import FP8, NVFP4, W4A16, Format
from annie_quant.quantize.formats import choose, excluded, four_bit_formats
from annie_quant.quantize.frontier import Limits
from annie_quant.quantize.plan import QuantizationPlan
from annie_quant.quantize.strategies.best import STRATEGY as BEST
from annie_quant.quantize.strategies.best import plan_model
from annie_quant.quantize.strategy import (
    ALL_NVFP4,
    KEPT_INPUTS,
    SWEEP_TIME,
    Cost,
    Job,
    Method,
    Strategy,
    StrategyOptions,
    described,
)

LINEARS = ("mlp", "attention", "deltanet")


def max_calibrated(
    formats_of: Callable[[Job[StrategyOptions]], dict[str, Format]],
) -> Callable[..., QuantizationPlan]:
    """Return the plan of a strategy with formats that are known before: the largest inputs set the scales."""

    def plan(job: Job[StrategyOptions], progress: Progress) -> QuantizationPlan:
        from annie_quant.quantize import input_stats

        return input_stats.max_calibrated_plan(job, formats_of(job), progress)

    return plan


def all_nvfp4(job: Job[StrategyOptions]) -> dict[str, Format]:
    return four_bit_formats(job, 4)


NAIVE = Strategy(
    name="naive",
    summary="ModelOpt's NVFP4_DEFAULT_CFG, max calibration: smallest, loses manners (the control)",
    formats=ALL_NVFP4,
    cost=Cost(rank=10, layerwise=True, passes=1),
    plan=max_calibrated(all_nvfp4),
    any_family=True,
    modelopt_options={"config": "NVFP4_DEFAULT_CFG"},
)


def mlp_in_nvfp4(job: Job[StrategyOptions]) -> dict[str, Format]:
    return {n: NVFP4 for n in all_nvfp4(job) if ModelFolder(job.model).family.kind_of(n) == "mlp"}


# Tool calls are kept where attention keeps its precision. The cost is size: 10.96 GB for a 9B, counted from its shapes.
MLP_ONLY = Strategy(
    name="mlp_only",
    summary="B: ModelOpt's NVFP4_MLP_ONLY_CFG: MLP in NVFP4, attention and DeltaNet stay bf16",
    formats={"mlp": NVFP4},
    cost=Cost(rank=80, layerwise=True, passes=1),
    plan=max_calibrated(mlp_in_nvfp4),
    any_family=True,
    modelopt_options={"config": "NVFP4_MLP_ONLY_CFG"},
)


def weights_only_or_fp8(job: Job[StrategyOptions]) -> dict[str, Format]:
    folder = ModelFolder(job.model)
    kind_of = folder.family.kind_of
    head = {n for n in all_linears(folder) if kind_of(n) == "head"} - excluded(
        job.exclude, all_linears(folder)
    )
    formats = {n: W4A16 if kind_of(n) == "mlp" else FP8 for n in choose(folder, job.exclude)}
    return formats | dict.fromkeys(head, W4A16)


# Upstream's recipe for Qwen3.5: no 4-bit activations; 7.42 GB for a 9B, counted from its shapes. NVIDIA's recipe for a Spark
# (`w4a16_nvfp4-fp8_attn-kv_fp8_cast` of ModelOpt 0.47) is this with --scale amax --kv-cache fp8_cast.
W4A16_MIXED = Strategy(
    name="w4a16_mixed",
    summary="D: MLP and head in NVFP4 W4A16, attention and DeltaNet in FP8: no 4-bit activation anywhere",
    formats={"mlp": W4A16, "head": W4A16, "attention": FP8, "deltanet": FP8},
    cost=Cost(rank=60, layerwise=True, passes=1, encode=SWEEP_TIME),
    plan=max_calibrated(weights_only_or_fp8),
    scale="sweep",
    modelopt_options={"config": "huggingface/qwen3_5/ptq/w4a16_nvfp4-fp8_attn-kv_fp8_cast"},
)


def plan_folds(job: Job[StrategyOptions], progress: Progress) -> QuantizationPlan:
    from annie_quant.quantize.folding import folded_model

    return folded_model(job, progress)


AWQ_LITE = Strategy(
    name="awq_lite",
    summary="A: activation-aware scales, searched and folded exactly into norms; plain NVFP4 W4A4",
    formats=ALL_NVFP4,
    cost=Cost(rank=30, layerwise=True, passes=22, encode=20, reads_answers=True),
    plan=plan_folds,
    modelopt_options={"config": "NVFP4_AWQ_LITE_CFG"},
)


class GptqOptions(Method, frozen=True):
    activations: Annotated[Literal[4, 16], described("bits of the inputs: 4 (W4A4) or 16")] = 4


def plan_columns(job: Job[GptqOptions], progress: Progress) -> QuantizationPlan:
    formats = four_bit_formats(job, job.options.activations)
    return plan_model(job, formats, job.options, progress)


GPTQ = Strategy(
    name="gptq",
    summary="error feedback column by column under the codec's block scales, Hessian over responses and prompts; W4A4",
    formats=ALL_NVFP4,
    cost=Cost(
        rank=50,
        layerwise=True,
        passes=1,
        encode=SWEEP_TIME,
        column_feedback=True,
        hessians=2,
        kept_inputs=KEPT_INPUTS,
        reads_answers=True,
    ),
    plan=plan_columns,
    options=GptqOptions,
    scale="sweep",
)


class AutoMixedOptions(StrategyOptions, frozen=True):
    bits: Annotated[float, described("bits per weight, over the linears that may be quantized")] = (
        4.8
    )

    MEASURED_WITHOUT: ClassVar[tuple[str, ...]] = ("bits",)


def limits_of_bits(options: AutoMixedOptions) -> Limits:
    return Limits(decode_speed.default_device(), max_bits=options.bits)


def plan_bits(job: Job[AutoMixedOptions], progress: Progress) -> QuantizationPlan:
    """Return the plan of the frontier's point at `bits` per weight, where all inputs of 4-bit linears are rounded."""
    limits = limits_of_bits(job.options)
    return plan_model(job, all_nvfp4(job), Method(), progress, limits)


AUTO_MIXED = Strategy(
    name="auto_mixed",
    summary="C: NVFP4, FP8 or bf16 by KL on response tokens (--set bits=4.8)",
    formats=dict.fromkeys(LINEARS, AutoMixedOptions().bits),
    cost=replace(BEST.cost, rank=90, passes=200, held_out_look=False, tunes_norms=False),
    plan=plan_bits,
    options=AutoMixedOptions,
    limits=limits_of_bits,
    scale="sweep",
    conservative=True,
    any_family=True,
    modelopt_options={"config": "general/auto_quantize/nvfp4_fp8_kl_div_at_5p4bits"},
)

"""best: every linear in NVFP4, as small as naive, by the recipe that stays closest to the source on held-out conversations.

First the source answers with the inputs of one group of linears rounded at a time; the groups with most of the harm stay W4A16
(mixed_formats.py). Then recipes are compared on conversations that they do not round with (recipe_choice.py), and the best one
rounds with all conversations. --effort sets how many recipes are tried. A killed run continues after its last trial, recipe or
layer.

Under --max-gb, --min-tps or --max-loss the formats of all groups of linears and of the head are chosen first (frontier_plan.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from annie_quant.checkpoint import decode_speed
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.core.errors import UsageError
from annie_quant.core.progress import Progress
from annie_quant.quantize.formats import choose
from annie_quant.quantize.frontier import Limits
from annie_quant.quantize.plan import QuantizationPlan
from annie_quant.quantize.strategy import (
    ALL_NVFP4,
    KEPT_INPUTS,
    SWEEP_TIME,
    Cost,
    Job,
    Strategy,
    StrategyOptions,
    four_bit_format,
    option,
)


@dataclass(frozen=True)
class BestOptions(StrategyOptions):
    recipe: str = option(
        "measured", "measured: by held-out answers; fixed: by these options", ("measured", "fixed")
    )
    effort: str = option("normal", "how many recipes are compared", ("fast", "normal", "max"))
    damping: float = option(0.05, "added to the Hessian's diagonal, relative to its mean")
    prompt: float = option(0.1, "weight of a prompt's token relative to a response's")
    norms: int = option(0, "1: the norms are tuned after rounding (norm_tuning.py)", (0, 1))
    activations: str = option(
        "mixed",
        "bits of all inputs; mixed: 4 for what `share` allows, else 16",
        ("mixed", "4", "16"),
    )
    share: float = option(
        0.05, "of the divergence that rounding all inputs adds, what activations=mixed may leave"
    )
    max_gb: float = option(math.inf, "GB of tensors at most (frontier_plan.py)")
    min_tps: float = option(0.0, "predicted tokens per second of one stream at least")
    max_loss: float = option(
        math.inf, "held-out divergence at most: mean KL plus that of the tokens that decide"
    )
    device: str = option(
        "", "whose speed: gb10, h200, GB/s, or a device file; by default this machine's, else gb10"
    )

    MEASURED_WITHOUT: ClassVar[tuple[str, ...]] = ("max_gb", "min_tps", "max_loss", "device")


def plan(job: Job[BestOptions], progress: Progress) -> QuantizationPlan:
    from annie_quant.quantize.frontier_plan import plan_model
    from annie_quant.quantize.rounding import Method

    options, limits = job.options, limits_of(job.options)
    if not 0 <= options.share <= 1:
        raise UsageError(f"share={options.share}: expected a share of 0 to 1", "--set share=0.05")
    formats = dict.fromkeys(
        choose(ModelFolder(job.model), job.exclude), four_bit_format(options.activations)
    )
    share = options.share if options.activations == "mixed" else None
    fixed = options.recipe == "fixed"
    method = Method(prompt=options.prompt, damping=options.damping, norms=bool(options.norms))
    return plan_model(
        job, limits, formats, method, progress, share, "" if fixed else options.effort
    )


def limits_of(options: BestOptions) -> Limits:
    """Return the limits of the options. Raises UsageError for values that cannot be limits."""
    for name in ("max_gb", "max_loss"):
        if not getattr(options, name) > 0:
            raise UsageError(
                f"--{name.replace('_', '-')} {getattr(options, name):g}: expected a positive number"
            )
    if not 0 <= options.min_tps < math.inf:
        raise UsageError(f"--min-tps {options.min_tps:g}: expected a positive number")
    device = (
        decode_speed.find_device(options.device)
        if options.device
        else decode_speed.default_device()
    )
    return Limits(device, options.max_gb, options.min_tps, options.max_loss)


STRATEGY = Strategy(
    name="best",
    summary="ours: all linears NVFP4 by the recipe that keeps held-out answers closest, W4A4 where that does little harm",
    formats=ALL_NVFP4,
    # Of the passes (counted, not measured) 16 are trials of inputs, 18 the recipes, their scores and the final rounding. Of a
    # layer's bytes per weight 2 are the layer in bf16, the others the sweep's.
    cost=Cost(
        rank=12,
        layerwise=True,
        passes=34,
        recipes=4,
        encode=SWEEP_TIME,
        column_feedback=True,
        bytes_per_layer_weight=18,
        hessians=5,
        kept_inputs=KEPT_INPUTS,
        keeps_results=True,
        # Trials with the whole model in bf16.
        whole_model=lambda o: 2.0 if o.activations == "mixed" or o.recipe == "measured" else 0.0,
    ),
    plan=plan,
    options=BestOptions,
    scale="sweep",
)

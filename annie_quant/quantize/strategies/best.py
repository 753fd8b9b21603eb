"""best: every linear in NVFP4, as small as naive, with 4-bit inputs where they do little harm.

First the source answers with the inputs of one group of linears rounded at a time; the groups with most of the harm stay W4A16
(mixed_formats.py). Under --max-gb, --min-tps, --max-ttft-ms or --max-loss the formats of all groups and of the head are chosen
(frontier_plan.py). Then GPTQ rounds with all conversations, unless plain rounding is better on held-out ones (held_out.py), and
on a GPU the norms are tuned (norm_tuning.py). A killed run continues after its last trial or layer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from annie_quant.checkpoint import decode_speed
from annie_quant.checkpoint.first_token import Prompt
from annie_quant.checkpoint.linears import HEAD
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.core.errors import UsageError
from annie_quant.core.progress import Progress
from annie_quant.documents import Device
from annie_quant.models.formats import NVFP4, W4A16, Format
from annie_quant.quantize.formats import four_bit_formats
from annie_quant.quantize.frontier import Limits
from annie_quant.quantize.plan import QuantizationPlan, announce_size
from annie_quant.quantize.strategy import (
    ALL_NVFP4,
    KEPT_INPUTS,
    SWEEP_TIME,
    Cost,
    Job,
    Method,
    Strategy,
    described,
)


class BestOptions(Method, frozen=True):
    activations: Annotated[
        Literal["mixed", 4, 16],
        described("bits of all inputs, 4 or 16; mixed: 4 for what `share` allows, else 16"),
    ] = "mixed"
    share: Annotated[
        float,
        described("of the divergence that rounding all inputs adds, what activations=mixed leaves"),
    ] = 0.05
    max_gb: Annotated[float, described("GB of tensors at most")] = math.inf
    min_tps: Annotated[float, described("predicted tokens per second of one stream at least")] = 0.0
    max_loss: Annotated[
        float,
        described("held-out divergence at most: mean KL plus that of the tokens that decide"),
    ] = math.inf
    max_ttft_ms: Annotated[
        float,
        described("predicted milliseconds to the first token at most; inputs are chosen by it"),
    ] = math.inf
    prompt_tokens: Annotated[
        int, described("of the prompt of max_ttft_ms; 0: 2,048, or the context")
    ] = 0
    cached_tokens: Annotated[int, described("of prompt_tokens, those that are not computed")] = 0
    device: Annotated[
        str,
        described(
            "whose speed: gb10, h200, GB/s, or a device file; default: this machine's, else gb10"
        ),
    ] = ""

    MEASURED_WITHOUT: ClassVar[tuple[str, ...]] = (
        "max_gb",
        "min_tps",
        "max_loss",
        "max_ttft_ms",
        "prompt_tokens",
        "cached_tokens",
        "device",
    )


def plan_best(job: Job[BestOptions], progress: Progress) -> QuantizationPlan:
    options = job.options
    if not 0 <= options.share <= 1:
        raise UsageError(f"share={options.share}: expected a share of 0 to 1", "--set share=0.05")
    share = options.share if options.activations == "mixed" else None
    four_bit = four_bit_formats(job, options.activations)
    limits = limits_of(options)
    device = device_of(options)
    return plan_model(job, four_bit, options, progress, limits, share, look=True, device=device)


def plan_model(
    job: Job[Any],
    four_bit: Mapping[str, Format],
    method: Method,
    progress: Progress,
    limits: Limits | None = None,
    share: float | None = None,
    look: bool = False,
    device: Device | None = None,
) -> QuantizationPlan:
    """Return the plan of a model: which inputs are rounded, formats under the limits if there are any, and rounded linears.

    Raises UsageError before anything is measured for limits that no choice satisfies.

    four_bit: linear → "nvfp4" or "w4a16".
    share: of the divergence that rounding all inputs adds, what "nvfp4" may leave; other linears get "w4a16". None: any.
        With a limit of the time to the first token the limits decide instead.
    look: compare GPTQ with plain rounding on held-out conversations, and take plain rounding where GPTQ is worse.
    device: whose time to the first token is reported; None: no report.
    """
    from annie_quant.quantize import frontier_plan, held_out, mixed_formats, norm_tuning
    from annie_quant.quantize.backend import device_kind
    from annie_quant.quantize.calibration_text import read_answers
    from annie_quant.quantize.input_stats import calibrated
    from annie_quant.quantize.rounding import round_model

    inputs: dict[str, tuple[Format, ...]] = {name: (kind,) for name, kind in four_bit.items()}
    if limits and share is not None:
        chosen_by_limits = limits.max_ttft_ms < math.inf
        inputs = dict.fromkeys(four_bit, (NVFP4, W4A16) if chosen_by_limits else (W4A16,))
        share = None if chosen_by_limits else share
    if limits:
        frontier_plan.planner_of(job, limits, inputs)
    text = read_answers(job, progress)
    samples = text.samples
    if share is not None:
        four_bit = mixed_formats.formats_of_inputs(job, list(four_bit), samples, progress, share)
        inputs = {name: (kind,) for name, kind in four_bit.items()}
    planned = QuantizationPlan.of(four_bit)
    looked = held_out.HeldOutLook()
    if limits or look:
        learned, held = held_out.hold_out(samples)
        if look and not held:
            progress.message(held_out.TOO_FEW)
        look = look and bool(held)
    if limits or look:
        rounded = round_model(job, four_bit, learned, method, progress, "layers-learned")
        trials = held_out.FormatTrials(job, held or samples, rounded)
        if limits:
            planner = frontier_plan.planner_of(job, limits, inputs)
            planned = frontier_plan.choose_formats(
                job, planner, learned, trials, method.damping, progress
            )
        if look:
            looked = held_out.compare_with_plain(trials, planned.formats, held, progress)
        if device:
            progress.message(mixed_formats.given_up_line(trials, job, planned.formats, device))
        del trials  # its model is not needed in memory any more
    elif device:
        progress.message(mixed_formats.given_up_line(None, job, planned.formats, device))
    announce_size(ModelFolder(job.model), planned.formats, progress)
    formats = {n: f for n, f in planned.formats.items() if f.in_four_bits and n != HEAD}
    tunes = method.norms
    if tunes is None:
        tunes = look and device_kind() == "cuda"
    if looked.plain_is_better:
        amax, tokens, _ = calibrated(job, list(formats), progress)
        result = QuantizationPlan.of(formats, amax, tokens)
    else:
        # Other limits may follow in the same folder.
        layers = f"layers-{held_out.key_of(formats)[:12]}"
        result = round_model(job, formats, samples, method, progress, layers)
    result.linears = planned.linears | result.linears
    result.frontier = planned.frontier
    result.held_out = looked.held_out
    result.ingredients = list(looked.methods)
    result.calibration = text.use
    if tunes and not looked.plain_is_better:
        norm_tuning.tune_norms(job, result, samples, progress)
    return result


def limits_of(options: BestOptions) -> Limits | None:
    """Return the limits of the options, or None without any. Raises UsageError for values that cannot be limits."""
    for name in ("max_gb", "max_loss", "max_ttft_ms"):
        if not getattr(options, name) > 0:
            raise UsageError(
                f"--{name.replace('_', '-')} {getattr(options, name):g}: expected a positive number"
            )
    if not 0 <= options.min_tps < math.inf:
        raise UsageError(f"--min-tps {options.min_tps:g}: expected a positive number")
    limits = Limits(
        device_of(options),
        max_gb=options.max_gb,
        min_tps=options.min_tps,
        max_loss=options.max_loss,
        max_ttft_ms=options.max_ttft_ms,
        prompt=Prompt(options.prompt_tokens or None, options.cached_tokens),
    )
    return limits if str(limits) else None


def device_of(options: BestOptions) -> Device:
    if options.device:
        return decode_speed.find_device(options.device)
    return decode_speed.default_device()


STRATEGY = Strategy(
    name="best",
    summary="ours: all linears NVFP4 by GPTQ, W4A4 where that does little harm; never worse than naive on held-out answers",
    formats=ALL_NVFP4,
    # Of the passes (counted, not measured) 16 are trials of inputs, 7 the two roundings and the look between them. Of a layer's
    # bytes per weight 2 are the layer in bf16, the others the sweep's.
    cost=Cost(
        rank=12,
        layerwise=True,
        passes=23,
        held_out_look=True,
        encode=SWEEP_TIME,
        column_feedback=True,
        bytes_per_layer_weight=18,
        hessians=5,
        kept_inputs=KEPT_INPUTS,
        trials=True,
        reads_answers=True,
        tunes_norms=True,
    ),
    plan=plan_best,
    options=BestOptions,
    limits=limits_of,
    scale="sweep",
)

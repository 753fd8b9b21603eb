"""Choose formats by measured divergence: a trial for each group of linears that is decided together, then the exact knapsack.

Each group of linears that is served as one matrix is rounded alone, and the KL divergence of the source's answers is measured;
small divergences are additive. A knapsack gives the formats with the least sum under a size budget.

NVFP4 weights have one size whether a server rounds the inputs of their linear to 4 bits (W4A4) or not (W4A16). The inputs of a few
linears carry most of the harm, so W4A4 for the others keeps most of its matrix products for a small part of its divergence.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.core.errors import UsageError
from annie_quant.core.progress import Progress
from annie_quant.models import Family, in_layer
from annie_quant.quantize.backend import device_and_dtype
from annie_quant.quantize.calibration_samples import RESPONSE, CalibrationSample, TokenWeights, read_samples
from annie_quant.quantize.formats import (
    BITS,
    FP8,
    NVFP4,
    PLAIN_BITS,
    W4A16,
    active_weights,
    choose,
    decoder_linears,
    effective_bits,
)
from annie_quant.quantize.frontier import least_cost, with_rounded_inputs
from annie_quant.quantize.input_stats import InputStats, collect_stats
from annie_quant.quantize.kl_trial import Trial, answers_to_score
from annie_quant.quantize.plan import QuantizationPlan, announce_size
from annie_quant.quantize.strategy import Job, StrategyOptions

TOKENS = 1024  # of answers, scored in each trial
POSITIONS = 4096  # of these answers with their prompts, on a CPU, where trials take most of the time
BANDS = 32  # units that are measured at most on a CPU: linears of neighbouring layers form one unit


def units_of(family: Family, chosen: Sequence[str]) -> dict[str, list[str]]:
    """Return the linears that are decided together, by the name of the first: a fused group, or a layer's experts."""
    fused = {m: group for group in family.served_groups(chosen) for m in group}
    return {members[0]: members for members in (fused.get(n, [n]) for n in chosen)}


def bands_of(units: Mapping[str, list[str]], count: int) -> dict[str, list[str]]:
    """Return about `count` units at most, each with the same linears of neighbouring layers."""
    kinds: dict[str, list[str]] = {}
    for unit in units:
        kinds.setdefault(in_layer(unit), []).append(unit)
    bands = max(1, count // max(1, len(kinds)))
    result = {}
    for same in kinds.values():
        size = math.ceil(len(same) / bands)
        for start in range(0, len(same), size):
            result[same[start]] = [n for u in same[start : start + size] for n in units[u]]
    return result


def formats_of_inputs(
    job: Job[StrategyOptions],
    chosen: Sequence[str],
    samples: Sequence[CalibrationSample],
    share: float,
    progress: Progress,
) -> dict[str, str]:
    """Return "nvfp4" or "w4a16" for every chosen linear: rounded inputs for the most weights that leave `share` of the harm.

    Harm is the divergence of the source's answers with only the inputs of one unit rounded, summed over the units. Measurements
    of an interrupted run are used again.
    """
    folder = ModelFolder(job.model)
    units = units_of(folder.family, chosen)
    if device_and_dtype(folder)[0] == "cpu":
        units = bands_of(units, BANDS)
    harm = measure_inputs(job, units, samples, progress)
    active = active_weights(folder, chosen)
    weights = {u: sum(active[n] for n in members) for u, members in units.items()}
    total = sum(harm.values())
    narrow = with_rounded_inputs(harm, weights, share * total)
    rounded_share = sum(weights[u] for u in narrow) / max(sum(weights.values()), 1e-30)
    left = sum(harm[u] for u in narrow)
    progress.message(
        f"W4A4 for {len(narrow)} of {len(units)} groups of linears, {rounded_share:.0%} of the weights: {left:.2g} nats of the "
        f"{total:.2g} of all rounded inputs; W4A16 for the others"
    )
    rounded = {n for u in narrow for n in units[u]}
    return {n: NVFP4 if n in rounded else W4A16 for n in chosen}


def measure_inputs(
    job: Job[StrategyOptions], units: Mapping[str, list[str]], samples: Sequence[CalibrationSample], progress: Progress
) -> dict[str, float]:
    """Return unit → divergence with its inputs rounded, in nats per response token; weights are the source's."""
    folder = ModelFolder(job.model)
    file = job.measurements("input_divergence.json")
    harm: dict[str, float] = file.load({})
    waiting = [u for u in units if u not in harm]
    if waiting:
        positions = POSITIONS if device_and_dtype(folder)[0] == "cpu" else math.inf
        trial = Trial(folder, answers_to_score(samples, RESPONSE, TOKENS, positions))
        amax = trial.largest_inputs([n for members in units.values() for n in members])
        noise = trial.divergence()  # of the stored reference, which is float16
    for done, unit in enumerate(waiting, len(units) - len(waiting) + 1):
        harm[unit] = max(0.0, trial.cost_of_inputs({n: amax[n] for n in units[unit] if n in amax}) - noise)
        file.save(harm)
        progress.update(done, len(units), f"rounding inputs: {done} of {len(units)}, {unit}: {harm[unit]:.2g} nats")
    return {u: harm[u] for u in units}


@dataclass(frozen=True)
class FormatSearch:
    """Formats for every unit under a size budget.

    formats: that a unit may have instead of bf16.
    bits: budget, in bits per weight.
    of_decoder: the budget is for all linears of the decoder, including those that stay bf16; else for those that may be quantized.
    statistics: weights of tokens in the second moments of inputs, by which block scales are chosen; None: chosen without them.
    scored: weights of tokens in the divergence.
    tokens: number of answer tokens that each trial scores.
    inputs: divergence that 4-bit inputs of W4A16 units may add, relative to that of the rounded weights; None: no 4-bit inputs.
    """

    formats: tuple[str, ...]
    bits: float
    of_decoder: bool
    statistics: TokenWeights | None
    scored: TokenWeights
    tokens: int
    inputs: float | None = None


def mixed_model(job: Job[StrategyOptions], search: FormatSearch, progress: Progress) -> QuantizationPlan:
    """Return the plan with the formats of the least summed divergence under the budget."""
    folder = ModelFolder(job.model)
    chosen = choose(folder, job.exclude)
    units = units_of(folder.family, chosen)
    budget = budget_bytes(folder, chosen, search)
    progress.message(f"size budget {search.bits} bits per weight: {budget / 1e6:,.1f} MB for {len(chosen)} linears")
    stats = collect_stats(job, search.statistics or search.scored, progress)
    costs = measure_formats(job, units, stats, search, progress)
    sizes = {u: sum(active_weights(folder, members).values()) for u, members in units.items()}
    picked = pick(costs, sizes, budget, search)
    formats = {n: f for u, f in picked.items() if f for n in units[u]}
    progress.message(f"{effective_bits(folder, formats):.2f} bits per weight over the decoder's linears")
    announce_size(folder, formats, progress)
    importance = {n: stats.second[n] for n, f in formats.items() if f != FP8} if search.statistics else {}
    return QuantizationPlan(formats, stats.amax, job.scale, importance, coverage=stats.coverage)


def budget_bytes(folder: ModelFolder, chosen: Sequence[str], search: FormatSearch) -> float:
    """Return the bytes that the chosen linears may take. Experts count by the share that a token passes."""
    weights = active_weights(folder, decoder_linears(folder) if search.of_decoder else chosen)
    total = sum(weights.values())
    fixed = sum(n * PLAIN_BITS for m, n in weights.items() if m not in set(chosen))
    least = (fixed + sum(weights[m] * BITS[NVFP4] for m in chosen)) / total
    if search.bits < least:
        raise UsageError(
            f"bits={search.bits}: excluded linears stay at 16 bits, so less than {least:.2f} cannot be reached",
            f"--set bits={least + 0.05:.2f}, or exclude less",
        )
    return (search.bits * total - fixed) / 8


def measure_formats(
    job: Job[StrategyOptions],
    units: Mapping[str, list[str]],
    stats: InputStats,
    search: FormatSearch,
    progress: Progress,
) -> dict[str, dict[str, float]]:
    """Return unit → format → divergence. Measurements of an interrupted run are used again."""
    file = job.measurements("divergence.json")
    divergence: dict[str, dict[str, float]] = file.load({})
    importance = stats.second if search.statistics else {}
    tried = (NVFP4, *search.formats) if search.inputs is not None else search.formats
    work = [(u, f) for u in units for f in tried if f not in divergence.get(u, {})]
    if not work:
        return divergence
    trial = Trial(ModelFolder(job.model), answers_to_score(read_samples(job), search.scored, search.tokens))
    for done, (unit, kind) in enumerate(work, 1):
        nats = trial.cost(dict.fromkeys(units[unit], kind), stats.amax, job.scale, importance)
        divergence.setdefault(unit, {})[kind] = nats
        file.save(divergence)
        progress.update(done, len(work), f"measuring: {done} of {len(work)}, {unit} as {kind}: {nats:.2g} nats")
    return divergence


def pick(
    costs: Mapping[str, Mapping[str, float]], sizes: Mapping[str, float], budget: float, search: FormatSearch
) -> dict[str, str | None]:
    """Return unit → format (None: bf16) with the least summed divergence that fits into `budget` bytes.

    W4A16 units with as many weights as possible then get rounded inputs, which add at most `search.inputs` times the divergence of
    the weights.
    """
    units, steps = list(costs), (*search.formats, None)
    harm = [[0.0 if kind is None else costs[u][kind] for kind in steps] for u in units]
    size = [[sizes[u] * (PLAIN_BITS if kind is None else BITS[kind]) / 8 for kind in steps] for u in units]
    chosen = least_cost(harm, size, budget)
    formats: dict[str, str | None] = {u: steps[i] for u, i in zip(units, chosen, strict=True)}
    if search.inputs is None:
        return formats
    allowed = search.inputs * sum(row[i] for row, i in zip(harm, chosen, strict=True))
    extra = {u: costs[u][NVFP4] - costs[u][W4A16] for u in units if formats[u] == W4A16}
    return formats | dict.fromkeys(with_rounded_inputs(extra, sizes, allowed), NVFP4)

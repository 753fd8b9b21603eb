"""sensitivity: each linear gets the format that its measured divergence allows, under a size budget.

Every group of linears that is served as one matrix is rounded alone, to each format, and the KL divergence of the answers
is measured; small divergences add up. The formats with the least sum under the budget are those of an exact knapsack. Four-bit
groups quantize their activations, too, only while that adds little: in a trial the activations broke the tools, and only those
of a few linears.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.core.errors import UsageError
from annie_quant.core.progress import Progress
from annie_quant.quantize.format_choice import least_cost, units_of, with_rounded_inputs
from annie_quant.quantize.formats import BITS, FP8, NVFP4, PLAIN_BITS, W4A16
from annie_quant.quantize.job import Job
from annie_quant.quantize.plan import Plan, active_weights, announce_size, effective_bits
from annie_quant.quantize.select import choose, decoder_linears
from annie_quant.quantize.strategy import SWEEP_TIME, Cost, Option, Strategy

if TYPE_CHECKING:
    from annie_quant.quantize.calibration_samples import Sample
    from annie_quant.quantize.input_stats import InputStats

FORMATS = (NVFP4, W4A16, FP8)
BITS_OPTION = Option(
    5.5, "bits per weight of the decoder's linears, those that stay bf16 included; of experts the active ones count"
)


def quantize(job: Job, progress: Progress) -> None:
    from annie_quant.quantize import calibration_samples
    from annie_quant.quantize.export import export
    from annie_quant.quantize.input_stats import collect_stats

    folder = ModelFolder(job.model)
    chosen = choose(folder, job.exclude)
    units = units_of(folder.family, chosen)
    bits = job.options["bits"]
    budget = budget_bytes(folder, chosen, bits)
    progress.message(f"size budget {bits} bits per weight: {budget / 1e6:,.1f} MB for {len(chosen)} linears")
    samples = calibration_samples.read_samples(job)
    stats = collect_stats(folder, samples, calibration_samples.MANNERS, progress)
    stats.coverage.report(job.output, progress)
    costs = measure(folder, units, samples, stats, job, progress)
    sizes = {u: sum(active_weights(folder, members).values()) for u, members in units.items()}
    picked = pick(costs, sizes, budget, job.options["activations"])
    formats = {n: f for u, f in picked.items() if f for n in units[u]}
    progress.message(f"{effective_bits(folder, formats):.2f} bits per weight over the decoder's linears")
    announce_size(folder, formats, job, progress)
    importance = {n: stats.second[n] for n, f in formats.items() if f != FP8}
    export(folder, job, Plan(formats, stats.amax, job.scale, importance))


def budget_bytes(folder: ModelFolder, chosen: Sequence[str], bits: float) -> float:
    """Return the bytes that the chosen linears may take if the decoder's linears have `bits` per weight on average.

    Experts count by the share that a token passes, in both the average and the bytes.
    """
    weights = active_weights(folder, decoder_linears(folder))
    total = sum(weights.values())
    fixed = sum(n * PLAIN_BITS for m, n in weights.items() if m not in set(chosen))
    least = (fixed + sum(weights[m] * BITS[NVFP4] for m in chosen)) / total
    if bits < least:
        raise UsageError(
            f"bits={bits}: excluded linears stay at 16 bits, so less than {least:.2f} cannot be reached",
            f"--set bits={least + 0.05:.2f}, or exclude less",
        )
    return (bits * total - fixed) / 8


def measure(
    folder: ModelFolder,
    units: Mapping[str, list[str]],
    samples: Sequence[Sample],
    stats: InputStats,
    job: Job,
    progress: Progress,
) -> dict[str, dict[str, float]]:
    """Return unit → format → divergence. What an interrupted run measured is not measured again."""
    from annie_quant.quantize.calibration_samples import MANNERS_RESPONSE
    from annie_quant.quantize.kl_trial import Trial

    file = job.measurements("divergence.json")
    divergence: dict[str, dict[str, float]] = file.load({})
    work = [(u, f) for u in units for f in FORMATS if f not in divergence.get(u, {})]
    if not work:
        return divergence
    trial = Trial(folder, samples, MANNERS_RESPONSE, job.options["tokens"])
    for done, (unit, kind) in enumerate(work, 1):
        nats = trial.cost(dict.fromkeys(units[unit], kind), stats.amax, job.scale, stats.second)
        divergence.setdefault(unit, {})[kind] = nats
        file.save(divergence)
        progress.update(done, len(work), f"measuring: {done} of {len(work)}, {unit} as {kind}: {nats:.2g} nats")
    return divergence


def pick(
    costs: Mapping[str, Mapping[str, float]], sizes: Mapping[str, float], budget: float, activations: float
) -> dict[str, str | None]:
    """Return unit → format (None: bf16) with the least summed divergence that fits.

    Of the four-bit units, as many weights as possible then round their activations, too, while these add at most `activations`
    times the divergence of the weights.
    """
    units = list(costs)
    steps = (W4A16, FP8, None)
    harm = [[0.0 if kind is None else costs[u][kind] for kind in steps] for u in units]
    size = [[sizes[u] * (PLAIN_BITS if kind is None else BITS[kind]) / 8 for kind in steps] for u in units]
    chosen = least_cost(harm, size, budget)
    formats: dict[str, str | None] = {u: steps[i] for u, i in zip(units, chosen, strict=True)}
    allowed = activations * sum(row[i] for row, i in zip(harm, chosen, strict=True))
    extra = {u: costs[u][NVFP4] - costs[u][W4A16] for u in units if formats[u] == W4A16}
    return formats | dict.fromkeys(with_rounded_inputs(extra, sizes, allowed), NVFP4)


STRATEGY = Strategy(
    name="sensitivity",
    summary="ours: W4A4, W4A16, FP8 or bf16 by measured divergence under a size budget (--set bits=5.5)",
    formats=dict.fromkeys(("mlp", "attention", "deltanet"), BITS_OPTION.default),
    cost=Cost(rank=70, passes=200, encode=SWEEP_TIME),
    quantize=quantize,
    options={
        "bits": BITS_OPTION,
        "activations": Option(0.25, "divergence that 4-bit activations may add, relative to that of rounded weights"),
        "tokens": Option(1024, "tokens of answers that are scored in each trial"),
    },
    scale="sweep",
)

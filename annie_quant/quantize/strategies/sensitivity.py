"""sensitivity: each linear gets the format that its measured divergence allows, under a size budget.

Every group of linears that is served as one matrix is rounded alone, to each format, and the KL divergence of the answers
is measured; small divergences add up. From everything in four bits, the group that saves most divergence per byte grows
until the budget is spent. Four-bit groups quantize their activations, too, only while that adds little: in a trial the
activations broke the tools, and only those of a few linears.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.errors import UsageError
from annie_quant.models import Family
from annie_quant.progress import Progress
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


def units_of(family: Family, chosen: Sequence[str]) -> dict[str, list[str]]:
    """Return the linears that are decided together, by the name of the first: a fused group, or a layer's experts."""
    fused = {m: group for group in family.served_groups(chosen) for m in group}
    return {members[0]: members for members in (fused.get(n, [n]) for n in chosen)}


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
    """Return unit → format (None: bf16) with the least summed divergence that fits, greedily by divergence per byte."""
    steps = (W4A16, FP8, None)
    bits = [BITS[W4A16], BITS[FP8], PLAIN_BITS]
    level = dict.fromkeys(costs, 0)
    spent = sum(n * bits[0] / 8 for n in sizes.values())

    def harm(unit: str, step: int) -> float:
        kind = steps[step]
        return 0.0 if kind is None else costs[unit][kind]

    while True:
        offers = []
        for unit, step in level.items():
            for to in range(step + 1, len(steps)):
                price = sizes[unit] * (bits[to] - bits[step]) / 8
                saved = harm(unit, step) - harm(unit, to)
                if spent + price <= budget and saved > 0:
                    offers.append((saved / price, unit, to, price))
        if not offers:
            break
        _, unit, to, price = max(offers)
        level[unit], spent = to, spent + price
    formats = {unit: steps[step] for unit, step in level.items()}
    allowed = activations * sum(harm(u, step) for u, step in level.items())
    extra = {u: max(0.0, costs[u][NVFP4] - costs[u][W4A16]) for u, f in formats.items() if f == W4A16}
    for unit in sorted(extra, key=lambda u: extra[u] / sizes[u]):
        allowed -= extra[unit]
        if allowed < 0:
            break
        formats[unit] = NVFP4
    return formats


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

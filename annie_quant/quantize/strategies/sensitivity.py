"""sensitivity: each linear becomes what its measured harm allows, W4A4, W4A16, FP8 or bf16, under a size budget.

Every group of linears that reads one input is rounded alone, to each format, and the KL divergence of the answers is
measured; for small harms these add up. From everything in four bits, whatever saves most divergence a byte grows
until the budget is spent. Four-bit groups quantize their activations too only while that adds little: in a trial it
was the activations that broke the tools, and only those of a few linears.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from annie_quant.checkpoint.linears import fused_groups
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.errors import UsageError
from annie_quant.files import read_json, write_json
from annie_quant.quantize import calibration_samples, kl_trial
from annie_quant.quantize.export import (
    BITS,
    FP8,
    NVFP4,
    W4A16,
    Decided,
    choose,
    decoder_linears,
    effective_bits,
    export,
    say_size,
)
from annie_quant.quantize.input_stats import gather
from annie_quant.quantize.job import Job, Report
from annie_quant.quantize.strategies.manners import BY_MARK

NAME = "sensitivity"
SUMMARY = "ours: W4A4, W4A16, FP8 or bf16 by measured divergence under a size budget (--set bits=5.5)"
SCALE = "sweep"
# bits: a weight of the decoder's linears, those that stay bf16 included. activations: what 4-bit activations may add
# to the divergence, as a share of what the rounded weights cost. tokens: of answers, scored in each trial.
OPTIONS = {"bits": 5.5, "activations": 0.25, "tokens": 1024}
FORMATS = (NVFP4, W4A16, FP8)
SCORED = {m: w for m, w in BY_MARK.items() if m != calibration_samples.PROMPT}


def quantize(job: Job, report: Report) -> None:
    folder = ModelFolder(job.model)
    chosen = choose(folder, job)
    units = units_of(chosen)
    budget = budget_bytes(folder, chosen, job.options["bits"])
    report(f"size budget {job.options['bits']} bits a weight: {budget / 1e6:,.1f} MB for {len(chosen)} linears")
    conversations = calibration_samples.read(job)
    moments = gather(folder, conversations, BY_MARK, report)
    costs = measure(folder, units, conversations, moments.amax, moments.second, job, report)
    sizes = {u: sum(folder.info(f"{n}.weight").elements for n in members) for u, members in units.items()}
    picked = pick(costs, sizes, budget, job.options["activations"])
    formats = {n: f for u, f in picked.items() if f for n in units[u]}
    report(f"{effective_bits(folder, formats):.2f} bits a weight over the decoder's linears")
    say_size(folder, formats, job, report)
    importance = {n: moments.second[n] for n, f in formats.items() if f != FP8}
    export(folder, job, Decided(formats, moments.amax, job.scale, importance))


def units_of(chosen: Sequence[str]) -> dict[str, list[str]]:
    """Linears that are decided together, those that a server fuses, by the name of the first."""
    fused = {m: group for group in fused_groups(set(chosen)) for m in group}
    return {members[0]: members for members in (fused.get(n, [n]) for n in chosen)}


def budget_bytes(folder: ModelFolder, chosen: Sequence[str], bits: float) -> float:
    """Bytes that the chosen linears may take so that the decoder's linears have `bits` a weight on average."""
    weights = {n: folder.info(f"{n}.weight").elements for n in decoder_linears(folder)}
    fixed = sum(n * 16 for m, n in weights.items() if m not in set(chosen))
    least = (fixed + sum(weights[m] * BITS[NVFP4] for m in chosen)) / sum(weights.values())
    if bits < least:
        raise UsageError(
            f"bits={bits}: what is excluded stays at 16 bits, so less than {least:.2f} cannot be reached",
            f"--set bits={least + 0.05:.2f}, or exclude less",
        )
    return (bits * sum(weights.values()) - fixed) / 8


def measure(
    folder: ModelFolder,
    units: Mapping[str, list[str]],
    conversations: Sequence[calibration_samples.Text],
    amax: Mapping[str, float],
    importance: Mapping,
    job: Job,
    report: Report,
) -> dict[str, dict[str, float]]:
    """Unit → format → divergence; measured ones are kept, so a killed run goes on."""
    file = job.kept() / "divergence.json"
    known: dict[str, dict[str, float]] = read_json(file) if file.is_file() else {}
    work = [(u, f) for u in units for f in FORMATS if f not in known.get(u, {})]
    if not work:
        return known
    trial = kl_trial.Trial(kl_trial.load(folder), conversations, SCORED, job.options["tokens"])
    for done, (unit, kind) in enumerate(work, 1):
        formats = dict.fromkeys(units[unit], kind)
        known.setdefault(unit, {})[kind] = trial.cost(formats, amax, job.scale, importance)
        report(f"measuring: {done} of {len(work)}, {unit} as {kind}: {known[unit][kind]:.2g} nats")
        write_json(file, json.loads(json.dumps(known)))
    return known


def pick(
    costs: Mapping[str, Mapping[str, float]], sizes: Mapping[str, int], budget: float, activations: float
) -> dict[str, str | None]:
    """Unit → format (None: bf16), the least summed divergence that fits: greedy by divergence saved a byte."""
    steps = (W4A16, FP8, None)
    bits = [BITS[W4A16], BITS[FP8], 16.0]
    level = dict.fromkeys(costs, 0)
    spent = sum(n * bits[0] / 8 for n in sizes.values())

    def harm(unit: str, at: int) -> float:
        kind = steps[at]
        return 0.0 if kind is None else costs[unit][kind]

    while True:
        offers = []
        for unit, at in level.items():
            for to in range(at + 1, len(steps)):
                price = sizes[unit] * (bits[to] - bits[at]) / 8
                saved = harm(unit, at) - harm(unit, to)
                if spent + price <= budget and saved > 0:
                    offers.append((saved / price, unit, to, price))
        if not offers:
            break
        _, unit, to, price = max(offers)
        level[unit], spent = to, spent + price
    formats = {unit: steps[at] for unit, at in level.items()}
    allowed = activations * sum(harm(u, at) for u, at in level.items())
    extra = {u: max(0.0, costs[u][NVFP4] - costs[u][W4A16]) for u, f in formats.items() if f == W4A16}
    for unit in sorted(extra, key=lambda u: extra[u] / sizes[u]):
        allowed -= extra[unit]
        if allowed < 0:
            break
        formats[unit] = NVFP4
    return formats

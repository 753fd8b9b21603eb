"""Choose formats by measured divergence: the linears that are decided together, an exact knapsack, and which inputs are rounded.

NVFP4 weights have one size whether a server rounds the inputs of their linear to 4 bits (W4A4) or not (W4A16). The inputs of a few
linears carry most of the harm, so W4A4 for the others keeps most of its matrix products for a small part of its divergence.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.core.progress import Progress
from annie_quant.models import Family, in_layer
from annie_quant.quantize.formats import NVFP4, W4A16
from annie_quant.quantize.job import Job
from annie_quant.quantize.plan import active_weights

if TYPE_CHECKING:
    from annie_quant.quantize.calibration_samples import Sample

TIE = 1e-9  # sums of sizes that differ by less of the limit are equal
TOKENS = 1024  # of answers, scored in each trial
POSITIONS = 4096  # of these answers with their prompts on a CPU, where trials take much of the time
BANDS = 32  # units that are measured there at most: of neighbouring layers together


def units_of(family: Family, chosen: Sequence[str]) -> dict[str, list[str]]:
    """Return the linears that are decided together, by the name of the first: a fused group, or a layer's experts."""
    fused = {m: group for group in family.served_groups(chosen) for m in group}
    return {members[0]: members for members in (fused.get(n, [n]) for n in chosen)}


def bands_of(units: Mapping[str, list[str]], count: int) -> dict[str, list[str]]:
    """Return at most about `count` units, each with the same linears of neighbouring layers."""
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


def least_cost(costs: Sequence[Sequence[float]], sizes: Sequence[Sequence[float]], limit: float) -> list[int]:
    """Return one choice per row, with the least summed cost of all whose summed size is at most `limit`: an exact knapsack.

    Of a row's choices that cost the same, the smallest. The first choices fit in any case.
    """
    import numpy as np
    from scipy.optimize import Bounds, LinearConstraint, milp

    if not costs:
        return []
    cost, size = np.asarray(costs, float), np.asarray(sizes, float)
    rows, choices = cost.shape
    limit = max(limit, float(size[:, 0].sum()))
    # Numbers near 1, because the solver's tolerances are absolute.
    cost, size = cost / (np.abs(cost).max() or 1.0), size / (limit or size.max() or 1.0)
    one_each = LinearConstraint(np.kron(np.eye(rows), np.ones(choices)), 1, 1)
    fits = LinearConstraint(size.reshape(1, -1), -np.inf, (1.0 if limit else 0.0) + TIE)
    result = milp(1e3 * cost.ravel(), integrality=np.ones(cost.size), bounds=Bounds(0, 1),
                  constraints=[one_each, fits], options={"mip_rel_gap": 0.0})  # fmt: skip
    if result.x is None:
        raise RuntimeError(f"the choice of formats failed: {result.message}")
    best = cost[np.arange(rows), result.x.reshape(rows, choices).argmax(1)]
    return [int(i) for i in np.where(cost <= best[:, None], size, np.inf).argmin(1)]


def with_rounded_inputs(harm: Mapping[str, float], weights: Mapping[str, float], allowed: float) -> list[str]:
    """Return the units with the most weights whose summed harm is at most `allowed`. Both are given by unit."""
    rounds = least_cost([[0.0, -weights[u]] for u in harm], [[0.0, max(0.0, h)] for h in harm.values()], allowed)
    return [u for u, i in zip(harm, rounds, strict=True) if i]


def formats_of_inputs(
    folder: ModelFolder, chosen: Sequence[str], samples: Sequence[Sample], share: float, job: Job, progress: Progress
) -> dict[str, str]:
    """Return "nvfp4" or "w4a16" for every chosen linear: rounded inputs for the most weights that leave `share` of the harm.

    Harm is the divergence of the source's answers when only the inputs of one unit are rounded, summed over the units. What an
    interrupted run measured is not measured again.
    """
    from annie_quant.quantize.layerwise import device_and_dtype

    units = units_of(folder.family, chosen)
    if device_and_dtype(folder)[0] == "cpu":
        units = bands_of(units, BANDS)
    harm = measure_inputs(folder, units, samples, job, progress)
    active = active_weights(folder, chosen)
    weights = {u: sum(active[n] for n in members) for u, members in units.items()}
    total = sum(harm.values())
    narrow = with_rounded_inputs(harm, weights, share * total)
    part = sum(weights[u] for u in narrow) / max(sum(weights.values()), 1e-30)
    left = sum(harm[u] for u in narrow)
    progress.message(
        f"W4A4 for {len(narrow)} of {len(units)} groups of linears, {part:.0%} of the weights: {left:.2g} nats of the {total:.2g} "
        "of all rounded inputs; W4A16 for the others"
    )
    rounded = {n for u in narrow for n in units[u]}
    return {n: NVFP4 if n in rounded else W4A16 for n in chosen}


def measure_inputs(
    folder: ModelFolder, units: Mapping[str, list[str]], samples: Sequence[Sample], job: Job, progress: Progress
) -> dict[str, float]:
    """Return unit → divergence with its inputs rounded, in nats per response token; weights are the source's."""
    from annie_quant.quantize.calibration_samples import RESPONSE
    from annie_quant.quantize.kl_trial import Trial
    from annie_quant.quantize.layerwise import device_and_dtype

    job.work_folder()  # the layers' rounding would empty a folder that this file alone had made
    file = job.measurements("input_divergence.json")
    harm: dict[str, float] = file.load({})
    waiting = [u for u in units if u not in harm]
    if waiting:
        on_cpu = device_and_dtype(folder)[0] == "cpu"
        trial = Trial(folder, samples, RESPONSE, TOKENS, POSITIONS if on_cpu else math.inf)
        amax = trial.largest_inputs([n for members in units.values() for n in members])
        noise = trial.divergence()  # of the stored reference, which is float16
    for done, unit in enumerate(waiting, len(units) - len(waiting) + 1):
        harm[unit] = max(0.0, trial.cost_of_inputs({n: amax[n] for n in units[unit] if n in amax}) - noise)
        file.save(harm)
        progress.update(done, len(units), f"rounding inputs: {done} of {len(units)}, {unit}: {harm[unit]:.2g} nats")
    return {u: harm[u] for u in units}

"""The linears that have one format, with their bytes and divergence in each, and which of them round their inputs (W4A4).

NVFP4 weights have one size whether a server rounds the inputs of their linear to 4 bits (W4A4) or not (W4A16). The inputs of a few
linears carry most of the harm, so W4A4 for the others keeps most of its matrix products for a small part of its divergence.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from annie_quant.checkpoint.first_token import NoRate, Prompt, PromptTime, flops_share, predict
from annie_quant.checkpoint.linears import HEAD, unties, weight_name
from annie_quant.checkpoint.prompt_work import work_of
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.checkpoint.size import bytes_per_token
from annie_quant.core.progress import Progress
from annie_quant.documents import Device
from annie_quant.models import Family, in_layer
from annie_quant.models.formats import BF16, FP8_CHANNEL, GROUP, NVFP4, W4A16, Format
from annie_quant.quantize.backend import device_kind
from annie_quant.quantize.calibration_samples import CalibrationSample
from annie_quant.quantize.formats import active_weights, choose, names_module
from annie_quant.quantize.frontier import with_rounded_inputs
from annie_quant.quantize.kl_trial import StoredTrials, answers_to_score, loss_of
from annie_quant.quantize.plan import QuantizationPlan
from annie_quant.quantize.strategy import Job, StrategyOptions

if TYPE_CHECKING:
    from annie_quant.quantize.held_out import FormatTrials

SHARE = 0.05  # of the divergence that rounding all inputs adds, what W4A4 may leave
TOKENS = 1024  # of answers, scored in each trial
POSITIONS = (
    4096  # of these answers with their prompts, on a CPU, where trials take most of the time
)
BUDGET_STEPS = (0.05, 0.1, 0.2, 0.4)  # budgets of a search, between all linears in 4 bits and in 16
BANDS = 32  # units that are measured at most on a CPU: linears of neighbouring layers form one unit


def units_of(folder: ModelFolder, chosen: Sequence[str]) -> dict[str, list[str]]:
    """Return the linears that are decided together, by the name of the first: a fused group, or a layer's experts.

    On a CPU the same linears of neighbouring layers are decided together, too.
    """
    units = served_units(folder.family, chosen)
    return bands_of(units, BANDS) if device_kind() == "cpu" else units


def served_units(family: Family, chosen: Sequence[str]) -> dict[str, list[str]]:
    """Return the linears that are served as one, by the name of the first: a fused group, or a layer's experts."""
    fused = {m: group for group in family.served_groups(chosen) for m in group}
    return {members[0]: members for members in (fused.get(n, [n]) for n in chosen)}


def bands_of(units: Mapping[str, list[str]], count: int) -> dict[str, list[str]]:
    """Return about `count` units at most, each with the same linears of neighbouring layers."""
    kinds: dict[str, list[str]] = {}
    for unit in units:
        kinds.setdefault(in_layer(unit), []).append(unit)
    bands = max(1, count // max(1, len(kinds)))
    result: dict[str, list[str]] = {}
    for same in kinds.values():
        size = math.ceil(len(same) / bands)
        for number, unit in enumerate(same):
            first = same[number - number % size]
            result.setdefault(first, []).extend(units[unit])
    return result


@dataclass(frozen=True)
class Group:
    """Linears with one format. Lists are parallel to `formats`, whose first entry has the fewest bytes.

    size: bytes of tensors.
    read: bytes per token.
    times: parts of the time to the first token; empty where it is not predicted.
    weights: number of weights, experts by the share that a token passes.
    elements: number of weights, with all experts.
    """

    members: list[str]
    formats: list[Format]
    size: list[float]
    read: list[float]
    weights: float
    elements: float = 0.0
    are_experts: bool = False
    times: list[PromptTime] = field(default_factory=list)

    def has(self, kind: Format) -> bool:
        return kind in self.formats

    def without(self, kind: Format) -> Group:
        """Return the group without one of its formats."""
        i = self.formats.index(kind)

        def others(values: list[Any]) -> list[Any]:
            return values[:i] + values[i + 1 :]

        return replace(
            self, formats=others(self.formats), size=others(self.size), read=others(self.read)
        )


def groups_of(
    job: Job[StrategyOptions],
    four_bit: Mapping[str, Sequence[Format]],
    head: bool = True,
    wider: Sequence[Format] = (FP8_CHANNEL, BF16),
) -> dict[str, Group]:
    """Return the groups by their first linear, and the head last unless it is excluded.

    four_bit: linear → the 4-bit formats that it may have.  wider: the other formats of all but the head.
    """
    folder = ModelFolder(job.model)
    units = units_of(folder, list(four_bit))
    groups = {u: group_of(folder, names, [*four_bit[u], *wider]) for u, names in units.items()}
    info = folder.info(weight_name(folder, HEAD))
    if head and info.shape[1] % GROUP == 0 and not any(names_module(p, HEAD) for p in job.exclude):
        # No 4-bit inputs: a server computes the head for the last position of a prompt only.
        groups[HEAD] = group_of(folder, [HEAD], [W4A16, FP8_CHANNEL, BF16])
    return groups


def group_of(folder: ModelFolder, members: list[str], formats: list[Format]) -> Group:
    """Return linears as a group that may have these formats."""
    active = active_weights(folder, members)
    infos = {n: folder.info(weight_name(folder, n)) for n in members}
    experts = folder.family.experts
    group = Group(
        members,
        formats,
        [],
        [],
        weights=sum(active.values()),
        elements=float(sum(info.elements for info in infos.values())),
        are_experts=experts is not None and experts.contain(members[0]),
    )
    for kind in group.formats:
        size = read = 0.0
        for name, info in infos.items():
            stored = info.size_bytes if kind == BF16 else kind.stored_bytes(info.shape)
            size += stored
            read += stored * active[name] / info.elements
        group.size.append(size)
        group.read.append(read)
    if unties(folder, members):
        group.size[-1] = 0.0  # 16 bits take no bytes besides the embedding, which stays
    return group


def budgets(model: Path) -> list[float]:
    """Return the bytes of weights per token at which a search tries `best`, rising.

    The first is the fewest possible, with a 4-bit head. Those with all linears in 4 bits and a 16-bit head need no budget.
    """
    folder = ModelFolder(model)
    groups = groups_of(Job(model, model), dict.fromkeys(choose(folder, ()), (W4A16,)))
    plain = sum(group.read[-1] for group in groups.values())
    least = sum(min(group.read) for group in groups.values())
    usual = sum(group.read[-1 if unit == HEAD else 0] for unit, group in groups.items())
    read = [usual + step * (plain - usual) for step in BUDGET_STEPS]
    if least < usual:
        read.insert(0, least)
    return [bytes_per_token(folder) - plain + of_linears for of_linears in read]


def formats_of_inputs(
    job: Job[StrategyOptions],
    chosen: Sequence[str],
    samples: Sequence[CalibrationSample],
    progress: Progress,
    share: float,
) -> dict[str, Format]:
    """Return "nvfp4" or "w4a16" for every chosen linear: rounded inputs for the most weights that leave `share` of the harm.

    Harm is the divergence of the source's answers with only the inputs of one unit rounded, summed over the units. Measurements
    of an interrupted run are used again.
    """
    folder = ModelFolder(job.model)
    units = units_of(folder, chosen)
    harm = measure_inputs(job, units, samples, progress)
    active = active_weights(folder, chosen)
    weights: dict[str, float] = {}
    for unit, members in units.items():
        weights[unit] = sum(active[n] for n in members)
    total = sum(harm.values())
    narrow = with_rounded_inputs(harm, weights, share * total)
    rounded_share = sum(weights[u] for u in narrow) / max(sum(weights.values()), 1e-30)
    left = sum(harm[u] for u in narrow)
    progress.message(
        f"W4A4 for {len(narrow)} of {len(units)} groups of linears, {rounded_share:.0%} of the weights: {left:.2g} nats of the "
        f"{total:.2g} of all rounded inputs; W4A16 for the others"
    )
    rounded = set(chain.from_iterable(units[u] for u in narrow))
    return {n: NVFP4 if n in rounded else W4A16 for n in chosen}


def given_up_line(
    trials: FormatTrials | None,
    job: Job[StrategyOptions],
    formats: Mapping[str, Format],
    device: Device,
) -> str:
    """Return what 16-bit inputs cost in time to the first token, next to 4-bit inputs of all linears.

    trials: measure the divergence of both; None: without it.  formats: linear → format, of all that are quantized.
    """
    folder = ModelFolder(job.model)
    every = {n: NVFP4 if f == W4A16 and n != HEAD else f for n, f in formats.items()}
    work = work_of(folder, "vllm", formats)
    line = f"inputs of {flops_share(work, 'w4a4'):.0%} of the FLOPs in 4 bits"
    if every == formats:
        return line
    prompt = Prompt().within(folder)
    times = []
    for planned in (work, work_of(folder, "vllm", every)):
        with contextlib.suppress(NoRate):
            times.append(f"{predict(planned, 'vllm', device, prompt).ms:,.0f} ms")
    more = ""
    if trials:
        chosen, rounded = (float(trials.measure(f)[:, 0].sum()) for f in (formats, every))
        more = f"KL x{rounded / chosen:.2g}" if chosen > 0 else ""
    if len(times) < 2:
        return f"{line}; all in 4 bits {more}" if more else line
    first, least = times
    where = f"at {prompt.tokens:,} tokens, vLLM on {device.name}"
    return f"{line}: first token after about {first} {where}; all in 4 bits {', '.join(filter(None, (least, more)))}"


def measure_inputs(
    job: Job[StrategyOptions],
    units: Mapping[str, list[str]],
    samples: Sequence[CalibrationSample],
    progress: Progress,
) -> dict[str, float]:
    """Return unit → divergence with its inputs rounded, in nats per response token; weights are the source's."""
    positions = POSITIONS if device_kind() == "cpu" else math.inf
    answers = answers_to_score(samples, TOKENS, positions)
    trials = StoredTrials(job, "input_shares.json", answers)
    scored = sum(len(a.decides) for a in answers)
    progress.message(
        f"each trial scores {len(answers)} of {len(samples)} answers, {scored:,} tokens"
    )
    waiting = [u for u in units if u not in trials.figures]
    amax: dict[str, float] = {}
    if waiting:
        amax = trials.trial.largest_inputs(chain.from_iterable(units.values()))
    # The reference is float16, so the unchanged model differs from it.
    noise = loss_of(trials.shares("unchanged", QuantizationPlan()))
    harm = {}
    for done, (unit, members) in enumerate(units.items(), 1):
        plan = QuantizationPlan.of(dict.fromkeys(members, NVFP4), amax)
        harm[unit] = max(0.0, loss_of(trials.shares(unit, plan)) - noise)
        if unit in waiting:
            line = f"{done} of {len(units)}, {unit}: {harm[unit]:.2g} nats"
            progress.update(done, len(units), f"rounding inputs: {line}")
    return harm

"""`best` under limits of size, speed, time to the first token or loss: the formats of all groups of linears and of the head.

A group is what servers need in one format: queries, keys and values, gate and up, a layer's experts. Each group alone gets each
format that it may have, and the divergence of held-out answers is measured: FP8 with a scale per row, and NVFP4 by weights that a
first run rounded. Under a limit of the time to the first token each group may have 4-bit or 16-bit inputs; without one the rule of
`best` (mixed_formats.formats_of_inputs) decides that. The integer program of frontier.py gives the choice. It is evaluated as a
whole; where that is worse than the sum of its groups by more than the noise, the costs of its formats are scaled and it is solved
again. The formats without limits are evaluated too, where they satisfy the limits: what is taken is never worse than them on these
answers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from annie_quant.checkpoint import decode_speed, first_token
from annie_quant.checkpoint.first_token import NoRate, PrefillRates, Prompt, PromptTime, prompt_time
from annie_quant.checkpoint.linears import HEAD, unties, weight_name
from annie_quant.checkpoint.prompt_work import ModelShape, PromptWork, kernel_of, work_of
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.checkpoint.size import bytes_per_token
from annie_quant.core.progress import Progress
from annie_quant.models.family import ModelSize
from annie_quant.models.formats import BF16, FP8_CHANNEL, W4A16, Format
from annie_quant.quantize.backend import device_kind
from annie_quant.quantize.calibration_samples import CalibrationSample
from annie_quant.quantize.format_planner import FormatPlanner
from annie_quant.quantize.formats import active_weights
from annie_quant.quantize.frontier import Limits, frontier_lines
from annie_quant.quantize.held_out import FormatTrials
from annie_quant.quantize.kl_trial import answers_to_score
from annie_quant.quantize.mixed_formats import Group, groups_of
from annie_quant.quantize.plan import PlannedLinear, QuantizationPlan
from annie_quant.quantize.rounding import round_head
from annie_quant.quantize.strategy import Job, StrategyOptions

HEAD_TOKENS = {"cpu": 4096, "cuda": 1 << 15}  # inputs of the head at most
PUBLISHED_BANDS = 8  # groups per kind of part of a published model


def planner_of(
    job: Job[StrategyOptions], limits: Limits, four_bit: Mapping[str, Sequence[Format]]
) -> FormatPlanner:
    """Return the planner of a model. Raises UsageError for limits that no choice satisfies, or the unchanged model does.

    four_bit: linear → the 4-bit formats that it may have. Without a limit of bytes or loss, a limit of the time to the first token
    leaves all linears but the head in them.
    """
    folder = ModelFolder(job.model)
    prompt = limits.prompt.within(folder)
    groups = groups_of(job, four_bit, math.isinf(limits.max_bits), wider_formats(limits))
    members = [name for group in groups.values() for name in group.members]
    unchanged = {n: folder.info(weight_name(folder, n)).size_bytes for n in members}
    active = active_weights(folder, members)
    elements = {n: folder.info(weight_name(folder, n)).elements for n in members}
    size = sum(unchanged[n] for n in members if not unties(folder, [n]))
    read = sum(unchanged[n] * active[n] / elements[n] for n in members)
    base = {
        "size": sum(folder.info(n).size_bytes for n in folder) - size,
        "read": bytes_per_token(folder) - read,
    }
    counted = sum(active_weights(folder, four_bit).values())
    token = decode_speed.token_bytes(folder)
    planner = FormatPlanner(groups, limits, token, base, counted, prompt=prompt)
    add_times(planner, work_of(folder, "vllm", {}, members))
    planner.check_limits()
    return planner


def wider_formats(limits: Limits) -> list[Format]:
    """Return the formats with more than 4 bits that linears may have: none where only the time to the first token is limited."""
    of_time_alone = limits.max_ttft_ms < math.inf and not limits.of_bytes
    return [] if of_time_alone else [FP8_CHANNEL, BF16]


def planner_of_size(size: ModelSize, limits: Limits, four_bit: Sequence[Format]) -> FormatPlanner:
    """Return the planner of a published model, whose parts of one kind form PUBLISHED_BANDS groups. Raises as planner_of does."""
    counts = size.counts
    kinds = [kind for kind in counts if kind not in ("head", "embedding", "rest")]
    groups = {}
    for kind in kinds:
        for number in range(PUBLISHED_BANDS):
            weights = counts[kind] / PUBLISHED_BANDS
            name = f"{kind} {number + 1}"
            groups[name] = group_of_size(name, weights, [*four_bit, *wider_formats(limits)])
    unchanged = {"size": 2.0 * sum(counts.values()), "read": 2.0 * sum(counts.values())}
    unchanged["read"] -= 2.0 * counts["embedding"]
    if math.isinf(limits.max_bits):
        groups[HEAD] = group_of_size(HEAD, counts["head"], [W4A16, FP8_CHANNEL, BF16])
    in_groups = 2.0 * sum(group.weights for group in groups.values())
    base = {axis: total - in_groups for axis, total in unchanged.items()}
    counted = sum(counts[kind] for kind in kinds)
    token = decode_speed.TokenBytes(unchanged["read"], size.layers)
    prompt = limits.prompt.within(None)
    planner = FormatPlanner(groups, limits, token, base, counted, prompt=prompt)
    shape = first_token.prefill().models.get(size.label)
    if shape is None and limits.max_ttft_ms < math.inf:
        raise NoRate(f"the shape of {size.label} is not known", "give --model a folder")
    if shape is not None:
        head_bytes = 0.0 if HEAD in groups else 2.0 * counts["head"]
        add_times(planner, PromptWork(shape, {}, head_bytes))
    planner.check_limits()
    return planner


def group_of_size(name: str, weights: float, formats: list[Format]) -> Group:
    """Return a part of a published model as a group."""
    sizes = [weights * kind.bits / 8 for kind in formats]
    return Group([name], formats, sizes, list(sizes), weights, elements=weights)


def add_times(planner: FormatPlanner, others: PromptWork) -> None:
    """Predict the time to the first token of each group's formats, where the device has rates.

    Under a limit of that time a format without a rate is left out. Raises NoRate where none is left.

    others: the work of everything that is in no group.
    """
    limited = planner.limits.max_ttft_ms < math.inf
    prompt = planner.prompt
    computed = (prompt.tokens or 0) - prompt.cached
    times: dict[str, list[PromptTime]] = {}
    notes: dict[str, None] = {}
    try:
        rates = first_token.rates_of("vllm", planner.limits.device)
        base_time = prompt_time(others, "vllm", computed, prompt.cached, rates)
        for unit, group in planner.groups.items():
            times[unit] = []
            for kind in list(group.formats):
                try:
                    time = time_of_group(group, kind, others.shape, prompt, rates)
                except NoRate as error:
                    if not limited or len(group.formats) == 1:
                        raise
                    group = group.without(kind)
                    notes[f"{error.message}, so no group gets that format there"] = None
                else:
                    times[unit].append(time)
            planner.groups[unit] = group
    except NoRate:
        if limited:
            raise
        return
    for unit, group in planner.groups.items():
        planner.groups[unit] = replace(group, times=times[unit])
    planner.base_time = base_time
    planner.notes = list(notes)


def time_of_group(
    group: Group, kind: Format, shape: ModelShape, prompt: Prompt, rates: PrefillRates
) -> PromptTime:
    """Return the parts of the time to the first token that a group adds in a format."""
    index = group.formats.index(kind)
    if group.members == [HEAD]:
        return PromptTime(head_s=group.read[index] / rates.read_bytes_s)
    sizes = {kernel_of(kind.name, "vllm"): (group.elements, group.size[index])}
    work = PromptWork(shape, {} if group.are_experts else sizes, 0.0)
    if group.are_experts:
        work = replace(work, experts=sizes)
    computed = (prompt.tokens or 0) - prompt.cached
    return replace(prompt_time(work, "vllm", computed, prompt.cached, rates), rest_ms=0.0)


def expected_choice(planner: FormatPlanner) -> tuple[tuple[int, ...], str]:
    """Return a choice within the limits before anything is measured, and what it stands for as a line.

    A limit of loss is not known to be satisfied: then it is the choice with the fewest bytes per token.
    """
    planner.assume()
    limits = planner.limits
    if limits.max_loss < math.inf:
        choices = planner.program.least(
            [planner.quantity("read"), planner.quantity("loss")],
            list(planner.limited().values()),
        )
        line = f"{limits}: the smallest possible; --max-loss is measured and may need more bytes"
    else:
        choices = planner.solve(math.inf)
        line = f"{limits}: formats by their rounding errors; the run measures divergences instead"
    assert choices is not None  # check_limits
    point = planner.point(choices)
    shares = ", ".join(f"{share:.0%} {name}" for name, share in point.formats.items())
    return choices, f"{line} ({shares}, head {point.head})"


def choose_formats(
    job: Job[StrategyOptions],
    planner: FormatPlanner,
    learned: Sequence[CalibrationSample],
    trials: FormatTrials,
    damping: float,
    progress: Progress,
) -> QuantizationPlan:
    """Return the formats under the limits, the rounded head where it is in NVFP4, and the frontier. Linears are not rounded yet.

    learned: samples that are not held out.
    damping: of the head's rounding.
    """
    device = device_kind()
    if HEAD in planner.groups:
        positions = 4 * HEAD_TOKENS[device]
        rows = [a.row for a in answers_to_score(learned, HEAD_TOKENS[device], positions, cut=False)]
        file = job.work_folder() / "head.safetensors"
        head = round_head(trials.trial, rows, damping, job.scale, file, progress)
        trials.rounded.linears[HEAD] = PlannedLinear(W4A16, packed=head)
    for note in planner.notes:
        progress.message(note)
    planner.measure(trials, progress)
    taken, evaluated = planner.search(trials, progress)
    plan = planner.describe(taken, evaluated)
    for line in frontier_lines(plan):
        progress.message(line)
    planned = QuantizationPlan.of(planner.formats(planner.kinds_of(taken.choices)))
    planned.frontier = plan
    if planned.formats.get(HEAD) == W4A16:
        planned.linears[HEAD] = trials.rounded.linears[HEAD]
    return planned

"""`best` under limits of size, speed or loss: the formats of all groups of linears and of the head by measured divergence.

A group is what servers need in one format: queries, keys and values, gate and up, a layer's experts. Each group alone gets each
format that it may have, and the divergence of held-out answers is measured: FP8 with a scale per row, and NVFP4, with 4-bit inputs
where the rule of `best` rounds them (mixed_formats.formats_of_inputs) and else with 16-bit ones, by weights that a first run
rounded. The exact knapsack (frontier.py) gives the choice. It is evaluated as a whole; where that is worse than the sum of its
groups by more than the noise, the costs of its formats are scaled and it is solved again. The formats without limits are evaluated
too, where they satisfy the limits: what is taken is never worse than them on these answers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from annie_quant.checkpoint import decode_speed
from annie_quant.checkpoint.linears import HEAD
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.checkpoint.size import bytes_per_token
from annie_quant.core.errors import UsageError
from annie_quant.core.progress import Progress
from annie_quant.documents import FormatPlan, FrontierPoint
from annie_quant.models.formats import BF16, FP8_CHANNEL, NVFP4, W4A16, Format
from annie_quant.quantize import held_out
from annie_quant.quantize.backend import device_kind
from annie_quant.quantize.calibration_samples import CalibrationSample
from annie_quant.quantize.formats import active_weights
from annie_quant.quantize.frontier import Front, Limits, front_of, frontier_lines
from annie_quant.quantize.held_out import FormatTrials
from annie_quant.quantize.kl_trial import answers_to_score, loss_of
from annie_quant.quantize.mixed_formats import Group, groups_of
from annie_quant.quantize.plan import PlannedLinear, QuantizationPlan
from annie_quant.quantize.rounding import round_head
from annie_quant.quantize.strategy import Job, StrategyOptions

TABLE_FORMATS = (NVFP4, W4A16, FP8_CHANNEL, BF16)
MAX_SOLUTIONS = 6  # that are evaluated
TABLE_POINTS = 12  # of the frontier
HEAD_TOKENS = {"cpu": 4096, "cuda": 1 << 15}  # inputs of the head at most


@dataclass(frozen=True)
class Solution:
    """A choice per group, and each conversation's share of the three figures of Trial.shares for the whole."""

    choices: tuple[int, ...]
    whole: np.ndarray

    @property
    def loss(self) -> float:
        return loss_of(self.whole)


@dataclass
class FormatPlanner:
    """The costs of all groups, and the choices under limits.

    read: what a token of the model reads.
    base: bytes of everything that is in no group, by axis: "size" and "read".
    counted: number of weights that a limit of bits counts, by the share that a token passes.
    costs: group → format → FormatTrials.measure of it alone; zero for 16 bits.
    ratios: format → measured divergence of a whole relative to the sum of its groups.
    """

    groups: dict[str, Group]
    limits: Limits
    read: decode_speed.TokenBytes
    base: dict[str, float]
    counted: float = 0.0
    costs: dict[str, dict[Format, np.ndarray]] = field(default_factory=dict)
    ratios: dict[Format, float] = field(default_factory=dict)

    def line(self, axis: str) -> float:
        """Return the bytes that an axis may have."""
        limits = self.limits
        if axis == "size":
            return limits.max_gb * 1e9
        by_speed = by_bits = math.inf
        if limits.min_tps:
            by_speed = decode_speed.largest_bytes(self.read, limits.device, limits.min_tps)
        if limits.max_bits < math.inf:
            by_bits = self.base[axis] + limits.max_bits / 8 * self.counted
        return min(by_speed, by_bits)

    def chosen(self, choices: Sequence[int]) -> list[tuple[str, Group, int]]:
        return [(u, g, i) for (u, g), i in zip(self.groups.items(), choices, strict=True)]

    def bytes_of(self, choices: Sequence[int], axis: str) -> float:
        return self.base[axis] + sum(getattr(g, axis)[i] for _, g, i in self.chosen(choices))

    def tok_s(self, choices: Sequence[int]) -> float:
        read = replace(self.read, weights=self.bytes_of(choices, "read"))
        return decode_speed.tok_s(read, self.limits.device)

    def fits(self, choices: Sequence[int]) -> bool:
        return all(self.bytes_of(choices, axis) <= self.line(axis) for axis in self.base)

    def check_limits(self) -> None:
        """Raise UsageError where no choice has so few bytes, or where the unchanged model has."""
        limits = self.limits
        device = limits.device.name
        groups = self.groups.values()
        smallest = [int(np.argmin(group.size)) for group in groups]
        size = self.bytes_of(smallest, "size") / 1e9
        if limits.max_gb < size:
            raise UsageError(
                f"--max-gb {limits.max_gb:g}: the smallest possible is {size:.4g} GB, {size - limits.max_gb:.3g} GB more",
                f"--max-gb {size * 1.001:.4g}, or exclude less",
            )
        fastest = [int(np.argmin(group.read)) for group in groups]
        speed = self.tok_s(fastest)
        if limits.min_tps > speed:
            raise UsageError(
                f"--min-tps {limits.min_tps:g}: the smallest possible decodes at {speed:.4g} tok/s on {device}, "
                f"{limits.min_tps - speed:.3g} fewer",
                f"--min-tps {speed * 0.999:.4g}, or exclude less",
            )
        if limits.max_bits < math.inf:
            least_bytes = self.bytes_of(fastest, "read") - self.base["read"]
            least_bits = 8 * least_bytes / self.counted
            if limits.max_bits < least_bits:
                raise UsageError(
                    f"bits={limits.max_bits:g}: excluded linears stay at 16 bits, so less than {least_bits:.2f} cannot be reached",
                    f"--set bits={least_bits + 0.05:.2f}, or exclude less",
                )
        unchanged = [group.unquantized for group in groups]
        if math.isinf(limits.max_loss) and self.fits(unchanged):
            size = self.bytes_of(unchanged, "size") / 1e9
            speed = self.tok_s(unchanged)
            smaller = "a smaller --max-gb or a larger --min-tps"
            raise UsageError(
                f"the unchanged model is within the limits: {size:.4g} GB, {speed:.4g} tok/s on {device}",
                smaller if math.isinf(limits.max_bits) else "fewer bits",
            )

    def measure(self, trials: FormatTrials, progress: Progress) -> None:
        """Measure every group in every format."""
        count = sum(group.unquantized for group in self.groups.values())
        done = 0
        for unit, group in self.groups.items():
            self.costs[unit] = {BF16: np.zeros_like(trials.figures_of({}))}
            for kind in group.formats[: group.unquantized]:
                cost = trials.measure(dict.fromkeys(group.members, kind))
                self.costs[unit][kind] = cost
                done += 1
                line = f"{done} of {count}, {unit} in {kind}: {loss_of(cost):.2g} nats"
                progress.update(done, count, f"measuring formats: {line}")

    def cost(self, unit: str, kind: Format) -> np.ndarray:
        """Return a group's figures, scaled where it is not the head: that is one group, measured as it is."""
        return self.costs[unit][kind] * (1.0 if unit == HEAD else self.ratios.get(kind, 1.0))

    def expected(self, choices: Sequence[int]) -> np.ndarray:
        """Return the sum of the groups' figures [conversations, 3], without ratios."""
        return np.sum([self.costs[u][g.formats[i]] for u, g, i in self.chosen(choices)], axis=0)

    def front(self, axis: str) -> Front:
        losses = []
        for unit, group in self.groups.items():
            losses.append([max(0.0, loss_of(self.cost(unit, kind))) for kind in group.formats])
        return front_of(losses, [getattr(group, axis) for group in self.groups.values()])

    def solve(self, allowed: float) -> tuple[int, ...]:
        """Return the choice within the limits with the least loss, or with a finite `allowed` loss that with the fewest bytes."""
        least_loss = ""
        limited_first = sorted(self.base, key=lambda axis: (math.isinf(self.line(axis)), axis))
        for axis in limited_first:
            front = self.front(axis)
            point = front.within_size(self.line(axis) - self.base[axis])
            if point is not None and not least_loss:
                loss = front.costs[point]
                least_loss = f"; the least loss within that of bytes is {loss:.3g} nats"
            if math.isfinite(allowed):
                point = front.within_cost(allowed)
            if point is None:
                continue
            choices = front.choices(point)
            if self.fits(choices):
                return tuple(choices)
        raise UsageError(
            f"nothing satisfies the limits together{least_loss}", "allow more bytes or more loss"
        )

    def formats(self, choices: Sequence[int]) -> dict[str, Format]:
        """Return linear → format, without those in 16 bits."""
        formats: dict[str, Format] = {}
        for _, group, i in self.chosen(choices):
            if i != group.unquantized:
                formats |= dict.fromkeys(group.members, group.formats[i])
        return formats

    def search(self, trials: FormatTrials, progress: Progress) -> tuple[Solution, list[Solution]]:
        """Return the solution that is taken, and all that were evaluated."""
        evaluated: dict[tuple[int, ...], Solution] = {}
        max_loss = allowed = self.limits.max_loss
        for _ in range(MAX_SOLUTIONS):
            choices = self.solve(allowed)
            if choices in evaluated:
                break
            solution = Solution(choices, trials.measure(self.formats(choices)))
            evaluated[choices] = solution
            excesses = (solution.whole - self.expected(choices))[:, :2].sum(1)
            excess, noise = held_out.sum_and_standard_error(excesses.tolist())
            progress.message(
                f"formats together: {solution.loss:.3g} nats, {solution.loss - excess:.3g} expected, noise {noise:.2g}"
            )
            if excess <= noise and solution.loss <= max_loss:
                break
            if solution.loss > max_loss:
                allowed *= 0.98 * max_loss / solution.loss
            if excess > noise:
                self.rescale(trials, solution)
        usual = tuple(g.unquantized if unit == HEAD else 0 for unit, g in self.groups.items())
        if self.fits(usual) and usual not in evaluated:
            evaluated[usual] = Solution(usual, trials.measure(self.formats(usual)))
        return self.best_of(list(evaluated.values())), list(evaluated.values())

    def best_of(self, evaluated: Sequence[Solution]) -> Solution:
        """Return the solution that is taken. Raises UsageError where none has a loss within the limit."""
        max_loss = self.limits.max_loss
        quantized = [s for s in evaluated if self.formats(s.choices)]
        satisfying = [s for s in quantized if s.loss <= max_loss]
        if not satisfying:
            losses = [s.loss for s in quantized]
            if not losses:
                for costs in self.costs.values():
                    losses += [loss_of(cost) for kind, cost in costs.items() if kind != BF16]
            least = max(0.0, min(losses))
            raise UsageError(
                f"--max-loss {max_loss:g}: nothing quantized satisfies it, the least measured is {least:.3g} nats",
                f"--max-loss {least * 1.01:.2g}",
            )

        def order(solution: Solution) -> tuple[float, float]:
            read = self.bytes_of(solution.choices, "read")
            return (solution.loss, read) if math.isinf(max_loss) else (read, solution.loss)

        return min(satisfying, key=order)

    def rescale(self, trials: FormatTrials, solution: Solution) -> None:
        """Set the ratios by a whole that is worse than the sum of its groups: one for FP8, one for both 4-bit formats."""
        choices = solution.choices
        in_four_bits = []
        head_alone = []
        for unit, group, i in self.chosen(choices):
            is_head = unit == HEAD
            in_four_bits.append(
                i if is_head or group.formats[i].in_four_bits else group.unquantized
            )
            head_alone.append(i if is_head else group.unquantized)
        measured = trials.measure(self.formats(in_four_bits))
        expected = self.expected(in_four_bits)
        head = self.expected(head_alone)
        self.set_ratio((FP8_CHANNEL,), solution.whole - measured, self.expected(choices) - expected)
        self.set_ratio((NVFP4, W4A16), measured - head, expected - head)

    def set_ratio(self, kinds: Sequence[Format], whole: np.ndarray, parts: np.ndarray) -> None:
        total = loss_of(parts)
        if total > 0:
            self.ratios |= dict.fromkeys(kinds, max(0.1, loss_of(whole) / total))

    def point(
        self, choices: Sequence[int], whole: np.ndarray | None = None, taken: bool = False
    ) -> FrontierPoint:
        """Return a line of the table. whole: figures of the choice where it was measured."""
        single = []
        weights: dict[Format, float] = dict.fromkeys(TABLE_FORMATS, 0.0)
        for unit, group, i in self.chosen(choices):
            single.append(self.cost(unit, group.formats[i]).sum(0))
            weights[group.formats[i]] += group.weights
        if whole is None:
            kl, decisions, _ = np.sum(single, 0)
            # A token flips by one group or by another.
            flips = 1.0 - math.prod(1.0 - min(1.0, max(0.0, float(x[2]))) for x in single)
        else:
            kl, decisions, flips = whole.sum(0)
        total = sum(weights.values())
        head = self.groups[HEAD].formats[choices[-1]] if HEAD in self.groups else BF16
        return FrontierPoint(
            read_bytes=self.bytes_of(choices, "read"),
            size_bytes=self.bytes_of(choices, "size"),
            head=head.name,
            kl=max(0.0, float(kl)),
            tok_s=self.tok_s(choices),
            decisions=max(0.0, float(decisions)),
            flips=max(0.0, float(flips)),
            measured=whole is not None,
            taken=taken,
            formats={f.name: round(n / total, 4) for f, n in weights.items() if n},
        )

    def describe(self, taken: Solution, evaluated: Sequence[Solution]) -> FormatPlan:
        """Return the table of some of the frontier and of all solutions, and why one was taken."""
        front = self.front("read")
        limits = self.limits
        points: dict[int, FrontierPoint] = {}
        for target in np.linspace(front.sizes[0], front.sizes[-1], TABLE_POINTS):
            point = front.within_size(float(target))
            if point is not None and point not in points:
                points[point] = self.point(front.choices(point))
        measured = [self.point(s.choices, s.whole, s is taken) for s in evaluated]
        rows = sorted([*points.values(), *measured], key=lambda p: p.read_bytes)
        best = "the least divergence"
        if math.isfinite(limits.max_loss):
            best = "the fewest bytes per token"
        reason = f"=> {best} within {limits}: {taken.loss:.3g} nats measured"
        return FormatPlan(limits.device.name, reason, rows)


def planner_of(
    job: Job[StrategyOptions], limits: Limits, four_bit: Mapping[str, Format]
) -> FormatPlanner:
    """Return the planner of a model. Raises UsageError for limits that no choice satisfies, or the unchanged model does."""
    folder = ModelFolder(job.model)
    groups = groups_of(job, four_bit, head=math.isinf(limits.max_bits))
    size = sum(group.size[-1] for group in groups.values())
    read = sum(group.read[-1] for group in groups.values())
    base = {
        "size": sum(folder.info(n).size_bytes for n in folder) - size,
        "read": bytes_per_token(folder) - read,
    }
    counted = sum(active_weights(folder, four_bit).values())
    planner = FormatPlanner(groups, limits, decode_speed.token_bytes(folder), base, counted)
    planner.check_limits()
    return planner


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
    planner.measure(trials, progress)
    taken, evaluated = planner.search(trials, progress)
    plan = planner.describe(taken, evaluated)
    for line in frontier_lines(plan):
        progress.message(line)
    planned = QuantizationPlan.of(planner.formats(taken.choices))
    planned.frontier = plan
    if planned.formats.get(HEAD) == W4A16:
        planned.linears[HEAD] = trials.rounded.linears[HEAD]
    return planned

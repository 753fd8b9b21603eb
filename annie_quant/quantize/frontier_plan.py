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
from annie_quant.quantize.formats import active_weights, decoder_linears
from annie_quant.quantize.frontier import Front, Limits, front_of, frontier_lines
from annie_quant.quantize.held_out import FormatTrials
from annie_quant.quantize.kl_trial import answers_to_score
from annie_quant.quantize.mixed_formats import Group, groups_of
from annie_quant.quantize.plan import PlannedLinear, QuantizationPlan
from annie_quant.quantize.rounding import round_head
from annie_quant.quantize.strategy import Job, StrategyOptions

FORMATS = (NVFP4, W4A16, FP8_CHANNEL, BF16)
ROUNDS = 6  # solutions that are evaluated at most
POINTS = 12  # of the frontier, in the table
HEAD_TOKENS = {"cpu": 4096, "cuda": 1 << 15}  # inputs of the head at most


@dataclass(frozen=True)
class Solution:
    """A choice per group, and each conversation's share of the three figures of Trial.shares for the whole."""

    choices: tuple[int, ...]
    whole: np.ndarray

    @property
    def loss(self) -> float:
        return float(self.whole[:, :2].sum())


@dataclass
class FormatPlanner:
    """The costs of all groups, and the choices under limits.

    read: what a token of the model reads.
    base: bytes of everything that is in no group, by axis: "size" and "read".
    counted: number of weights that a limit of bits counts, by the share that a token passes.
    fixed: bytes of those that are in no group.
    costs: group → format → FormatTrials.measure of it alone; zero for 16 bits.
    ratios: format → measured divergence of a whole relative to the sum of its groups.
    """

    groups: dict[str, Group]
    limits: Limits
    read: decode_speed.TokenBytes
    base: dict[str, float]
    counted: float = 0.0
    fixed: float = 0.0
    costs: dict[str, dict[Format, np.ndarray]] = field(default_factory=dict)
    ratios: dict[Format, float] = field(default_factory=dict)

    def line(self, axis: str) -> float:
        """Return the bytes that an axis may have."""
        if axis == "size":
            return self.limits.max_gb * 1e9
        speed, bits = self.limits.min_tps, self.limits.max_bits
        by_speed = (
            decode_speed.largest_bytes(self.read, self.limits.device, speed) if speed else math.inf
        )
        by_bits = (
            math.inf if math.isinf(bits) else self.base[axis] + bits / 8 * self.counted - self.fixed
        )
        return min(by_speed, by_bits)

    def chosen(self, choices: Sequence[int]) -> list[tuple[str, Group, int]]:
        return [(u, g, i) for (u, g), i in zip(self.groups.items(), choices, strict=True)]

    def bytes_of(self, choices: Sequence[int], axis: str) -> float:
        return self.base[axis] + sum(getattr(g, axis)[i] for _, g, i in self.chosen(choices))

    def tok_s(self, choices: Sequence[int]) -> float:
        return decode_speed.tok_s(
            replace(self.read, weights=self.bytes_of(choices, "read")), self.limits.device
        )

    def fits(self, choices: Sequence[int]) -> bool:
        return all(self.bytes_of(choices, axis) <= self.line(axis) for axis in self.base)

    def check_limits(self) -> None:
        """Raise UsageError where no choice has so few bytes, or where the unchanged model has."""
        limits, name = self.limits, self.limits.device.name
        least = {
            axis: [int(np.argmin(getattr(g, axis))) for g in self.groups.values()]
            for axis in self.base
        }
        size, speed = self.bytes_of(least["size"], "size") / 1e9, self.tok_s(least["read"])
        if limits.max_gb < size:
            raise UsageError(
                f"--max-gb {limits.max_gb:g}: the smallest possible is {size:.4g} GB, {size - limits.max_gb:.3g} GB more",
                f"--max-gb {size * 1.001:.4g}, or exclude less",
            )
        if limits.min_tps > speed:
            raise UsageError(
                f"--min-tps {limits.min_tps:g}: the smallest possible decodes at {speed:.4g} tok/s on {name}, "
                f"{limits.min_tps - speed:.3g} fewer",
                f"--min-tps {speed * 0.999:.4g}, or exclude less",
            )
        if not math.isinf(limits.max_bits):
            least_bits = (
                8
                * (self.bytes_of(least["read"], "read") - self.base["read"] + self.fixed)
                / self.counted
            )
            if limits.max_bits < least_bits:
                raise UsageError(
                    f"bits={limits.max_bits:g}: excluded linears stay at 16 bits, so less than {least_bits:.2f} cannot be reached",
                    f"--set bits={least_bits + 0.05:.2f}, or exclude less",
                )
        plain = [len(g.formats) - 1 for g in self.groups.values()]
        if math.isinf(limits.max_loss) and self.fits(plain):
            size, speed = self.bytes_of(plain, "size") / 1e9, self.tok_s(plain)
            raise UsageError(
                f"the unchanged model is within the limits: {size:.4g} GB, {speed:.4g} tok/s on {name}",
                "a smaller --max-gb or a larger --min-tps"
                if math.isinf(limits.max_bits)
                else "fewer bits",
            )

    def measure(self, trials: FormatTrials, progress: Progress) -> None:
        """Measure every group in every format."""
        count, done = sum(len(g.formats) - 1 for g in self.groups.values()), 0
        for unit, group in self.groups.items():
            self.costs[unit] = {BF16: np.zeros_like(trials.figures_of({}))}
            for kind in group.formats[:-1]:
                self.costs[unit][kind] = trials.measure(dict.fromkeys(group.members, kind))
                done, loss = done + 1, float(self.costs[unit][kind][:, :2].sum())
                progress.update(
                    done,
                    count,
                    f"measuring formats: {done} of {count}, {unit} in {kind}: {loss:.2g} nats",
                )

    def cost(self, unit: str, kind: Format) -> np.ndarray:
        """Return a group's figures, scaled where it is not the head: that is one group, measured as it is."""
        return self.costs[unit][kind] * (1.0 if unit == HEAD else self.ratios.get(kind, 1.0))

    def expected(self, choices: Sequence[int]) -> np.ndarray:
        """Return the sum of the groups' figures [conversations, 3], without ratios."""
        return np.sum([self.costs[u][g.formats[i]] for u, g, i in self.chosen(choices)], axis=0)

    def front(self, axis: str) -> Front:
        losses = [
            [max(0.0, float(self.cost(u, f)[:, :2].sum())) for f in g.formats]
            for u, g in self.groups.items()
        ]
        return front_of(losses, [getattr(g, axis) for g in self.groups.values()])

    def solve(self, allowed: float) -> tuple[int, ...]:
        """Return the choice within the limits with the least loss, or with a finite `allowed` loss that with the fewest bytes."""
        losses = list[str]()
        for axis in sorted(
            self.base, key=lambda axis: (math.isinf(self.line(axis)), axis)
        ):  # a limited one first
            front = self.front(axis)
            within = front.within_size(self.line(axis) - self.base[axis])
            losses += (
                []
                if within is None
                else [f"; the least loss within that of bytes is {front.costs[within]:.3g} nats"]
            )
            point = within if math.isinf(allowed) else front.within_cost(allowed)
            if point is not None and self.fits(choices := front.choices(point)):
                return tuple(choices)
        raise UsageError(
            f"nothing satisfies the limits together{''.join(losses[:1])}",
            "allow more bytes or more loss",
        )

    def formats(self, choices: Sequence[int]) -> dict[str, Format]:
        """Return linear → format, without those in 16 bits."""
        return {
            n: g.formats[i]
            for _, g, i in self.chosen(choices)
            if g.formats[i] != BF16
            for n in g.members
        }

    def search(self, trials: FormatTrials, progress: Progress) -> tuple[Solution, list[Solution]]:
        """Return the solution that is taken, and all that were evaluated."""
        evaluated: dict[tuple[int, ...], Solution] = {}
        most = allowed = self.limits.max_loss
        for _ in range(ROUNDS):
            if (choices := self.solve(allowed)) in evaluated:
                break
            solution = evaluated[choices] = Solution(choices, trials.measure(self.formats(choices)))
            excess = (solution.whole - self.expected(choices))[:, :2].sum(1)
            more, noise = held_out.sum_and_standard_error(excess.tolist())
            expected = solution.loss - more
            progress.message(
                f"formats together: {solution.loss:.3g} nats, {expected:.3g} expected, noise {noise:.2g}"
            )
            if more <= noise and solution.loss <= most:
                break
            if solution.loss > most:
                allowed *= 0.98 * most / solution.loss
            if more > noise:
                self.rescale(trials, choices, solution)
        usual = tuple(len(g.formats) - 1 if u == HEAD else 0 for u, g in self.groups.items())
        if self.fits(usual) and usual not in evaluated:
            evaluated[usual] = Solution(usual, trials.measure(self.formats(usual)))
        quantized = [s for s in evaluated.values() if self.formats(s.choices)]
        satisfying = [s for s in quantized if s.loss <= most]
        if not satisfying:
            single = [float(c[f][:, :2].sum()) for c in self.costs.values() for f in c if f != BF16]
            least = min([s.loss for s in quantized] or [max(0.0, min(single))])
            raise UsageError(
                f"--max-loss {most:g}: nothing quantized satisfies it, the least measured is {least:.3g} nats",
                f"--max-loss {least * 1.01:.2g}",
            )
        read = {id(s): self.bytes_of(s.choices, "read") for s in satisfying}
        limited = not math.isinf(most)
        taken = min(
            satisfying, key=lambda s: (read[id(s)], s.loss) if limited else (s.loss, read[id(s)])
        )
        return taken, list(evaluated.values())

    def rescale(self, trials: FormatTrials, choices: Sequence[int], solution: Solution) -> None:
        """Set the ratios by a whole that is worse than the sum of its groups: one for FP8, one for both 4-bit formats."""

        def only(kinds: Sequence[Format]) -> list[int]:
            return [
                i if u == HEAD or g.formats[i] in kinds else len(g.formats) - 1
                for u, g, i in self.chosen(choices)
            ]

        four, head = only((NVFP4, W4A16)), self.expected(only(()))
        measured = trials.measure(self.formats(four))
        for kinds, whole, parts in (
            (
                (FP8_CHANNEL,),
                solution.whole - measured,
                self.expected(choices) - self.expected(four),
            ),
            ((NVFP4, W4A16), measured - head, self.expected(four) - head),
        ):
            if (total := float(parts[:, :2].sum())) > 0:
                self.ratios |= dict.fromkeys(kinds, max(0.1, float(whole[:, :2].sum()) / total))

    def point(
        self, choices: Sequence[int], whole: np.ndarray | None = None, taken: bool = False
    ) -> FrontierPoint:
        chosen = self.chosen(choices)
        single = [self.cost(u, g.formats[i]).sum(0) for u, g, i in chosen]
        kl, decisions, flips = (
            max(0.0, float(x)) for x in (np.sum(single, 0) if whole is None else whole.sum(0))
        )
        if whole is None:  # a token flips by one group or by another
            flips = 1.0 - math.prod(1.0 - min(1.0, max(0.0, float(x[2]))) for x in single)
        total = sum(g.weights for g in self.groups.values())
        shares = {
            f: sum(g.weights for _, g, i in chosen if g.formats[i] == f) / total for f in FORMATS
        }
        head = self.groups[HEAD].formats[choices[-1]] if HEAD in self.groups else BF16
        return FrontierPoint(
            read_bytes=self.bytes_of(choices, "read"),
            size_bytes=self.bytes_of(choices, "size"),
            head=head.name,
            kl=kl,
            tok_s=self.tok_s(choices),
            decisions=decisions,
            flips=flips,
            measured=whole is not None,
            taken=taken,
            formats={f.name: round(share, 4) for f, share in shares.items() if share},
        )

    def describe(self, taken: Solution, evaluated: Sequence[Solution]) -> FormatPlan:
        front, limits = self.front("read"), self.limits
        targets = np.linspace(front.sizes[0], front.sizes[-1], POINTS)
        shown = dict.fromkeys(p for t in targets if (p := front.within_size(float(t))) is not None)
        points = [self.point(front.choices(p)) for p in shown]
        points += [self.point(s.choices, s.whole, s is taken) for s in evaluated]
        best = (
            "the least divergence" if math.isinf(limits.max_loss) else "the fewest bytes per token"
        )
        reason = f"=> {best} within {limits}: {taken.loss:.3g} nats measured"
        return FormatPlan(limits.device.name, reason, sorted(points, key=lambda p: p.read_bytes))


def planner_of(
    job: Job[StrategyOptions], limits: Limits, four_bit: Mapping[str, Format]
) -> FormatPlanner:
    """Return the planner of a model. Raises UsageError for limits that no choice satisfies, or the unchanged model does."""
    folder = ModelFolder(job.model)
    groups = groups_of(job, four_bit, head=math.isinf(limits.max_bits))
    size, read = (sum(getattr(g, axis)[-1] for g in groups.values()) for axis in ("size", "read"))
    base = {
        "size": sum(folder.info(n).size_bytes for n in folder) - size,
        "read": bytes_per_token(folder) - read,
    }
    counted = active_weights(folder, decoder_linears(folder) if limits.of_decoder else four_bit)
    fixed = sum(n for linear, n in counted.items() if linear not in four_bit) * BF16.bits / 8
    planner = FormatPlanner(
        groups, limits, decode_speed.token_bytes(folder), base, sum(counted.values()), fixed
    )
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

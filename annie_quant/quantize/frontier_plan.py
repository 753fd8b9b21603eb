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
from dataclasses import dataclass, field

import numpy as np

from annie_quant.checkpoint import decode_speed
from annie_quant.checkpoint.linears import HEAD
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.checkpoint.size import bytes_per_token
from annie_quant.core.errors import UsageError, need
from annie_quant.core.progress import Progress
from annie_quant.documents import FormatPlan, FrontierPoint
from annie_quant.quantize import recipe_choice
from annie_quant.quantize.backend import device_and_dtype, device_kind
from annie_quant.quantize.calibration_samples import RESPONSE, CalibrationSample
from annie_quant.quantize.formats import FP8_CHANNEL, NVFP4, W4A16
from annie_quant.quantize.frontier import Front, Limits, front_of
from annie_quant.quantize.frontier_costs import PLAIN, FormatTrials, Group, groups_of
from annie_quant.quantize.frontier_report import frontier_lines
from annie_quant.quantize.head_rounding import round_head
from annie_quant.quantize.kl_trial import answers_to_score
from annie_quant.quantize.layer_rounder import Method
from annie_quant.quantize.plan import QuantizationPlan
from annie_quant.quantize.rounding import round_model
from annie_quant.quantize.strategy import Job, StrategyOptions

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

    base_size, base_read: bytes of everything that is in no group.
    costs: group → format → FormatTrials.measure of it alone; zero for 16 bits.
    ratios: format → measured divergence of a whole relative to the sum of its groups.
    """

    groups: dict[str, Group]
    limits: Limits
    read: decode_speed.TokenBytes
    base_size: float
    base_read: float
    costs: dict[str, dict[str, np.ndarray]] = field(default_factory=dict)
    ratios: dict[str, float] = field(default_factory=dict)
    allowed: float = math.inf

    @property
    def max_read(self) -> float:
        """The bytes of weights that a token may read."""
        if not self.limits.min_tps:
            return math.inf
        return decode_speed.largest_bytes(self.read, self.limits.device, self.limits.min_tps)

    def bytes_of(self, choices: Sequence[int], axis: str) -> float:
        """Return the bytes of a choice. axis: "size" or "read"."""
        base = self.base_size if axis == "size" else self.base_read
        return base + sum(getattr(g, axis)[i] for g, i in zip(self.groups.values(), choices, strict=True))

    def tok_s(self, read: float) -> float:
        token = decode_speed.TokenBytes(read, self.read.layers, state=self.read.state)
        return decode_speed.tok_s(token, self.limits.device)

    def fits(self, choices: Sequence[int]) -> bool:
        within_size = self.bytes_of(choices, "size") <= self.limits.max_gb * 1e9
        return within_size and self.bytes_of(choices, "read") <= self.max_read

    def check_limits(self) -> None:
        """Raise UsageError where no choice has so few bytes, or where the unchanged model has."""
        size = (self.base_size + sum(min(g.size) for g in self.groups.values())) / 1e9
        speed = self.tok_s(self.base_read + sum(min(g.read) for g in self.groups.values()))
        limits, name = self.limits, self.limits.device.name
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
        plain = [len(g.formats) - 1 for g in self.groups.values()]
        if math.isinf(limits.max_loss) and self.fits(plain):
            raise UsageError(
                f"the unchanged model is within the limits: {self.bytes_of(plain, 'size') / 1e9:.4g} GB, "
                f"{self.tok_s(self.bytes_of(plain, 'read')):.4g} tok/s on {name}",
                "a smaller --max-gb or a larger --min-tps",
            )

    def measure(self, trials: FormatTrials, progress: Progress) -> None:
        """Measure every group in every format."""
        count, done = sum(len(g.formats) - 1 for g in self.groups.values()), 0
        for unit, group in self.groups.items():
            self.costs[unit] = {PLAIN: np.zeros_like(trials.stored({}))}
            for kind in group.formats[:-1]:
                self.costs[unit][kind] = trials.measure(dict.fromkeys(group.members, kind))
                done, loss = done + 1, float(self.costs[unit][kind][:, :2].sum())
                progress.update(done, count, f"measuring formats: {done} of {count}, {unit} in {kind}: {loss:.2g} nats")

    def expected(self, choices: Sequence[int], scaled: bool = False) -> np.ndarray:
        """Return the sum of the groups' figures [conversations, 3]. scaled: by the ratios."""
        parts = [
            self.costs[u][g.formats[i]] * (self.ratio(u, g.formats[i]) if scaled else 1.0)
            for (u, g), i in zip(self.groups.items(), choices, strict=True)
        ]
        return np.sum(parts, axis=0)

    def ratio(self, unit: str, kind: str) -> float:
        return 1.0 if unit == HEAD else self.ratios.get(kind, 1.0)  # one group, measured as it is

    def front(self, axis: str) -> Front:
        losses = [
            [max(0.0, float(self.costs[u][f][:, :2].sum())) * self.ratio(u, f) for f in g.formats]
            for u, g in self.groups.items()
        ]
        return front_of(losses, [getattr(g, axis) for g in self.groups.values()])

    def solve(self) -> tuple[int, ...]:
        """Return the choice within the limits with the least loss; under a limit of the loss, that with the fewest bytes."""
        lines = {"read": self.max_read - self.base_read, "size": self.limits.max_gb * 1e9 - self.base_size}
        axes = sorted(lines, key=lambda axis: math.isinf(lines[axis]))  # a limited one first
        for axis in axes:
            front = self.front(axis)
            point = (
                front.within_cost(self.allowed) if self.limits.max_loss < math.inf else front.within_size(lines[axis])
            )
            if point is not None and self.fits(choices := front.choices(point)):
                return tuple(choices)
        raise self.nothing_fits()

    def nothing_fits(self) -> UsageError:
        """Return the error of limits that no choice satisfies together."""
        front = self.front("read")
        within = [c for i in range(len(front.sizes)) if self.fits(c := front.choices(i))]
        least = min((float(self.expected(c, scaled=True)[:, :2].sum()) for c in within), default=math.nan)
        loss = f"--max-loss {self.limits.max_loss:g}: " if self.limits.max_loss < math.inf else ""
        return UsageError(
            f"{loss}nothing satisfies the limits together; the least loss within those of bytes is {least:.3g} nats",
            "allow more bytes or more loss",
        )

    def formats(self, choices: Sequence[int]) -> dict[str, str]:
        """Return linear → format, without those in 16 bits."""
        chosen = zip(self.groups.values(), choices, strict=True)
        return {n: g.formats[i] for g, i in chosen if g.formats[i] != PLAIN for n in g.members}

    def search(self, trials: FormatTrials, progress: Progress) -> tuple[Solution, list[Solution]]:
        """Return the solution that is taken, and all that were evaluated."""
        evaluated: dict[tuple[int, ...], Solution] = {}
        self.allowed = self.limits.max_loss
        for _ in range(ROUNDS):
            choices = self.solve()
            if choices in evaluated:
                break
            solution = evaluated[choices] = Solution(choices, trials.measure(self.formats(choices)))
            excess = (solution.whole - self.expected(choices))[:, :2].sum(1)
            noise = math.sqrt(len(excess) / max(1, len(excess) - 1) * float(np.square(excess - excess.mean()).sum()))
            progress.message(
                f"formats as a whole: {solution.loss:.3g} nats, {solution.loss - excess.sum():.3g} expected, noise {noise:.2g}"
            )
            self.allowed *= (
                min(1.0, 0.98 * self.limits.max_loss / max(solution.loss, 1e-30))
                if self.limits.max_loss < math.inf
                else 1
            )
            if excess.sum() <= noise and solution.loss <= self.limits.max_loss:
                break
            if excess.sum() > noise:
                self.rescale(trials, choices, solution)
        usual = tuple(len(g.formats) - 1 if u == HEAD else 0 for u, g in self.groups.items())
        if self.fits(usual) and usual not in evaluated:
            evaluated[usual] = Solution(usual, trials.measure(self.formats(usual)))
        quantized = [s for s in evaluated.values() if self.formats(s.choices)]
        satisfying = [s for s in quantized if s.loss <= self.limits.max_loss]
        if not satisfying:
            single = [float(c[f][:, :2].sum()) for c in self.costs.values() for f in c if f != PLAIN]
            least = min([s.loss for s in quantized] or [max(0.0, min(single))])
            raise UsageError(
                f"--max-loss {self.limits.max_loss:g}: nothing quantized satisfies it, the least measured is {least:.3g} nats",
                f"--max-loss {least * 1.01:.2g}",
            )
        limited = self.limits.max_loss < math.inf

        def rank(s: Solution) -> tuple[float, float]:
            read = self.bytes_of(s.choices, "read")
            return (read, s.loss) if limited else (s.loss, read)

        return min(satisfying, key=rank), list(evaluated.values())

    def rescale(self, trials: FormatTrials, choices: Sequence[int], solution: Solution) -> None:
        """Set the ratios by a whole that is worse than the sum of its groups: one for FP8, one for both 4-bit formats."""
        eight = [i if u == HEAD or g.formats[i] != FP8_CHANNEL else len(g.formats) - 1
                 for (u, g), i in zip(self.groups.items(), choices, strict=True)]  # fmt: skip
        four = trials.measure(self.formats(eight))
        head = self.expected([i if u == HEAD else len(g.formats) - 1
                              for (u, g), i in zip(self.groups.items(), choices, strict=True)])  # fmt: skip
        for kinds, measured, expected in (
            ((FP8_CHANNEL,), solution.whole - four, self.expected(choices) - self.expected(eight)),
            ((NVFP4, W4A16), four - head, self.expected(eight) - head),
        ):
            total = float(expected[:, :2].sum())
            if total > 0:
                self.ratios |= dict.fromkeys(kinds, max(0.1, float(measured[:, :2].sum()) / total))

    def point(self, choices: Sequence[int], whole: np.ndarray | None = None, taken: bool = False) -> FrontierPoint:
        figures = self.expected(choices, scaled=True) if whole is None else whole
        kl, decisions, flips = (max(0.0, float(x)) for x in figures.sum(0))
        if whole is None:  # a token flips by one group or by another
            kinds = zip(self.groups.items(), choices, strict=True)
            single = [float(self.costs[u][g.formats[i]][:, 2].sum()) for (u, g), i in kinds]
            flips = 1.0 - math.prod(1.0 - min(1.0, max(0.0, x)) for x in single)
        shares: dict[str, float] = {}
        for group, i in zip(self.groups.values(), choices, strict=True):
            shares[group.formats[i]] = shares.get(group.formats[i], 0.0) + group.weights
        total = sum(shares.values())
        read = self.bytes_of(choices, "read")
        head = self.groups[HEAD].formats[choices[-1]] if HEAD in self.groups else PLAIN
        return FrontierPoint(
            read_bytes=read, size_bytes=self.bytes_of(choices, "size"), tok_s=self.tok_s(read), kl=kl, decisions=decisions,
            flips=flips, formats={f: round(n / total, 4) for f, n in sorted(shares.items())}, head=head,
            measured=whole is not None, taken=taken,
        )  # fmt: skip

    def describe(self, taken: Solution, evaluated: Sequence[Solution]) -> FormatPlan:
        front, limits = self.front("read"), self.limits
        targets = np.linspace(front.sizes[0], front.sizes[-1], POINTS)
        shown = dict.fromkeys(p for t in targets if (p := front.within_size(float(t))) is not None)
        points = [self.point(front.choices(p)) for p in shown]
        points += [self.point(s.choices, s.whole, s is taken) for s in evaluated]
        names = [f"--max-gb {limits.max_gb:g}"] * (limits.max_gb < math.inf)
        names += [f"--min-tps {limits.min_tps:g}"] * (limits.min_tps > 0)
        if limits.max_loss < math.inf:
            names.append(f"--max-loss {limits.max_loss:g}")
            reason = f"=> the fewest bytes per token within {', '.join(names)}: {taken.loss:.3g} nats measured"
        else:
            reason = f"=> the least divergence within {', '.join(names)}: {taken.loss:.3g} nats measured"
        return FormatPlan(limits.device.name, reason, sorted(points, key=lambda p: p.read_bytes))


def planner_of(job: Job[StrategyOptions], limits: Limits, four_bit: Mapping[str, str]) -> FormatPlanner:
    """Return the planner of a model. Raises UsageError for limits that no choice satisfies, or the unchanged model does."""
    need("matplotlib", "plots")  # for the picture
    folder, groups = ModelFolder(job.model), groups_of(job, four_bit)
    size, read = (sum(getattr(g, axis)[-1] for g in groups.values()) for axis in ("size", "read"))
    tensors = sum(folder.info(n).size_bytes for n in folder)
    token = decode_speed.token_bytes(folder)
    planner = FormatPlanner(groups, limits, token, tensors - size, bytes_per_token(folder) - read)
    planner.check_limits()
    return planner


def choose_formats(
    job: Job[StrategyOptions],
    limits: Limits,
    four_bit: Mapping[str, str],
    samples: Sequence[CalibrationSample],
    method: Method,
    progress: Progress,
) -> QuantizationPlan:
    """Return the formats under the limits, the rounded head where it is in NVFP4, and the frontier. Linears are not rounded yet.

    four_bit: linear → "nvfp4" or "w4a16", as `best` chooses them without limits.
    """
    planner, folder = planner_of(job, limits, four_bit), ModelFolder(job.model)
    device = device_kind(device_and_dtype(folder)[0])
    learned, held = recipe_choice.hold_out(samples, recipe_choice.POSITIONS[device])
    rounded = round_model(job, four_bit, learned, method, progress, "layers-learned")
    trials = FormatTrials(job, held or samples, rounded)
    if HEAD in planner.groups:
        positions = 4 * HEAD_TOKENS[device]
        rows = [a.row for a in answers_to_score(learned, RESPONSE, HEAD_TOKENS[device], positions, cut=False)]
        file = job.work_folder() / "head.safetensors"
        rounded.packed[HEAD] = round_head(trials.trial, rows, method.damping, job.scale, file, progress)
    planner.measure(trials, progress)
    taken, evaluated = planner.search(trials, progress)
    plan = planner.describe(taken, evaluated)
    for line in frontier_lines(plan):
        progress.message(line)
    formats = planner.formats(taken.choices)
    head = {HEAD: rounded.packed[HEAD]} if formats.get(HEAD) == W4A16 else {}
    return QuantizationPlan(formats, packed=head, frontier=plan)

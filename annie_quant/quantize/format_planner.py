"""The choice of formats under limits: the costs of all groups, the search, and the table of the frontier (frontier_plan.py)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from annie_quant.checkpoint import decode_speed, first_token
from annie_quant.checkpoint.first_token import Prompt, PromptTime
from annie_quant.checkpoint.linears import HEAD
from annie_quant.core.errors import UsageError
from annie_quant.core.progress import Progress
from annie_quant.documents import FormatPlan, FrontierPoint, GroupCost
from annie_quant.models.formats import BF16, FP8_CHANNEL, NVFP4, W4A16, Format
from annie_quant.quantize import held_out
from annie_quant.quantize.frontier import Limits, Program, Quantity, exceeds
from annie_quant.quantize.held_out import FormatTrials
from annie_quant.quantize.kl_trial import loss_of
from annie_quant.quantize.mixed_formats import Group

TABLE_FORMATS = (NVFP4, W4A16, FP8_CHANNEL, BF16)
MAX_SOLUTIONS = 6  # that are evaluated
TABLE_POINTS = 12  # of the frontier
# Squared error of a product relative to its size, of weights and of inputs: E2M1 in blocks of 16, E4M3 in rows. They stand for
# divergences until these are measured.
ASSUMED_ERRORS = {NVFP4: 0.018, W4A16: 0.009, FP8_CHANNEL: 0.0007, BF16: 0.0}


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
    base_time: time to the first token of everything that is in no group; None where no rate is known.
    prompt: of that time, with its tokens.
    notes: formats that some groups cannot have.
    costs: group → format → FormatTrials.measure of it alone; zero for 16 bits.
    ratios: format → measured divergence of a whole relative to the sum of its groups.
    """

    groups: dict[str, Group]
    limits: Limits
    read: decode_speed.TokenBytes
    base: dict[str, float]
    counted: float = 0.0
    base_time: PromptTime | None = None
    prompt: Prompt = field(default_factory=Prompt)
    notes: list[str] = field(default_factory=list)
    costs: dict[str, dict[Format, np.ndarray]] = field(default_factory=dict)
    ratios: dict[Format, float] = field(default_factory=dict)

    @property
    def program(self) -> Program:
        return Program([len(group.formats) for group in self.groups.values()])

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

    def ttft_ms(self, choices: Sequence[int]) -> float | None:
        """Return the predicted time to the first token; None where no rate is known."""
        if self.base_time is None:
            return None
        return self.quantity("time").of(self.program.indices(choices))

    def quantity(self, axis: str) -> Quantity:
        """Return a figure of choices: "size", "read", "time" in milliseconds, or "loss" in nats."""
        flat = self.program.flat
        groups = self.groups.values()
        if axis == "loss":
            losses = []
            for unit, group in self.groups.items():
                losses.append([max(0.0, loss_of(self.cost(unit, kind))) for kind in group.formats])
            return Quantity(flat(losses))
        if axis == "time":
            base = self.base_time
            assert base is not None
            parts = {}
            for part in ("head_s", "reads_s", "products_s"):
                rows = []
                for group in groups:
                    rows.append([1e3 * getattr(time, part) for time in group.times])
                parts[part] = flat(rows)
            return Quantity(
                parts["head_s"],
                base.rest_ms + 1e3 * base.head_s,
                np.array([parts["reads_s"], parts["products_s"]]),
                1e3 * np.array([base.reads_s, base.products_s]),
            )
        return Quantity(flat([getattr(group, axis) for group in groups]), self.base[axis])

    def limited(self, max_loss: float = math.inf) -> dict[str, tuple[Quantity, float]]:
        """Return axis → its figure and limit, of the limits that are finite."""
        limits = {axis: self.line(axis) for axis in self.base}
        limits |= {"time": self.limits.max_ttft_ms, "loss": max_loss}
        finite = {axis: limit for axis, limit in limits.items() if limit < math.inf}
        return {axis: (self.quantity(axis), limit) for axis, limit in finite.items()}

    def fits(self, choices: Sequence[int]) -> bool:
        """Return whether a choice is within the limits of bytes and time."""
        chosen = self.program.indices(choices)
        return not any(exceeds(q.of(chosen), limit) for q, limit in self.limited().values())

    def check_limits(self) -> None:
        """Raise UsageError where no choice is within a limit, or within all of them, or where the unchanged model is."""
        self.check_each_limit()
        limited = self.limited()
        if self.program.least([self.quantity("read")], list(limited.values())) is None:
            raise self.infeasible(limited)
        limits = self.limits
        if not all(group.has(BF16) for group in self.groups.values()):
            return
        unchanged = [group.formats.index(BF16) for group in self.groups.values()]
        if math.isinf(limits.max_loss) and self.fits(unchanged):
            smaller = "a smaller --max-gb or --max-ttft-ms, or a larger --min-tps"
            raise UsageError(
                f"the unchanged model is within the limits: {self.figures_text(unchanged)} on {limits.device.name}",
                smaller if math.isinf(limits.max_bits) else "fewer bits",
            )

    def check_each_limit(self) -> None:
        """Raise UsageError for a limit that no choice reaches."""
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
        if limits.max_ttft_ms < math.inf:
            ms = self.quantity("time").of(self.program.indices(self.soonest()))
            if limits.max_ttft_ms < ms:
                raise UsageError(
                    f"--max-ttft-ms {limits.max_ttft_ms:g}: the soonest possible is {ms:,.4g} ms at {self.prompt_text}, "
                    f"{ms - limits.max_ttft_ms:.3g} ms more",
                    f"--max-ttft-ms {ms * 1.001:.4g}, a shorter --prompt-tokens, or exclude less",
                )

    def soonest(self) -> tuple[int, ...]:
        """Return the choice with the least time to the first token."""
        time = self.quantity("time")
        return self.program.nearest([(time, max(time.base, 1e-9))])

    @property
    def prompt_text(self) -> str:
        return first_token.prompt_text("vllm", self.limits.device, self.prompt)

    def figures_text(self, choices: Sequence[int]) -> str:
        """Return the size, speed and time to the first token of a choice."""
        size = self.bytes_of(choices, "size") / 1e9
        ms = self.ttft_ms(choices)
        time = "" if ms is None else f", first token after {ms:,.4g} ms"
        return f"{size:.4g} GB, {self.tok_s(choices):.4g} tok/s{time}"

    def infeasible(self, limited: Mapping[str, tuple[Quantity, float]]) -> UsageError:
        """Return the error that names the nearest choice: that whose largest relative excess over a limit is the smallest."""
        choices = self.program.nearest(list(limited.values()))
        chosen = self.program.indices(choices)
        text = self.figures_text(choices)
        options = []
        for axis, (quantity, limit) in limited.items():
            value = quantity.of(chosen)
            over = exceeds(value, limit)
            if axis == "loss":
                text += f", {value:.3g} nats"
            options.append(self.option(axis, value if over else limit, 1.001 if over else 1.0))
        message = f"nothing satisfies the limits together; the nearest choice has {text}"
        return UsageError(message, f"it satisfies {' '.join(options)}")

    def option(self, axis: str, limit: float, slack: float) -> str:
        """Return the option that states a limit. slack: factor that makes room for rounding."""
        if axis == "size":
            return f"--max-gb {limit * slack / 1e9:.4g}"
        if axis == "time":
            return f"--max-ttft-ms {limit * slack:.4g}"
        if axis == "loss":
            return f"--max-loss {limit * slack:.4g}"
        if self.limits.max_bits < math.inf:
            return f"--set bits={8 * (limit - self.base[axis]) / self.counted * slack:.3f}"
        read = replace(self.read, weights=limit)
        return f"--min-tps {decode_speed.tok_s(read, self.limits.device) / slack:.4g}"

    def measure(self, trials: FormatTrials, progress: Progress) -> None:
        """Measure every group in every format."""
        formats = itertools.chain.from_iterable(g.formats for g in self.groups.values())
        count = sum(kind != BF16 for kind in formats)
        done = 0
        for unit, group in self.groups.items():
            self.costs[unit] = {BF16: np.zeros_like(trials.figures_of({}))}
            for kind in group.formats:
                if kind == BF16:
                    continue
                cost = trials.measure(dict.fromkeys(group.members, kind))
                self.costs[unit][kind] = cost
                done += 1
                line = f"{done} of {count}, {unit} in {kind}: {loss_of(cost):.2g} nats"
                progress.update(done, count, f"measuring formats: {line}")

    def assume(self) -> None:
        """Set the costs by the errors of formats and the numbers of weights, where no divergence is measured."""
        total = sum(group.weights for group in self.groups.values())
        for unit, group in self.groups.items():
            self.costs[unit] = {}
            for kind in group.formats:
                loss = ASSUMED_ERRORS[kind] * group.weights / total
                self.costs[unit][kind] = np.array([[loss, 0.0, 0.0]])

    def cost(self, unit: str, kind: Format) -> np.ndarray:
        """Return a group's figures, scaled where it is not the head: that is one group, measured as it is."""
        return self.costs[unit][kind] * (1.0 if unit == HEAD else self.ratios.get(kind, 1.0))

    def expected(self, kinds: Mapping[str, Format]) -> np.ndarray:
        """Return the sum of groups' figures [conversations, 3], without ratios. kinds: group → format."""
        unchanged = next(iter(self.costs.values()))
        zero = np.zeros_like(next(iter(unchanged.values())))
        return np.sum([zero, *(self.costs[unit][kind] for unit, kind in kinds.items())], axis=0)

    def kinds_of(self, choices: Sequence[int]) -> dict[str, Format]:
        """Return group → format."""
        return {unit: group.formats[i] for unit, group, i in self.chosen(choices)}

    def solve(self, max_loss: float) -> tuple[int, ...] | None:
        """Return the choice within the limits with the least loss; None where no choice is within them.

        With a finite `max_loss` it is the choice with the fewest bytes per token.
        """
        objectives = [self.quantity("loss"), self.quantity("read")]
        if math.isfinite(max_loss):
            objectives.reverse()
        return self.program.least(objectives, list(self.limited(max_loss).values()))

    def formats(self, kinds: Mapping[str, Format]) -> dict[str, Format]:
        """Return linear → format, without those in 16 bits. kinds: group → format."""
        formats: dict[str, Format] = {}
        for unit, kind in kinds.items():
            if kind != BF16:
                formats |= dict.fromkeys(self.groups[unit].members, kind)
        return formats

    def measured(self, trials: FormatTrials, choices: Sequence[int]) -> Solution:
        whole = trials.measure(self.formats(self.kinds_of(choices)))
        return Solution(tuple(choices), whole)

    def with_inputs(self, kind: Format) -> tuple[int, ...]:
        """Return the choice without limits: the head in 16 bits, all others in a 4-bit format, `kind` where they may have it."""
        choices = []
        for unit, group in self.groups.items():
            usual = BF16 if unit == HEAD else group.formats[0]
            choices.append(group.formats.index(kind if unit != HEAD and group.has(kind) else usual))
        return tuple(choices)

    @property
    def chooses_inputs(self) -> bool:
        return any(group.has(NVFP4) and group.has(W4A16) for group in self.groups.values())

    def search(self, trials: FormatTrials, progress: Progress) -> tuple[Solution, list[Solution]]:
        """Return the solution that is taken, and all that were evaluated."""
        evaluated: dict[tuple[int, ...], Solution] = {}
        max_loss = allowed = self.limits.max_loss
        for _ in range(MAX_SOLUTIONS):
            choices = self.solve(allowed)
            if choices is None or choices in evaluated:
                break
            solution = self.measured(trials, choices)
            evaluated[choices] = solution
            excesses = (solution.whole - self.expected(self.kinds_of(choices)))[:, :2].sum(1)
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
        if not evaluated:
            raise self.infeasible(self.limited(max_loss))
        for kind in (NVFP4, W4A16):
            usual = self.with_inputs(kind)
            # Both ends of the choice of inputs are in the table, also where they exceed a limit.
            if usual not in evaluated and (self.chooses_inputs or self.fits(usual)):
                evaluated[usual] = self.measured(trials, usual)
        return self.best_of(list(evaluated.values())), list(evaluated.values())

    def best_of(self, evaluated: Sequence[Solution]) -> Solution:
        """Return the solution that is taken. Raises UsageError where none has a loss within the limit."""
        max_loss = self.limits.max_loss
        quantized = []
        for solution in evaluated:
            changes = set(self.kinds_of(solution.choices).values()) != {BF16}
            if changes and self.fits(solution.choices):
                quantized.append(solution)
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
        kinds = self.kinds_of(solution.choices)
        head = {HEAD: kinds[HEAD]} if HEAD in kinds else {}
        in_four_bits = head | {unit: kind for unit, kind in kinds.items() if kind.in_four_bits}
        measured = trials.measure(self.formats(in_four_bits))
        expected = self.expected(in_four_bits)
        of_head = self.expected(head)
        self.set_ratio((FP8_CHANNEL,), solution.whole - measured, self.expected(kinds) - expected)
        self.set_ratio((NVFP4, W4A16), measured - of_head, expected - of_head)

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
        ms = self.ttft_ms(choices)
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
            ttft_ms=ms,
            formats={f.name: round(n / total, 4) for f, n in weights.items() if n},
        )

    def describe(self, taken: Solution, evaluated: Sequence[Solution]) -> FormatPlan:
        """Return the table of some of the frontier and of all solutions, and why one was taken."""
        limits = self.limits
        points = [self.point(choices) for choices in self.frontier()]
        points += [self.point(s.choices, s.whole, s is taken) for s in evaluated]
        best = "the least divergence"
        if math.isfinite(limits.max_loss):
            best = "the fewest bytes per token"
        reason = f"=> {best} within {limits}: {taken.loss:.3g} nats measured"
        by_bytes = sorted(points, key=lambda p: (p.read_bytes, -(p.ttft_ms or 0.0)))
        prompt = self.prompt_text if self.base_time else ""
        groups = self.group_costs(taken) if self.chooses_inputs and self.base_time else []
        return FormatPlan(limits.device.name, reason, by_bytes, prompt, groups)

    def frontier(self) -> list[tuple[int, ...]]:
        """Return choices with the least loss within some limits of bytes.

        Where inputs are chosen these are limits of the time to the first token, and of both where bytes are limited.
        """
        reads = self.range_of("read")
        if not self.chooses_inputs:
            grid = [{"read": read} for read in np.linspace(*reads, TABLE_POINTS)]
        else:
            times = np.linspace(*self.range_of("time"), TABLE_POINTS)
            grid = [{"time": ms} for ms in times]
            if self.limits.of_bytes:
                middle = (reads[0] + reads[1]) / 2
                for read in (reads[0], middle):
                    grid += [{"time": ms, "read": read} for ms in times]
        objectives = [self.quantity("loss"), self.quantity("read")]
        choices: dict[tuple[int, ...], None] = {}
        for limits in grid:
            most = [(self.quantity(axis), float(limit)) for axis, limit in limits.items()]
            choice = self.program.least(objectives, most)
            if choice is not None:
                choices[choice] = None
        return list(choices)

    def range_of(self, axis: str) -> tuple[float, float]:
        """Return the least figure of all choices, and that of the choice with the least loss."""
        figure = self.quantity(axis)
        if axis == "time":
            least = figure.of(self.program.indices(self.soonest()))
        else:
            rows = [getattr(group, axis) for group in self.groups.values()]
            least = figure.base + sum(map(min, rows))
        harmless = self.program.least([self.quantity("loss"), figure_of_sums(figure)], [])
        assert harmless is not None  # without limits every choice is allowed
        return least, figure.of(self.program.indices(harmless))

    def group_costs(self, taken: Solution) -> list[GroupCost]:
        """Return what 4-bit inputs cost and save in each group that may have both kinds."""
        unrounded = self.with_inputs(W4A16)
        slowest = self.ttft_ms(unrounded) or 0.0
        total = sum(group.weights for unit, group in self.groups.items() if unit != HEAD)
        costs = []
        for number, (unit, group, i) in enumerate(self.chosen(taken.choices)):
            if not (group.has(NVFP4) and group.has(W4A16)):
                continue
            rounded = list(unrounded)
            rounded[number] = group.formats.index(NVFP4)
            harm = loss_of(self.cost(unit, NVFP4)) - loss_of(self.cost(unit, W4A16))
            cost = GroupCost(
                name=unit,
                flops=group.weights / total,
                harm=harm,
                saved_ms=slowest - (self.ttft_ms(rounded) or 0.0),
                format=group.formats[i].name,
            )
            costs.append(cost)
        return costs


def figure_of_sums(figure: Quantity) -> Quantity:
    """Return the plain sum of a figure's parts, to choose among equals by it."""
    if figure.curved is None:
        return figure
    return Quantity(figure.amounts + figure.curved.sum(0), figure.base)

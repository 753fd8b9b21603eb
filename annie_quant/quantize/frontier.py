"""The exact choice of one format per group under limits, and the table of the frontier.

The choice is an integer program, which HiGHS (scipy) solves: one variable per group and format. Bytes and divergence are sums over
the groups. A prompt's time is a sum and the root of two squared sums, which is convex: each tangent is a linear bound that no
choice within the limit exceeds, so tangents are added until the choice satisfies the limit itself.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from annie_quant.checkpoint.first_token import Prompt
from annie_quant.documents import Device, FormatPlan, GroupCost

TIE = 1e-9  # sums that differ by less of the limit are equal
TANGENTS = 9  # of a prompt's time, from the start
# HiGHS takes limits as satisfied within 1e-6. Choices that exceed one by less are excluded one by one, then the limit is lowered.
MAX_EXCLUDED = 20
_TOLERANCE = 2e-6
OBJECTIVE_SCALE = 1e5  # HiGHS stops at an absolute gap of 1e-6
SOLVER_SECONDS = 30.0
MAX_GROUP_LINES = 12


@dataclass(frozen=True)
class Limits:
    """What a checkpoint may have: bytes of tensors, bytes of weights that a token reads, time to the first token, and divergence.

    device: whose speed is predicted.
    max_bits: bits per weight of the linears that get a format; the head then stays as it is. Experts count by the share that a
        token passes.
    max_ttft_ms: predicted for `prompt` in vLLM.
    """

    device: Device
    max_gb: float = math.inf
    min_tps: float = 0.0
    max_loss: float = math.inf
    max_bits: float = math.inf
    max_ttft_ms: float = math.inf
    prompt: Prompt = field(default_factory=Prompt)

    @property
    def of_bytes(self) -> bool:
        """Return whether bytes are limited."""
        return bool(self.min_tps) or min(self.max_gb, self.max_bits) < math.inf

    def __str__(self) -> str:
        limits = []
        if self.min_tps:
            limits.append(f"--min-tps {self.min_tps:g}")
        if self.max_bits < math.inf:
            limits.append(f"{self.max_bits:.4g} bits per weight")
        if self.max_gb < math.inf:
            limits.append(f"--max-gb {self.max_gb:g}")
        if self.max_ttft_ms < math.inf:
            limits.append(f"--max-ttft-ms {self.max_ttft_ms:g}")
        if self.max_loss < math.inf:
            limits.append(f"--max-loss {self.max_loss:g}")
        return ", ".join(limits)


# ---- the integer program


@dataclass(frozen=True)
class Quantity:
    """A figure of a choice: base + sum + |curved_base + curved sum|, which is a plain sum without `curved`.

    amounts: of each group's formats, one after another [variables].
    curved: two further amounts whose sums' root of squares is added [2, variables].
    """

    amounts: np.ndarray
    base: float = 0.0
    curved: np.ndarray | None = None
    curved_base: np.ndarray | None = None

    def of(self, chosen: np.ndarray) -> float:
        """Return the figure of a choice, given by the indices of its variables."""
        total = self.base + float(self.amounts[chosen].sum())
        if self.curved is not None:
            total += math.hypot(*self.curved_sums(chosen))
        return total

    def curved_sums(self, chosen: np.ndarray) -> np.ndarray:
        assert self.curved is not None and self.curved_base is not None
        return self.curved_base + self.curved[:, chosen].sum(1)

    def tangent(self, direction: np.ndarray) -> Quantity:
        """Return the sum that the figure is never below. direction: of length 1."""
        assert self.curved is not None and self.curved_base is not None
        amounts = self.amounts + direction @ self.curved
        return Quantity(amounts, self.base + float(direction @ self.curved_base))

    def tangents(self) -> list[Quantity]:
        """Return the sums to start with."""
        if self.curved is None:
            return [self]
        angles = np.linspace(0.0, math.pi / 2, TANGENTS)
        return [self.tangent(np.array([math.cos(a), math.sin(a)])) for a in angles]

    def tangent_at(self, chosen: np.ndarray) -> Quantity:
        sums = self.curved_sums(chosen)
        return self.tangent(sums / max(math.hypot(*sums), 1e-300))


def exceeds(value: float, limit: float) -> bool:
    return value > limit + TIE * abs(limit)


class Program:
    """Choices of one format per group. counts: number of formats of each group."""

    def __init__(self, counts: Sequence[int]) -> None:
        self.counts = list(counts)
        self.starts = np.concatenate(([0], np.cumsum(self.counts)[:-1])).astype(int)
        self.variables = int(sum(self.counts))

    def flat(self, rows: Sequence[Sequence[float]]) -> np.ndarray:
        """Return one number per group and format as the amounts of a Quantity."""
        return np.fromiter(itertools.chain.from_iterable(rows), float)

    def indices(self, choices: Sequence[int]) -> np.ndarray:
        return self.starts + np.asarray(choices, int)

    def least(
        self, objectives: Sequence[Quantity], limits: Sequence[tuple[Quantity, float]]
    ) -> tuple[int, ...] | None:
        """Return the choice within the limits with the least first objective, of equal ones the least second, and so on.

        None: no choice is within the limits.
        """
        best: tuple[int, ...] | None = None
        held = list(limits)
        for objective in objectives:
            choice = self._within(objective, held)
            if choice is None:
                break
            best = choice
            held.append((objective, objective.of(self.indices(choice))))
        return best

    def nearest(self, limits: Sequence[tuple[Quantity, float]]) -> tuple[int, ...]:
        """Return the choice whose largest excess, relative to the limit, is the smallest. Limits are positive."""
        bounds = [(row, limit) for q, limit in limits for row in q.tangents()]
        curved = [(q, limit) for q, limit in limits if q.curved is not None]
        excesses: dict[tuple[int, ...], float] = {}
        while True:
            choice = self._solve(None, bounds, [])
            assert choice is not None  # any choice is allowed with a large enough excess
            if choice in excesses:  # its tangents are known, so nothing else has less
                break
            chosen = self.indices(choice)
            excesses[choice] = max(q.of(chosen) / limit - 1.0 for q, limit in limits)
            bounds += [(q.tangent_at(chosen), limit) for q, limit in curved]
            if not curved or len(excesses) > MAX_EXCLUDED:
                break
        return min(excesses, key=lambda c: excesses[c])

    def _within(
        self, objective: Quantity, limits: Sequence[tuple[Quantity, float]]
    ) -> tuple[int, ...] | None:
        bounds = [(row, limit) for q, limit in limits for row in q.tangents()]
        excluded: list[np.ndarray] = []
        while True:
            choice = self._solve(objective, bounds, excluded)
            if choice is None:
                return None
            chosen = self.indices(choice)
            broken = [(q, limit) for q, limit in limits if exceeds(q.of(chosen), limit)]
            if not broken:
                return choice
            excluded.append(chosen)
            lower = 1.0 - _TOLERANCE if len(excluded) > MAX_EXCLUDED else 1.0
            for q, limit in broken:
                row = q if q.curved is None else q.tangent_at(chosen)
                bounds.append((row, limit * lower))

    def _solve(
        self,
        objective: Quantity | None,
        bounds: Sequence[tuple[Quantity, float]],
        excluded: Sequence[np.ndarray],
    ) -> tuple[int, ...] | None:
        """Solve the program without curved quantities. objective: None minimizes the largest relative excess."""
        from scipy import optimize, sparse

        if not self.counts:
            return () if all(row.base <= limit for row, limit in bounds) else None
        rows = []
        tops = []
        for row, limit in bounds:
            scale = max(float(np.abs(row.amounts).max()), 1e-300)
            relaxed = [] if objective else [-limit / scale]
            rows.append(np.concatenate((row.amounts / scale, relaxed)))
            tops.append((limit - row.base) / scale)
        for chosen in excluded:
            cut = np.zeros(self.variables + (objective is None))
            cut[chosen] = 1.0
            rows.append(cut)
            tops.append(len(chosen) - 1.0)
        extra = 0 if objective else 1
        blocks = [np.ones((1, count)) for count in self.counts]
        one_each = sparse.block_diag(blocks, format="csr")
        one_each = sparse.hstack([one_each, sparse.csr_matrix((len(self.counts), extra))])
        constraints = [optimize.LinearConstraint(one_each, 1.0, 1.0)]
        if rows:
            constraints.append(optimize.LinearConstraint(np.array(rows), -np.inf, np.array(tops)))
        if objective:
            cost = objective.amounts - _least_of_groups(objective.amounts, self.starts, self.counts)
            cost = cost / max(float(np.abs(cost).max()), 1e-300) * OBJECTIVE_SCALE
        else:
            cost = np.concatenate((np.zeros(self.variables), [OBJECTIVE_SCALE]))
        result = optimize.milp(
            cost,
            constraints=constraints,
            integrality=np.concatenate((np.ones(self.variables), np.zeros(extra))),
            bounds=optimize.Bounds(
                0.0, np.concatenate((np.ones(self.variables), [np.inf] * extra))
            ),
            options={"mip_rel_gap": 0.0, "time_limit": SOLVER_SECONDS},
        )
        if result.x is None:
            return None
        ends = self.starts + self.counts
        pairs = zip(self.starts, ends, strict=True)
        return tuple(int(np.argmax(result.x[start:end])) for start, end in pairs)


def _least_of_groups(amounts: np.ndarray, starts: np.ndarray, counts: Sequence[int]) -> np.ndarray:
    """Return each group's least amount, repeated for its formats."""
    return np.repeat(np.minimum.reduceat(amounts, starts), counts)


def with_rounded_inputs(
    harm: Mapping[str, float], weights: Mapping[str, float], allowed: float
) -> list[str]:
    """Return the units with the most weights whose summed harm is at most `allowed`. harm, weights: by unit."""
    program = Program([2] * len(harm))
    harms = Quantity(program.flat([[0.0, max(0.0, h)] for h in harm.values()]))
    unrounded = Quantity(program.flat([[weights[u], 0.0] for u in harm]))
    choices = program.least([unrounded, harms], [(harms, max(0.0, allowed))])
    assert choices is not None  # no rounded input costs nothing
    return [u for u, rounded in zip(harm, choices, strict=True) if rounded]


# ---- the table


def frontier_lines(plan: FormatPlan) -> list[str]:
    """Return the table, one line per point, what each group costs, and the reason."""
    timed = any(p.ttft_ms is not None for p in plan.points)
    speeds = ("tok/s", "first token, ms") if timed else ("tok/s",)
    losses = ("KL", "at decisions", "flips", "head")
    rows = [("", "GB per token", "GB", *speeds, *losses, "formats")]
    for p in plan.points:
        mark = "measured" if p.measured else ""
        if p.taken:
            mark = "=>"
        size = [f"{p.read_bytes / 1e9:.4g}", f"{p.size_bytes / 1e9:.4g}", f"{p.tok_s:.1f}"]
        if timed:
            size.append("" if p.ttft_ms is None else f"{p.ttft_ms:,.0f}")
        loss = (f"{p.kl:.2e}", f"{p.decisions:.2e}", f"{p.flips:.2%}")
        formats = ", ".join(f"{share:.0%} {name}" for name, share in p.formats.items())
        rows.append((mark, *size, *loss, p.head, formats))
    first_token = f"; first token at {plan.prompt}" if timed else ""
    lines = [f"frontier, tok/s on {plan.device}{first_token}:", *_aligned(rows)]
    return [*lines, *_group_lines(plan.groups), plan.reason]


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows as lines; all columns but the last are aligned to the right."""
    widths = [max(map(len, column)) for column in list(zip(*rows, strict=True))[:-1]]
    lines = []
    for *cells, last in rows:
        aligned = [cell.rjust(width) for cell, width in zip(cells, widths, strict=True)]
        lines.append("  ".join((*aligned, last)))
    return lines


def _group_lines(groups: Sequence[GroupCost]) -> list[str]:
    """Return what rounding each group's inputs to 4 bits costs and saves: the most harm per millisecond first."""
    rows = [("nats", "ms saved", "FLOPs", "format", "group")]
    ordered = sorted(groups, key=lambda g: -g.harm_per_ms)
    for group in ordered[:MAX_GROUP_LINES]:
        saved = f"{group.saved_ms:.3g}"
        rows.append((f"{group.harm:.2e}", saved, f"{group.flops:.1%}", group.format, group.name))
    others = ordered[MAX_GROUP_LINES:]
    if others:
        kinds = [kind for kind, _ in itertools.groupby(sorted(g.format for g in others))]
        saved = f"{sum(g.saved_ms for g in others):.3g}"
        flops = f"{sum(g.flops for g in others):.1%}"
        harm = f"{sum(g.harm for g in others):.2e}"
        rows.append((harm, saved, flops, ", ".join(kinds), f"{len(others)} others"))
    return ["what 4-bit inputs cost, per group:", *_aligned(rows)] if groups else []

"""The frontier of formats: the exact knapsack, its limits, and the table of its points.

The knapsack has all sums of sizes and costs of which none is both smaller and cheaper, by dynamic programming over units. After
each unit only the points that no other one beats stay, so the front is exact: sizes of linears are multiples of a few numbers, and
there are few different sums of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from annie_quant.documents import Device, FormatPlan

TIE = 1e-9  # sums that differ by less of the limit are equal
# A front with more points keeps the cheapest one of each of as many equal ranges of sizes.
MAX_POINTS = 1 << 17


@dataclass(frozen=True)
class Limits:
    """What a checkpoint may have: bytes of tensors, bytes of weights that a token reads, and divergence in nats.

    device: whose speed is predicted.
    max_bits: bits per weight of the linears that get a format; the head then stays as it is. Experts count by the share that a
        token passes.
    """

    device: Device
    max_gb: float = math.inf
    min_tps: float = 0.0
    max_loss: float = math.inf
    max_bits: float = math.inf

    def __str__(self) -> str:
        limits = []
        if self.min_tps:
            limits.append(f"--min-tps {self.min_tps:g}")
        if self.max_bits < math.inf:
            limits.append(f"{self.max_bits:.4g} bits per weight")
        if self.max_gb < math.inf:
            limits.append(f"--max-gb {self.max_gb:g}")
        if self.max_loss < math.inf:
            limits.append(f"--max-loss {self.max_loss:g}")
        return ", ".join(limits)


@dataclass(frozen=True)
class Front:
    """Points by rising size and falling cost.

    sizes, costs: sums, float64 [points].
    steps: per unit, of each point the point before this unit, and the choice, int [points] both.
    """

    sizes: np.ndarray
    costs: np.ndarray
    steps: list[tuple[np.ndarray, np.ndarray]]

    def within_size(self, limit: float) -> int | None:
        """Return the cheapest point of at most this size, or None."""
        within = int(np.searchsorted(self.sizes, limit + TIE * abs(limit), side="right"))
        return within - 1 if within else None

    def within_cost(self, limit: float) -> int | None:
        """Return the smallest point of at most this cost, or None."""
        within = np.flatnonzero(self.costs <= limit + TIE * abs(limit))
        return int(within[0]) if len(within) else None

    def choices(self, point: int) -> list[int]:
        """Return the choice of every unit at a point."""
        chosen = []
        for before, choice in reversed(self.steps):
            chosen.append(int(choice[point]))
            point = int(before[point])
        return chosen[::-1]


def front_of(costs: Sequence[Sequence[float]], sizes: Sequence[Sequence[float]]) -> Front:
    """Return the front of one choice per row. costs, sizes: of each row's choices."""
    total_size = np.zeros(1)
    total_cost = np.zeros(1)
    steps = []
    for cost, size in zip(costs, sizes, strict=True):
        count = len(cost)
        all_sizes = (total_size[:, None] + np.asarray(size, float)).ravel()
        all_costs = (total_cost[:, None] + np.asarray(cost, float)).ravel()
        order = np.lexsort((all_costs, all_sizes))
        cheapest = np.minimum.accumulate(all_costs[order])
        best = order[np.concatenate(([True], cheapest[1:] < cheapest[:-1]))]
        if len(best) > MAX_POINTS:
            ranges = np.floor(all_sizes[best] / all_sizes[best[-1]] * MAX_POINTS)
            best = best[np.concatenate((ranges[1:] > ranges[:-1], [True]))]
        total_size = all_sizes[best]
        total_cost = all_costs[best]
        steps.append(((best // count).astype(np.int32), (best % count).astype(np.int8)))
    return Front(total_size, total_cost, steps)


def with_rounded_inputs(
    harm: Mapping[str, float], weights: Mapping[str, float], allowed: float
) -> list[str]:
    """Return the units with the most weights whose summed harm is at most `allowed`. harm, weights: by unit."""
    front = front_of([[0.0, max(0.0, h)] for h in harm.values()], [[weights[u], 0.0] for u in harm])
    point = front.within_cost(max(0.0, allowed))
    assert point is not None  # no rounded input costs nothing
    return [u for u, rounded in zip(harm, front.choices(point), strict=True) if rounded]


def frontier_lines(plan: FormatPlan) -> list[str]:
    """Return the table, one line per point, and the reason."""
    rows = [("", "GB per token", "GB", "tok/s", "KL", "at decisions", "flips", "head", "formats")]
    for p in plan.points:
        mark = "measured" if p.measured else ""
        if p.taken:
            mark = "=>"
        size = (f"{p.read_bytes / 1e9:.4g}", f"{p.size_bytes / 1e9:.4g}", f"{p.tok_s:.1f}")
        loss = (f"{p.kl:.2e}", f"{p.decisions:.2e}", f"{p.flips:.2%}")
        formats = ", ".join(f"{share:.0%} {name}" for name, share in p.formats.items())
        rows.append((mark, *size, *loss, p.head, formats))
    widths = [max(map(len, column)) for column in list(zip(*rows, strict=True))[:-1]]
    lines = []
    for *cells, formats in rows:
        aligned = [cell.rjust(width) for cell, width in zip(cells, widths, strict=True)]
        lines.append("  ".join((*aligned, formats)))
    return [f"frontier, tok/s on {plan.device}:", *lines, plan.reason]

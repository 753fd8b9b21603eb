"""The exact knapsack behind every choice of formats: all sums of sizes and costs of which none is both smaller and cheaper.

Dynamic programming over units. After each unit only the points that no other one beats stay, so the front is exact: sizes of
linears are multiples of a few numbers, and there are few different sums of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from annie_quant.documents import Device

TIE = 1e-9  # sums that differ by less of the limit are equal
MOST_POINTS = 1 << 17  # a front with more keeps the cheapest point of each of as many equal ranges of sizes


@dataclass(frozen=True)
class Limits:
    """What a checkpoint may have: bytes of tensors, bytes of weights that a token reads, and divergence in nats.

    device: whose speed is predicted.
    """

    device: Device
    max_gb: float = math.inf
    min_tps: float = 0.0
    max_loss: float = math.inf

    def __str__(self) -> str:
        given = [("gb", self.max_gb), ("loss", self.max_loss)]
        speed = [f"--min-tps {self.min_tps:g}"] if self.min_tps else []
        return ", ".join([*speed, *(f"--max-{name} {value:g}" for name, value in given if value < math.inf)])


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
        found = int(np.searchsorted(self.sizes, limit + TIE * abs(limit), side="right")) - 1
        return found if found >= 0 else None

    def within_cost(self, limit: float) -> int | None:
        """Return the smallest point of at most this cost, or None."""
        found = np.flatnonzero(self.costs <= limit + TIE * abs(limit))
        return int(found[0]) if len(found) else None

    def choices(self, point: int) -> list[int]:
        """Return the choice of every unit at a point."""
        chosen = []
        for before, choice in reversed(self.steps):
            chosen.append(int(choice[point]))
            point = int(before[point])
        return chosen[::-1]


def front_of(costs: Sequence[Sequence[float]], sizes: Sequence[Sequence[float]]) -> Front:
    """Return the front of one choice per row. costs, sizes: of each row's choices."""
    total_size, total_cost, steps = np.zeros(1), np.zeros(1), []
    for cost, size in zip(costs, sizes, strict=True):
        count = len(cost)
        all_sizes = (total_size[:, None] + np.asarray(size, float)).ravel()
        all_costs = (total_cost[:, None] + np.asarray(cost, float)).ravel()
        order = np.lexsort((all_costs, all_sizes))
        cheapest = np.minimum.accumulate(all_costs[order])
        kept = order[np.concatenate(([True], cheapest[1:] < cheapest[:-1]))]
        if len(kept) > MOST_POINTS:
            ranges = np.floor(all_sizes[kept] / all_sizes[kept[-1]] * MOST_POINTS)
            kept = kept[np.concatenate((ranges[1:] > ranges[:-1], [True]))]
        total_size, total_cost = all_sizes[kept], all_costs[kept]
        steps.append(((kept // count).astype(np.int32), (kept % count).astype(np.int8)))
    return Front(total_size, total_cost, steps)


def least_cost(costs: Sequence[Sequence[float]], sizes: Sequence[Sequence[float]], limit: float) -> list[int]:
    """Return one choice per row: those with the least summed cost whose summed size is at most `limit`.

    The first choices are allowed whatever their size.
    """
    front = front_of(costs, sizes)
    point = front.within_size(max(limit, float(sum(row[0] for row in sizes))))
    assert point is not None  # the first choices are a point, or a smaller point is as cheap
    return front.choices(point)


def with_rounded_inputs(harm: Mapping[str, float], weights: Mapping[str, float], allowed: float) -> list[str]:
    """Return the units with the most weights whose summed harm is at most `allowed`. harm, weights: by unit."""
    front = front_of([[0.0, max(0.0, h)] for h in harm.values()], [[weights[u], 0.0] for u in harm])
    point = front.within_cost(max(0.0, allowed))
    assert point is not None  # no rounded input costs nothing
    return [u for u, rounded in zip(harm, front.choices(point), strict=True) if rounded]

"""The exact knapsack: compared with all choices, limits on both axes, ties."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from annie_quant.quantize import frontier
from annie_quant.quantize.frontier import front_of


def every(costs: np.ndarray, sizes: np.ndarray) -> dict[tuple[int, ...], tuple[float, float]]:
    """Return size and cost of every choice."""
    rows = np.arange(len(costs))
    return {
        c: (float(sizes[rows, list(c)].sum()), float(costs[rows, list(c)].sum()))
        for c in itertools.product(range(costs.shape[1]), repeat=len(costs))
    }


def test_the_front_is_every_choice_that_no_other_one_beats() -> None:
    rng = np.random.default_rng(5)
    for _ in range(30):
        costs, sizes = (
            rng.integers(0, 99, (5, 4)).astype(float),
            rng.integers(1, 9, (5, 4)).astype(float),
        )
        sums = every(costs, sizes)
        best = {
            s: min(c for t, c in sums.values() if t <= s) for s in {s for s, _ in sums.values()}
        }
        expected = [s for s in sorted(best) if all(best[s] < best[t] for t in best if t < s)]
        front = front_of(costs, sizes)
        assert front.sizes.tolist() == expected
        assert front.costs == pytest.approx([best[s] for s in expected])
        for point in range(len(front.sizes)):
            assert sums[tuple(front.choices(point))] == pytest.approx(
                (front.sizes[point], front.costs[point])
            )


def test_limits_of_size_and_of_cost_are_the_same_points() -> None:
    front = front_of([[3.0, 1.0, 0.0], [2.0, 1.0, 0.0]], [[1.0, 2.0, 4.0], [1.0, 2.0, 4.0]])
    assert front.within_size(1.9) is None and front.within_cost(-1.0) is None
    for point, (size, cost) in enumerate(zip(front.sizes, front.costs, strict=True)):
        assert front.within_size(size) == front.within_cost(cost) == point
        assert front.within_size(size * (1 - 1e-12)) == point, (
            "rounding of a sum is not a larger size"
        )
    assert front_of([], []).choices(0) == []


def test_equal_costs_take_the_smaller_size_and_equal_sizes_the_smaller_cost() -> None:
    for costs, sizes in (([[1.0, 1.0, 2.0]], [[5.0, 3.0, 1.0]]), ([[2.0, 1.0]], [[3.0, 3.0]])):
        front = front_of(costs, sizes)
        point = front.within_size(sizes[0][0])
        assert point is not None and front.choices(point) == [1]


def test_too_many_points_stay_within_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """With sizes that are multiples of nothing the front is thinned, and a limit is never exceeded."""
    rng = np.random.default_rng(2)
    costs, sizes = -np.sort(-rng.lognormal(-6, 2, (14, 3))), np.sort(rng.random((14, 3)) + 0.1)
    exact = front_of(costs, sizes)
    monkeypatch.setattr(frontier, "MAX_POINTS", 50)
    thin = front_of(costs, sizes)
    assert len(thin.sizes) <= 51 < len(exact.sizes)
    for limit in np.linspace(exact.sizes[0], exact.sizes[-1], 50):
        point, best = thin.within_size(limit), exact.within_size(limit)
        if point is not None and best is not None:
            assert thin.sizes[point] <= limit * (1 + 1e-8)
            assert exact.costs[best] <= thin.costs[point] * (1 + 1e-12)

"""The choice of formats under a budget against all choices, and against a greedy one."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from annie_quant.quantize.calibration_samples import RESPONSE
from annie_quant.quantize.formats import BITS, FP8, NVFP4, PLAIN_BITS, W4A16

pytest.importorskip("torch", reason="formats are tried on torch: pip install annie-quant[quantize]")
from annie_quant.quantize.frontier import least_cost
from annie_quant.quantize.mixed_formats import FormatSearch, pick

STEPS = (W4A16, FP8, None)


def search(inputs: float) -> FormatSearch:
    return FormatSearch((W4A16, FP8), 5.5, True, None, RESPONSE, 1024, inputs)


def size_of(kind: str | None) -> float:
    return (PLAIN_BITS if kind is None else BITS[kind]) / 8


def greedy(costs: dict[str, dict[str, float]], sizes: dict[str, float], budget: float) -> float:
    """Return the summed divergence where the best divergence per byte is always bought next."""
    level, spent = dict.fromkeys(costs, 0), sum(sizes[u] * size_of(W4A16) for u in costs)

    def harm(unit: str, step: int) -> float:
        return costs[unit].get(STEPS[step] or "", 0.0)

    while True:
        offers = [
            ((harm(u, at) - harm(u, to)) / price, u, to, price)
            for u, at in level.items()
            for to in range(at + 1, 3)
            if spent + (price := sizes[u] * (size_of(STEPS[to]) - size_of(STEPS[at]))) <= budget
            and harm(u, at) > harm(u, to)
        ]
        if not offers:
            return sum(harm(u, step) for u, step in level.items())
        _, unit, level[unit], price = max(offers)
        spent += price


def test_the_choice_has_the_least_divergence_of_all() -> None:
    rng, worse = np.random.default_rng(1), 0
    for _ in range(40):
        units = [f"u{i}" for i in range(5)]
        costs = {u: dict(zip((NVFP4, W4A16, FP8), np.sort(rng.lognormal(-6, 2, 3))[::-1], strict=True)) for u in units}
        sizes = {u: float(rng.integers(1, 40)) * 4096 for u in units}
        least, most = (sum(sizes.values()) * size_of(kind) for kind in (W4A16, None))
        budget = least + rng.random() * (most - least)
        formats = pick(costs, sizes, budget, search(0.25))
        stored = {u: W4A16 if f == NVFP4 else f for u, f in formats.items()}
        total = sum(costs[u].get(f or "", 0.0) for u, f in stored.items())
        assert sum(sizes[u] * size_of(f) for u, f in stored.items()) <= budget * (1 + 1e-8)
        every = (dict(zip(units, choice, strict=True)) for choice in itertools.product(STEPS, repeat=5))
        sums = [
            sum(costs[u].get(f or "", 0.0) for u, f in choice.items())
            for choice in every
            if sum(sizes[u] * size_of(f) for u, f in choice.items()) <= budget
        ]
        assert total == pytest.approx(min(sums), rel=1e-6)
        worse += greedy(costs, sizes, budget) > min(sums) * 1.001
        extra = sum(costs[u][NVFP4] - costs[u][W4A16] for u, f in formats.items() if f == NVFP4)
        assert extra <= 0.25 * total * (1 + 1e-6)
    assert worse >= 5, "cases that a greedy choice solves, too, show nothing"


def test_the_least_budget_gives_four_bits_and_nothing_is_bought_without_gain() -> None:
    costs = {"a": {NVFP4: 0.3, W4A16: 0.2, FP8: 0.0}, "b": {NVFP4: 0.0, W4A16: 0.0, FP8: 0.0}}
    sizes = {"a": 3e9 + 1, "b": 7e9}
    assert pick(costs, sizes, sum(sizes.values()) * size_of(W4A16), search(0.0)) == {"a": W4A16, "b": NVFP4}
    assert pick(costs, sizes, 1e12, search(0.0)) == {"a": FP8, "b": NVFP4}
    assert least_cost([], [], 0.0) == []

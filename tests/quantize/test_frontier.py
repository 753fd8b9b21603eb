"""The exact choice: compared with all choices on every axis, limits that are met exactly, and what is said where nothing fits."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from annie_quant.quantize.frontier import Program, Quantity, with_rounded_inputs

AXES = ("size", "loss", "time")


def random_case(rng: np.random.Generator) -> tuple[Program, dict[str, Quantity]]:
    """Return up to five groups with up to four formats: sizes of few numbers, as tensors have, and other real figures."""
    counts = [int(n) for n in rng.integers(1, 5, int(rng.integers(1, 6)))]
    program = Program(counts)
    n = program.variables
    sizes = rng.integers(1, 12, n).astype(float) if rng.random() < 0.5 else rng.random(n)
    losses = np.where(rng.random(n) < 0.2, 0.0, rng.lognormal(-6, 2, n))
    curved = rng.lognormal(1, 1, (2, n))
    base = rng.random(4) * 5
    return program, {
        "size": Quantity(sizes, base[0]),
        "loss": Quantity(losses),
        "time": Quantity(np.zeros(n), base[1], curved, base[2:] * rng.integers(0, 2)),
    }


def figures(program: Program, quantities: dict[str, Quantity]) -> dict[tuple, dict[str, float]]:
    """Return the figures of every choice, by plain sums."""
    table = {}
    for choice in itertools.product(*(range(n) for n in program.counts)):
        at = [sum(program.counts[:g]) + i for g, i in enumerate(choice)]
        row = {}
        for axis, q in quantities.items():
            row[axis] = q.base + sum(float(q.amounts[k]) for k in at)
            if q.curved is not None:
                sums = [
                    float(start) + sum(float(values[k]) for k in at)
                    for start, values in zip(q.curved_base, q.curved, strict=True)
                ]
                row[axis] += math.sqrt(sums[0] ** 2 + sums[1] ** 2)
        table[choice] = row
    return table


def random_limits(rng: np.random.Generator, table: dict[tuple, dict[str, float]]) -> dict:
    """Return limits of some axes: often exactly those of a choice, sometimes below or above all choices."""
    limits = {}
    for axis in AXES:
        values = sorted(row[axis] for row in table.values())
        kind = rng.integers(0, 4)
        if kind == 1:
            limits[axis] = values[int(rng.integers(0, len(values)))]
        elif kind == 2:
            limits[axis] = float(rng.uniform(values[0] * 0.9, values[-1] * 1.1))
        elif kind == 3:
            limits[axis] = values[0] + (values[-1] - values[0]) * float(rng.random()) ** 2
    return {axis: limit for axis, limit in limits.items() if limit > 0}


def check_case(rng: np.random.Generator) -> str:
    """Compare one random case with all choices. Return what it was: "infeasible" or the objective."""
    program, quantities = random_case(rng)
    table = figures(program, quantities)
    limits = random_limits(rng, table)
    bounds = [(quantities[axis], limit) for axis, limit in limits.items()]
    first, second = ("loss", "size") if rng.random() < 0.5 else ("size", "loss")
    within = [
        row
        for row in table.values()
        if all(row[axis] <= limit * (1 + 1e-9) for axis, limit in limits.items())
    ]
    choice = program.least([quantities[first], quantities[second]], bounds)
    if not within:
        assert choice is None
        nearest = program.nearest(bounds)
        excess = {
            c: max(row[axis] / limit for axis, limit in limits.items()) for c, row in table.items()
        }
        assert excess[nearest] == pytest.approx(min(excess.values()), rel=1e-7)
        return "infeasible"
    assert choice is not None
    row = table[choice]
    assert all(row[axis] <= limit * (1 + 2e-9) for axis, limit in limits.items())
    least = min(row[first] for row in within)
    assert row[first] == pytest.approx(least, rel=1e-9, abs=1e-12)
    among = min(r[second] for r in within if r[first] <= least * (1 + 1e-9))
    assert row[second] == pytest.approx(among, rel=1e-6, abs=1e-9)
    return first


def test_the_choice_is_the_best_of_all_choices_on_every_axis() -> None:
    rng = np.random.default_rng(5)
    kinds = [check_case(rng) for _ in range(250)]
    assert min(kinds.count(kind) for kind in ("infeasible", "loss", "size")) > 20


def test_a_limit_that_a_choice_has_exactly_is_met() -> None:
    program = Program([3, 3])
    size = Quantity(program.flat([[0.1, 0.2, 0.4], [0.1, 0.2, 0.4]]))
    loss = Quantity(program.flat([[3.0, 1.0, 0.0], [2.0, 1.0, 0.0]]))
    assert program.least([loss], [(size, 0.1 + 0.2)]) in {(1, 0), (0, 1)}
    assert program.least([loss], [(size, 0.3 * (1 - 1e-12))]) in {(1, 0), (0, 1)}
    assert program.least([loss], [(size, 0.3 * (1 - 1e-8))]) == (0, 0)
    assert program.least([loss], [(size, 0.19)]) is None


def test_of_equal_choices_the_second_objective_decides() -> None:
    program = Program([3])
    size = Quantity(program.flat([[5.0, 3.0, 1.0]]))
    loss = Quantity(program.flat([[1.0, 1.0, 2.0]]))
    assert program.least([loss, size], []) == (1,)
    assert program.least([size, loss], [(loss, 1.5)]) == (1,)


def test_without_groups_there_is_one_choice() -> None:
    assert Program([]).least([Quantity(np.zeros(0), 2.0)], []) == ()
    assert with_rounded_inputs({}, {}, 1.0) == []


def test_two_hundred_groups_are_chosen_between_the_relaxed_bounds() -> None:
    """No brute force reaches that: the linear program's optimum bounds the loss, and is at most two groups' loss away."""
    from scipy.optimize import linprog

    rng = np.random.default_rng(3)
    program = Program([4] * 200)
    n = program.variables
    weights = np.repeat(rng.choice([1.0, 4.0, 8.0], 200), 4)
    loss = rng.lognormal(-6, 1.5, n) * np.tile([3, 1, 0.05, 0], 200)
    size = weights * np.tile([4.5, 4.5, 8, 16], 200)
    time = weights / np.tile([249.0, 53, 107, 71], 200)
    limits = [size.sum() / 4 * 0.7, time.sum() / 4 * 0.8]
    bounds = [(Quantity(size), limits[0]), (Quantity(time), limits[1])]
    choice = program.least([Quantity(loss)], bounds)
    assert choice is not None
    chosen = program.indices(choice)
    one_each = np.kron(np.eye(200), np.ones(4))
    relaxed = linprog(loss, A_ub=[size, time], b_ub=limits, A_eq=one_each, b_eq=np.ones(200))
    assert size[chosen].sum() <= limits[0] and time[chosen].sum() <= limits[1]
    assert relaxed.fun <= loss[chosen].sum() + 1e-9
    assert loss[chosen].sum() <= relaxed.fun * 1.02

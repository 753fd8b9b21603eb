"""Where a rate's spread comes from: variance components of outcomes that cross prompts, calibration draws, arithmetics, overlays.

The outcomes are a full table: one value per combination of the factors' levels, 1 where the answer passes, else 0 (or their
difference between two strategies). Each factor is a random sample of more levels. The model is the crossed random-effects model
with all interactions; it asks for no distribution. Components are estimated by the method of moments: each mean square of the
analysis of variance equals its expectation (Cornfield and Tukey 1956; Searle, Casella, McCulloch, "Variance Components", 1992,
chapter 4). An estimate may be negative, which means about zero; it is shown as it is and counts as zero in sums.

The interaction of all factors includes the Bernoulli variance of a single outcome: it is their residual.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.stats import t

from annie_quant.documents import Evaluation
from annie_quant.judge.gates import REFERENCE_GATES, decides
from annie_quant.judge.statistics import holm, wilson

RESIDUAL = "residual"
LEVEL = 0.05
FACTORS = ("prompts", "calibration", "arithmetic")


@dataclass
class VarianceComponent:
    """What a factor, or an interaction, adds to the spread. variance: of one outcome. of_mean: of the mean over all levels."""

    variance: float
    of_mean: float


@dataclass
class Spread:
    """A pass rate, or a difference of two, with the spread over all that was sampled.

    levels: factor → number of levels. se: standard error of the mean over other prompts, draws, ... low, high: 95 % interval.
    freedom: its degrees of freedom. components: by factor, by interaction ("prompts × calibration"), "residual".
    """

    levels: dict[str, int]
    mean: float
    se: float
    freedom: float
    low: float
    high: float
    components: dict[str, VarianceComponent]


def mean_squares(values: Any) -> dict[tuple[int, ...], tuple[float, int]]:
    """Return axes → (mean square, degrees of freedom) of every effect and interaction. values: float [n_1, ..., n_k]."""
    values = np.asarray(values, dtype=np.float64)
    axes = range(values.ndim)
    effects: dict[tuple[int, ...], Any] = {(): values.mean(keepdims=True)}
    result = {}
    for size in range(1, values.ndim + 1):
        for chosen in itertools.combinations(axes, size):
            others = tuple(a for a in axes if a not in chosen)
            effect = values.mean(axis=others, keepdims=True)
            for smaller, part in effects.items():
                if set(smaller) < set(chosen):
                    effect = effect - part
            effects[chosen] = effect
            freedom = math.prod(values.shape[a] - 1 for a in chosen)
            repeats = math.prod(values.shape[a] for a in others)
            result[chosen] = (
                float(repeats * np.sum(effect**2) / freedom) if freedom else 0.0,
                freedom,
            )
    return result


def spread(values: Any, factors: Sequence[str]) -> Spread:
    """Return the components of a table of outcomes. values: float [n_1, ..., n_k], in the order of `factors`.

    A factor with one level has no component: what it adds stays in the others, and the figures hold for that level alone. se: of
    the mean over other samples of all factors. low, high: its t interval at 95 %, with Satterthwaite's degrees of freedom (too
    short near 0 and 1); without any spread, Wilson's of the prompts.
    Raises ValueError for a table without two levels of any factor.
    """
    values = np.asarray(values, dtype=np.float64)
    sampled = [axis for axis, n in enumerate(values.shape) if n > 1]
    if not sampled or values.ndim != len(factors):
        raise ValueError(
            f"a table of {len(factors)} factors with two levels or more is needed, got {values.shape}"
        )
    table = values.reshape([values.shape[a] for a in sampled])
    names = [factors[a] for a in sampled]
    squares = mean_squares(table)
    everything = tuple(range(table.ndim))
    components = {
        c: sum(
            weight * squares[larger][0]
            for larger, weight in coefficients(c, squares, table.shape).items()
        )
        for c in squares
    }
    shares = {c: max(0.0, v) / math.prod(table.shape[a] for a in c) for c, v in components.items()}
    variance, freedom = sum(shares.values()), _freedom(components, squares, table.shape)
    mean = float(table.mean())
    half = float(t.ppf(1 - LEVEL / 2, freedom)) * math.sqrt(variance)
    if not variance:  # as many prompts without a change leave this open (Wilson)
        n = max(table.shape)
        half = 1 - wilson(n, n)[0]
    least = min(0.0, float(table.min()))
    return Spread(
        levels=dict(zip(factors, values.shape, strict=True)),
        mean=mean,
        se=math.sqrt(variance),
        freedom=freedom,
        low=max(mean - half, least),
        high=min(mean + half, 1.0),
        components={
            RESIDUAL if c == everything and len(c) > 1 else " × ".join(names[a] for a in c): VarianceComponent(v, shares[c])
            for c, v in sorted(components.items(), key=lambda item: (len(item[0]), item[0]))
        },
    )  # fmt: skip


def coefficients(
    chosen: tuple[int, ...], effects: Collection[tuple[int, ...]], shape: Sequence[int]
) -> dict[tuple[int, ...], float]:
    """Return a component as a sum of mean squares: effect → weight.

    The expected mean square of an effect is the sum of the components of all effects that contain it, each times the number of
    levels of the factors that are not in it. Inclusion and exclusion inverts this.
    """
    repeats = math.prod(n for axis, n in enumerate(shape) if axis not in chosen)
    return {e: (-1) ** (len(e) - len(chosen)) / repeats for e in effects if set(chosen) <= set(e)}


def _freedom(
    components: Mapping[tuple[int, ...], float],
    squares: Mapping[tuple[int, ...], tuple[float, int]],
    shape: Sequence[int],
) -> float:
    """Satterthwaite's degrees of freedom of the mean's variance, a sum of mean squares; components below zero are left out."""
    weights = dict.fromkeys(squares, 0.0)  # of each mean square in the variance of the mean
    for chosen, value in components.items():
        if value > 0:
            for larger, weight in coefficients(chosen, squares, shape).items():
                weights[larger] += weight / math.prod(shape[a] for a in chosen)
    total = sum(weight * squares[c][0] for c, weight in weights.items())
    below = sum(
        (weight * squares[c][0]) ** 2 / squares[c][1]
        for c, weight in weights.items()
        if squares[c][1]
    )
    return max(1.0, total**2 / below) if below else 1.0


def ranking(
    tables: Mapping[str, Any], factors: Sequence[str]
) -> list[tuple[str, str, Spread, float]]:
    """Return (better, worse, spread of the difference, p after Holm) of each pair of strategies whose order is sure.

    tables: strategy → outcomes on the same prompts, draws and arithmetics. The difference of a pair is analysed as one table, so
    what both share cancels. p: two-sided t test of the mean difference.
    """
    pairs = []
    for a, b in itertools.combinations(tables, 2):
        result = spread(
            np.asarray(tables[a], dtype=np.float64) - np.asarray(tables[b], dtype=np.float64),
            factors,
        )
        if result.se:
            p = float(2 * t.sf(abs(result.mean) / result.se, result.freedom))
        else:  # the same difference everywhere: the sign test over the prompts
            p = 2 * 0.5 ** max(result.levels.values()) if result.mean else 1.0
        pairs.append((a, b, result, p))
    sure = []
    for (a, b, result, _), adjusted in zip(pairs, holm([p for *_, p in pairs]), strict=True):
        if adjusted is not None and adjusted < LEVEL:
            if result.mean < 0:
                a, b = b, a
                result.mean, result.low, result.high = -result.mean, -result.high, -result.low
            sure.append((a, b, result, adjusted))
    return sure


def members(evaluation: Evaluation, kind: str) -> list[Mapping[str, str]]:
    """Return the outcomes (gate → one character per prompt) of a numerics and of its ensemble's further members."""
    return [own for name, own in evaluation.outcomes().items() if name.partition("+")[0] == kind]


def right_answers(evaluations: Sequence[Evaluation], kind: str) -> Any:
    """Return whether each answer passes all of its deciding gates, float64 [prompts, draws, arithmetics]."""
    prompts = evaluations[0].prompts
    gates = [gate for gate in prompts if decides(gate) and gate not in REFERENCE_GATES] or [
        g for g in prompts if decides(g)
    ]
    position = {
        name: i
        for i, name in enumerate(dict.fromkeys(name for gate in gates for name in prompts[gate]))
    }
    sides = [[*members(e, kind)] for e in evaluations]
    right = np.ones((len(position), len(evaluations), len(sides[0])))
    for draw, (evaluation, own) in enumerate(zip(evaluations, sides, strict=True)):
        for arithmetic, text in enumerate(own):
            for gate in gates:
                for name, passed in zip(evaluation.prompts[gate], text.get(gate, ""), strict=False):
                    if passed == "0":
                        right[position[name], draw, arithmetic] = 0
    return right

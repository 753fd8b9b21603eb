"""Variance components of crossed outcomes: known components, an independent computation, and what a ranking may state."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from variance import mean_squares, ranking, spread

FACTORS = ("prompts", "calibration", "arithmetic")
FOUR = (*FACTORS, "fine-tune")


def outcomes(rng, shape, sd, mean=0.5):
    """0 and 1 with a probability that is a sum of crossed random effects. sd: axes → standard deviation of the probability."""
    p = np.full(shape, mean)
    for axes, value in sd.items():
        size = [n if a in axes else 1 for a, n in enumerate(shape)]
        p = p + value * rng.uniform(
            -np.sqrt(3), np.sqrt(3), size
        )  # bounded, so that nothing is cut off
    assert p.min() >= 0 and p.max() <= 1
    return (rng.random(shape) < p).astype(float)


def test_the_sums_of_squares_are_those_of_the_regression_on_dummies():
    """The analysis of variance by projections: the fit of each model by least squares on dummy variables."""
    rng = np.random.default_rng(0)
    values = rng.normal(size=(5, 3, 4))
    grid = np.array(list(np.ndindex(values.shape)))
    flat = values.ravel()

    def dummies(axes):
        keys = [tuple(row[list(axes)]) for row in grid]
        order = {key: i for i, key in enumerate(dict.fromkeys(keys))}
        return np.eye(len(order))[[order[key] for key in keys]]

    def explained(models):
        columns = np.hstack([np.ones((len(flat), 1)), *(dummies(m) for m in models)])
        return float(
            np.sum((columns @ np.linalg.lstsq(columns, flat, rcond=None)[0] - flat.mean()) ** 2)
        )

    for axes, (square, freedom) in mean_squares(values).items():
        smaller = [c for size in range(1, len(axes)) for c in itertools.combinations(axes, size)]
        assert square * freedom == pytest.approx(
            explained([*smaller, axes]) - explained(smaller), abs=1e-9
        )
        assert freedom == np.prod([values.shape[a] - 1 for a in axes])


def test_the_mean_squares_are_those_of_statsmodels():
    """anova_lm of "y ~ C(p)*C(c)+C(p)*C(a)+C(c)*C(a)" in statsmodels 0.15.0; its MixedLM (REML) gave the components below."""
    rng, (n_p, n_c, n_a) = np.random.default_rng(0), (12, 4, 3)
    values = (
        rng.normal(0, 0.3, (n_p, 1, 1))
        + rng.normal(0, 0.2, (1, n_c, 1))
        + rng.normal(0, 0.1, (1, 1, n_a))
    )
    values = values + rng.normal(0, 0.15, (n_p, n_c, 1)) + rng.normal(0, 0.2, (n_p, n_c, n_a))
    expected = {
        (0,): 0.8145774717556407,
        (1,): 0.8978790799253864,
        (2,): 0.04106128223682588,
        (0, 1): 0.07560001492469366,
        (0, 2): 0.03430120503751528,
        (1, 2): 0.08069322039727121,
        (0, 1, 2): 0.03651639391720718,
    }
    assert {axes: square for axes, (square, _) in mean_squares(values).items()} == pytest.approx(
        expected
    )
    components = spread(values, FACTORS).components
    for name, reml in (
        ("prompts", 0.0616),
        ("calibration", 0.0228),
        ("prompts × calibration", 0.0123),
    ):
        assert components[name].variance == pytest.approx(reml, rel=0.07)


def test_known_components_are_recovered_without_bias():
    shape, sd = (60, 4, 3), {(0,): 0.10, (1,): 0.06, (2,): 0.04, (0, 1): 0.06}
    rng = np.random.default_rng(1)
    runs = [spread(outcomes(rng, shape, sd), FACTORS) for _ in range(300)]
    names = {
        (0,): "prompts",
        (1,): "calibration",
        (2,): "arithmetic",
        (0, 1): "prompts × calibration",
    }
    for axes, name in names.items():
        estimates = np.array([r.components[name].variance for r in runs])
        error = estimates.std() / np.sqrt(len(runs))
        assert abs(estimates.mean() - sd[axes] ** 2) < 4 * error, (
            name,
            estimates.mean(),
            sd[axes] ** 2,
        )
    residual = np.mean([r.components["residual"].variance for r in runs])
    assert residual == pytest.approx(
        0.25 - sum(v**2 for v in sd.values()), abs=0.01
    )  # Bernoulli, less what is explained


@pytest.mark.parametrize("planted", [None, 0, 1, 2, 3], ids=["none", *FOUR])
def test_a_variance_is_attributed_to_the_factor_that_has_it_and_to_no_other(planted):
    """Fine-tunes as the fourth factor, three of them and three draws: the smallest table from which docs report components."""
    shape, runs = (60, 3, 4, 3), 120
    sd = {} if planted is None else {(planted,): 0.12}
    rng = np.random.default_rng(17)
    spreads = [spread(outcomes(rng, shape, sd), FOUR).components for _ in range(runs)]
    for axis, name in enumerate(FOUR):
        estimates = np.array([components[name].variance for components in spreads])
        error = estimates.std() / np.sqrt(runs)
        assert abs(estimates.mean() - (0.12**2 if axis == planted else 0)) < 4 * error, (
            name,
            estimates.mean(),
        )
        assert axis == planted or estimates.mean() < 0.12**2 / 50, name
    for name in set(spreads[0]) - {*FOUR, "residual"}:
        estimates = np.array([components[name].variance for components in spreads])
        assert abs(estimates.mean()) < 4 * estimates.std() / np.sqrt(runs), (name, estimates.mean())


@pytest.mark.parametrize(
    ("shape", "sd"),
    [
        ((100, 4, 4), {(0,): 0.15, (1,): 0.05}),
        ((100, 3, 4), {(0,): 0.10, (1,): 0.08, (0, 1): 0.05}),
        ((200, 3, 3), {(0,): 0.15}),
    ],
)
def test_the_interval_contains_the_mean_over_all_draws(shape, sd):
    """95 % intervals; a prompt interval alone misses the spread of the calibration draws."""
    rng = np.random.default_rng(2)
    inside = narrow = 0
    for _ in range(300):
        values = outcomes(rng, shape, sd)
        result = spread(values, FACTORS)
        inside += result.low <= 0.5 <= result.high
        rate = values[:, 0, 0].mean()
        narrow += abs(rate - 0.5) <= 1.96 * np.sqrt(rate * (1 - rate) / shape[0])
    assert inside / 300 >= 0.92
    if (1,) in sd:
        assert narrow < inside


def test_a_factor_with_one_level_has_no_component():
    values = outcomes(np.random.default_rng(3), (50, 1, 3), {(0,): 0.1})
    result = spread(values, FACTORS)
    assert (
        set(result.components) == {"prompts", "arithmetic", "residual"}
        and result.levels["calibration"] == 1
    )
    with pytest.raises(ValueError, match="two levels"):
        spread(np.ones((1, 1)), ("prompts", "calibration"))
    same = spread(np.ones((100, 2)), ("prompts", "calibration"))
    assert same.se == 0 and same.high == 1 and same.low == pytest.approx(0.963, abs=0.001), (
        "not 100 % for sure"
    )


def test_a_ranking_is_stated_only_where_the_spread_allows():
    """Two equal strategies whose calibration draws differ by chance, and one that is 15 points worse in every draw."""
    rng, false, detected = np.random.default_rng(4), 0, 0
    for _ in range(200):
        base = rng.uniform(0.75, 0.95, (100, 1, 1))
        draws = {name: rng.uniform(-0.05, 0.05, (1, 4, 1)) for name in "abc"}
        tables = {
            name: (rng.random((100, 4, 3)) < base + d - 0.2 * (name == "c")).astype(float)
            for name, d in draws.items()
        }
        stated = {(better, worse) for better, worse, *_ in ranking(tables, FACTORS)}
        false += bool(stated & {("a", "b"), ("b", "a")})
        detected += {("a", "c"), ("b", "c")} <= stated
    assert false / 200 <= 0.05 and detected / 200 >= 0.8


def test_an_order_without_any_spread_is_sure():
    tables = {"a": np.ones((20, 3)), "b": np.zeros((20, 3))}
    few = {name: table[:3] for name, table in tables.items()}
    assert ranking(few, ("prompts", "calibration")) == []
    assert [(a, b) for a, b, *_ in ranking(tables, ("prompts", "calibration"))] == [("a", "b")]
    assert ranking({"a": np.ones((20, 3)), "b": np.ones((20, 3))}, ("prompts", "calibration")) == []

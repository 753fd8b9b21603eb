"""Intervals and tests against scipy, statsmodels (where installed), brute force and simulation."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom, binomtest, bootstrap

from annie_quant.judge.gates import n_to_decide
from annie_quant.judge.statistics import (
    compare,
    excess_loss,
    holm,
    hommel,
    least_p,
    median_interval,
    paired,
    prompts_to_decide,
    wilson,
)


@pytest.mark.parametrize("n", [1, 2, 5, 10, 25, 100, 1000])
def test_wilson_agrees_with_scipy(n):
    for passes in sorted({0, 1, n // 3, n // 2, n - 1, n} & set(range(n + 1))):
        for confidence in (0.9, 0.95, 0.99):
            theirs = binomtest(passes, n).proportion_ci(confidence, method="wilson")
            assert wilson(passes, n, confidence) == pytest.approx(
                (theirs.low, theirs.high), abs=1e-12
            )


def test_wilson_of_no_answers_and_of_invalid_counts():
    assert wilson(0, 0) == (0.0, 1.0)
    with pytest.raises(ValueError, match=r"0\.\.n"):
        wilson(3, 2)


@given(st.integers(1, 400).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_contains_the_rate_and_is_symmetric(case):
    passes, n = case
    low, high = wilson(passes, n)
    assert 0 <= low <= passes / n <= high <= 1
    assert wilson(n - passes, n) == pytest.approx((1 - high, 1 - low), abs=1e-12)


@pytest.mark.parametrize("n", [25, 100, 200])
def test_wilson_coverage(n):
    """Coverage from the binomial distribution: near 95 % on average, never below 83 %."""
    bounds = [wilson(k, n) for k in range(n + 1)]
    coverage = []
    for share in np.linspace(0.02, 0.98, 97):
        inside = [k for k, (low, high) in enumerate(bounds) if low <= share <= high]
        coverage.append(binom.pmf(inside, n, share).sum())
    assert 0.94 < np.mean(coverage) < 0.965
    assert min(coverage) > 0.83


@pytest.mark.parametrize("n", [2, 3, 8, 25, 40])
def test_median_interval_agrees_with_scipys_bootstrap(n):
    """The same distribution of resampled medians, drawn differently: bounds agree up to chance."""
    values = np.random.default_rng(n).lognormal(size=n)
    theirs = bootstrap(
        (values,), np.median, n_resamples=20_000, method="percentile", rng=np.random.default_rng(1)
    )
    low, high = median_interval(values, resamples=20_000)
    ordered = np.sort(values)
    step = np.diff(ordered, prepend=ordered[0], append=ordered[-1]).max() / 2 + 1e-9
    assert abs(low - theirs.confidence_interval.low) <= step
    assert abs(high - theirs.confidence_interval.high) <= step
    many = theirs.bootstrap_distribution
    ours = [median_interval(values, confidence=c, resamples=20_000)[1] for c in (0.2, 0.5, 0.8)]
    shares = [np.mean(many < x) for x in ours], [np.mean(many <= x) for x in ours]
    for quantile, below, upto in zip((0.6, 0.75, 0.9), *shares, strict=True):
        assert below - 0.02 <= quantile <= upto + 0.02


def test_median_interval_covers_the_median():
    rng = np.random.default_rng(7)
    hits = 0
    for trial in range(300):
        low, high = median_interval(rng.lognormal(size=40), resamples=400, seed=trial)
        hits += low <= 1.0 <= high
    # 95 % of 300 is 285, three standard errors are 11; the percentile bootstrap of a median covers slightly less.
    assert 270 <= hits <= 297


def test_median_interval_of_few_values():
    assert median_interval([3.0]) == (None, None)
    assert median_interval([2.0, 2.0, 2.0]) == (2.0, 2.0)
    assert median_interval([1.0, 2.0, 5.0], seed=1) == median_interval([1.0, 2.0, 5.0], seed=1)


def test_the_prompt_is_the_unit():
    """A hundred repeats of three prompts are three prompts."""
    a = {p: list(np.full(100, 10.0 + p)) for p in range(3)}
    b = {p: list(np.full(100, 11.0 + 2 * p)) for p in range(3)}
    result = compare(a, b)
    assert result.n_prompts == 3 and result.median_difference == 2.0
    assert result.p == pytest.approx(least_p(3)) == 0.25


def test_only_shared_prompts_are_paired():
    pairs = paired({"x": [1, 3], "y": [5], "z": []}, {"y": [6, 8], "x": [2], "w": [1], "z": [1]})
    assert pairs.tolist() == [[2, 2], [5, 7]]
    assert compare({"x": [1]}, {"y": [1]}).n_prompts == 0
    assert compare({"x": [1]}, {"x": [2]}).p is None


def test_small_samples_get_the_exact_permutation_p():
    differences = np.array([3.0, 1.0, -0.5, 2.0, 4.0, 1.5])
    result = compare({i: [0.0] for i in range(6)}, {i: [d] for i, d in enumerate(differences)})
    flips = [abs(np.mean(differences * signs)) for signs in itertools.product([1, -1], repeat=6)]
    brute = np.mean(np.array(flips) >= abs(differences.mean()) - 1e-12)
    assert result.p == pytest.approx(brute)


def test_large_samples_agree_with_random_sign_flips():
    rng = np.random.default_rng(3)
    differences = rng.normal(0.35, 1.0, 40)
    result = compare({i: [0.0] for i in range(40)}, {i: [d] for i, d in enumerate(differences)})
    ranks = np.argsort(np.argsort(np.abs(differences))) + 1
    signs = rng.choice([-1, 1], size=(40_000, 40))
    brute = np.mean(np.abs(signs @ ranks) >= abs(np.sign(differences) @ ranks))
    assert result.test.startswith("wilcoxon") and result.p == pytest.approx(brute, abs=0.01)


def test_holm_by_hand():
    # Sorted: .005 x 4 = .02, .01 x 3 = .03, .03 x 2 = .06, .04 x 1 = .04 but not below .06.
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.5, None, 0.9]) == [1.0, None, 1.0]
    assert holm([]) == []


def test_holm_and_power_agree_with_statsmodels():
    multitest = pytest.importorskip(
        "statsmodels.stats.multitest", reason="statsmodels is not installed"
    )
    power = pytest.importorskip("statsmodels.stats.power")
    rng = np.random.default_rng(1)
    for size in (1, 2, 7, 60):
        p = rng.uniform(0, 0.2, size)
        assert holm(list(p)) == pytest.approx(list(multitest.multipletests(p, method="holm")[1]))
        assert hommel(list(p)) == pytest.approx(
            list(multitest.multipletests(p, method="hommel")[1])
        )
    for effect in (0.2, 0.5, 1.0):
        theirs = power.TTestPower().solve_power(
            effect_size=effect, alpha=0.05, power=0.8, alternative="two-sided"
        )
        assert abs(prompts_to_decide(1.0, effect) - theirs) < 4


def two_sides(rng, prompts, shift, metrics=6):
    """Simulated servers: a time per prompt, 5 % noise per request, side b slower by `shift`."""
    own = rng.lognormal(4, 0.4, (metrics, prompts))
    noise = rng.normal(1, 0.05, (2, metrics, prompts, 3))
    return own[:, :, None] * noise[0], own[:, :, None] * noise[1] * (1 + shift)


def family(rng, prompts, shift):
    a, b = two_sides(rng, prompts, shift)
    rows = [
        compare(dict(enumerate(x)), dict(enumerate(y)), resamples=50)
        for x, y in zip(a, b, strict=True)
    ]
    return [p < 0.05 for p in holm([row.p for row in rows])]


def test_a_against_a_shows_no_difference():
    rng = np.random.default_rng(11)
    alarms = sum(any(family(rng, 30, 0.0)) for _ in range(100))
    assert alarms <= 10  # 5 expected; more than 10 has a probability of 1 %


def test_a_difference_of_five_percent_is_detected():
    rng = np.random.default_rng(12)
    detected = sum(all(family(rng, 60, 0.05)) for _ in range(30))
    assert detected >= 28


def test_prompts_to_decide_gives_the_stated_power():
    rng = np.random.default_rng(5)
    n = prompts_to_decide(1.0, 0.5)
    hits = sum(
        compare(
            {i: [0.0] for i in range(n)},
            {i: [d] for i, d in enumerate(rng.normal(0.5, 1, n))},
            resamples=20,
        ).p
        < 0.05
        for _ in range(300)
    )
    # Wilcoxon's efficiency relative to the normal test is 0.955, so the power is slightly below 0.8.
    assert 0.70 < hits / 300 < 0.88
    assert prompts_to_decide(1.0, 0.0) is None


@pytest.mark.parametrize(("share", "rate"), [(0.69, 0.6), (0.55, 0.6), (0.99, 0.95), (0.82, 0.8)])
def test_n_to_decide_is_the_first_that_decides(share, rate):
    def decided(n):
        low, high = wilson(share * n, n)
        return low >= rate or high < rate

    result = n_to_decide(share, rate, 100)
    assert decided(result) and not any(decided(n) for n in range(101, result))


def closed_simes(p_values):
    """Hommel's adjustment by its definition: of each hypothesis, the largest Simes p of all sets that contain it."""
    n = len(p_values)
    sets = [s for size in range(1, n + 1) for s in itertools.combinations(range(n), size)]
    simes = {
        s: min(len(s) * p / k for k, p in enumerate(sorted(p_values[i] for i in s), 1))
        for s in sets
    }
    return [max(simes[s] for s in sets if i in s) for i in range(n)]


def test_hommel_is_the_closed_test_of_simes():
    rng = np.random.default_rng(0)
    for size in range(1, 8):
        for _ in range(20):
            p_values = (
                (rng.random(size) ** rng.choice([1, 3]) * rng.choice([0.1, 1])).round(2).tolist()
            )
            assert hommel(p_values) == pytest.approx(closed_simes(p_values))
    assert hommel([0.02] * 5) == pytest.approx([0.02] * 5) and holm([0.02] * 5) == pytest.approx(
        [0.1] * 5
    )
    assert hommel([]) == []
    p_values = rng.random(160).tolist()
    assert all(
        up <= down + 1e-12 for up, down in zip(hommel(p_values), holm(p_values), strict=True)
    )


def test_p_of_a_large_loss_is_not_zero() -> None:
    """84 lost and 1 won of 117 at a margin of 5 points is 16 standard errors from it: below what 1 - p can hold."""
    p = excess_loss(84, 117, 0.05, won=1)
    assert 0 < p < 1e-16
    assert excess_loss(85, 117, 0.05, won=1) < p

"""Factors of folded linears, where 4-bit rounding leaves too little of a column to fit one."""

from __future__ import annotations

import numpy as np
import pytest

from annie_quant.checkpoint.folding_check import certain, distance, fit, uniform_factor


@pytest.fixture(scope="module")
def weights() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return a folded and rounded weight, the source's, and the column factors; every fourth column is rounded away."""
    rng = np.random.default_rng(3)
    theirs = rng.standard_normal((64, 32)).astype(np.float32)
    factors = np.exp(0.3 * rng.standard_normal(32))
    factors[::4] = 1e-3
    step = 0.25
    return np.round(theirs * factors / step) * step, theirs, factors


def test_a_column_that_was_rounded_away_has_no_factor(weights) -> None:
    ours, theirs, factors = weights
    r, c = certain(ours, theirs, *fit(ours, theirs))
    assert np.isnan(c[::4]).all() and not np.isnan(np.delete(c, np.s_[::4])).any() and not np.isnan(r).any()
    gain = c / uniform_factor(c, factors)
    assert distance(gain, factors) < 0.025, "the other columns have their factors"


def test_a_wrong_factor_of_a_certain_column_is_still_a_distance(weights) -> None:
    ours, theirs, factors = weights
    wrong = ours.copy()
    wrong[:, 5] *= 1.5
    _, c = certain(wrong, theirs, *fit(wrong, theirs))
    assert distance(c / uniform_factor(c, factors), factors) > 0.05

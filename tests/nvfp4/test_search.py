"""Scale search against trying all 126 codes in NumPy, and the two-candidate rule against its definition."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nvfp4_cases import DTYPES, VALUES, adversarial, in_dtype
from randomised import examples

from annie_quant import nvfp4


@pytest.fixture(autouse=True)
def fastest_variant():
    yield
    nvfp4.set_variant("auto")


def by_variant(w: np.ndarray, **options) -> tuple[dict[str, np.ndarray], np.float32]:
    """Return each variant's scale codes [blocks], and the tensor scale, which all have."""
    codes, scales = {}, set()
    for variant in nvfp4.variants():
        nvfp4.set_variant(variant)
        t = nvfp4.pack(w, **options)
        codes[variant] = t.block_scale.view(np.uint8).reshape(-1)
        scales.add(t.tensor_scale)
    (scale,) = scales
    return codes, scale


def errors(blocks: np.ndarray, steps: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return [blocks, codes]: in float64 and in column order, the sum of weight * distance^2 to the nearest grid point."""
    total = np.zeros((len(blocks), len(steps)))
    grid = VALUES.astype(np.float64)[None] * steps.astype(np.float64)[:, None]
    for column in range(blocks.shape[1]):
        a = np.abs(blocks[:, column].astype(np.float64))
        distance = np.abs(a[:, None, None] - grid[None]).min(-1)
        total += weights[:, column, None].astype(np.float64) * (distance * distance)
    return total


def all_codes(
    w: np.ndarray, tensor_scale: np.float32, importance: np.ndarray | None, group: int = 16
) -> np.ndarray:
    steps = nvfp4.E4M3_VALUES[1:127] * tensor_scale
    blocks = w.astype(np.float32).reshape(-1, group)
    columns = np.ones(w.shape[-1], np.float32) if importance is None else importance
    weights = np.broadcast_to(columns, w.shape).reshape(-1, group)
    return (errors(blocks, steps, weights).argmin(1) + 1).astype(np.uint8)


@pytest.mark.parametrize("weighted", [False, True])
def test_sweep_is_all_126_codes(weighted):
    rng = np.random.default_rng(11)
    for name, w in adversarial(16, 512, 9):
        x = in_dtype(w, DTYPES[2])
        importance = rng.gamma(0.3, 1, 512).astype(np.float32) if weighted else None
        for scale in (None, 2.0**-8):
            codes, tensor_scale = by_variant(
                x, tensor_scale=scale, scale="sweep", importance=importance
            )
            nonzero = (x.astype(np.float32).reshape(-1, 16) != 0).any(1)
            expected = all_codes(x, tensor_scale, importance)
            for variant, got in codes.items():
                wrong = nonzero & (got != expected)
                assert not wrong.any(), (
                    variant,
                    name,
                    scale,
                    np.argwhere(wrong)[:3],
                    got[wrong][:3],
                    expected[wrong][:3],
                )


@pytest.mark.parametrize("group", [32, 64])
def test_sweep_of_larger_groups_is_all_126_codes(group):
    rng = np.random.default_rng(19)
    w = (rng.standard_t(4, (8, 1024)) * 0.02).astype(np.float32)
    importance = rng.gamma(0.3, 1, 1024).astype(np.float32)
    for weights in (None, importance):
        codes, tensor_scale = by_variant(w, scale="sweep", group=group, importance=weights)
        expected = all_codes(w, tensor_scale, weights, group)
        for variant, got in codes.items():
            np.testing.assert_array_equal(got, expected, variant)


@settings(max_examples=examples(150), deadline=None)
@given(
    st.lists(st.integers(-20, 20), min_size=16, max_size=16),
    st.integers(-14, 10),
    st.integers(0, 3),
)
def test_sweep_on_blocks_with_few_values(values, exponent, seed):
    """Small integers times a power of two: many codes have the same error, and the lowest code must be chosen."""
    w = (np.array([values]) * 2.0**exponent).astype(np.float32)
    if not w.any():
        return
    codes, tensor_scale = by_variant(
        np.repeat(w, 8, 0), tensor_scale=2.0**-9 * (1 + seed / 7), scale="sweep"
    )
    expected = np.repeat(all_codes(w, tensor_scale, None), 8)
    for variant, got in codes.items():
        np.testing.assert_array_equal(got, expected, variant)


def test_four_over_six_chooses_the_lower_error_and_six_on_a_tie():
    for name, w in adversarial(16, 512, 13):
        if name in ("subnormal", "minus zero"):
            continue
        of_variants, tensor_scale = by_variant(w, scale="four_over_six")
        assert tensor_scale == np.abs(w).max() / np.float32(6 * 256)
        blocks = w.reshape(-1, 16)
        amax = np.abs(blocks).max(1)
        codes = []
        for factor in (1.0, 1.5):
            with np.errstate(over="ignore"):
                ratio = amax * np.float32(factor) / (np.float32(6) * tensor_scale)
            ratio = np.clip(
                np.where(ratio == 0, np.float32(1), ratio), np.float32(2**-9), np.float32(448)
            )
            codes.append(ratio.astype(nvfp4.E4M3).view(np.uint8))
        table = errors(blocks, nvfp4.E4M3_VALUES[:127] * tensor_scale, np.ones_like(blocks))
        six, four = (table[np.arange(len(blocks)), c] for c in codes)
        expected = np.where(four < six, codes[1], codes[0])
        usable = amax > 0
        for variant, got in of_variants.items():
            np.testing.assert_array_equal(got[usable], expected[usable], f"{name}, {variant}")


def test_importance_lowers_the_weighted_error():
    rng = np.random.default_rng(17)
    w = rng.standard_t(5, (256, 512)).astype(np.float32)
    importance = rng.gamma(0.2, 1, 512).astype(np.float32)

    def weighted_error(t):
        return float((importance * (w - nvfp4.unpack(t, "float32")) ** 2).sum())

    plain = nvfp4.pack(w, scale="sweep")
    aware = nvfp4.pack(w, scale="sweep", importance=importance)
    assert weighted_error(aware) < weighted_error(plain) < weighted_error(nvfp4.pack(w))

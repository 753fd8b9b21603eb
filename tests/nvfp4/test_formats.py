"""The number formats against ml_dtypes' tables and an independent decoder: all codes, all scales, all midpoints."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nvfp4_cases import BFLOAT16, DTYPES, MIDPOINTS, VALUES, bits, near_ties_of_steps

from annie_quant import nvfp4


def test_tables_are_those_of_ml_dtypes():
    e2m1 = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    np.testing.assert_array_equal(bits(nvfp4.E2M1_VALUES), bits(e2m1))
    e4m3 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(nvfp4.E4M3_VALUES, e4m3)
    assert (
        nvfp4.E4M3_VALUES[0x7E] == 448
        and nvfp4.E4M3_VALUES[0x01] == 2**-9
        and np.isnan(nvfp4.E4M3_VALUES[0x7F])
    )


@pytest.mark.parametrize("variant", nvfp4.variants())
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tensor_scale", [1.0, 2.0**-7, 0.0013, 3e-39, 1e30, 1e38])
def test_every_code_under_every_scale(variant, dtype, tensor_scale):
    codes = np.tile(np.arange(16, dtype=np.uint8), (256, 1))
    packed = (codes[:, 1::2] << 4 | codes[:, ::2]).astype(np.uint8)
    scales = np.arange(256, dtype=np.uint8)[:, None].view(ml_dtypes.float8_e4m3fn)
    t = nvfp4.Tensor(packed, scales, np.float32(tensor_scale), (256, 16))
    nvfp4.set_variant(variant)
    got = nvfp4.unpack(t, dtype, nan="keep")
    with np.errstate(all="ignore"):
        step = scales.astype(np.float32) * np.float32(tensor_scale)
        expected = (
            np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32) * step
        ).astype(dtype)
    number = ~np.isnan(expected.astype(np.float32))
    np.testing.assert_array_equal(bits(got)[number], bits(expected)[number])
    quiet = np.array(
        np.nan, dtype
    )  # the scale is NaN of either sign, or the step is infinite and the element zero
    np.testing.assert_array_equal(bits(got)[~number], np.broadcast_to(bits(quiet), (~number).sum()))
    with pytest.raises(
        ValueError, match=r"2 scales are NaN and 127 negative, the first at \[127, 0\]"
    ):
        nvfp4.unpack(t, dtype)


def by_definition(x: np.ndarray, step: np.ndarray) -> np.ndarray:
    """Return the nibble of x / step by counting midpoints; ties go to the even index."""
    with np.errstate(all="ignore"):
        q = x.astype(np.float32) / step
    a = np.abs(q)[..., None]
    over = np.where(np.arange(7) % 2 == 0, ~(a <= MIDPOINTS), ~(a < MIDPOINTS))
    return (over.sum(-1) + 8 * (q < 0)).astype(np.uint8)


@pytest.mark.parametrize("variant", nvfp4.variants())
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tensor_scale", [1.0, 2.0**-10, 0.000731, 0.0123])
def test_midpoints_and_their_neighbours_under_every_scale(variant, dtype, tensor_scale):
    steps = nvfp4.E4M3_VALUES[1:127] * np.float32(tensor_scale)
    near = near_ties_of_steps(steps, dtype)
    rows = []
    for row, step in zip(near, steps, strict=True):
        # A first column of 6 steps gives the block this step, if it can be represented.
        top = np.full((len(row) // 14, 1), 6 * step).astype(dtype)
        pairs = np.concatenate([row.reshape(-1, 7), -row.reshape(-1, 7)], 1)
        rows.append(
            np.concatenate([top, pairs[: len(top)], np.full((len(top), 1), -0.0, dtype)], 1)
        )
    w = np.concatenate(rows)
    w = np.where(np.isfinite(w.astype(np.float32)), w, np.zeros((), dtype)).astype(dtype)
    nvfp4.set_variant(variant)
    t = nvfp4.pack(w, tensor_scale=tensor_scale)
    with np.errstate(all="ignore"):
        expected = by_definition(w, t.block_scale.astype(np.float32) * np.float32(tensor_scale))
    np.testing.assert_array_equal(t.codes & 15, expected[:, ::2])
    np.testing.assert_array_equal(t.codes >> 4, expected[:, 1::2])


@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=16, max_size=16),
    st.integers(0, 200),
)
def test_any_block_rounds_by_the_definition(values, exponent):
    w = np.array([values], np.float32)
    scale = np.float32(2.0 ** (exponent / 2 - 70))
    t = nvfp4.pack(w, tensor_scale=scale)
    amax = np.abs(w).max()
    with np.errstate(all="ignore"):
        ratio = amax / (np.float32(6) * scale)
        expected = (
            np.float32(1) if ratio == 0 else np.clip(ratio, np.float32(2**-9), np.float32(448))
        )
        assert t.block_scale[0, 0] == expected.astype(ml_dtypes.float8_e4m3fn)
        nibbles = by_definition(w, t.block_scale.astype(np.float32) * scale)
    np.testing.assert_array_equal(
        np.stack([t.codes & 15, t.codes >> 4], -1).reshape(1, 16), nibbles
    )


def test_bfloat16_rounds_once_from_float32():
    w = np.array([[6.0] + [0.0] * 15], np.float32)
    t = nvfp4.pack(w, tensor_scale=np.float32(0.0123456))
    product = VALUES[7] * np.float32(t.block_scale.astype(np.float32)[0, 0] * np.float32(0.0123456))
    assert nvfp4.unpack(t)[0, 0] == np.float32(product).astype(BFLOAT16)

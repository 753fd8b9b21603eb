"""Activation fake quantization against the op's definition in NumPy (ModelOpt's fp4_fake_quant_block)."""

from __future__ import annotations

import numpy as np
import pytest
from nvfp4_cases import DTYPES, VALUES, adversarial, bits, in_dtype

from annie_quant import nvfp4


@pytest.fixture(autouse=True)
def fastest_variant():
    yield
    nvfp4.set_variant("auto")


def by_definition(x: np.ndarray, tensor_scale: np.float32) -> np.ndarray:
    with np.errstate(all="ignore"):
        v = x.astype(np.float32).reshape(*x.shape[:-1], -1, 16)
        a = np.abs(v)
        ratio = np.minimum(
            a.max(-1, keepdims=True) / (np.float32(6) * tensor_scale), np.float32(448)
        )
        step = ratio.astype(nvfp4.E4M3).astype(np.float32) * tensor_scale
        step = np.where(step >= np.float32(1e-5), step, np.float32(1))
        s = a / step
        q = np.select(
            [s <= 0.25, s < 0.75, s <= 1.25, s < 1.75, s <= 2.5, s < 3.5, s <= 5],
            list(VALUES[:7]),
            default=VALUES[7],
        ).astype(np.float32)
        y = q * step
        return np.where(v >= 0, y, np.float32(0) - y).reshape(x.shape).astype(x.dtype)


@pytest.mark.parametrize("variant", nvfp4.variants())
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fake_quant_is_the_op(variant, dtype):
    nvfp4.set_variant(variant)
    for name, w in adversarial(17, 256, 31):
        x = in_dtype(w, dtype)
        for scale in (np.float32(0.001), np.float32(2.0**-6), np.float32(3.1e-6), np.float32(5)):
            got = nvfp4.fake_quant(x, scale)
            assert got.dtype == x.dtype
            wrong = bits(got) != bits(by_definition(x, scale))
            assert not wrong.any(), (name, scale, np.argwhere(wrong)[:3])


def test_computed_scale_in_place_and_sign_of_zero():
    x = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)
    scale = nvfp4.tensor_scale(np.abs(x).max(), "modelopt-cuda")
    expected = by_definition(x, scale)
    np.testing.assert_array_equal(nvfp4.fake_quant(x), expected)
    assert nvfp4.fake_quant(x, out=x) is x
    np.testing.assert_array_equal(x, expected)
    tiny = np.full((1, 16), -1e-3, np.float32)
    tiny[0, 0] = 6
    assert not np.signbit(nvfp4.fake_quant(tiny, 1.0)[0, 1])  # the op gives +0.0, pack's rule 0x8


def test_it_differs_from_pack_where_the_op_does():
    """No lower clamp on the scale byte: a block far below the tensor's range is unchanged, with step 1."""
    x = np.full((1, 16), 1e-7, np.float32)
    assert not nvfp4.fake_quant(x, 1.0).any()
    assert nvfp4.pack(x, tensor_scale=1.0).block_scale.view(np.uint8)[0, 0] == 1

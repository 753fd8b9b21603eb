"""ggml's NVFP4 blocks and the 128x4 swizzle against NumPy views and gguf-py's decoder."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from randomised import examples

from annie_quant import nvfp4


@settings(max_examples=examples(60), deadline=None)
@given(st.integers(1, 300), st.integers(1, 40))
def test_swizzle_is_a_permuted_view(rows, columns):
    scales = np.random.default_rng(rows * 41 + columns).integers(0, 256, (rows, columns), np.uint8)
    high, wide = -(-rows // 128) * 128, -(-columns // 4) * 4
    padded = np.zeros((high, wide), np.uint8)
    padded[:rows, :columns] = scales
    expected = padded.reshape(high // 128, 4, 32, wide // 4, 4).transpose(0, 3, 2, 1, 4).reshape(-1)
    tiles = nvfp4.swizzle(scales)
    np.testing.assert_array_equal(tiles, expected)
    np.testing.assert_array_equal(nvfp4.unswizzle(tiles, rows, columns), scales)


def test_swizzled_scales_keep_their_dtype_and_wrong_sizes_are_refused():
    t = nvfp4.pack(np.ones((4, 64), np.float32))
    assert nvfp4.swizzle(t.block_scale).dtype == t.block_scale.dtype
    with pytest.raises(ValueError, match="in: 512 bytes, expected 1024"):
        nvfp4.unswizzle(np.zeros(512, np.uint8), 129, 4)


def test_ggml_blocks_come_back_and_decode_to_the_same_weights():
    quants = pytest.importorskip("gguf.quants", reason="gguf is not installed")
    rng = np.random.default_rng(0)
    t = nvfp4.pack(rng.standard_normal((6, 256)).astype(np.float32), tensor_scale=0.01)
    raw = nvfp4.to_ggml(t)
    assert raw.shape == (6, 256 // 64 * 36)
    again = nvfp4.from_ggml(raw, 0.01)
    np.testing.assert_array_equal(again.codes, t.codes)
    np.testing.assert_array_equal(again.block_scale.view(np.uint8), t.block_scale.view(np.uint8))
    # the layout's definition: in each 16, low nibbles are elements 0-7 and high ones 8-15
    blocks = raw.reshape(6, 4, 36)
    nibbles = blocks[..., 4:].reshape(6, 4, 4, 8)
    values = nvfp4.E2M1_VALUES[np.concatenate([nibbles & 15, nibbles >> 4], -1)]
    scales = nvfp4.E4M3_VALUES[blocks[..., :4]] * np.float32(0.01)
    np.testing.assert_array_equal(
        (values * scales[..., None]).reshape(6, 256), nvfp4.unpack(t, "float32")
    )
    import gguf

    kind = getattr(gguf.GGMLQuantizationType, "NVFP4", None)
    if kind is not None:
        theirs = quants.dequantize(raw, kind)
        np.testing.assert_allclose(theirs * np.float32(0.01), nvfp4.unpack(t, "float32"), rtol=1e-6)


def test_ggml_needs_rows_of_64():
    with pytest.raises(ValueError, match="multiple of 64"):
        nvfp4.to_ggml(nvfp4.pack(np.ones((2, 48), np.float32)))
    with pytest.raises(ValueError, match="multiple of 36"):
        nvfp4.from_ggml(np.zeros((2, 40), np.uint8))

"""Products with packed weights, and GPTQ: every variant, forced, gives the bits of the serial reference."""

from __future__ import annotations

import numpy as np
import pytest
from nvfp4_cases import DTYPES, bits

from annie_quant import nvfp4

# With n terms, fused sums of float32 differ from exact ones by at most n roundings of the sum of magnitudes.
ROUNDING = 2.0**-24
ROUNDING_OF = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}


@pytest.fixture(autouse=True)
def fastest_variant():
    yield
    nvfp4.set_variant("auto")
    nvfp4.set_threads(0)


@pytest.mark.parametrize("variant", nvfp4.variants())
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("columns", "group"), [(16, 16), (32, 16), (48, 16), (544, 16), (1024, 32), (4096, 64)]
)
def test_gemv_has_the_bits_of_the_serial_reference(variant, dtype, columns, group):
    """All numbers of rows of x that share a decoding, and a last half piece."""
    rng = np.random.default_rng(columns)
    t = nvfp4.pack(rng.standard_normal((7, columns)).astype(np.float32), group=group)
    x = rng.standard_normal((9, columns)).astype(dtype)
    nvfp4.set_variant("serial")
    expected = nvfp4.gemv(x, t)
    nvfp4.set_variant(variant)
    for tokens in range(1, 10):
        np.testing.assert_array_equal(
            bits(nvfp4.gemv(x[:tokens], t)), bits(expected[:tokens]), f"{tokens} rows of x"
        )


@pytest.mark.parametrize("variant", nvfp4.variants())
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gemv_is_within_its_error_bound_of_the_exact_product(variant, dtype):
    rng = np.random.default_rng(3)
    t = nvfp4.pack(rng.standard_normal((64, 4096)).astype(np.float32) * np.float32(0.02))
    x = rng.standard_normal((3, 4096)).astype(dtype)
    w = nvfp4.unpack(t, "float32").astype(np.float64)
    exact, size = x.astype(np.float64) @ w.T, np.abs(x.astype(np.float64)) @ np.abs(w).T
    nvfp4.set_variant(variant)
    y = nvfp4.gemv(x, t).astype(np.float64)
    terms = 4096 // 32 + 6
    assert (
        np.abs(y - exact)
        <= terms * ROUNDING * size + ROUNDING_OF[np.dtype(dtype).name] * np.abs(exact)
    ).all()


@pytest.mark.parametrize("variant", nvfp4.variants())
@pytest.mark.parametrize("divisor", [None, np.float32(27.3)], ids=["times", "divided"])
@pytest.mark.parametrize(
    "blocks", [2, 16, 19]
)  # after those that are read together come single ones
def test_gemv_of_every_code_and_block_scale(variant, divisor, blocks):
    """One weight that is not multiplied by zero, so the sum is that weight: value * step, rounded once."""
    finite = np.arange(0x7F, dtype=np.uint8)
    columns = 16 * blocks
    nvfp4.set_variant(variant)
    for shift in range(blocks):  # each scale in each place of a row
        block_scale = np.resize(np.roll(finite, shift), (-(-finite.size // blocks), blocks))
        codes = np.resize(np.arange(16, dtype=np.uint8), (len(block_scale), columns))
        packed = codes[:, ::2] | codes[:, 1::2] << 4
        t = nvfp4.Tensor(
            packed, block_scale.view(nvfp4.E4M3), np.float32(0.037), codes.shape, divisor=divisor
        )
        np.testing.assert_array_equal(
            nvfp4.gemv(np.eye(columns, dtype=np.float32), t).T, nvfp4.unpack(t, "float32")
        )
        for invalid in (0x7F, 0x80, 0xC0, 0xFF):
            block_scale[-1, shift] = invalid
            with pytest.raises(
                ValueError, match=rf"the first at \[{len(block_scale) - 1}, {shift}\]"
            ):
                nvfp4.gemv(np.ones((1, columns), np.float32), t)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [48, 1024])
def test_gemv_of_inputs_that_are_not_finite_has_the_same_bits_in_all_variants(dtype, columns):
    """0 * inf, inf - inf and a NaN of either sign: the sign of the sum's NaN is that of the compiler's operand order."""
    rng = np.random.default_rng(columns)
    t = nvfp4.pack(rng.integers(-2, 3, (40, columns)).astype(np.float32))
    x = rng.standard_normal((4, columns)).astype(dtype)
    not_finite = np.array([np.inf, -np.inf, np.nan, -np.nan], dtype)
    for row in x:
        row[rng.choice(columns, 3)] = rng.choice(not_finite, 3)
    results = []
    for variant in nvfp4.variants():
        nvfp4.set_variant(variant)
        results.append(bits(nvfp4.gemv(x, t)))
        np.testing.assert_array_equal(results[-1], results[0], variant)
    nan = bits(np.array(np.nan, dtype))[()]
    is_nan = np.isnan(results[0].view(dtype).astype(np.float32))
    assert is_nan.any() and (results[0][is_nan] == nan).all()


@pytest.mark.parametrize("variant", nvfp4.variants()[1:])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    ("columns", "group", "scale"),
    [(48, 16, "amax"), (320, 32, "sweep"), (448, 64, "amax"), (64, 16, "sweep")],
)
def test_gptq_has_the_bytes_of_the_serial_reference(variant, columns, group, scale, weighted):
    """Windows that are not full, rows that are not a multiple of four, columns that are not a multiple of 16."""
    rng = np.random.default_rng(columns)
    w = rng.standard_normal((67, columns)).astype(np.float32)
    factor = np.triu(rng.standard_normal((columns, columns)) * 0.05).astype(np.float32)
    np.fill_diagonal(factor, rng.uniform(0.5, 2, columns))
    importance = rng.gamma(0.5, 1, columns).astype(np.float32) if weighted else None
    results = {}
    for name in ("serial", variant):
        nvfp4.set_variant(name)
        rounded = w.copy()
        t = nvfp4.gptq(rounded, factor, 0.01, scale=scale, group=group, importance=importance)
        results[name] = rounded.view(np.uint32), t.codes, t.block_scale.view(np.uint8)
    for got, expected in zip(results[variant], results["serial"], strict=True):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("variant", nvfp4.variants())
@pytest.mark.parametrize(("rows", "group"), [(1, 16), (67, 16), (130, 32)])
def test_gptq_without_corrections_chooses_the_scales_of_pack(variant, rows, group):
    """The importance is that of a block's own columns, in every row of every tile."""
    rng = np.random.default_rng(rows)
    w, importance = (
        rng.standard_normal((rows, 320)).astype(np.float32),
        rng.gamma(0.5, 1, 320).astype(np.float32),
    )
    nvfp4.set_variant("serial")
    expected = nvfp4.pack(w, tensor_scale=0.01, scale="sweep", group=group, importance=importance)
    nvfp4.set_variant(variant)
    t = nvfp4.gptq(
        w, np.eye(320, dtype=np.float32), 0.01, scale="sweep", group=group, importance=importance
    )
    np.testing.assert_array_equal(t.block_scale.view(np.uint8), expected.block_scale.view(np.uint8))
    np.testing.assert_array_equal(t.codes, expected.codes)

"""What a valid tensor is: one check for unpack, gemv, to_ggml, error and the audit; and results that are not one."""

from __future__ import annotations

import subprocess
from dataclasses import replace

import numpy as np
import pytest
from nvfp4_cases import BFLOAT16, bits
from paths import ROOT

from annie_quant import kquant, nvfp4


@pytest.fixture(autouse=True)
def fastest_variant():
    yield
    nvfp4.set_variant("auto")


def tensor(**fields: object) -> nvfp4.Tensor:
    w = np.random.default_rng(0).standard_normal((4, 128)).astype(np.float32)
    return replace(nvfp4.pack(w), **fields)


def with_scale(byte: int) -> nvfp4.Tensor:
    t = tensor()
    t.block_scale.view(np.uint8)[2, 5] = byte
    return t


USES = {
    "check": nvfp4.check,
    "unpack": nvfp4.unpack,
    "gemv": lambda t: nvfp4.gemv(np.ones((1, 128), np.float32), t),
    "to_ggml": nvfp4.to_ggml,
    "error": lambda t: nvfp4.error(np.ones((4, 128), np.float32), t),
}
FACTORS = [0.0, -0.0, -1.0, np.inf, -np.inf, np.nan]


@pytest.mark.parametrize("use", USES.values(), ids=USES)
@pytest.mark.parametrize("byte", [0x7F, 0xFF, 0x80, 0x81, 0xB8, 0xFE], ids=hex)
def test_a_block_scale_that_is_nan_or_negative_is_refused(use, byte):
    with pytest.raises(
        ValueError, match=r"block_scale: . scales are NaN and . negative, the first at \[2, 5\]"
    ):
        use(with_scale(byte))


@pytest.mark.parametrize("use", USES.values(), ids=USES)
@pytest.mark.parametrize("field", ["tensor_scale", "divisor"])
@pytest.mark.parametrize("value", FACTORS)
def test_a_factor_that_is_not_positive_and_finite_is_refused(use, field, value):
    with pytest.raises(
        ValueError, match=f"{field} {np.float32(value)}, expected a positive finite number"
    ):
        use(tensor(**{field: np.float32(value)}))


@pytest.mark.parametrize("use", USES.values(), ids=USES)
@pytest.mark.parametrize("byte", [0, 1, 0x7E])
@pytest.mark.parametrize("factor", [2.0**-149, 1.0, 3.4e38])
def test_a_valid_tensor_is_accepted(use, byte, factor):
    t = with_scale(byte)
    t.tensor_scale = np.float32(factor)
    with np.errstate(over="ignore", invalid="ignore"):
        use(t)


def test_invalid_scales_are_counted_by_kind():
    scales = np.array([[0, 0x7E, 0x7F], [0xFF, 0x80, 0xC0]], np.uint8)
    assert nvfp4.invalid_scales(scales) == (2, 2)
    assert nvfp4.invalid_scales(scales[:1, :2]) == (0, 0)
    assert [nvfp4.is_factor(v) for v in (1.0, 2.0**-149, 0.0, 1e39, -1.0, np.nan)] == [
        True,
        True,
        *[False] * 4,
    ]


# ---- pack does not change its target before it has a result


@pytest.mark.parametrize(
    "options",
    [{}, {"tensor_scale": 0.01}, {"encoding": "compressed-tensors", "divisor": 100.0}],
    ids=str,
)
@pytest.mark.parametrize("bad", ["nan", "overlap", "read-only"])
def test_pack_into_a_target_leaves_it_as_it_was_where_it_raises(options, bad):
    w = np.random.default_rng(1).standard_normal((64, 128)).astype(np.float32)
    out = tensor(tensor_scale=np.float32(7), shape=(1, 2))
    out.codes = np.full((64, 64), 5, np.uint8)
    out.block_scale = np.full((64, 8), 6, np.uint8)
    if bad == "nan":
        w[-1, -1] = np.nan
    if bad == "overlap":
        out.codes = w.view(np.uint8).reshape(-1)[: 64 * 64].reshape(64, 64)
    if bad == "read-only":
        out.codes.flags.writeable = False
    before = replace(out, codes=out.codes.copy(), block_scale=out.block_scale.copy())
    with pytest.raises(ValueError, match=r"NaN or inf|overlap|writeable"):
        nvfp4.pack(w, out=out, **options)
    np.testing.assert_array_equal(out.codes, before.codes)
    np.testing.assert_array_equal(out.block_scale, before.block_scale)
    assert (out.tensor_scale, out.divisor, out.shape) == (7, None, (1, 2))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"encoding": "compressed-tensors"},
        {"tensor_scale": 0.01},
        {"encoding": "compressed-tensors", "divisor": 90.0},
    ],
)
def test_pack_into_a_tensor_reads_the_weight_once_for_its_amax(options: dict, monkeypatch) -> None:
    w = np.random.default_rng(0).standard_normal((4, 128)).astype(np.float32)
    expected = nvfp4.pack(w, **options)
    out = tensor()
    calls = []
    finite_amax = nvfp4.finite_amax
    monkeypatch.setattr(nvfp4, "finite_amax", lambda *a: calls.append(1) or finite_amax(*a))
    assert nvfp4.pack(w, out=out, **options) is out
    assert len(calls) == 1
    np.testing.assert_array_equal(out.codes, expected.codes)
    assert (out.tensor_scale, out.divisor) == (expected.tensor_scale, expected.divisor)


# ---- scales that would lose the weights


@pytest.mark.parametrize("amax", [0.041, 0.03, 6e-5, 6e-8])
def test_small_float16_weights_have_compressed_tensors_scale_and_survive(amax):
    """2688 / amax has no float16 below .041; its observer then stores 1 (generate_gparam)."""
    torch = pytest.importorskip("torch")
    helpers = pytest.importorskip("compressed_tensors.quantization.utils.helpers")
    w = (np.random.default_rng(2).uniform(-1, 1, (8, 64)) * amax).astype(np.float16)
    w[0, 0] = np.float16(amax)
    t = nvfp4.pack(w, encoding="compressed-tensors")
    smallest, largest = (torch.tensor(v) for v in (w.min(), w.max()))
    stored = helpers.generate_gparam(smallest, largest, dtype=torch.float32)
    assert t.divisor == stored.item()
    if amax > 0.001:  # steps of E4M3 without a larger factor do not reach smaller weights
        assert nvfp4.error(w, t)["rel_l2"] < 0.35


@pytest.mark.parametrize("variant", nvfp4.variants())
@pytest.mark.parametrize("group", [16, 32, 64])
@pytest.mark.parametrize("dtype", [np.float32, BFLOAT16])
def test_columns_of_importance_0_are_still_quantized(variant, group, dtype):
    """All errors of a block were 0, so code 1 won and the weights became 0."""
    rng = np.random.default_rng(group)
    w = rng.standard_normal((16, 256)).astype(dtype)
    importance = np.zeros(256, np.float32)
    importance[128:] = rng.gamma(0.3, 1, 128)
    w[:, 192:208] = 0  # important columns of zeros next to unimportant weights
    importance[208:256] = 0
    nvfp4.set_variant(variant)
    t = nvfp4.pack(w, scale="sweep", group=group, importance=importance)
    plain = nvfp4.pack(w, scale="sweep", group=group)
    unimportant = (importance.reshape(-1, group) == 0).all(1)
    assert unimportant.sum() >= 2
    for attribute in ("block_scale", "codes"):
        blocks = (
            getattr(x, attribute).view(np.uint8).reshape(16, unimportant.size, -1)
            for x in (t, plain)
        )
        got, expected = (b[:, unimportant] for b in blocks)
        np.testing.assert_array_equal(got, expected, attribute)
    restored = nvfp4.unpack(t, "float32")[:, 208:]
    original = w[:, 208:].astype(np.float32)
    assert np.linalg.norm(restored - original) < 0.2 * np.linalg.norm(original)


@pytest.mark.parametrize("variant", nvfp4.variants())
@pytest.mark.parametrize("columns", [16, 64, 144])
def test_gptq_finds_a_correction_that_is_not_finite_in_the_last_block(variant, columns):
    nvfp4.set_variant(variant)
    w = np.ones((3, columns), np.float32)
    factor = np.eye(columns, dtype=np.float32)
    factor[columns - 3, columns - 3] = 1e-30
    factor[columns - 3, columns - 1] = 3e38
    w[1, columns - 3] = 0.97  # the only row with an error in that column
    with pytest.raises(ValueError, match="not finite"):
        nvfp4.gptq(w, factor, 1 / 2688)
    nvfp4.gptq(np.ones((3, columns), np.float32), factor, 1 / 6)


# ---- K-quants


@pytest.mark.parametrize("kind", kquant.BLOCKS)
@pytest.mark.parametrize("weighted", [False, True])
def test_weights_whose_scale_is_no_float16_are_refused(kind, weighted):
    """llama.cpp validates a file's blocks and does not load one with infinite scales."""
    w = np.random.default_rng(3).standard_normal((5, 512)).astype(np.float32)
    importance = np.ones(512, np.float32) if weighted else None
    fits = kquant.quantize(w * np.float32(1e5), kind, importance=importance)
    assert np.isfinite(kquant.dequantize(fits, kind)).all()
    w[3, 300] = 3e9
    w[4, 0] = 3e9
    with pytest.raises(
        ValueError,
        match=rf"w: row 3, whose largest magnitude is 3e\+09, has a block whose {kind} scale",
    ):
        kquant.quantize(w, kind, importance=importance)


# ---- builds that would give other bytes


@pytest.mark.parametrize("flag", ["-ffast-math", "-Ofast", "-ffinite-math-only", ""])
def test_a_build_with_inexact_arithmetic_is_refused(flag):
    command = ["gcc", "-std=c11", "-Icsrc", "-fsyntax-only", *flag.split(), "csrc/nvfp4/serial.c"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode != 0) == bool(flag)
    assert ("without -ffast-math" in done.stderr) == bool(flag)


def test_keep_decodes_an_invalid_tensor():
    t = with_scale(0x7F)
    t.tensor_scale = np.float32(-2)
    w = nvfp4.unpack(t, "float32", nan="keep")
    assert np.isnan(w[2, 80:96]).all() and np.isnan(w).sum() == 16
    expected = nvfp4.unpack(replace(t, tensor_scale=np.float32(2)), "float32", nan="keep")
    number = ~np.isnan(w)
    np.testing.assert_array_equal(bits(w)[number] ^ 0x80000000, bits(expected)[number])

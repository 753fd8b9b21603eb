"""pack and unpack against the code of ModelOpt and compressed-tensors, and with invalid input."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from nvfp4_cases import BFLOAT16, DTYPES, adversarial, in_dtype, near_ties_of_steps

from annie_quant import nvfp4
from annie_quant.core import codec_arrays

TORCH_NAME = {
    np.dtype(np.float32): "float32",
    np.dtype(np.float16): "float16",
    BFLOAT16: "bfloat16",
}


@pytest.fixture(autouse=True)
def fastest_variant():
    yield
    nvfp4.set_variant("auto")


def to_torch(x: np.ndarray):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    if x.dtype == BFLOAT16:
        return torch.from_numpy(x.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(x.copy())


def modelopt(x: np.ndarray, tensor_scale: float | None):
    module = pytest.importorskip(
        "modelopt.torch.quantization.qtensor.nvfp4_tensor", reason="ModelOpt is not installed"
    )
    import torch

    s2 = None if tensor_scale is None else torch.tensor(tensor_scale, dtype=torch.float32)
    q, s, s2 = module.NVFP4QTensor.quantize(to_torch(x), 16, None, s2)
    return q, s, s2


@pytest.mark.parametrize("variant", nvfp4.variants())
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_same_bytes_as_modelopt(variant, dtype):
    nvfp4.set_variant(variant)
    for name, w in adversarial(24, 512, 3):
        x = in_dtype(w, dtype)
        for scale in (None, 0.001, 2.0**-6, 3.1e-5):
            if scale is None and not x.any():
                continue  # ModelOpt divides 0 by 0; see test_zeros
            if scale is None and nvfp4.tensor_scale(np.abs(x.astype(np.float32)).max()) < 1e-37:
                continue  # its tensor scale is subnormal or zero there
            q, s, s2 = modelopt(x, scale)
            t = nvfp4.pack(x, tensor_scale=scale)
            assert t.tensor_scale == s2.numpy(), name
            wrong = t.block_scale.view(np.uint8) != s.view(__import__("torch").uint8).numpy()
            assert not wrong.any(), (name, scale, np.argwhere(wrong)[:3])
            wrong = t.codes != q._quantized_data.numpy()
            assert not wrong.any(), (name, scale, np.argwhere(wrong)[:3])
            back = (
                q.dequantize(to_torch(x).dtype, scale=s, double_scale=s2, block_sizes={-1: 16})
                .float()
                .numpy()
            )
            np.testing.assert_array_equal(
                nvfp4.unpack(t, TORCH_NAME[dtype]).astype(np.float32), back
            )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_reciprocal_would_be_detected(dtype):
    """Negative control of the test data: dividing and multiplying by 1 / step differ on near-ties."""
    steps = nvfp4.E4M3_VALUES[8:127] * np.float32(0.000731)
    near = near_ties_of_steps(steps, dtype).astype(np.float32)
    divided = near / steps[:, None]
    multiplied = near * (np.float32(1) / steps[:, None])
    sides = [
        (np.abs(q)[..., None] > [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]).sum(-1)
        for q in (divided, multiplied)
    ]
    if dtype == np.float32:
        assert (sides[0] != sides[1]).any()
    gauss = np.random.default_rng(0).standard_normal(near.shape).astype(np.float32) * steps[:, None]
    sides = [
        (np.abs(q)[..., None] > 0.25).sum(-1)
        for q in (gauss / steps[:, None], gauss * (1 / steps[:, None]))
    ]
    assert (sides[0] == sides[1]).all()


def test_cuda_exports_take_the_tensor_scale_times_a_reciprocal():
    amax = np.float32(0.1000001)
    assert nvfp4.tensor_scale(amax) == amax / np.float32(2688)
    assert nvfp4.tensor_scale(amax, "modelopt-cuda") == amax * (np.float32(1) / np.float32(2688))
    values = np.random.default_rng(0).random(1000).astype(np.float32)
    assert any(nvfp4.tensor_scale(v) != nvfp4.tensor_scale(v, "modelopt-cuda") for v in values)


@pytest.mark.parametrize("variant", nvfp4.variants())
def test_static_encoding_is_modelopts_static_export(variant):
    """Block scales relative to the tensor's amax: _cast_per_block_scale_to_fp8 on bamax / 6, 448 and gamax / 6."""
    module = pytest.importorskip(
        "modelopt.torch.quantization.qtensor.nvfp4_tensor", reason="ModelOpt is not installed"
    )
    import torch

    nvfp4.set_variant(variant)
    for name, w in adversarial(16, 256, 5):
        if name == "minus zero":
            continue
        x = to_torch(w)
        block = x.view(16, 16, 16).abs().amax(-1) / 6.0
        block[block == 0] = 1.0
        scale = module._cast_per_block_scale_to_fp8(block, x.abs().max() / 6.0)
        t = nvfp4.pack(w, encoding="modelopt-static")
        np.testing.assert_array_equal(
            t.block_scale.view(np.uint8), scale.view(torch.uint8).numpy(), name
        )


@pytest.mark.parametrize("dtype", [np.dtype(np.float32), BFLOAT16], ids=str)
def test_same_bytes_as_compressed_tensors(dtype):
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    import torch
    from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import quantize
    from compressed_tensors.quantization.utils.helpers import calculate_qparams, generate_gparam

    args = QuantizationArgs(
        num_bits=4, type="float", strategy="tensor_group", symmetric=True, dynamic=False, group_size=16,
        scale_dtype=torch.float8_e4m3fn, zp_dtype=torch.float8_e4m3fn,
    )  # fmt: skip
    for name, w in adversarial(16, 256, 7):
        if name in ("subnormal", "minus zero", "random bits", "wide"):
            continue  # its global scale falls back to 1 or overflows there
        x = in_dtype(w, dtype)
        xt = to_torch(x)
        gs = generate_gparam(xt.min(), xt.max())
        blocks = xt.view(16, 16, 16)
        scale, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), args, gs)
        q = quantize(xt, scale, torch.zeros_like(scale), args, global_scale=gs)
        t = nvfp4.pack(x, encoding="compressed-tensors")
        assert t.divisor == gs.numpy()[0], name
        np.testing.assert_array_equal(t.block_scale.astype(np.float32), scale.float().numpy(), name)
        theirs = pack_fp4_to_uint8(q.float()).numpy()
        ours = t.codes
        # They preserve the sign of zero. ModelOpt's rule, and this package, drop it for -0.0.
        np.testing.assert_array_equal(unsigned_zeros(ours), unsigned_zeros(theirs), name)


def unsigned_zeros(codes: np.ndarray) -> np.ndarray:
    nibbles = np.stack([codes & 15, codes >> 4])
    return np.where(nibbles == 8, 0, nibbles)


@pytest.mark.parametrize("group", [16, 32, 64])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_unpacking_and_packing_again_changes_nothing(group, dtype):
    w = in_dtype(np.random.default_rng(1).standard_normal((8, 256)).astype(np.float32), dtype)
    t = nvfp4.pack(w, group=group, tensor_scale=2.0**-9)
    back = nvfp4.unpack(t, dtype)
    again = nvfp4.pack(back, group=group, tensor_scale=2.0**-9)
    np.testing.assert_array_equal(nvfp4.unpack(again, dtype), back)


@pytest.mark.parametrize("scale", ["amax", "four_over_six", "sweep"])
def test_zeros_decode_to_zeros(scale):
    for w in (np.zeros((4, 64), BFLOAT16), np.full((4, 64), -0.0, np.float32)):
        t = nvfp4.pack(w, scale=scale)
        assert t.tensor_scale == 1 and not t.codes.any()
        assert not np.isnan(t.block_scale.astype(np.float32)).any()
        assert not nvfp4.unpack(t).any()
    assert nvfp4.pack(np.zeros((0, 64), np.float32)).codes.shape == (0, 32)


def test_nan_and_inf_are_named():
    w = np.ones((3, 32), np.float32)
    w[1, 20] = np.nan
    assert np.isnan(nvfp4.amax(w))
    with pytest.raises(ValueError, match=r"1 values are NaN or inf, the first at \[1, 20\]"):
        nvfp4.pack(w)
    w[1, 20] = np.inf
    with pytest.raises(ValueError, match=r"the first at \[1, 20\]"):
        nvfp4.pack(w.astype(BFLOAT16), tensor_scale=0.01)


def test_leading_dimensions_strides_and_read_only_arrays():
    rng = np.random.default_rng(2)
    base = rng.standard_normal((4, 6, 128)).astype(np.float32)
    flat = nvfp4.pack(base.reshape(24, 128))
    t = nvfp4.pack(base)
    assert (
        t.codes.shape == (4, 6, 64) and t.block_scale.shape == (4, 6, 8) and t.shape == (4, 6, 128)
    )
    np.testing.assert_array_equal(t.codes.reshape(24, 64), flat.codes)
    every_other = nvfp4.pack(base[::2, ::-1])
    np.testing.assert_array_equal(every_other.codes, nvfp4.pack(base[::2, ::-1].copy()).codes)
    transposed = np.asfortranarray(base[0])
    np.testing.assert_array_equal(nvfp4.pack(transposed).codes, nvfp4.pack(base[0]).codes)
    base.flags.writeable = False
    np.testing.assert_array_equal(nvfp4.pack(base).codes, t.codes)
    one = nvfp4.pack(base[0, 0])
    assert one.codes.shape == (64,)


def test_torch_tensors_come_in_without_a_copy():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    w = torch.randn(8, 64).bfloat16()
    taken = codec_arrays.host_array(w, "w")
    assert taken.dtype == BFLOAT16 and taken.ctypes.data == w.data_ptr()
    expected = nvfp4.pack(w.float().numpy().astype(BFLOAT16))
    np.testing.assert_array_equal(nvfp4.pack(w).codes, expected.codes)
    np.testing.assert_array_equal(nvfp4.pack(torch.nn.Parameter(w)).codes, expected.codes)
    np.testing.assert_array_equal(nvfp4.pack(w.T.contiguous().T).codes, expected.codes)
    np.testing.assert_array_equal(
        nvfp4.pack(w[2:, 16:48]).codes, nvfp4.pack(taken[2:, 16:48]).codes
    )
    for dtype in (torch.float32, torch.float16):
        x = torch.randn(4, 32).to(dtype)
        assert codec_arrays.host_array(x, "x").ctypes.data == x.data_ptr()
        np.testing.assert_array_equal(nvfp4.pack(x).codes, nvfp4.pack(x.numpy()).codes)
    for wrong, message in (
        (torch.zeros(4, 16, dtype=torch.int32), "int32"),
        ([[1.0] * 16], "list"),
        (w.to("meta"), "meta"),
    ):
        with pytest.raises(ValueError, match=message):
            nvfp4.pack(wrong)


def test_output_arrays_are_written_in_place():
    rng = np.random.default_rng(3)
    first, second = (rng.standard_normal((4, 64)).astype(np.float32) for _ in range(2))
    t = nvfp4.pack(first)
    codes = t.codes
    assert nvfp4.pack(second, out=t) is t and t.codes is codes
    np.testing.assert_array_equal(codes, nvfp4.pack(second).codes)
    out = np.empty((4, 64), np.float16)
    assert nvfp4.unpack(t, "float16", out=out) is out
    with pytest.raises(ValueError, match="out: float16"):
        nvfp4.unpack(t, "float32", out=out)
    with pytest.raises(ValueError, match=r"out\.codes"):
        nvfp4.pack(np.ones((8, 64), np.float32), out=t)
    with pytest.raises(ValueError, match="overlap"):
        memory = np.ones(64 * 4, np.uint8)
        overlapping = nvfp4.Tensor(
            memory[:32].reshape(1, 32), memory[32:36].reshape(1, 4), np.float32(1), (1, 64)
        )
        nvfp4.pack(memory.view(np.float32).reshape(1, 64), out=overlapping)


def overlapping_fake_quant():
    memory = np.ones(48, np.float32)
    nvfp4.fake_quant(memory[:32].reshape(2, 16), 1.0, out=memory[16:].reshape(2, 16))


def overlapping_unpack():
    memory = np.zeros(80, np.uint8)
    t = nvfp4.Tensor(memory[8:16].reshape(1, 8), np.ones((1, 1), np.uint8), np.float32(1), (1, 16))
    nvfp4.unpack(t, "float32", out=memory[:64].view(np.float32).reshape(1, 16))


def test_a_torch_dtype_that_numpy_does_not_know_is_named():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    with pytest.raises(ValueError, match=r"w: dtype torch\.float8_e4m3fn, expected float32"):
        nvfp4.pack(torch.ones(2, 32).to(torch.float8_e4m3fn))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: nvfp4.pack(np.ones((2, 24), np.float32)), r"shape \(2, 24\), expected a last dimension .* multiple of 16"),
        (lambda: nvfp4.pack(np.ones((2, 32))), "dtype float64"),
        (lambda: nvfp4.pack(np.ones((2, 32), np.uint16)), "dtype uint16"),
        (lambda: nvfp4.pack([1.0] * 16), "list, expected a NumPy array"),
        (lambda: nvfp4.pack(np.ones((2, 32), np.float32), tensor_scale=0), "tensor_scale 0, expected a positive"),
        (lambda: nvfp4.pack(np.ones((2, 32), np.float32), tensor_scale=np.nan), "tensor_scale nan"),
        (lambda: nvfp4.pack(np.ones((2, 32), np.float32), group=8), "group 8"),
        (lambda: nvfp4.pack(np.ones((2, 32), np.float32), scale="best"), "scale 'best'"),
        (lambda: nvfp4.pack(np.ones((2, 32), np.float32), encoding="x"), "encoding 'x'"),
        (lambda: nvfp4.pack(np.ones((2, 32), np.float32), importance=np.ones(31)), r"importance: shape \(31,\)"),
        (lambda: nvfp4.pack(np.ones((2, 32), np.float32), importance=-np.ones(32)), "negative"),
        (lambda: nvfp4.pack(np.ones((2, 32), np.float32), encoding="compressed-tensors", tensor_scale=1), "divisor"),
        (lambda: nvfp4.unpack(nvfp4.pack(np.ones((2, 32), np.float32)), "float64"), "dtype float64, expected bfloat16"),
        (lambda: nvfp4.unpack(nvfp4.pack(np.ones((2, 32), np.float32)), out=np.empty((2, 16), BFLOAT16)), r"\(2, 32\)"),
        (lambda: nvfp4.fake_quant(np.ones((2, 24), np.float32)), r"x: shape \(2, 24\), expected .* multiple of 16"),
        (lambda: nvfp4.fake_quant(np.ones((2, 32), np.float32), out=np.empty((2, 16), np.float32)), r"expected float32 \(2, 32\)"),
        (lambda: nvfp4.unpack(replace(nvfp4.pack(np.ones((2, 32), np.float32)), tensor_scale=np.nan)), "tensor_scale nan, exp"),
        (lambda: nvfp4.unpack(nvfp4.pack(np.ones((2, 32), np.float32)), nan="drop"), "nan 'drop', expected raise or keep"),
        (lambda: nvfp4.pack(np.ones((2, 32), np.float32), group="16"), "group '16', expected one of 16"),
        (lambda: nvfp4.pack(np.ones((2, 32), np.float32), group=16.0), "group 16.0, expected one of 16"),
        (lambda: overlapping_fake_quant(), "x and out overlap"),
        (lambda: overlapping_unpack(), "codes and out overlap"),
        (lambda: nvfp4.swizzle(np.ones(16, np.uint8)), r"shape \(16,\), expected \[rows, blocks\]"),
        (lambda: nvfp4.swizzle(np.ones((4, 4), np.float32)), "dtype float32, expected one byte"),
        (lambda: nvfp4.pack(np.array(3, np.float32)), r"shape \(\)"),
        (lambda: nvfp4.tensor_scale(np.inf), "amax inf"),
        (lambda: nvfp4.set_variant("quantum"), "variant quantum"),
        (lambda: nvfp4.set_threads(-1), "-1 threads"),
        (lambda: nvfp4.set_threads(10**30), "10{30} threads, expected 0"),
        (
            lambda: nvfp4.unpack(
                nvfp4.Tensor(np.zeros((2, 16), np.uint8), np.zeros((2, 1), np.uint8), np.float32(1), (2, 32))
            ),
            r"expected \(2, 16\) and \(2, 2\)",
        ),
    ],
)  # fmt: skip
def test_invalid_calls_report_actual_and_expected(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: nvfp4.set_threads("4"), "threads is a str, expected a whole number"),
        (lambda: nvfp4.set_threads(1.5), "threads is a float, expected a whole number"),
        (lambda: nvfp4.set_variant(3), "variant is a int, expected a string"),
    ],
)
def test_an_argument_of_another_type_is_named(call, message):
    with pytest.raises(TypeError, match=message):
        call()


def test_error_report():
    w = (np.random.default_rng(4).standard_normal((512, 1024)) * 0.02).astype(BFLOAT16)
    actual = {
        s: nvfp4.error(w, nvfp4.pack(w, scale=s))["rel_l2"]
        for s in ("amax", "four_over_six", "sweep")
    }
    # relative errors for Gaussian weights
    assert actual == pytest.approx(
        {"amax": 0.0951, "four_over_six": 0.0869, "sweep": 0.0812}, abs=4e-4
    )
    exact = nvfp4.unpack(nvfp4.pack(w))
    assert nvfp4.error(exact, nvfp4.pack(exact, scale="sweep"))["rel_l2"] < 1e-2


def test_error_report_equals_numpy():
    w = np.random.default_rng(5).standard_t(3, (64, 256)).astype(np.float32)
    t = nvfp4.pack(w, tensor_scale=0.002)  # too small for the largest elements, which are clipped
    actual = nvfp4.error(w, t)
    nibbles = np.stack([t.codes & 15, t.codes >> 4], -1).reshape(64, 256)
    step = (t.block_scale.astype(np.float32) * t.tensor_scale).astype(np.float64).repeat(16, 1)
    off = w.astype(np.float64) - nvfp4.E2M1_VALUES[nibbles] * step
    assert actual["rel_l2"] == pytest.approx(
        np.sqrt((off**2).sum() / (w.astype(np.float64) ** 2).sum()), rel=1e-6
    )
    assert actual["max_abs"] == pytest.approx(np.abs(off).max(), rel=1e-6)
    assert actual["clipped"] == (np.abs(w) > 6 * step).mean() and 0 < actual["clipped"] < 0.5


def test_linears_that_share_a_tensor_scale_are_the_rows_of_one_matrix():
    """q, k and v are served as one matrix: packing them separately with the largest amax must give the matrix's rows."""
    rng = np.random.default_rng(6)
    parts = [
        (rng.standard_normal((rows, 256)) * s).astype(BFLOAT16)
        for rows, s in ((96, 0.02), (32, 0.05), (32, 0.01))
    ]
    whole = nvfp4.pack(np.concatenate(parts), scale="sweep")
    shared = nvfp4.tensor_scale(max(float(nvfp4.amax(p)) for p in parts))
    assert shared == whole.tensor_scale
    packed = [nvfp4.pack(p, tensor_scale=shared, scale="sweep") for p in parts]
    np.testing.assert_array_equal(np.concatenate([t.codes for t in packed]), whole.codes)
    np.testing.assert_array_equal(
        np.concatenate([t.block_scale.view(np.uint8) for t in packed]),
        whole.block_scale.view(np.uint8),
    )


def test_ggml_and_e4m3_dtypes():
    t = nvfp4.pack(np.ones((1, 16), np.float32))
    assert t.block_scale.dtype == np.dtype(ml_dtypes.float8_e4m3fn) and t.codes.dtype == np.uint8
    assert t.nbytes == 8 + 1 + 4

"""The GEMM kernels on a CUDA GPU against the float64 oracle; skipped without a GPU. Needs only NumPy and ml_dtypes."""

import contextlib

import ml_dtypes
import numpy as np
import pytest
from gemm_cases import adversarial, encode, ue4m3
from gemm_module import count_devices

from annie_quant.core.errors import UsageError
from annie_quant.gemm.arrays import View, native

gemm = pytest.importorskip("annie_quant.gemm")
oracle = gemm.oracle
COUNT = count_devices()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(COUNT == 0, reason="needs a CUDA GPU and annie_quant._gemm"),
]
BF16 = np.dtype(ml_dtypes.bfloat16)
HOPPER = COUNT > 0 and native().device_info(0)["major"] == 9
PATHS = [
    "skinny",
    "tiled",
    pytest.param("wgmma", marks=pytest.mark.skipif(not HOPPER, reason="wgmma is Hopper's")),
]


def case(m, n, k, dtype=BF16, seed=0):
    codes, scales = oracle.random_weight(n, k, seed)
    x = (np.random.default_rng(seed + 1).standard_normal((m, k)) * 2).astype(dtype)
    return x, codes, scales, 0.0173


def run(x, codes, scales, ts, out_dtype="float32", fault=None, **more):
    weight = gemm.Weight(gemm.to_device(codes), gemm.to_device(scales), ts, fault=fault)
    guard = 64
    m, n = x.shape[0], codes.shape[0]
    raw = gemm.DeviceArray((m * n + 2 * guard,), out_dtype).fill(0xFF)
    inside = _slice(raw, guard, (m, n))
    gemm.w4a16(gemm.to_device(x), weight, inside, **more)
    host = raw.host()
    edge = np.concatenate([host[:guard], host[-guard:]]).view(np.uint8)
    assert (edge == 0xFF).all(), "the kernel wrote outside its output"
    return host[guard:-guard].reshape(m, n)


def _slice(raw, start, shape):
    """A slice of a device array [n], as a matrix."""
    return View(
        raw.ptr + start * (raw.nbytes // raw.shape[0]),
        shape,
        (shape[1], 1),
        raw.dtype,
        raw.device,
        raw,
        raw.stream,
    )


def check(actual, x, codes, scales, ts, dtype="float32"):
    exact, magnitude = oracle.linear(x, oracle.dequantize(codes, scales, ts))
    assert not np.isnan(actual.astype(np.float64)).any()
    return oracle.worst(actual, exact, oracle.bound(exact, magnitude, x.shape[1], dtype))


@pytest.mark.parametrize("m", [*range(1, 18), 33, 64, 65, 130, 257])
def test_w4a16_is_within_the_fp32_bound_for_every_token_count(m):
    args = case(m, 272, 768, seed=m)
    assert check(run(*args), *args) <= 1


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("n", "k"),
    [
        (16, 64),
        (1, 16),
        (17, 48),
        (150, 64),
        (128, 192),
        (300, 80),
        (40, 1008),
        (2048, 2064),
        (64, 8192),
        (4112, 256),
    ],
)
@pytest.mark.parametrize("m", [1, 5, 11])
def test_w4a16_padded_and_odd_shapes(path, n, k, m):
    args = case(m, n, k, seed=n + k)
    assert check(run(*args, path=path), *args) <= 1


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("x_dtype", [np.dtype(np.float16), BF16])
@pytest.mark.parametrize("m", [3, 12, 70])
def test_types(dtype, x_dtype, m):
    args = case(m, 96, 512, x_dtype)
    x = (args[0].astype(np.float32) / 64).astype(x_dtype)
    assert check(run(x, *args[1:], dtype), x, *args[1:], dtype) <= 1


@pytest.mark.parametrize("m", [1, 16, 17])
def test_all_codes_and_scales_are_exact(m):
    """Row = scale byte, column = code; x selects one column, so every output is one exact product."""
    scales = np.arange(127, dtype=np.uint8).repeat(4).reshape(127, 4)
    codes = np.tile(
        np.arange(16, dtype=np.uint8).reshape(8, 2) @ np.array([[1], [16]], np.uint8), (127, 4, 1)
    )
    codes = codes.reshape(127, 32)
    expected = oracle.dequantize(codes, scales)
    for start in range(0, 64, m):
        x = np.zeros((m, 64), BF16)
        for i in range(min(m, 64 - start)):
            x[i, start + i] = 1
        actual = run(x, codes, scales, 1.0)
        for i in range(min(m, 64 - start)):
            assert (actual[i] == expected[:, start + i]).all()


@pytest.mark.parametrize("path", PATHS)
def test_bits_repeat_and_do_not_depend_on_m(path):
    x, codes, scales, ts = case(16, 4096, 4096)
    weight = gemm.Weight(gemm.to_device(codes), gemm.to_device(scales), ts)
    top = 8 if path == "skinny" else 16
    plan = weight.plan(top, path)

    def bits(rows):
        out = gemm.DeviceArray((rows.shape[0], 4096), "float32").fill(0xFF)
        gemm.w4a16(gemm.to_device(np.ascontiguousarray(rows)), weight, out, plan=plan)
        return out.host()

    whole = bits(x[:top])
    for _ in range(3):
        assert (bits(x[:top]) == whole).all()
    for m in (1, 2, 5):
        assert (bits(x[:m]) == whole[:m]).all()


def skinny_plan(n, stages, split, tiles, clusters):
    """Return a plan of the few-token kernel with this number of clusters."""
    clusters = min(clusters, -(-n // 32))
    return gemm.SkinnyPlan(clusters * split, split, stages, tiles)


@pytest.mark.parametrize(
    "split",
    [1, pytest.param(2, marks=pytest.mark.skipif(not HOPPER, reason="clusters begin with sm_90"))],
)
@pytest.mark.parametrize("tiles", [2, 4])
@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("clusters", [1, 3, 5, 300])
@pytest.mark.parametrize("m", [1, 7, 16])
def test_every_shape_of_the_few_token_kernel(split, tiles, stages, clusters, m):
    """Warps with many rows and with parts of one, blocks that begin and end within a pair of row tiles, one or two stages."""
    if stages == 2 and m > 8:
        pytest.skip("two stages are for 8 tokens at most")
    n, k = (
        600,
        1360 if tiles == 2 and stages == 1 else 1408,
    )  # K is a multiple of a chunk except in the simplest case
    args = case(m, n, k)
    weight = gemm.Weight(gemm.to_device(args[1]), gemm.to_device(args[2]), args[3])
    plan = skinny_plan(n, stages, split, tiles, clusters)
    first = None
    for _ in range(3):
        out = gemm.DeviceArray((m, n), "float32").fill(0xFF)
        gemm.w4a16(gemm.to_device(args[0]), weight, out, plan=plan)
        first = out.host() if first is None else first
        assert (out.host() == first).all()
    assert check(first, *args) <= 1


@pytest.mark.parametrize("split", [1, 2, 4])
def test_every_split_of_k(split):
    args = case(7, 528, 4096)
    weight = gemm.Weight(gemm.to_device(args[1]), gemm.to_device(args[2]), args[3])
    out = gemm.DeviceArray((7, 528), "float32").fill(0xFF)
    gemm.w4a16(
        gemm.to_device(args[0]),
        weight,
        out,
        plan=weight.plan(7, "tiled")._replace(cluster_size=split),
    )
    assert check(out.host(), *args) <= 1


def tiles():
    """Return the tile_tokens that the check of a plan accepts."""
    accepted = []
    for tokens in range(8, 257, 8):
        with contextlib.suppress(ValueError):
            native().plan_needs(40, 528, 1024, "tiled", (tokens, 1, 2))
            accepted.append(tokens)
    return accepted


@pytest.mark.parametrize("dtype", [BF16, np.dtype(np.float16)], ids=str)
@pytest.mark.parametrize("m", [1, 40, 300])
def test_every_tile_of_the_many_token_kernel(m, dtype):
    assert {16, 64} <= set(tiles())
    args = case(m, 528, 1024, dtype)
    for tokens in tiles():
        actual = run(*args, plan=gemm.TiledPlan(tokens, cluster_size=1, stages=2))
        assert check(actual, *args) <= 1, tokens


def wgmma_plan(tokens, blocks, stream_k_tiles, split, rows, permuted):
    """Return a plan of the wgmma kernel with two stages."""
    return gemm.WgmmaPlan(tokens, rows, blocks, split, 2, stream_k_tiles, permuted)


def repeats_within_the_bound(args, plan):
    """For each output type the result is right, repeats to the bit, and nothing else is written."""
    m, n = args[0].shape[0], args[1].shape[0]
    weight = gemm.Weight(gemm.to_device(args[1]), gemm.to_device(args[2]), args[3])
    size = weight.workspace_bytes(m, plan)
    for dtype in ("float32", "bfloat16"):
        guard = 64
        raw = gemm.DeviceArray((m * n + 2 * guard,), dtype).fill(0xFF)
        workspace = gemm.DeviceArray((size + 64,), "uint8").fill(0xFF)  # larger than needed
        first = None
        for _ in range(4):
            raw.fill(0xFF)
            gemm.w4a16(
                gemm.to_device(args[0]),
                weight,
                _slice(raw, guard, (m, n)),
                plan=plan,
                workspace=workspace,
            )
            host = raw.host()
            assert (np.concatenate([host[:guard], host[-guard:]]).view(np.uint8) == 0xFF).all(), (
                "wrote outside"
            )
            first = host if first is None else first
            assert (host.view(np.uint8) == first.view(np.uint8)).all()
        assert check(first[guard:-guard].reshape(m, n), *args, dtype) <= 1
        assert (workspace.host()[-64:] == 0xFF).all(), "the kernel wrote outside its workspace"


@pytest.mark.skipif(not HOPPER, reason="wgmma is Hopper's")
@pytest.mark.parametrize("permuted", [0, 1])
@pytest.mark.parametrize("tokens", [16, 32, 64, 128])
@pytest.mark.parametrize(
    ("blocks", "stream_k_tiles"), [(1, 0), (4, 0), (4, 3), (5, 6), (60, 2), (66, 33)]
)
@pytest.mark.parametrize("m", [7, 139])
def test_every_shape_of_the_wgmma_kernel(permuted, tokens, blocks, stream_k_tiles, m):
    """Blocks with several whole tiles, stream-K tiles of two blocks, and stream-K tiles of many blocks."""
    n, k = 1296, 4288  # the last tile has 16 rows, the last chunk 64 columns
    if stream_k_tiles > 6 * -(-m // tokens):
        pytest.skip("more stream-K tiles than there are tiles")
    if tokens == 128 and not permuted:
        pytest.skip("tiles of 128 tokens have too few registers for the in-place permutation")
    repeats_within_the_bound(
        case(m, n, k), wgmma_plan(tokens, blocks, stream_k_tiles, 1, 256, permuted)
    )


@pytest.mark.skipif(not HOPPER, reason="wgmma is Hopper's")
@pytest.mark.parametrize("permuted", [0, 1])
@pytest.mark.parametrize(("tokens", "halves"), [(16, 1), (32, 1), (32, 2), (64, 1), (64, 2)])
@pytest.mark.parametrize(
    ("m", "n", "k"), [(7, 1296, 4352), (61, 528, 1008), (61, 528, 880), (139, 40, 1040)]
)
def test_every_cluster_of_the_wgmma_kernel(permuted, tokens, halves, m, n, k):
    """Two blocks add one tile's parts through each other's stream_k_tiles memory; unequal parts, tiles of few rows."""
    if halves == 2 and -(-k // 128) % 2:
        pytest.skip("an odd number of chunks has no halves")
    tiles = -(-(-(-n // 32) * 2) * halves // 16) * -(-m // tokens)
    repeats_within_the_bound(
        case(m, n, k), wgmma_plan(tokens, tiles * 2, tiles, 2, 256 // halves, permuted)
    )


@pytest.mark.skipif(not HOPPER, reason="wgmma is Hopper's")
@pytest.mark.parametrize("tokens", [32, 64, 128])
@pytest.mark.parametrize(
    ("blocks", "stream_k_tiles"), [(4, 3), (5, 6), (60, 2), (66, 33), (200, 6)]
)
@pytest.mark.parametrize("m", [7, 139])
def test_sums_in_the_launch_have_the_bits_of_the_fixup_kernel(tokens, blocks, stream_k_tiles, m):
    """Shares that begin and end in one tile, tiles of many blocks, whole tiles after them, and more blocks than multiprocessors."""
    if stream_k_tiles > 6 * -(-m // tokens):
        pytest.skip("more stream-K tiles than there are tiles")
    args = case(m, 1296, 4288)
    plan = wgmma_plan(tokens, blocks, stream_k_tiles, 1, 256, 1)
    in_launch = plan._replace(add_in_launch=1)
    repeats_within_the_bound(args, in_launch)
    for dtype in ("float32", "bfloat16"):
        assert (run(*args, dtype, plan=in_launch, pdl=True) == run(*args, dtype, plan=plan)).all()


@pytest.mark.skipif(not HOPPER, reason="wgmma is Hopper's")
@pytest.mark.parametrize("permuted", [0, 1])
@pytest.mark.parametrize("tokens", [16, 32, 64])
@pytest.mark.parametrize("blocks", [1, 3, 60])
@pytest.mark.parametrize(("m", "n", "k"), [(7, 1296, 4288), (61, 304, 1008), (139, 40, 1040)])
def test_tiles_of_192_rows_of_the_wgmma_kernel(permuted, tokens, blocks, m, n, k):
    """Their rows are in one or two of the repacked weights' blocks of 256, the last of which is shorter."""
    repeats_within_the_bound(case(m, n, k), wgmma_plan(tokens, blocks, 0, 1, 192, permuted))


@pytest.mark.parametrize("m", [1, 8, 64])
def test_dependent_launch_gives_the_same_bits(m):
    args = case(m, 512, 2048)
    assert (run(*args) == run(*args, pdl=True)).all()


@pytest.mark.parametrize("fault", ["nibbles", "scales", "fragment", "lane"])
@pytest.mark.parametrize("m", [1, 32])
def test_negative_controls_fail(fault, m):
    args = case(m, 64, 256)
    assert check(run(*args, fault=fault), *args) > 50


@pytest.mark.parametrize(
    ("m", "n", "k"), [(1, 64, 64), (17, 80, 192), (33, 150, 80), (5, 257, 1040)]
)
def test_emulated_w4a4_is_the_documented_arithmetic(m, n, k):
    a, sa = oracle.random_weight(m, k, 5)
    w, sw = oracle.random_weight(n, k, 6)
    arrays = [gemm.to_device(v) for v in (a, sa, w, sw)]
    out = gemm.DeviceArray((m, n), "float32").fill(0xFF)
    gemm.w4a4(arrays[0], arrays[1], 1.0, arrays[2], arrays[3], 1.0, out, mode="emulated")
    assert (out.host() == documented_w4a4(a, sa, w, sw)).all()
    for fault in ("nibbles", "scales", "fragment", "lane"):
        if fault == "lane" and m == 1:
            continue
        gemm.w4a4(
            arrays[0], arrays[1], 1.0, arrays[2], arrays[3], 1.0, out, mode="emulated", fault=fault
        )
        assert (out.host() != documented_w4a4(a, sa, w, sw)).any(), fault


def test_a_negative_scale_makes_the_products_that_use_it_nan():
    """The instruction ignores the sign: the result would look right."""
    a, sa = oracle.random_weight(20, 192, 5)
    w, sw = oracle.random_weight(40, 192, 6)
    sa[3, 2] |= 0x80
    sw[7, 11] |= 0x80
    modes = ("emulated", "native") if gemm.fp4_native() else ("emulated",)
    for mode in modes:
        out = gemm.DeviceArray((20, 40), "float32").fill(0)
        gemm.w4a4(
            *map(gemm.to_device, (a, sa)), 1.0, *map(gemm.to_device, (w, sw)), 1.0, out, mode=mode
        )
        expected = np.zeros((20, 40), bool)
        expected[3] = expected[:, 7] = True
        np.testing.assert_array_equal(np.isnan(out.host()), expected, mode)


def documented_w4a4(a, sa, w, sw):
    """acc = acc + T_b in fp32 for blocks b in ascending order, T_b exact (computed here in float64)."""
    ea, ew = oracle.e2m1(a), oracle.e2m1(w)
    fa, fw = ue4m3(sa), ue4m3(sw)
    acc = np.zeros((a.shape[0], w.shape[0]), np.float32)
    for b in range(fa.shape[1]):
        term = (ea[:, 16 * b : 16 * b + 16] @ ew[:, 16 * b : 16 * b + 16].T) * (
            fa[:, b, None] * fw[None, :, b]
        )
        assert (term == term.astype(np.float32)).all()
        acc = acc + term.astype(np.float32)
    return acc


def test_bad_input_is_refused_before_any_launch():
    x, codes, scales, ts = case(2, 32, 64)
    weight = gemm.Weight(gemm.to_device(codes), gemm.to_device(scales), ts)
    good = gemm.to_device(x)
    for bad, message in [
        ((x, weight), "host memory"),
        ((gemm.to_device(x.astype(np.float32)), weight), "dtype float32"),
        ((gemm.to_device(np.zeros((2, 48), BF16)), weight), r"shape \[2, 48\]"),
        ((good, weight, gemm.DeviceArray((2, 31), "float32")), "shape"),
        ((_slice(gemm.to_device(np.zeros(200, BF16)), 1, (2, 64)), weight), "multiple of 16"),
    ]:
        with pytest.raises(UsageError, match=message):
            gemm.w4a16(*bad)
    scales[3, 2] = 0x7F
    with pytest.raises(UsageError, match="row 3, block 2"):
        gemm.Weight(gemm.to_device(codes), gemm.to_device(scales), ts)
    with pytest.raises(UsageError, match="multiple of 16"):
        gemm.Weight(gemm.to_device(codes[:, :20].copy()), gemm.to_device(scales), ts)
    with pytest.raises(UsageError, match="tensor_scale"):
        gemm.Weight(gemm.to_device(codes), gemm.to_device(scales), float("nan"))


@pytest.mark.parametrize("dtype", [np.dtype(np.float32), np.dtype(np.float16), BF16])
def test_fake_quant_equals_modelopts_encoding(dtype):
    x = adversarial(dtype)
    ts = np.float32(np.abs(x.astype(np.float32)).max() / np.float32(2688))
    *_, fake = encode(x, ts)
    actual = gemm.fake_quant(gemm.to_device(x), float(ts)).host()
    assert (actual.view(np.uint8) == fake.astype(dtype).view(np.uint8)).all()

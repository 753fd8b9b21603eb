"""All SIMD variants give the serial reference's bytes; any bytes can be decoded; threads and forks are safe."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import threading

import numpy as np
import pytest
from nvfp4_cases import DTYPES, adversarial, bits, in_dtype
from paths import ROOT

from annie_quant import kquant, nvfp4

SIMD = nvfp4.variants()[1:]
FUZZ = int(os.environ.get("ANNIE_QUANT_FUZZ", "300"))
# 10^8 weights take minutes on two cores: ANNIE_QUANT_WEIGHTS=100000000 pytest tests/nvfp4/test_variants.py
WEIGHTS = int(os.environ.get("ANNIE_QUANT_WEIGHTS", "2000000"))


@pytest.fixture(autouse=True)
def fastest_variant():
    yield
    nvfp4.set_variant("auto")
    nvfp4.set_threads(0)


def packed(x, **how):
    t = nvfp4.pack(x, **how)
    return np.concatenate([t.codes.reshape(-1), t.block_scale.view(np.uint8).reshape(-1)])


# Variants of a few functions, which are never called: their addresses are the numbers 1, 2 and 3.
PARTIAL = """
#include "nvfp4/variant.h"
#include <stdio.h>

const struct kernels variant_serial = {.codec.amax = (void *)1, .gemv = (void *)1};
const struct kernels variant_SECOND = {.gemv = (void *)2};
const struct kernels variant_THIRD = {.codec.amax = (void *)3};

int main(void)
{
    for (const char *const *name = variant_names(); *name && variant_set(*name); name++) {
        const struct kernels *k = kernels_current();
        printf("%s %d %d\\n", *name, (int)(size_t)k->codec.amax, (int)(size_t)k->gemv);
    }
    return variant_set("no such variant");
}
"""


@pytest.mark.skipif(
    not shutil.which("gcc"),
    reason="compiles the table of variants with gcc, which is not installed",
)
def test_a_function_that_a_variant_lacks_is_the_earlier_ones(tmp_path):
    second, third = {"x86_64": ("avx2", "avx512"), "aarch64": ("neon", "none")}.get(
        platform.machine(), ("none", "no")
    )
    source, program = tmp_path / "partial.c", tmp_path / "partial"
    source.write_text(PARTIAL.replace("SECOND", second).replace("THIRD", third))
    table = ROOT / "csrc/nvfp4/variant.c"
    subprocess.run(
        ["gcc", "-std=c11", f"-I{ROOT}/csrc", str(source), str(table), "-o", str(program)],
        check=True,
    )
    lines = subprocess.run(
        [str(program)], check=True, capture_output=True, text=True
    ).stdout.splitlines()
    assert lines == ["serial 1 1", f"{second} 1 2", f"{third} 3 2"][: len(nvfp4.variants())]


@pytest.mark.skipif(not SIMD, reason="this processor runs the serial variant alone")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_variants_agree_on_adversarial_weights(dtype):
    rng = np.random.default_rng(1)
    importance = rng.gamma(0.5, 1, 256).astype(np.float32)
    ways = [
        *(
            {"scale": s, "tensor_scale": ts}
            for s in ("amax", "four_over_six", "sweep")
            for ts in (None, 0.001, 2.0**-6)
        ),
        {"scale": "sweep", "importance": importance},
        {"encoding": "modelopt-static"},
        {"encoding": "compressed-tensors"},
        {"group": 32},
        {"group": 32, "scale": "sweep", "importance": importance},
        {"group": 32, "scale": "four_over_six"},
        {"group": 64, "encoding": "compressed-tensors"},
        {"group": 64, "scale": "sweep"},
    ]
    for name, w in adversarial(37, 256, 21):
        x = in_dtype(w, dtype)
        for way in ways:
            nvfp4.set_variant("serial")
            expected, t = packed(x, **way), nvfp4.pack(x, **way)
            decoded = {d: bits(nvfp4.unpack(t, d)) for d in ("bfloat16", "float16", "float32")}
            for variant in SIMD:
                nvfp4.set_variant(variant)
                assert (packed(x, **way) == expected).all(), (variant, name, way)
                for d, pattern in decoded.items():
                    assert (bits(nvfp4.unpack(t, d)) == pattern).all(), (variant, name, way, d)


@pytest.mark.skipif(not SIMD, reason="this processor runs the serial variant alone")
def test_variants_agree_on_many_random_weights():
    rng = np.random.default_rng(int.from_bytes(os.urandom(4), "little"))
    left = WEIGHTS
    while left > 0:
        pattern = rng.integers(0, 2**16, (512, 1024), dtype=np.uint16)
        # Half of them have similar exponents, so that rounding decides and not the range.
        pattern[:256] = pattern[:256] & 0x83FF | 0x3C00
        x = in_dtype(pattern.view(DTYPES[2]).astype(np.float32), DTYPES[2])
        scale = float(np.exp(rng.uniform(-12, 2)))
        for way in (
            {"tensor_scale": scale, "scale": s} for s in ("amax", "four_over_six", "sweep")
        ):
            nvfp4.set_variant("serial")
            expected = packed(x, **way)
            for variant in SIMD:
                nvfp4.set_variant(variant)
                assert (packed(x, **way) == expected).all(), (variant, way)
        left -= x.size


@pytest.mark.parametrize("scale", [2.0**-60, 2.0**-120, 2.0**100])
def test_variants_agree_on_a_tensor_scale_far_from_the_weights(scale):
    """All codes clip, or none reaches the amax: floats overflow or underflow, and the exact search decides."""
    w = np.random.default_rng(3).standard_normal((8, 256)).astype(np.float16) * np.float16(1000)
    nvfp4.set_variant("serial")
    expected = packed(w, tensor_scale=scale, scale="sweep")
    for variant in SIMD:
        nvfp4.set_variant(variant)
        np.testing.assert_array_equal(
            packed(w, tensor_scale=scale, scale="sweep"), expected, variant
        )


@pytest.mark.parametrize("group", [16, 64])
def test_variants_agree_if_the_smallest_step_is_larger_than_the_weights(group):
    """All codes give zeros and the same error, so the lowest is chosen; squares of |x| / step underflow in float."""
    divisor = np.float32(8.31409e-14)
    w = (
        np.random.default_rng(3).integers(-2000, 2001, (16, 256)).astype(np.float32)
        * divisor
        / np.float32(4)
    )
    for variant in nvfp4.variants():
        nvfp4.set_variant(variant)
        t = nvfp4.pack(
            w, group=group, scale="sweep", encoding="compressed-tensors", divisor=float(divisor)
        )
        assert (t.block_scale.view(np.uint8) == 1).all(), variant


@pytest.mark.parametrize("variant", nvfp4.variants())
def test_all_lengths_and_alignments(variant):
    """Remainders of the SIMD loops, and outputs that are not aligned."""
    rng = np.random.default_rng(5)
    w = rng.standard_normal(16 * 70).astype(np.float32)
    nvfp4.set_variant("serial")
    expected = nvfp4.pack(w, tensor_scale=0.01)
    back = nvfp4.unpack(expected, "bfloat16")
    nvfp4.set_variant(variant)
    for blocks in range(1, 70):
        for offset in (0, 1, 3):
            memory = np.full(8 * blocks + 64, 0xAA, np.uint8)
            codes = memory[offset : offset + 8 * blocks]
            out = nvfp4.Tensor(codes, np.empty(blocks, nvfp4.E4M3), np.float32(1), (16 * blocks,))
            nvfp4.pack(w[: 16 * blocks], tensor_scale=0.01, out=out)
            assert (codes == expected.codes[: 8 * blocks]).all()
            assert (memory[:offset] == 0xAA).all() and (memory[offset + 8 * blocks :] == 0xAA).all()
        assert (bits(nvfp4.unpack(out, "bfloat16")) == bits(back[: 16 * blocks])).all()


def misaligned(a: np.ndarray) -> np.ndarray:
    """The same values at an odd address, as in a file that is mapped."""
    memory = np.empty(a.nbytes + 2, np.uint8)
    start = 1 - memory.ctypes.data % 2
    view = memory[start : start + a.nbytes].view(a.dtype).reshape(a.shape)
    view[...] = a
    assert view.ctypes.data % 2 == 1
    return view


@pytest.mark.parametrize("variant", nvfp4.variants())
def test_misaligned_numbers(variant):
    """Inputs are copied to aligned memory, outputs are refused: `make asan` reports a load of a number that is not aligned."""
    nvfp4.set_variant(variant)
    rng = np.random.default_rng(9)
    importance = rng.gamma(0.5, 1, 256).astype(np.float32)
    for dtype in DTYPES:
        w = in_dtype(rng.standard_normal((3, 256)).astype(np.float32), dtype)
        moved = misaligned(w)
        expected = packed(w, scale="sweep", importance=importance)
        assert (packed(moved, scale="sweep", importance=misaligned(importance)) == expected).all()
        assert nvfp4.amax(moved) == nvfp4.amax(w)
        assert (bits(nvfp4.fake_quant(moved, 0.01)) == bits(nvfp4.fake_quant(w, 0.01))).all()
        for kind in kquant.BLOCKS:
            raw = kquant.quantize(w, kind)
            assert (kquant.quantize(moved, kind) == raw).all()
            assert (kquant.dequantize(misaligned(raw), kind) == kquant.dequantize(raw, kind)).all()
    with pytest.raises(ValueError, match="aligned"):
        nvfp4.unpack(nvfp4.pack(w), "float32", out=misaligned(w.astype(np.float32)))
    with pytest.raises(ValueError, match="aligned"):
        nvfp4.gptq(misaligned(w.astype(np.float32)), np.eye(256, dtype=np.float32), 0.01)


@pytest.mark.parametrize("variant", nvfp4.variants())
def test_any_bytes_decode(variant):
    nvfp4.set_variant(variant)
    rng = np.random.default_rng(7)
    for _ in range(FUZZ):
        blocks = int(rng.integers(1, 40))
        codes = rng.integers(0, 256, (blocks, 8), np.uint8)
        scales = rng.integers(0, 256, (blocks, 1), np.uint8)
        scale = rng.integers(1, 0x7F800000, dtype=np.uint32).view(np.float32)
        t = nvfp4.Tensor(codes, scales, scale, (blocks, 16))
        got = nvfp4.unpack(t, "float32", nan="keep")
        finite = (scales & 0x7F) != 0x7F
        with np.errstate(over="ignore", invalid="ignore"):
            step = scales.view(nvfp4.E4M3).astype(np.float32) * scale
            expected = (
                nvfp4.E2M1_VALUES[np.stack([codes & 15, codes >> 4], -1).reshape(blocks, 16)] * step
            )
        known = np.broadcast_to(finite, got.shape) & ~np.isnan(expected)
        assert (bits(got)[known] == bits(expected)[known]).all()
        for kind, block in kquant.BLOCKS.items():
            raw = rng.integers(0, 256, (2, block.size_bytes * int(rng.integers(1, 4))), np.uint8)
            assert kquant.dequantize(raw, kind).shape == (
                2,
                raw.shape[1] // block.size_bytes * block.elements,
            )


def test_python_threads_at_once():
    rng = np.random.default_rng(9)
    arrays = [rng.standard_normal((256, 1024)).astype(np.float32) for _ in range(4)]
    expected = [packed(a, scale="sweep") for a in arrays]
    faults = []

    def work(k):
        for _ in range(10):
            if not (packed(arrays[k], scale="sweep") == expected[k]).all():
                faults.append(k)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not faults


def test_a_forked_child_can_pack():
    program = """
import os, numpy as np
from annie_quant import nvfp4
w = np.ones((512, 1024), np.float32)
nvfp4.set_threads(2)
before = nvfp4.pack(w).codes
child = os.fork()
if child == 0:
    os._exit(0 if (nvfp4.pack(w).codes == before).all() and len(os.listdir("/proc/self/task")) == 2 else 1)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0


def test_nothing_leaks():
    program = """
import resource, numpy as np
from annie_quant import nvfp4, kquant
w = np.ones((64, 1024), np.float32)
def once():
    t = nvfp4.pack(w, importance=w[0]); nvfp4.unpack(t); nvfp4.fake_quant(w)
    kquant.dequantize(kquant.quantize(w, "Q8_0"), "Q8_0")
    for bad in (w[:, :8], np.ones(16, np.int8)):
        try: nvfp4.pack(bad)
        except ValueError: pass
for _ in range(50): once()
low = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for _ in range(1000): once()
high = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
raise SystemExit(0 if high - low < 4096 else f"{high - low} KB more")
"""
    done = subprocess.run(
        [sys.executable, "-c", program], timeout=120, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("dtype", [np.float32, nvfp4.BFLOAT16])
def test_gemv_is_a_product_with_the_unpacked_weight(dtype):
    rng = np.random.default_rng(11)
    t = nvfp4.pack(rng.standard_normal((48, 96)).astype(np.float32))
    x = rng.standard_normal((3, 96)).astype(dtype)
    expected = x.astype(np.float64) @ nvfp4.unpack(t, "float32").astype(np.float64).T
    y = nvfp4.gemv(x, t)
    assert y.dtype == dtype and y.shape == (3, 48)
    tolerance = 1e-5 if dtype == np.float32 else 2e-2
    np.testing.assert_allclose(y.astype(np.float64), expected, rtol=tolerance, atol=tolerance * 10)
    np.testing.assert_array_equal(nvfp4.gemv(x[1], t), y[1])
    with pytest.raises(ValueError, match=r"expected \[\.\.\., 96\]"):
        nvfp4.gemv(x[:, :32], t)


def test_gptq_with_independent_inputs_rounds_like_pack():
    w = np.random.default_rng(12).standard_normal((16, 128)).astype(np.float32)
    expected = nvfp4.pack(w)
    rounded = w.copy()
    t = nvfp4.gptq(rounded, np.eye(128, dtype=np.float32), float(expected.tensor_scale))
    np.testing.assert_array_equal(t.codes, expected.codes)
    np.testing.assert_array_equal(t.block_scale.view(np.uint8), expected.block_scale.view(np.uint8))
    np.testing.assert_array_equal(rounded, nvfp4.unpack(t, "float32"))
    with pytest.raises(ValueError, match="factor: shape"):
        nvfp4.gptq(rounded, np.eye(64, dtype=np.float32), 1.0)
    with pytest.raises(ValueError, match="contiguous, aligned and writeable"):
        nvfp4.gptq(rounded.astype(nvfp4.BFLOAT16), np.eye(128, dtype=np.float32), 1.0)

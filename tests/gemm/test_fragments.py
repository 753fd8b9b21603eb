"""The lane maps of the kernels, simulated on the CPU: csrc/gemm/fragments.cuh compiled for the host, the mma in NumPy.

The NumPy side uses the fragment layouts of mma.m16n8k16 and m16n8k64 as the PTX ISA defines them, so a wrong map in
the header (a lane, a register, a nibble, a scale) gives a wrong product.
"""

import ctypes
import itertools
import shutil
import subprocess

import numpy as np
import pytest
from gemm_cases import ue4m3
from paths import ROOT

from annie_quant.gemm import oracle

HEADER = ROOT / "csrc" / "gemm" / "fragments.cuh"
NAMES = {
    "word_at": 3, "scale_at": 2, "column_at": 5, "row_at": 2, "code_field": 3, "field_of": 2, "e5m3": 1, "scale_word": 1,
    "x_column_at": 3, "fp4_a_row": 2, "fp4_a_col": 2, "fp4_b_col": 1, "fp4_b_row": 2, "fp4_sfa_lane": 1,
    "fp4_sfb_lane": 1, "image_column": 2, "image_unit": 2, "permute_source": 2,
    "permute_target": 2, "share_begin": 4, "share_owner": 4,
}  # fmt: skip


@pytest.fixture(scope="module")
def maps(tmp_path_factory):
    compiler = next((c for c in ("c++", "g++", "clang++") if shutil.which(c)), None)
    if compiler is None or not HEADER.exists():
        pytest.skip("needs a C++ compiler and the source tree")
    folder = tmp_path_factory.mktemp("maps")
    lines = [f'#include "{HEADER}"']
    for name, count in NAMES.items():
        params = ", ".join(f"uint32_t a{i}" for i in range(count))
        args = ", ".join(f"a{i}" for i in range(count))
        lines.append(
            f'extern "C" uint32_t c_{name}({params}) {{ return (uint32_t){name}({args}); }}'
        )
    (folder / "maps.cpp").write_text("\n".join(lines))
    subprocess.run(
        [
            compiler,
            "-std=c++17",
            "-O1",
            "-shared",
            "-fPIC",
            str(folder / "maps.cpp"),
            "-o",
            str(folder / "maps.so"),
        ],
        check=True,
    )
    library = ctypes.CDLL(str(folder / "maps.so"))

    class Maps:
        pass

    for name in NAMES:
        function = getattr(library, f"c_{name}")
        function.restype = ctypes.c_uint32
        setattr(Maps, name, staticmethod(function))
    return Maps


def bf16(bits):
    """Return the float64 value of 16 bits of bfloat16."""
    return np.array([bits << 16], np.uint32).view(np.float32)[0].astype(np.float64)


def nibble(codes, row, col):
    return int(codes[row, col // 2]) >> (4 * (col & 1)) & 15


def test_every_code_is_recovered_from_its_word(maps):
    for code in range(16):
        for j in range(4):
            for half in range(2):
                word = maps.code_field(code, j, half)
                value = bf16(maps.field_of(word, j) >> (16 * half) & 0xFFFF) * 2.0**126
                assert value == oracle.e2m1(np.array([code], np.uint8))[0]
    rng = np.random.default_rng(0)
    for _ in range(2000):  # eight codes together: no code changes another one
        codes = rng.integers(0, 16, (4, 2))
        word = 0
        for j in range(4):
            for half in range(2):
                word |= maps.code_field(int(codes[j, half]), j, half)
        for j in range(4):
            alone = maps.field_of(maps.code_field(int(codes[j, 0]), j, 0), j) | maps.field_of(
                maps.code_field(int(codes[j, 1]), j, 1), j
            )
            assert maps.field_of(word, j) == alone


def test_every_scale_is_exact_after_the_change_of_bias(maps):
    for byte in range(1, 0x7F):
        scale = bf16(maps.scale_word(maps.e5m3(byte)) & 0xFFFF) * 2.0**-118
        assert scale == oracle.e4m3(np.array([byte], np.uint8))[0]


def test_every_product_of_code_and_scale_is_exact_in_bf16(maps):
    import ml_dtypes

    for code in range(16):
        c = bf16(maps.field_of(maps.code_field(code, 0, 0), 0) & 0xFFFF)
        for byte in range(1, 0x7F):
            product = c * bf16(maps.scale_word(maps.e5m3(byte)) & 0xFFFF)
            assert np.float64(np.float32(product).astype(ml_dtypes.bfloat16)) == product
            expected = (
                oracle.e2m1(np.array([code], np.uint8))[0]
                * oracle.e4m3(np.array([byte], np.uint8))[0]
            )
            assert product * 256 == expected


def mma16816(a, b):
    """Return D[16, 8] from the registers of 32 lanes as the PTX ISA defines them: a[lane][4][2], b[lane][2][2]."""
    full_a, full_b = np.zeros((16, 16)), np.zeros((16, 8))
    for lane in range(32):
        g, t = lane >> 2, lane & 3
        for i in range(4):
            for half in range(2):
                full_a[g + 8 * (i & 1), 2 * t + 8 * (i >> 1) + half] = a[lane][i][half]
        for i in range(2):
            for half in range(2):
                full_b[2 * t + 8 * i + half, g] = b[lane][i][half]
    return full_a @ full_b


@pytest.mark.parametrize("broken", [None, "fragment", "scales"])
def test_a_chunk_through_the_mma(maps, broken):
    codes, scales = oracle.random_weight(16, 128, 1)
    x = np.random.default_rng(2).integers(-8, 9, (8, 128)).astype(np.float64)
    chunk = np.zeros(1152, np.uint8)
    for q in range(2):
        for lane in range(32):
            for i in range(4):
                word = 0
                for j in range(4):
                    jj = {1: 2, 2: 1}.get(j, j) if broken == "fragment" else j
                    for half in range(2):
                        row, col = maps.row_at(lane, jj), maps.column_at(q, lane, i, jj, half)
                        word |= maps.code_field(nibble(codes, row, col), j, half)
                at = maps.word_at(q, lane, i)
                assert not chunk[at : at + 4].any()
                chunk[at : at + 4] = np.array([word], np.uint32).view(np.uint8)
            for h in range(2):
                row = (lane >> 2) + 8 * (h ^ (broken == "scales"))
                chunk[maps.scale_at(q, lane) + h] = maps.e5m3(int(scales[row, q * 4 + (lane & 3)]))
    d = np.zeros((16, 8))
    for q in range(2):
        for i in range(4):
            a, b = np.zeros((32, 4, 2)), np.zeros((32, 2, 2))
            for lane in range(32):
                word = int(chunk[maps.word_at(q, lane, i) :][:4].view(np.uint32)[0])
                for j in range(4):
                    scale = bf16(
                        maps.scale_word(int(chunk[maps.scale_at(q, lane) + (j & 1)])) & 0xFFFF
                    )
                    bits = maps.field_of(word, j)
                    a[lane, j] = [bf16(bits & 0xFFFF) * scale * 256, bf16(bits >> 16) * scale * 256]
                col = maps.x_column_at(q, lane, i)
                b[lane] = x[lane >> 2, col : col + 4].reshape(2, 2)
            d += mma16816(a, b)
    expected = oracle.dequantize(codes, scales) @ x.T
    assert (d == expected).all() == (broken is None)


def test_wgmmas_activations_are_in_the_column_order_of_the_weights(maps):
    """k of step i is bytes 2 k of 32: unit 2 i + k // 8, word k % 8 // 2; the weights are mma.m16n8k16's A fragment."""
    for i in range(4):
        for lane in range(32):
            for j in range(4):
                for half in range(2):
                    k = 2 * (lane & 3) + 8 * (j >> 1) + half
                    column = maps.image_column(2 * i + k // 8, k % 8 // 2) + k % 2
                    assert column == maps.column_at(0, lane, i, j, half)
    for row in range(16):
        assert sorted(maps.image_unit(row, unit) for unit in range(8)) == list(range(8))
        assert (
            maps.image_unit(row, 0) == row % 8
        )  # the 128-byte swizzle: address bits 4-6 by bits 7-9


def test_a_row_is_permuted_in_place_by_two_lanes_with_disjoint_units(maps):
    """Word w of unit u has columns 8 u + 2 w of 64; after the permutation unit u has image_column(u, l) as word l."""
    for h in range(2):
        for word in range(4):
            for unit in range(4):
                assert (
                    maps.image_column(maps.permute_target(word, h), unit)
                    == 8 * maps.permute_source(unit, h) + 2 * word
                )
    for turned in (maps.permute_source, maps.permute_target):
        assert sorted(turned(i, h) for i in range(4) for h in range(2)) == list(range(8))
        assert all(turned(i, h) == turned(i, 0) ^ turned(0, h) for i in range(4) for h in range(2))


def test_stream_k_shares_are_equal_and_have_the_right_owner(maps):
    for blocks, shared, chunks in [
        (1, 1, 1),
        (132, 32, 64),
        (128, 32, 64),
        (60, 2, 34),
        (5, 6, 33),
        (132, 4, 40),
    ]:
        starts = [maps.share_begin(b, blocks, shared, chunks) for b in range(blocks + 1)]
        assert starts[0] == 0
        assert starts[-1] == shared * chunks
        assert {b - a for a, b in itertools.pairwise(starts)} <= {
            -(-shared * chunks // blocks),
            shared * chunks // blocks,
        }
        for b in range(blocks):
            for u in range(starts[b], starts[b + 1]):
                assert maps.share_owner(u, blocks, shared, chunks) == b


def test_parts_of_stream_k_tiles_are_each_added_once_by_the_block_of_the_first(maps):
    """As add_parts in wgmma.cuh: a block writes at most one part, its first, and waits only for blocks with greater numbers."""
    for blocks, shared, steps in [
        (132, 68, 40),
        (128, 16, 96),
        (60, 2, 34),
        (5, 6, 34),
        (4, 3, 34),
        (300, 11, 34),
        (6, 2, 3),
    ]:
        starts = [maps.share_begin(b, blocks, shared, steps) for b in range(blocks + 1)]
        written, added = {}, {}
        for b in range(blocks):
            at = starts[b]
            while at < starts[b + 1]:
                tile, c0 = divmod(at, steps)
                c1 = min(steps, c0 + starts[b + 1] - at)
                if c0:
                    assert at == starts[b], (
                        "only a block's first part can be another block's to add"
                    )
                    written[b] = (tile, c1 - c0)
                elif c1 < steps:
                    last = maps.share_owner(tile * steps + steps - 1, blocks, shared, steps)
                    assert last > b
                    added[tile] = (c1, range(b + 1, last + 1))
                at += c1 - c0
        for tile, (own, others) in added.items():
            assert {written[b][0] for b in others} == {tile}
            assert own + sum(written[b][1] for b in others) == steps
        assert sorted(b for _, others in added.values() for b in others) == sorted(written)


def mma16864(a, b, sfa, sfb):
    """Return D[16, 8] of the block-scaled FP4 mma: a[lane][4] and b[lane][2] are words of 8 nibbles, scales words of 4 bytes."""
    full_a, full_b = np.zeros((16, 64)), np.zeros((64, 8))
    for lane in range(32):
        g, t = lane >> 2, lane & 3
        for j in range(8):
            for i in range(4):
                value = oracle.MAGNITUDES[a[lane][i] >> 4 * j & 7] * (
                    -1 if a[lane][i] >> 4 * j & 8 else 1
                )
                full_a[g + 8 * (i & 1), 8 * t + 32 * (i >> 1) + j] = value
            for i in range(2):
                value = oracle.MAGNITUDES[b[lane][i] >> 4 * j & 7] * (
                    -1 if b[lane][i] >> 4 * j & 8 else 1
                )
                full_b[8 * t + 32 * i + j, g] = value
    scale_a, scale_b = np.zeros((16, 64)), np.zeros((64, 8))
    for k in range(64):
        for row in range(16):
            scale_a[row, k] = ue4m3(
                np.array([sfa[4 * (row & 7) + (row >> 3)] >> 8 * (k // 16) & 255], np.uint8)
            )[0]
        for col in range(8):
            scale_b[k, col] = ue4m3(np.array([sfb[4 * col] >> 8 * (k // 16) & 255], np.uint8))[0]
    return (full_a * scale_a) @ (full_b * scale_b)


@pytest.mark.parametrize("broken", [None, "lane"])
def test_the_fp4_maps_load_row_major_bytes(maps, broken):
    a, sa = oracle.random_weight(16, 64, 3)
    w, sw = oracle.random_weight(8, 64, 4)
    ra, rb, fa, fb = [[0] * 4 for _ in range(32)], [[0] * 2 for _ in range(32)], [0] * 32, [0] * 32
    for lane in range(32):
        for i in range(4):
            at = maps.fp4_a_col(lane, i) // 2
            ra[lane][i] = int(a[maps.fp4_a_row(lane, i), at : at + 4].copy().view(np.uint32)[0])
        for i in range(2):
            at = maps.fp4_b_row(lane, i) // 2
            rb[lane][i] = int(w[maps.fp4_b_col(lane), at : at + 4].copy().view(np.uint32)[0])
    for row in range(16):
        fa[maps.fp4_sfa_lane(row ^ (8 if broken else 0))] = int(sa[row].view(np.uint32)[0])
    for col in range(8):
        fb[maps.fp4_sfb_lane(col)] = int(sw[col].view(np.uint32)[0])
    expected = oracle.dequantize(a, sa) @ oracle.dequantize(w, sw).T
    assert np.allclose(mma16864(ra, rb, fa, fb), expected, rtol=1e-12) == (broken is None)

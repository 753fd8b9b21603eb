// The lane maps of the two mma shapes and of the repacked weights, as integer functions for host and device.
// tests/gemm/test_fragments.py simulates them on the CPU against a float64 product.
//
// Sources: PTX ISA, "Matrix fragments for mma.m16n8k16 / m16n8k64"; CUTLASS cute/atom/mma_traits_sm120.hpp for the scales.
#pragma once
#include <stdint.h>

#ifdef __CUDACC__
#define AQ_HD __host__ __device__ __forceinline__
#else
#define AQ_HD inline
#endif

template <typename A, typename B>
AQ_HD constexpr auto ceil_div(A a, B b) {
    return (a + b - 1) / b;
}

// ---- repacked weights: chunks of 16 rows x 128 columns, 1152 contiguous bytes ----
// Chunks are ordered [block of 256 rows][128 columns][16 rows]: a block of 256 rows x 128 columns is contiguous for the tiled kernel, and
// two row tiles (32 rows) are contiguous for the skinny kernel. The last block has only the row tiles that exist, an even number.
// A lane (g = lane / 4, l = lane % 4) has the 16-column block l of each 64 columns, in rows g and g + 8. So two scale bytes are enough for
// four mma.m16n8k16, and the activations must be loaded in the resulting column order: mma i of a group of 64 takes columns
// 16 l + 4 i + {0, 1} (as its k = 2l, 2l + 1) and + {2, 3} (as its k = 2l + 8, 2l + 9).
constexpr int kRows = 16, kCols = 128, kChunk = 1152, kCodes = 1024, kBlockTiles = 16;

AQ_HD int row_tiles(int64_t n) { return (int)((n + 31) / 32) * 2; }
AQ_HD int column_chunks(int64_t k) { return (int)((k + kCols - 1) / kCols); }
AQ_HD int tiles_in_block(int block, int tiles) {
    return tiles - block * kBlockTiles < kBlockTiles ? tiles - block * kBlockTiles : kBlockTiles;
}
// byte offset of a chunk
AQ_HD int64_t chunk_at(int tile, int chunk, int tiles, int chunks) {
    const int block = tile / kBlockTiles;
    return ((int64_t)block * kBlockTiles * chunks + (int64_t)chunk * tiles_in_block(block, tiles) + tile % kBlockTiles) * kChunk;
}

// byte offset in a chunk of the word that feeds mma i of group q, and of the lane's scales of group q (row g, then row g + 8)
AQ_HD int word_at(int q, int lane, int i) { return q * 512 + lane * 16 + i * 4; }
AQ_HD int scale_at(int q, int lane) { return kCodes + lane * 4 + q * 2; }
AQ_HD int column_at(int q, int lane, int i, int j, int half) { return q * 64 + (lane & 3) * 16 + i * 4 + (j >> 1) * 2 + half; }
AQ_HD int row_at(int lane, int j) { return (lane >> 2) + 8 * (j & 1); }

// One 32-bit word has, in each 16-bit half, the four codes of A registers j = 0..3 (half = even or odd column). A code s e e m must be
// moved to bits 15 and 8..6 of a bf16 half (value * 2^-126): j = 0 is there already, 1 and 2 are rotated by 3 and 6, and 3 uses the four
// remaining bits and is moved by one multiplication whose three copies do not overlap.
constexpr uint32_t kField = 0x81C081C0u, kRest = 0x001B001Bu, kSpread = (1u << 3) | (1u << 8) | (1u << 14);

AQ_HD uint32_t code_field(uint32_t code, int j, int half) {
    const uint32_t s = code >> 3, e1 = (code >> 2) & 1, e0 = (code >> 1) & 1, m = code & 1;
    if (j == 3) return (e1 << 0 | s << 1 | m << 3 | e0 << 4) << (16 * half);
    const uint32_t word = (s << 15 | (code & 7u) << 6) << (16 * half);
    const int r = 3 * j;
    return r ? (word << r | word >> (32 - r)) : word;
}

// The inverse of code_field for register j: both halves at once, each a bf16 of value * 2^-126.
AQ_HD uint32_t field_of(uint32_t w, int j) {
    if (j == 0) return w & kField;
    if (j == 3) return ((w & kRest) * kSpread) & kField;
    return (w >> (3 * j) | w << (32 - 3 * j)) & kField;
}

// A scale byte as E5M3 (bias 15), in which every finite non-negative E4M3 value is normal. 0 becomes 1.0, and its codes are set to 0.
AQ_HD uint32_t e5m3(uint32_t e4m3) {
    const uint32_t e = e4m3 >> 3, m = e4m3 & 7u;
    if (e) return (e + 8u) << 3 | m;
    if (!m) return 15u << 3;
    return m & 4u ? 8u << 3 | (m & 3u) << 1 : m & 2u ? 7u << 3 | (m & 1u) << 2 : 6u << 3;  // m * 2^-9
}

// An E5M3 byte in both halves as bf16: value * 2^118, so that code (2^-126) * scale = true value * 2^-8, normal everywhere.
constexpr uint32_t kScaleBias = 230u << 7 | 230u << 23;
AQ_HD uint32_t scale_word(uint32_t byte) { return (byte | byte << 16) * 16u + kScaleBias; }

// First of the four columns of a chunk that this lane (token lane / 4) must supply to mma i of group q.
AQ_HD int x_column_at(int q, int lane, int i) { return q * 64 + (lane & 3) * 16 + i * 4; }

// ---- activations as wgmma reads them ----
// 64 columns of a token are a row of eight units of 16 bytes; step i of the group of 64 reads units 2 i and 2 i + 1. Word l (k = 2 l,
// 2 l + 1 of eight) has column image_column and the next one. The units of a row are swizzled: image_unit.
AQ_HD int image_column(int unit, int l) { return 16 * l + 2 * unit; }
AQ_HD int image_unit(int row, int unit) { return unit ^ (row & 7); }
// In-place permutation of a row: the four source units permute_source(l, h), l = 0 .. 3, have the words of the four target units
// permute_target(w, h), w = 0 .. 3; word w of source l is word l of target w.
AQ_HD int permute_source(int l, int h) { return 2 * l ^ h; }
AQ_HD int permute_target(int w, int h) { return w ^ 4 * h; }

// ---- stream-K: some tiles are divided among all blocks, in equal shares of their chunks ----
// First chunk of block b's share; it ends where the next share begins.
AQ_HD int share_begin(int b, int blocks, int stream_k_tiles, int chunks) {
    return (int)((uint32_t)stream_k_tiles * (uint32_t)chunks * (uint32_t)b / (uint32_t)blocks);
}
// The block whose share has chunk u (every share has at least one chunk).
AQ_HD int share_owner(int u, int blocks, int stream_k_tiles, int chunks) {
    return (int)((((uint32_t)u + 1) * (uint32_t)blocks - 1) / ((uint32_t)stream_k_tiles * (uint32_t)chunks));
}
// Whether the products above do not overflow.
AQ_HD bool shares_fit(int blocks, int stream_k_tiles, int chunks) {
    return (uint64_t)stream_k_tiles * (uint64_t)chunks * ((uint64_t)blocks + 1) < (1ull << 31);
}

// ---- mma.m16n8k64, e2m1 x e2m1 with block scales ----
AQ_HD int fp4_a_row(int lane, int i) { return (lane >> 2) + 8 * (i & 1); }
AQ_HD int fp4_a_col(int lane, int i) { return 8 * (lane & 3) + 32 * (i >> 1); }
AQ_HD int fp4_b_col(int lane) { return lane >> 2; }
AQ_HD int fp4_b_row(int lane, int i) { return 8 * (lane & 3) + 32 * i; }
AQ_HD int fp4_sfa_lane(int row) { return 4 * (row & 7) + (row >> 3); }
AQ_HD int fp4_sfb_lane(int col) { return 4 * col; }

// W4A16 on Hopper's wgmma (sm_90a): the transposed product, with decoded weights as the register operand.
//
// A block computes 16 rows per warp x TOKENS tokens. A warp's 16 rows x 16 columns of decoded weights are the A fragment of wgmma and of
// mma.sync, so the repacked layout is the same. The activations must be in the column order of this layout. Either the copy engine copies
// them unchanged and three warps of each block permute them in place in shared memory, or, if many blocks or many steps would repeat
// that, a small kernel permutes them once into the bytes that wgmma reads. One thread issues all copies.
//
// Assignment of tiles to blocks: (1) a block computes whole tiles of 256 or 192 rows, one after the other; (2) a cluster of two blocks
// computes one tile of 256 rows, half of K each, or one of 128 rows, a quarter of K per pair of warpgroups, and reduces through shared
// memory; (3) stream-K: `stream_k_tiles` tiles are divided along K into equal shares for all blocks, and the parts of a tile are added in
// the order of K, by a fix-up kernel or by the block that has the tile's first part.
#pragma once
#include <cuda.h>

#include "gemm/numerics.cuh"

struct WgmmaArgs {
    const uint8_t *packed, *image;
    float *sums;  // two partial tiles per block for the fix-up kernel; else one, and then the blocks' flags
    void *out;
    int64_t n;
    float scale;
    int m, n_tiles, m_tiles, tiles, chunks, steps, halves, row_tiles, stream_k_tiles, stages, out_type,
        pdl;  // row_tiles: 16 rows each, per block
};

constexpr int kTokenGroup = 8;  // tiles of tokens that run at the same time, so that they share weights in the L2
constexpr int kWarps = 16, kWgmmaThreads = 32 * kWarps + 128;  // consumers with 16 rows each, and a warpgroup for the producer
// Registers per thread at the start, of a consumer and of the producer. A block has 61440 in total; the rest of 65536 is enough for one
// resident block of the permutation kernel or the fix-up kernel.
constexpr int kRegisters = 96;
AQ_HD constexpr int consumer_registers(int tokens) { return tokens == 128 ? 112 : 104; }
AQ_HD constexpr int producer_registers(int tokens) { return tokens == 128 ? 32 : 64; }
constexpr int kWgmmaHead = 1024 + 512 * kWarps, kWeights = kWarps * kChunk;  // barriers and 512 bytes per warp; the weights of a step
constexpr int kPermuteWarps = 3, kRowsInFlight = 2;  // warps that permute the activations in place, and rows that each has in registers
AQ_HD constexpr int wgmma_stage(int tokens, int halves) { return kWeights + tokens * 256 * halves; }
// Shared memory for the reduction: the sums of the other half of a block, and those of the other block of a cluster.
AQ_HD constexpr int wgmma_reduce_bytes(int tokens, int cluster_size, int halves) {
    return cluster_size == 1 ? 0 : halves == 1 ? 512 * tokens : 768 * tokens;
}

// Bytes of the workspace: the permuted activations, the partial tiles of the blocks, and their flags.
struct WgmmaSpace {
    size_t image, sums, flags;
};
inline WgmmaSpace wgmma_space(int tokens, int m_tiles, int chunks, bool permuted, bool parts, bool add_in_launch, int blocks) {
    return {permuted ? (size_t)m_tiles * chunks * tokens * 256 : 0,
            parts ? (size_t)(add_in_launch ? 1 : 2) * blocks * kWarps * kRows * tokens * 4 : 0,
            parts && add_in_launch ? (size_t)blocks * kWarps * 4 : 0};
}

#if AQ_WGMMA
// Position of a tile: tokens vary fastest within a group, then weights, so that blocks that run at the same time share both.
struct TileAt {
    int mt, nt;
    __device__ TileAt(const WgmmaArgs &a, int tile) {
        const int group = tile / (kTokenGroup * a.n_tiles), in_group = tile - group * kTokenGroup * a.n_tiles;
        const int width = min(kTokenGroup, a.m_tiles - group * kTokenGroup);
        nt = in_group / width;
        mt = group * kTokenGroup + in_group - nt * width;
    }
};

// The number of this block. A block that adds the parts of others waits for blocks with greater numbers, so these must be the ones that
// start first: then the wait ends however few blocks are resident.
template <bool ADD>
__device__ __forceinline__ int block_number() {
    return ADD ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
}

// The work items of this block: its share of the stream-K tiles, then whole tiles.
struct WorkItems {
    int at, end, next_whole, tile = 0, c0 = 0, c1 = 0;
    __device__ WorkItems(const WgmmaArgs &a, int block)
        : at(share_begin(block, gridDim.x, a.stream_k_tiles, a.steps)), end(share_begin(block + 1, gridDim.x, a.stream_k_tiles, a.steps)),
          next_whole(a.stream_k_tiles + block) {}
    __device__ bool next(const WgmmaArgs &a) {
        if (at < end) {
            tile = at / a.steps, c0 = at - tile * a.steps, c1 = min(a.steps, c0 + end - at);
            at += c1 - c0;
            return true;
        }
        if (next_whole >= a.n_tiles * a.m_tiles) return false;
        tile = next_whole, c0 = 0, c1 = a.steps;
        next_whole += gridDim.x;
        return true;
    }
};

// Addresses in shared memory, computed so that the compiler knows that they are uniform in a warp. `ready`: like `full`, after the in-place
// permutation.
struct Ring {
    uint32_t full, empty, ready, stages;
    int stage, count, slot = 0, phase = 0;
    __device__ void step() {
        if (++slot == count) slot = 0, phase++;
    }
    __device__ uint32_t full_at() const { return full + slot * 8; }
    __device__ uint32_t stage_at() const { return stages + slot * stage; }
};

// The producer's position: the steps of the work items, one after the other. A step is 256 rows x 128 columns, or 128 rows x 256 columns.
struct WeightCursor {
    WorkItems pieces;
    // Two copies per step: of two chunks if a block computes two parts of K, else of the two blocks of rows that a tile of 192 rows may span.
    const uint8_t *weights[2] = {};
    uint32_t pitch[2] = {}, bytes[2] = {};  // bytes from one step to the next, and bytes of a copy
    int step = 0, end = 0, mt = 0;
    __device__ WeightCursor(const WgmmaArgs &a, int block) : pieces(a, block) { seek(a); }
    __device__ void seek(const WgmmaArgs &a) {
        if (!pieces.next(a)) return;
        const TileAt at(a, pieces.tile);
        const int first = at.nt * a.row_tiles, in_block = first % kBlockTiles, there = tiles_in_block(first / kBlockTiles, a.tiles);
        const int take = min(a.row_tiles, there - in_block), next = first + take, more = min(a.row_tiles - take, a.tiles - next);
        mt = at.mt, step = pieces.c0, end = pieces.c1;
        pitch[0] = (uint32_t)(there * a.halves * kChunk), bytes[0] = (uint32_t)(take * kChunk);
        weights[0] = a.packed + chunk_at(first, 0, a.tiles, a.chunks) + (int64_t)step * pitch[0];
        if (a.halves == 2) {
            weights[1] = weights[0] + there * kChunk, pitch[1] = pitch[0], bytes[1] = bytes[0];
        } else {
            bytes[1] = (uint32_t)(max(more, 0) * kChunk);
            if (more > 0) {
                pitch[1] = (uint32_t)(tiles_in_block(next / kBlockTiles, a.tiles) * kChunk);
                weights[1] = a.packed + chunk_at(next, 0, a.tiles, a.chunks) + (int64_t)step * pitch[1];
            }
        }
    }
    __device__ bool has_step() const { return step < end; }
    __device__ void advance(const WgmmaArgs &a) {
        weights[0] += pitch[0], weights[1] += pitch[1];
        if (++step == end) seek(a);
    }
};

// The thread that issues all copies. Weights do not depend on previous kernels; activations wait for them.
template <int TOKENS, bool ADD>
struct Producer {
    const WgmmaArgs &a;
    const CUtensorMap *map;
    Ring ring;
    __device__ int halves() const { return TOKENS == 128 ? 1 : a.halves; }
    __device__ bool depends() const { return TOKENS == 128 || a.pdl || a.image; }
    __device__ void copy_weights(int slot, const WeightCursor &s) const {
        const uint32_t bar = ring.full + slot * 8, to = ring.stages + slot * ring.stage;
        mbarrier_expect(bar, s.bytes[0] + s.bytes[1] + TOKENS * 256 * halves());
        bulk_copy(to, s.weights[0], s.bytes[0], bar);
        if (s.bytes[1]) bulk_copy(to + (halves() == 2 ? kWeights / 2 : s.bytes[0]), s.weights[1], s.bytes[1], bar);
    }
    __device__ void copy_x(int slot, const WeightCursor &s) const {
        const uint32_t bar = ring.full + slot * 8, to = ring.stages + slot * ring.stage + kWeights;
        if constexpr (TOKENS == 128) {
            bulk_copy(to, a.image + ((int64_t)s.mt * a.chunks + s.step) * (TOKENS * 256), TOKENS * 256, bar);
        } else if (a.image) {
            bulk_copy(to, a.image + ((int64_t)s.mt * a.chunks + s.step * halves()) * (TOKENS * 256), TOKENS * 256 * halves(), bar);
        } else {
            for (int part = 0; part < 2 * halves(); part++)
                tensor_copy(to + part * (TOKENS * 128), map, (s.step * halves() * 2 + part) * 64, s.mt * TOKENS, bar);
        }
    }
    // Before the block's first barrier. Two steps only: with more in flight, all of them arrive late.
    __device__ void prefetch() const {
        WeightCursor from(a, block_number<ADD>());
        for (int slot = 0; slot < 2 && from.has_step(); slot++, from.advance(a)) {
            copy_weights(slot, from);
            if (!depends()) copy_x(slot, from);
        }
    }
    __device__ void run() {
        WeightCursor from(a, block_number<ADD>());
        if (depends()) {
            wait_for_previous_kernel();
            async_fence_global();  // make other threads' writes visible to the copies
        }
        for (int step = 0; step < 2 && from.has_step(); step++, ring.step(), from.advance(a))
            if (depends()) copy_x(step, from);
        if (from.has_step()) mbarrier_wait_hidden_loop(ring.full, 0);
        for (; from.has_step(); ring.step(), from.advance(a)) {
            if (ring.phase) mbarrier_wait_hidden_loop(ring.empty + ring.slot * 8, (ring.phase - 1) & 1);
            copy_weights(ring.slot, from);
            copy_x(ring.slot, from);
        }
    }
};

// One of kPermuteWarps warps. A tensor copy writes 64 columns of a token as a row of eight units of 16 bytes in their original order; the
// repacked weights need the order of image_column. Four units have the words of four others, so two lanes permute a row in place.
template <int TOKENS>
__device__ void permute_in_place(const WgmmaArgs &a, Ring ring, int permute_warp, int lane) {
    const int first = 16 * permute_warp + (lane & 7) + (lane >> 4) * 8, rows = TOKENS * 2 * a.halves;
    const int half = lane >> 3 & 1;
    const uint32_t in = image_unit(lane, permute_source(0, half)) * 16, out = image_unit(lane, permute_target(0, half)) * 16;
    for (WorkItems p(a, blockIdx.x); p.next(a);)
        for (int c = p.c0; c < p.c1; c++, ring.step()) {
            mbarrier_wait_hidden_loop(ring.full_at(), ring.phase & 1);
            const uint32_t x = ring.stage_at() + kWeights;
            for (int row = first; row < rows; row += 16 * kPermuteWarps * kRowsInFlight) {
                uint4 v[kRowsInFlight][4];
#pragma unroll
                for (int i = 0; i < kRowsInFlight; i++) {
                    const uint32_t from = x + (row + i * 16 * kPermuteWarps) * 128 + in;
                    if (row + i * 16 * kPermuteWarps < rows)
#pragma unroll
                        for (int l = 0; l < 4; l++) v[i][l] = load_shared16(from ^ permute_source(l, 0) * 16);
                }
                __syncwarp();
#pragma unroll
                for (int i = 0; i < kRowsInFlight; i++) {
                    const uint32_t to = x + (row + i * 16 * kPermuteWarps) * 128 + out;
                    if (row + i * 16 * kPermuteWarps >= rows) break;
                    store_shared16(to, v[i][0].x, v[i][1].x, v[i][2].x, v[i][3].x);
                    store_shared16(to ^ permute_target(1, 0) * 16, v[i][0].y, v[i][1].y, v[i][2].y, v[i][3].y);
                    store_shared16(to ^ permute_target(2, 0) * 16, v[i][0].z, v[i][1].z, v[i][2].z, v[i][3].z);
                    store_shared16(to ^ permute_target(3, 0) * 16, v[i][0].w, v[i][1].w, v[i][2].w, v[i][3].w);
                }
            }
            async_fence_shared();  // make the writes visible to wgmma
            __syncwarp();
            if (lane < kReleaseArrivals) mbarrier_arrive(ring.ready + ring.slot * 8);
        }
}

// Address of a block's part of a stream-K tile. Each block has two slots, for the first tile of its share and for the last. A slot has
// the warps' accumulators, four floats of a lane together.
template <int TOKENS>
__device__ float4 *partial_tile(const WgmmaArgs &a, int block, int blocks, int tile, int warp, int lane) {
    const bool second = share_begin(block, blocks, a.stream_k_tiles, a.steps) / a.steps != tile;
    return (float4 *)a.sums + ((int64_t)(2 * block + second) * kWarps + warp) * (TOKENS / 2 / 4 * 32) + lane;
}

// Add the parts of a stream-K tile in this launch. A warp needs the same warp of other blocks only; its flag, 0 at the start, says that
// its part is written. Where the tile's first part is (c0 = 0), the other parts are added to `acc` in the order of K, and the result is true;
// any other part is written for that block.
template <int TOKENS>
__device__ bool add_parts(const WgmmaArgs &a, float (&acc)[TOKENS / 2], int tile, int c0, int warp, int lane) {
    constexpr int kLaneFloats = TOKENS / 2, kBlockFloats = kLaneFloats * 32 * kWarps;
    const int block = block_number<true>(), blocks = gridDim.x;
    uint32_t *const flags = (uint32_t *)(a.sums + (int64_t)blocks * kBlockFloats) + warp;
    float4 *const own = (float4 *)(a.sums + (int64_t)block * kBlockFloats) + warp * (kLaneFloats / 4 * 32) + lane;
    if (c0) {
#pragma unroll
        for (int i = 0; i < kLaneFloats; i += 4) __stcg(own + i * 8, make_float4(acc[i], acc[i + 1], acc[i + 2], acc[i + 3]));
        __syncwarp();
        if (lane == 0) store_release(flags + block * kWarps, 1);
        return false;
    }
    const int last = share_owner(tile * a.steps + a.steps - 1, blocks, a.stream_k_tiles, a.steps);
    for (int b = block + 1; b <= last; b++) {
        while (!load_acquire(flags + b * kWarps)) continue;
        const float4 *from = own + (int64_t)(b - block) * (kBlockFloats / 4);
#pragma unroll
        for (int i = 0; i < kLaneFloats; i += 4) {
            const float4 v = __ldcg(from + i * 8);
            acc[i] += v.x, acc[i + 1] += v.y, acc[i + 2] += v.z, acc[i + 3] += v.w;
        }
    }
    return true;
}

// Store 16 rows x TOKENS tokens of a warp's accumulators to out[token][row]. If n is a multiple of 8 and the type has 16 bits, 16 x 16
// elements at a time are transposed in the warp's 512 bytes of shared memory, so that a lane stores 16 bytes.
template <int TOKENS>
__device__ void store_rows(const WgmmaArgs &a, int64_t row0, int token0, const float (&acc)[TOKENS / 2], uint8_t *scratch, int lane) {
    if (TOKENS % 16 == 0 && a.out_type != 0 && a.n % 8 == 0 && ((uintptr_t)a.out & 15) == 0) {
        // matrices of stmatrix: rows 0-7 and 8-15 of tokens 0-7, then of 8-15; a lane addresses token (lane & 7) + 8 (lane >> 4), half (lane >> 3) & 1
        const int to_token = (lane & 7) + (lane >> 4) * 8, to_half = (lane >> 3) & 1, of_token = lane >> 1, of_half = lane & 1;
        const uint32_t to = smem_at(scratch) + to_token * 32 + (to_half ^ (to_token >> 2 & 1)) * 16;
        const uint4 *of = (const uint4 *)(scratch + of_token * 32 + (of_half ^ (of_token >> 2 & 1)) * 16);
        const bool row_there = row0 + of_half * 8 < a.n;
        uint16_t *out = (uint16_t *)a.out + (int64_t)(token0 + of_token) * a.n + row0 + of_half * 8;
#pragma unroll
        for (int i = 0; i < TOKENS / 2; i += 8, out += 16 * a.n) {
            uint32_t v[4];
#pragma unroll
            for (int j = 0; j < 4; j++) v[j] = pair_of(acc[i + 2 * j] * a.scale, acc[i + 2 * j + 1] * a.scale, a.out_type);
            store_matrices_transposed(to, v);
            __syncwarp();
            const uint4 row = *of;
            __syncwarp();
            if (row_there && token0 + i * 2 + of_token < a.m) *(uint4 *)out = row;
        }
        return;
    }
    const int64_t row = row0 + (lane >> 2);
    int token = token0 + (lane & 3) * 2;
    int64_t to = token * a.n + row;
#pragma unroll
    for (int i = 0; i < TOKENS / 2; i += 4, token += 8, to += 8 * a.n) {
        compute_here(to);  // otherwise the compiler holds every address in a register and spills
#pragma unroll
        for (int v = 0; v < 4; v++)
            if (token + (v & 1) < a.m && row + (v >> 1) * 8 < a.n)
                store_typed(a.out, to + (v & 1) * a.n + (v >> 1) * 8, acc[i + v] * a.scale, a.out_type);
    }
}

__device__ __forceinline__ void store_floats(uint32_t at, const float *v) {
    store_shared16(at, __float_as_uint(v[0]), __float_as_uint(v[1]), __float_as_uint(v[2]), __float_as_uint(v[3]));
}
template <int COUNT>
__device__ __forceinline__ void add_floats(float *v, uint32_t at) {
#pragma unroll
    for (int i = 0; i < COUNT; i += 4) {
        const uint4 w = load_shared16(at + i * 128);
        v[i] += __uint_as_float(w.x), v[i + 1] += __uint_as_float(w.y), v[i + 2] += __uint_as_float(w.z), v[i + 3] += __uint_as_float(w.w);
    }
}

// Two blocks have half of K each. One reduces the first half of `v`, the other the second; each receives the other block's values in
// shared memory at `at`. A sum of two numbers does not depend on their order, so bits repeat. The sum is v[0 .. COUNT / 2).
template <int COUNT>
__device__ __forceinline__ void cluster_reduce(float (&v)[COUNT], uint32_t at, int warp, int lane) {
    constexpr int kHalf = COUNT / 2;
    const int rank = (int)cluster_rank();
    const uint32_t own = at + (warp * (kHalf / 4 * 32) + lane) * 16, to = peer_at(own, rank ^ 1);
    cluster_wait();  // the other block has started
#pragma unroll
    for (int i = 0; i < kHalf; i++) {
        const float first = v[i], second = v[kHalf + i];
        v[i] = rank ? second : first, v[kHalf + i] = rank ? first : second;
    }
#pragma unroll
    for (int i = 0; i < kHalf; i += 4) store_peer16(to + i * 128, v[kHalf + i], v[kHalf + i + 1], v[kHalf + i + 2], v[kHalf + i + 3]);
    cluster_arrive();
    cluster_wait();
    add_floats<kHalf>(v, own);
}

// A cluster has one tile. If a block computed two parts of K in parallel, its warps first divide the tokens between them in the same way.
template <int TOKENS>
__device__ void finish_in_cluster(const WgmmaArgs &a, uint32_t at, float (&acc)[TOKENS / 2], uint8_t *scratch, int warp, int lane,
                                  const TileAt &tile) {
    const int rank = (int)cluster_rank();
    if (a.halves == 1) {
        cluster_reduce(acc, at, warp, lane);
        store_rows<TOKENS / 2>(a, (int64_t)(tile.nt * kWarps + warp) * 16, tile.mt * TOKENS + rank * (TOKENS / 2),
                               *(float(*)[TOKENS / 4]) acc, scratch, lane);
        return;
    }
    if constexpr (TOKENS >= 32) {
        constexpr int kHalf = TOKENS / 4;
        const int half = warp / (kWarps / 2), size = kHalf / 4 * 512;
        float v[kHalf];
#pragma unroll
        for (int i = 0; i < kHalf; i += 4) {
            float give[4];
#pragma unroll
            for (int j = i; j < i + 4; j++) give[j - i] = half ? acc[j] : acc[kHalf + j], v[j] = half ? acc[kHalf + j] : acc[j];
            store_floats(at + warp * size + lane * 16 + i * 128, give);
        }
        named_barrier<5, 32 * kWarps>();
        add_floats<kHalf>(v, at + (warp ^ (kWarps / 2)) * size + lane * 16);
        cluster_reduce(v, at + kWarps * size, warp, lane);
        const int token0 = tile.mt * TOKENS + half * (TOKENS / 2) + rank * (TOKENS / 4);
        store_rows<TOKENS / 4>(a, (int64_t)(tile.nt * (kWarps / 2) + warp % (kWarps / 2)) * 16, token0, *(float(*)[TOKENS / 8]) v, scratch,
                               lane);
    }
}

template <int TOKENS, bool HALF, bool ADD>
__device__ void consume(const WgmmaArgs &a, Ring ring, uint8_t *scratch, int cluster_size, int warp) {
    // kPer: multiplications per group; kSets: sets of fragments. With two sets a group is decoded while the previous one is multiplied. Up to
    // 64 tokens, one set for a whole step takes fewer instructions, and the other warpgroups multiply meanwhile.
    constexpr int kSets = TOKENS == 128 ? 2 : 1, kPer = TOKENS == 128 ? 2 : 8;
    const int lane = lane_id();  // read once: the compiler would read it again in the loop
    const uint32_t codes_at = ring.stages + warp * kChunk + lane * 16, scales_at = ring.stages + warp * kChunk + scale_at(0, lane);
    const uint32_t x_at = operand_at(ring.stages + kWeights + (a.halves == 2 && warp >= kWarps / 2 ? TOKENS * 256 : 0));
    const uint32_t ready_bar = a.image ? ring.full : ring.ready;
    if (warp >= a.row_tiles * a.halves) return;
    float acc[TOKENS / 2];
    for (WorkItems p(a, block_number<ADD>()); p.next(a);) {
#pragma unroll
        for (int i = 0; i < TOKENS / 2; i++) acc[i] = 0.f;
        int before = -1;  // slot of the previous step
        for (int c = p.c0; c < p.c1; c++, ring.step()) {
            mbarrier_wait_hidden_loop(ready_bar + ring.slot * 8, ring.phase & 1);
            // the result of a reduction is in a uniform register, and so is everything derived from it, which saves instructions
            const uint32_t at = __reduce_or_sync(0xFFFFFFFFu, ring.slot * ring.stage), x = x_at + at / 16;
            const uint32_t scales = load_shared4(scales_at + at);
            const uint4 codes[2] = {load_shared16(codes_at + at), load_shared16(codes_at + at + word_at(1, 0, 0))};
            uint32_t f[kSets][kPer][4];
#pragma unroll
            for (int g = 0; g < 8 / kPer; g++) {
                uint32_t(&to)[kPer][4] = f[g % kSets];
                wgmma_wait<kSets - 1>();  // the fragments `to` are free again
                if (g == kSets - 1 && before >= 0 && lane < kReleaseArrivals) mbarrier_arrive(ring.empty + before * 8);
#pragma unroll
                for (int i = 0; i < kPer; i++) {
                    const int q = (g * kPer + i) / 4;
                    const uint32_t w[4] = {codes[q].x, codes[q].y, codes[q].z, codes[q].w};
                    decode8(w[(g * kPer + i) % 4], scale_pair(scales, 2 * q), scale_pair(scales, 2 * q + 1), to[i]);
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        if (HALF) to[i][j] = bf16x2_to_f16x2(to[i][j]);
                        if (kSets == 1) compute_here(to[i][j]);  // not between two multiplications
                    }
                }
                wgmma_fence();
#pragma unroll
                for (int i = 0; i < kPer; i++)
                    wgmma<TOKENS, HALF>(acc, to[i], x + ((g * kPer + i) / 4 * (TOKENS * 128) + (g * kPer + i) % 4 * 32) / 16);
                wgmma_commit();
            }
            before = ring.slot;
        }
        wgmma_wait<0>();
        if (lane < kReleaseArrivals) mbarrier_arrive(ring.empty + before * 8);
        const TileAt at(a, p.tile);
        if constexpr (TOKENS < 128 && !ADD)
            if (cluster_size > 1)
                return finish_in_cluster<TOKENS>(a, ring.stages + ring.count * ring.stage, acc, scratch + warp * 512, warp, lane, at);
        if (ADD && p.c1 - p.c0 < a.steps) {
            if (!add_parts<TOKENS>(a, acc, p.tile, p.c0, warp, lane)) continue;
        } else if (p.c1 - p.c0 < a.steps) {
            float4 *to = partial_tile<TOKENS>(a, blockIdx.x, gridDim.x, p.tile, warp, lane);
#pragma unroll
            for (int i = 0; i < TOKENS / 2; i += 4, to += 32) __stcg(to, make_float4(acc[i], acc[i + 1], acc[i + 2], acc[i + 3]));
            continue;
        }
        store_rows<TOKENS>(a, (int64_t)(at.nt * a.row_tiles + warp) * 16, at.mt * TOKENS, acc, scratch + warp * 512, lane);
    }
}
#endif

// Without sm_90a code this is a stub; the planner recognises it by its launch bound.
template <int TOKENS, bool HALF, bool ADD>
__global__ void
#if AQ_WGMMA || !defined(__CUDA_ARCH__)
__maxnreg__(kRegisters)
#else
__launch_bounds__(32)
#endif
    wgmma_kernel(const WgmmaArgs a, int cluster_size, const __grid_constant__ CUtensorMap map) {
#if AQ_WGMMA
    extern __shared__ __align__(1024) uint8_t shared[];
    const uint32_t base = opaque(smem_at(shared));
    const Ring ring{base, base + 128, base + 256, base + kWgmmaHead, wgmma_stage(TOKENS, a.halves), a.stages};
    const int warp = __shfl_sync(0xFFFFFFFFu, threadIdx.x >> 5, 0);
    if (threadIdx.x == 32 * kWarps) {
        for (int s = 0; s < a.stages; s++) {
            mbarrier_init(ring.full + s * 8, 1), mbarrier_init(ring.empty + s * 8, kReleaseArrivals * a.row_tiles * a.halves);
            mbarrier_init(ring.ready + s * 8, kReleaseArrivals * kPermuteWarps);
        }
        mbarrier_init_fence();
        async_fence_shared();
        Producer<TOKENS, ADD>{a, &map, ring}.prefetch();
    }
    __syncthreads();
    if (cluster_size > 1) cluster_arrive_relaxed();
    if (a.pdl || a.stream_k_tiles) allow_next_kernel();
    if (warp < kWarps) {
        raise_registers<consumer_registers(TOKENS)>();
        consume<TOKENS, HALF, ADD>(a, ring, shared + 1024, cluster_size, warp);
    } else {
        lower_registers<producer_registers(TOKENS)>();
        if (warp != kWarps) {
            if constexpr (TOKENS < 128 && !ADD)
                if (!a.image) permute_in_place<TOKENS>(a, ring, warp - kWarps - 1, threadIdx.x & 31);
        } else if (threadIdx.x == 32 * kWarps) {
            Producer<TOKENS, ADD>{a, &map, ring}.run();
        }
    }
#endif
}

constexpr int kFixupWarps = 2;

// The fix-up kernel: adds the parts of stream-K tiles that several blocks computed. A warp takes 16 rows x 16 tokens.
template <int TOKENS>
__global__ void __launch_bounds__(32 * kFixupWarps, 16) fixup_kernel(const WgmmaArgs a, int blocks) {
#if AQ_WGMMA
    __shared__ __align__(16) uint8_t scratch[kFixupWarps * 512];
    const int lane = threadIdx.x & 31, unit = blockIdx.x * kFixupWarps + (threadIdx.x >> 5);
    const int part = unit % (TOKENS / 16), warp = unit / (TOKENS / 16) % kWarps, tile = unit / (TOKENS / 16 * kWarps);
    const int first = share_owner(tile * a.steps, blocks, a.stream_k_tiles, a.steps),
              last = share_owner(tile * a.steps + a.steps - 1, blocks, a.stream_k_tiles, a.steps);
    const TileAt at(a, tile);
    if (a.pdl) allow_next_kernel();
    wait_for_previous_kernel();
    if (first == last) return;
    float sum[8] = {};
#pragma unroll 4
    for (int b = first; b <= last; b++) {
        const float4 *from = partial_tile<TOKENS>(a, b, blocks, tile, warp, lane) + part * 64;
        const float4 v = __ldcg(from), w = __ldcg(from + 32);
        sum[0] += v.x, sum[1] += v.y, sum[2] += v.z, sum[3] += v.w, sum[4] += w.x, sum[5] += w.y, sum[6] += w.z, sum[7] += w.w;
    }
    store_rows<16>(a, (int64_t)(at.nt * kBlockTiles + warp) * 16, at.mt * TOKENS + part * 16, sum, scratch + (threadIdx.x >> 5) * 512,
                   lane);
#endif
}

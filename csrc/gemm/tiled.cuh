// W4A16 for more tokens: output tiles, with weights and activations in the same pipeline.
//
// A stage is BN rows x 128 columns of repacked weights (one bulk copy) and BM tokens x 128 columns of activations (16-byte copies by all
// threads; a warp only for copies would take registers from every thread). The warps decode the weights in registers, once for all
// their tokens, and feed mma.sync. Blocks of a cluster split K; their partial tiles are added in rank order through distributed
// shared memory.
#pragma once
#include <type_traits>

#include "gemm/numerics.cuh"
#include "gemm/paths.cuh"

// Tiles of 256 rows x tile_tokens by mma.sync.
struct TiledPlan {
    int tile_tokens;   // of one of Tiles
    int cluster_size;  // blocks that share K
    int stages;        // pipeline stages of a block
};
// The best plan for `products` products of one shape in one launch.
bool plan_tiled(const Shape &shape, int64_t products, const aq_limits &limits, TiledPlan *best);
const char *tiled_problem(const Shape &shape, const aq_limits &limits, const TiledPlan &plan, aq_needs *needs);

struct TiledArgs {
    const uint8_t *packed;
    const uint16_t *x;
    void *out;
    int64_t ldx, n;
    float scale;
    int m, k, n_tiles, m_tiles, tiles, chunks, cluster_size, stages, out_type, pdl;
};

constexpr int kTilePitch = kCols * 2 + 16;  // bytes between tokens: shifts the banks by 16 bytes per token
constexpr int kTiledRows = 256;             // rows per tile
constexpr int kMGroup = 8;                  // tiles of tokens that run at the same time, so that they share weights in the L2

// KS groups of WR warps; each warp has 16 TR rows and all 8 TC tokens; the groups share the columns of a chunk.
template <int WR, int KS, int TR, int TC>
struct TileShape {
    static constexpr int kWarps = WR * KS, kBN = 16 * TR * WR, kBM = 8 * TC;
    static constexpr int kWeightBytes = kBN / 16 * kChunk, kStage = kWeightBytes + kBM * kTilePitch;
    static constexpr int kOutPitch = kBN + 4;  // floats
    static constexpr int kOutBytes = kBM * kOutPitch * 4;
    static_assert(kBN == kTiledRows);
};

// Warps along the rows, groups of them that share K, row tiles per warp, tokens / 8.
using Tokens16 = TileShape<8, 2, 2, 2>;
using Tokens64 = TileShape<8, 2, 2, 8>;
using Tokens128 = TileShape<8, 1, 2, 16>;
// The tiles of one product. The planner, the check of a plan and the launch take them from here.
template <class... Shapes>
struct TileList {};
using Tiles = TileList<Tokens16, Tokens64, Tokens128>;
constexpr const char *kNoSuchTile = "tile_tokens must be 16, 64 or 128";

// From sm_90 on one thread issues a bulk copy of contiguous bytes; before, every thread copies its share in 16-byte units.
constexpr uint32_t kBulkArrivals = 1;  // at a full barrier, in addition to one arrival per thread

__device__ __forceinline__ void copy_bytes(uint32_t to, const uint8_t *from, uint32_t bytes, uint32_t bar) {
    if (threadIdx.x == 0) {
        mbarrier_expect(bar, bytes);
        bulk_copy(to, from, bytes, bar);
    }
}
// Four sums of the partial tile of a block of this cluster.
__device__ __forceinline__ float4 load_part(const float *p, uint32_t rank, int cluster_size) {
    if (cluster_size > 1) return load_peer16(peer_at(smem_at(p), rank));
    return *(const float4 *)p;
}
// Store four adjacent elements of a row of `out`; columns from `n` on do not exist.
__device__ __forceinline__ void store4(void *out, int64_t row, int64_t col, int64_t n, float4 v, float scale, int type) {
    const float f[4] = {v.x * scale, v.y * scale, v.z * scale, v.w * scale};
    if (type == 2 && col + 3 < n && n % 4 == 0 && (((uintptr_t)out & 7) == 0)) {
        *(uint2 *)((__nv_bfloat16 *)out + row + col) = make_uint2(pair_of(f[0], f[1], type), pair_of(f[2], f[3], type));
        return;
    }
#pragma unroll
    for (int i = 0; i < 4; i++)
        if (col + i < n) store_typed(out, row + col + i, f[i], type);
}

// What the tiles of a launch are of: one product, whose tokens are rows of x and of `out` one after the other; or products of several
// weights (grouped.cu), each tile with its own weight and a table of its tokens.
struct OneProduct {
    static constexpr int kHead = 1024;  // bytes for the barriers, of which a stage has two
};

template <int WR, int KS, int TR, int TC, bool HALF, class Of>
__global__ void __launch_bounds__(32 * WR * KS, 1) tiled_kernel(const TiledArgs a, const Of of) {
    using S = TileShape<WR, KS, TR, TC>;
    constexpr bool kGrouped = !std::is_same_v<Of, OneProduct>;
    if constexpr (kGrouped) {
        if (!of.begin(a, S::kBM)) return;  // all blocks of a cluster, or none
    }
    extern __shared__ __align__(128) uint8_t smem[];
    uint64_t *full = (uint64_t *)smem, *empty = full + a.stages;
    uint8_t *stages = smem + Of::kHead;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int rank = a.cluster_size > 1 ? (int)cluster_rank() : 0, tile = blockIdx.x / a.cluster_size;
    const uint8_t *packed = a.packed;
    int m0, nt;
    // tokens vary fastest within a group of kMGroup tiles, then weights: blocks that run at the same time share both
    if constexpr (kGrouped) {
        m0 = 0, nt = tile % a.n_tiles;
        packed += of.weight_at(tile / a.n_tiles);
    } else {
        const int group = tile / (kMGroup * a.n_tiles), in_group = tile - group * kMGroup * a.n_tiles;
        const int width = min(kMGroup, a.m_tiles - group * kMGroup);
        m0 = (group * kMGroup + in_group % width) * S::kBM, nt = in_group / width;
    }
    const int n0 = nt * S::kBN;
    const int c0 = a.chunks * rank / a.cluster_size, c1 = a.chunks * (rank + 1) / a.cluster_size;

    if (threadIdx.x == 0)
#pragma unroll 1
        for (int s = 0; s < a.stages; s++)
            mbarrier_init(smem_at(full + s), 32 * S::kWarps + kBulkArrivals),
                mbarrier_init(smem_at(empty + s), kReleaseArrivals * S::kWarps);
    mbarrier_init_fence();
    async_fence_shared();
    __syncthreads();

    const int g = lane >> 2, l = lane & 3;
    const int wr = warp % WR, part_of_k = warp / WR;
    float acc[TR][TC][4];
#pragma unroll
    for (int r = 0; r < TR; r++)
#pragma unroll
        for (int t = 0; t < TC; t++)
#pragma unroll
            for (int i = 0; i < 4; i++) acc[r][t][i] = 0.f;

    int tokens = min(S::kBM, a.m - m0);
    if constexpr (kGrouped) tokens = Of::tokens(S::kBM);
    const int have = tiles_in_block(nt, a.tiles);
    const uint8_t *weights_from = packed + chunk_at(nt * kBlockTiles, 0, a.tiles, a.chunks);
    const uint16_t *x_from = a.x + (int64_t)m0 * a.ldx;
    const auto fetch_weights = [&](int c, int s) {
        copy_bytes(smem_at(stages + (size_t)s * S::kStage), weights_from + (int64_t)c * have * kChunk, have * kChunk, smem_at(full + s));
    };
    const auto fetch_x = [&](int c, int s) {  // zeros beyond K: the padded codes are zeros, but 0 * NaN is not 0
        uint8_t *to = stages + (size_t)s * S::kStage + S::kWeightBytes;
#pragma unroll
        for (int i = threadIdx.x; i < S::kBM * 16; i += 32 * S::kWarps) {
            const int token = i >> 4, v = i & 15, col = c * kCols + v * 8;
            bool there = col < a.k && token < tokens;
            const uint16_t *from;
            if constexpr (kGrouped) there = there && Of::has(token), from = a.x + Of::row(token) * a.ldx + col;
            else from = x_from + token * a.ldx + col;
            copy_async16(smem_at(to + token * kTilePitch + v * 16), there ? from : a.x, there ? 16 : 0);
        }
        copy_async_arrive(smem_at(full + s));
    };
    const int ahead = a.stages > 3 ? a.stages - 2 : a.stages - 1;  // chunks in flight in addition to the one being computed
    for (int s = 0; s < ahead && c0 + s < c1; s++) fetch_weights(c0 + s, s);
    if (a.pdl && !kGrouped) {  // weights do not depend on the previous kernel; activations and the output do
        allow_next_kernel();
        wait_for_previous_kernel();
    }
    for (int s = 0; s < ahead && c0 + s < c1; s++) fetch_x(c0 + s, s);

    {
        int next = ahead % a.stages, next_phase = ahead / a.stages;  // the slot for chunk c + ahead
        for (int c = c0, s = 0, phase = 0; c < c1; c++) {
            if (c + ahead < c1) {
                if (next_phase) mbarrier_wait(smem_at(empty + next), (next_phase - 1) & 1);  // every warp has released the slot
                fetch_weights(c + ahead, next);
                fetch_x(c + ahead, next);
                if (++next == a.stages) next = 0, next_phase++;
            }
            mbarrier_wait(smem_at(full + s), phase & 1);
            const uint8_t *stage = stages + (size_t)s * S::kStage;
            const uint8_t *weights = stage + wr * TR * kChunk, *xs = stage + S::kWeightBytes + g * kTilePitch + l * 32;
            uint32_t scales[TR];
#pragma unroll
            for (int r = 0; r < TR; r++) scales[r] = *(const uint32_t *)(weights + r * kChunk + scale_at(0, lane));
#pragma unroll
            for (int qq = 0; qq < 2 / KS; qq++)
#pragma unroll(HALF &&TC == 16 ? 1 : 2)  // fully unrolled, this instance spills registers on sm_12x
                for (int h = 0; h < 2; h++) {
                    const int q = KS == 1 ? qq : part_of_k;
                    uint32_t f[TR][2][4];
#pragma unroll
                    for (int r = 0; r < TR; r++) {
                        const uint2 w = *(const uint2 *)(weights + r * kChunk + word_at(q, lane, 2 * h));
                        const uint32_t s0 = scale_pair(scales[r], 2 * q), s1 = scale_pair(scales[r], 2 * q + 1);
                        decode8(w.x, s0, s1, f[r][0]);
                        decode8(w.y, s0, s1, f[r][1]);
                        if (HALF)
#pragma unroll
                            for (int i = 0; i < 8; i++) f[r][i >> 2][i & 3] = bf16x2_to_f16x2(f[r][i >> 2][i & 3]);
                    }
#pragma unroll
                    for (int t = 0; t < TC; t++) {
                        const uint4 b = *(const uint4 *)(xs + t * 8 * kTilePitch + q * 128 + h * 16);
#pragma unroll
                        for (int r = 0; r < TR; r++) mma_m16n8k16<HALF>(acc[r][t], f[r][0], b.x, b.y);
#pragma unroll
                        for (int r = 0; r < TR; r++) mma_m16n8k16<HALF>(acc[r][t], f[r][1], b.z, b.w);
                    }
                }
            __syncwarp();
            if (lane < kReleaseArrivals) mbarrier_arrive(smem_at(empty + s));
            if (++s == a.stages) s = 0, phase++;
        }
    }
    __syncthreads();  // the pipeline is empty; its memory is reused for the partial tile, token by token
    float *part = (float *)stages;
#pragma unroll
    for (int group_of_k = 0; group_of_k < KS; group_of_k++) {
        if (part_of_k == group_of_k)
#pragma unroll
            for (int r = 0; r < TR; r++)
#pragma unroll
                for (int t = 0; t < TC; t++)
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        float *at = part + (t * 8 + 2 * l + (i & 1)) * S::kOutPitch + (wr * TR + r) * 16 + g + 8 * (i >> 1);
                        *at = group_of_k ? *at + acc[r][t][i] : acc[r][t][i];
                    }
        if (group_of_k + 1 < KS) __syncthreads();
    }
    if (a.cluster_size > 1) cluster_arrive(), cluster_wait();
    else __syncthreads();
    // The ranks divide the tokens; four rows per thread, with the ranks' sums added in order.
    const int first = tokens * rank / a.cluster_size, last = tokens * (rank + 1) / a.cluster_size;
    constexpr int kQuads = S::kBN / 4;
    for (int e = first * kQuads + threadIdx.x; e < last * kQuads; e += blockDim.x) {
        const int token = e / kQuads, r = (e - token * kQuads) * 4;
        const float *at = part + token * S::kOutPitch + r;
        float4 sum = load_part(at, 0, a.cluster_size);
#pragma unroll 4
        for (int peer = 1; peer < a.cluster_size; peer++) {
            const float4 v = load_part(at, peer, a.cluster_size);
            sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
        }
        if constexpr (kGrouped) {
            if (Of::has(token)) store4(a.out, Of::pair(token) * a.n, n0 + r, a.n, sum, a.scale * Of::scale(), a.out_type);
        } else {
            store4(a.out, (int64_t)(m0 + token) * a.n, n0 + r, a.n, sum, a.scale, a.out_type);
        }
    }
    if (a.cluster_size > 1) cluster_arrive_relaxed(), cluster_wait();  // no block may exit while another one reads its shared memory
}

// Launch the kernel for tiles of one shape. blocks: of tiles and tokens, without those of a cluster.
template <int WR, int KS, int TR, int TC, class Of>
int launch_tiles(TileShape<WR, KS, TR, TC>, bool half, int64_t blocks, int smem_bytes, cudaStream_t stream, const TiledArgs &a,
                 const Of &of) {
    const Launch how{dim3((unsigned)(blocks * a.cluster_size)), 32 * WR * KS, stream, a.pdl != 0, smem_bytes, a.cluster_size};
    return half ? launch<tiled_kernel<WR, KS, TR, TC, true, Of>>(how, a, of) : launch<tiled_kernel<WR, KS, TR, TC, false, Of>>(how, a, of);
}

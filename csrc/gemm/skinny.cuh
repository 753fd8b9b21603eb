// W4A16 for few tokens (M <= 16), limited by the memory bandwidth of the weights.
//
// One block per SM, each with an equal share of the row tiles (and, in a cluster, of the columns). The work of a block is a sequence of
// steps of 32 G rows x 128 columns, ordered by (group of rows, column); its 16 warps take equal parts of the sequence. Each warp has one or
// two pipeline stages in shared memory, each for 32 rows of a step, filled by bulk copies that the warp issues itself, so no warp waits for
// another one before the end. A warp loads a stage into registers, issues the next copy into the same stage, and then decodes into
// mma's A fragments. One stage is usually enough to keep the memory busy: more data in flight at the end arrives at the same time and is
// then decoded after the last byte. The activations are mma's B fragments, loaded through the L1 once for the G pairs of row tiles of a
// step. A warp writes partial sums to shared memory when it finishes its part of a group. They are added in a fixed order at the end, also
// across a cluster, so results repeat to the bit. The tensor scale is applied there, once, in fp32.
#pragma once
#include <type_traits>

#include "gemm/numerics.cuh"

constexpr int kSkinnyWarps = 16;

struct SkinnyArgs {
    const uint8_t *packed;
    const uint16_t *x;
    void *out;
    int64_t ldx, n;
    float scale;
    int m, k, tiles, chunks, cluster_size, out_type, pdl;
    uint32_t zero;  // 0; the compiler must not know its value
    // quotients from the host: an integer division takes 0.1 microseconds per block, and the whole launch takes 10
    int log_cluster, tiles_each, tiles_more, chunks_each, chunks_more;
    uint32_t by_chunks[2], by_m;  // ceil(2^32 / d) for d = chunks_each, chunks_each + 1 and m
};

// Shared memory of a block: pipeline stages, their barriers, partial sums [group + warp][token][kPitch], and in a cluster the sums that
// the blocks exchange [rank][item][32].
template <int NT, int G, int STAGES>
struct SkinnyShape {
    static constexpr int kStageBytes = 2 * kChunk, kRing = STAGES * (kStageBytes + 8);
    static constexpr int kPitch = 32 * G + 4, kSlot = 8 * NT * kPitch;
    static constexpr int kChains = NT == 1 ? 2 : 1;  // independent sums, to hide the latency of mma
    // Groups of a block with this number of row tiles. A block may begin in the middle of a pair; then no block has one tile more.
    AQ_HD static int groups(int tiles) { return ((tiles + 1) / 2 + G - 1) / G; }
    static int64_t bytes(int m, int64_t groups, int cluster_size) {
        return (int64_t)kSkinnyWarps * kRing + (groups + kSkinnyWarps) * kSlot * 4 +
               (cluster_size > 1 ? (groups * m * G + cluster_size) * 128 : 0);
    }
};

// ceil(2^32 / d); 0 means d = 1, because 2^32 does not fit
inline uint32_t reciprocal(int d) { return d <= 1 ? 0u : (uint32_t)(((1ull << 32) + (unsigned)d - 1) / (unsigned)d); }
// x / d from the host's reciprocal(d): exact for x * d < 2^32
__device__ __forceinline__ int divide(int x, uint32_t reciprocal) { return reciprocal ? (int)__umulhi((uint32_t)x, reciprocal) : x; }

// ---- a warp's own pipeline: the warp issues copies for itself, before sm_90 with all its lanes ----
__device__ __forceinline__ void pipeline_init(uint32_t bars, int count) {
#if AQ_HOPPER
    if ((threadIdx.x & 31) < count) mbarrier_init(bars + (threadIdx.x & 31) * 8, 1);
    mbarrier_init_fence();
    async_fence_shared();
    __syncwarp();
#endif
}
__device__ __forceinline__ void pipeline_copy(uint32_t to, const uint8_t *from, uint32_t bytes, uint32_t bar) {
    const uint32_t lane = threadIdx.x & 31;
#if AQ_HOPPER
    if (lane == 0) {
        mbarrier_expect(bar, bytes);
        if (bytes) bulk_copy<true>(to, from, bytes, bar);
    }
#else
    for (uint32_t at = lane * 16; at < bytes; at += 512) copy_async16(to + at, from + at, 16);
#endif
}
__device__ __forceinline__ void pipeline_commit() {
#if !AQ_HOPPER
    copy_async_commit();
#endif
}
template <int STAGES>
__device__ __forceinline__ void pipeline_wait(uint32_t bar, uint32_t parity) {
#if AQ_HOPPER
    mbarrier_wait(bar, parity);
#else
    copy_async_wait<STAGES - 1>();  // of two stages in flight, the older one must be complete
    __syncwarp();
#endif
}

// A lane's part of a stage: its words of the two row tiles and their scales.
struct SkinnyCodes {
    uint4 words[2][2];  // [row tile][64 columns]
    uint32_t scales[2];
    __device__ __forceinline__ void read(uint32_t stage, int lane) {
#pragma unroll
        for (int r = 0; r < 2; r++) scales[r] = load_shared4(stage + lane * 4 + r * kChunk + kCodes);
#pragma unroll
        for (int q = 0; q < 2; q++)
#pragma unroll
            for (int r = 0; r < 2; r++) words[r][q] = load_shared16(stage + lane * 16 + r * kChunk + q * 512);
    }
    // Returns 0 after every lane has read its bytes. A copy whose address depends on it cannot start before the reads are complete.
    __device__ __forceinline__ uint32_t all_read(uint32_t zero) const {
        const uint32_t some = scales[0] | scales[1] | words[0][0].x | words[0][1].x | words[1][0].x | words[1][1].x;
        __syncwarp();  // orders the lanes' reads; only their values show that they are complete
        return (uint32_t)__any_sync(~0u, (some & zero) != 0);
    }
    // sums += weights of 64 columns x activations: [row tile][chain][8 tokens][register], xs [16 bytes of 32][8 tokens].
    template <bool HALF, int CHAINS, int NT>
    __device__ __forceinline__ void multiply(int q, const uint4 (&xs)[2][NT], float (&sums)[2][CHAINS][NT][4]) const {
        uint32_t s[2][2];
#pragma unroll
        for (int r = 0; r < 2; r++) s[r][0] = scale_pair(scales[r], q * 2), s[r][1] = scale_pair(scales[r], q * 2 + 1);
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const uint4 &w = words[r][q];
                uint32_t f[4];
                decode8(i == 0 ? w.x : i == 1 ? w.y : i == 2 ? w.z : w.w, s[r][0], s[r][1], f);
                if (HALF)
#pragma unroll
                    for (int j = 0; j < 4; j++) f[j] = bf16x2_to_f16x2(f[j]);
#pragma unroll
                for (int t = 0; t < NT; t++) {
                    const uint4 &v = xs[i >> 1][t];
                    mma_m16n8k16<HALF>(sums[r][i % CHAINS][t], f, i & 1 ? v.z : v.x, i & 1 ? v.w : v.y);
                }
            }
    }
};

// NT: 1 for 8 tokens, 2 for 16; G: pairs of row tiles per step; WHOLE: K is a multiple of a chunk.
template <int NT, bool HALF, int G, int STAGES, bool WHOLE>
__global__ void __launch_bounds__(32 * kSkinnyWarps, 1) skinny_kernel(const SkinnyArgs a) {
    using Shape = SkinnyShape<NT, G, STAGES>;
    constexpr int kWarps = kSkinnyWarps, kStageBytes = Shape::kStageBytes, kPitch = Shape::kPitch, kSlot = Shape::kSlot,
                  kChains = Shape::kChains;
    extern __shared__ __align__(128) uint8_t smem[];
    const int lane = threadIdx.x & 31, warp = __shfl_sync(~0u, (int)threadIdx.x >> 5, 0);
    const uint32_t ring = smem_at(smem) + warp * (STAGES * kStageBytes),
                   bars = smem_at(smem) + kWarps * STAGES * kStageBytes + warp * (STAGES * 8);
    float *slots = (float *)(smem + kWarps * Shape::kRing);
    pipeline_init(bars, STAGES);
#if AQ_HOPPER
    if (a.cluster_size > 1) cluster_arrive_relaxed();
#endif

    const int rank = a.cluster_size > 1 ? (int)cluster_rank() : 0, cluster = blockIdx.x >> a.log_cluster;
    const int tile0 = cluster * a.tiles_each + min(cluster, a.tiles_more), tile1 = tile0 + a.tiles_each + (cluster < a.tiles_more);
    const int pair0 = tile0 >> 1, groups = (((tile1 + 1) >> 1) - pair0 + G - 1) / G;
    const int chunk0 = rank * a.chunks_each + min(rank, a.chunks_more), wide = rank < a.chunks_more, chunks = a.chunks_each + wide;
    const int total_steps = groups * chunks;
    const int begin = total_steps * warp / kWarps, end = total_steps * (warp + 1) / kWarps;
    int group = chunks ? divide(begin, wide ? a.by_chunks[1] : a.by_chunks[0]) : 0,
        chunk = begin - group * chunks;  // of the step computed next

    // Only this block's tiles of a pair are fetched; results from the other tile's old bytes are not stored.
    int fetch_group = group, fetch_left = 0, to_fetch = end - begin;
    int stride[G], bytes[G], skip[G];
    const uint8_t *from[G];
    const auto seek = [&](int at_chunk) {
#pragma unroll
        for (int h = 0; h < G; h++) {
            const int pair = pair0 + fetch_group * G + h, first = max(tile0, 2 * pair);
            bytes[h] = max(0, min(tile1, 2 * pair + 2) - first) * kChunk;
            skip[h] = (first & 1) * kChunk;
            from[h] = a.packed + chunk_at(first, chunk0 + at_chunk, a.tiles, a.chunks);
            stride[h] = tiles_in_block(first / kBlockTiles, a.tiles) * kChunk;
        }
        fetch_left = chunks - at_chunk;
    };
    const auto fetch = [&](auto which, uint32_t stage, uint32_t bar) {
        constexpr int h = decltype(which)::value;
        pipeline_copy(stage + skip[h], from[h], bytes[h], bar);
        from[h] += stride[h];
        if (h == G - 1) {
            to_fetch--;
            if (--fetch_left == 0 && to_fetch) fetch_group++, seek(0);
        }
    };
    constexpr std::integral_constant<int, 0> kFirst;
    constexpr std::integral_constant<int, G - 1> kLast;
    if (to_fetch) seek(chunk), fetch(kFirst, ring, bars);
    pipeline_commit();
    if (STAGES == 2) {
        if (to_fetch) fetch(kLast, ring + kStageBytes, bars + 8);
        pipeline_commit();
    }
    if (a.pdl) {  // weights do not depend on the previous kernel; activations and the output do
        allow_next_kernel();
        wait_for_previous_kernel();
    }

    const int g = lane >> 2, l = lane & 3;
    const int last = a.chunks - 1 - chunk0;  // unless WHOLE, the chunk that is partly filled
    const uint16_t *x_row[NT], *x[NT];       // a lane without a token reads the last token; its column is not stored
#pragma unroll
    for (int t = 0; t < NT; t++) {
        x_row[t] = a.x + min(8 * t + g, a.m - 1) * a.ldx + chunk0 * kCols + l * 16;
        x[t] = x_row[t] + chunk * kCols;
    }
    uint4 xs[2][2][NT];  // [64 columns][16 bytes of 32][8 tokens]
    const auto load_x = [&](int q, int of_chunk) {
        if (WHOLE || of_chunk != last) {
#pragma unroll
            for (int t = 0; t < NT; t++)
#pragma unroll
                for (int i = 0; i < 2; i++) xs[q][i][t] = load_global16(x[t] + q * 64 + i * 8);
        } else {  // zeros beyond K: the padded codes are zeros, but 0 * NaN is not 0
            const bool there = (chunk0 + of_chunk) * kCols + q * 64 + l * 16 < a.k;
#pragma unroll
            for (int t = 0; t < NT; t++)
#pragma unroll
                for (int i = 0; i < 2; i++) xs[q][i][t] = there ? load_global16(x[t] + q * 64 + i * 8) : make_uint4(0, 0, 0, 0);
        }
    };
    if (begin < end) load_x(0, chunk), load_x(1, chunk);

    float acc[G][2][kChains][NT][4] = {};
    const auto flush = [&]() {
        float *to = slots + (group + warp) * kSlot + 2 * l * kPitch + g;
#pragma unroll
        for (int h = 0; h < G; h++)
#pragma unroll
            for (int r = 0; r < 2; r++)
#pragma unroll
                for (int t = 0; t < NT; t++)
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        float sum = acc[h][r][0][t][i];
                        if (kChains == 2) sum += acc[h][r][kChains - 1][t][i];
                        to[(8 * t + (i & 1)) * kPitch + 32 * h + 16 * r + 8 * (i >> 1)] = sum;
#pragma unroll
                        for (int c = 0; c < kChains; c++) acc[h][r][c][t][i] = 0.f;
                    }
    };
    uint32_t stage = ring, bar = bars, parity = 0;
    const auto half_step = [&](auto which, int next, bool more) {  // one pair of row tiles; the last pair of a step reloads the activations
        constexpr int h = decltype(which)::value;
        pipeline_wait<STAGES>(bar, parity);
        SkinnyCodes codes;
        codes.read(stage, lane);
        if (to_fetch) fetch(std::integral_constant<int, (h + STAGES) % G>{}, stage + codes.all_read(a.zero), bar);
        pipeline_commit();
        if (STAGES == 1 || stage != ring) stage = ring, bar = bars, parity ^= 1;
        else stage += kStageBytes, bar += 8;
#pragma unroll
        for (int q = 0; q < 2; q++) {
            codes.multiply<HALF, kChains>(q, xs[q], acc[h]);
            if (h == G - 1 && more) load_x(q, next);
        }
    };
#pragma unroll 1
    for (int left = end - begin; left; left--) {
        const int next = chunk + 1 == chunks ? 0 : chunk + 1;
#pragma unroll
        for (int t = 0; t < NT; t++) x[t] = next ? x[t] + kCols : x_row[t];
        if (G == 2) half_step(kFirst, next, true);
        half_step(kLast, next, left > 1);
        chunk = next;
        if (!next) {
            flush();
            group++;
        }
    }
    if (begin < end && chunk != 0) flush();
    __syncthreads();

    // A warp adds the partial sums of 32 rows of a token in order, and stores the result or sends it to the block that adds all ranks.
    const int items = groups * a.m * G, each = (items + a.cluster_size - 1) >> a.log_cluster;
    float *peer_sums = slots + (Shape::groups(a.tiles_each + (a.tiles_more > 0)) + kWarps) * kSlot;
    const auto store = [&](int item, float sum) {
        const int u = item / G, t = divide(u, a.by_m), token = u - t * a.m;
        const int n = (pair0 + t * G + item % G) * 32 + lane;
        if (n >= tile0 * kRows && n < tile1 * kRows && n < a.n) store_typed(a.out, token * a.n + n, sum * a.scale, a.out_type);
    };
    const int lane_begin = total_steps * lane / kWarps,
              lane_end = total_steps * (lane + 1) / kWarps;  // lane i has warp i's part of the sequence
#if AQ_HOPPER
    if (a.cluster_size > 1) cluster_wait();  // every block of the cluster has started
#endif
    for (int e = warp; e < items; e += kWarps) {
        const int u = e / G, t = divide(u, a.by_m), token = u - t * a.m;
        const uint32_t contributors = __ballot_sync(~0u, max(lane_begin, t * chunks) < min(lane_end, t * chunks + chunks));
        const float *from_slot = slots + t * kSlot + token * kPitch + e % G * 32 + lane;
        float sum = 0.f;
#pragma unroll
        for (int w = 0; w < kWarps; w++)
            if (contributors >> w & 1) sum += from_slot[w * kSlot];
        if (a.cluster_size == 1) {
            store(e, sum);
        } else {
            int owner = 0, mine = e;
            while (mine >= each) mine -= each, owner++;
#if AQ_HOPPER
            store_peer4(peer_at(smem_at(peer_sums + (rank * each + mine) * 32 + lane), owner), sum);
#endif
        }
    }
    if (a.cluster_size == 1) return;
#if AQ_HOPPER
    cluster_arrive();
    cluster_wait();
#endif
    for (int e = warp; e < each && rank * each + e < items; e += kWarps) {
        float sum = 0.f;
        for (int peer = 0; peer < a.cluster_size; peer++) sum += peer_sums[(peer * each + e) * 32 + lane];
        store(rank * each + e, sum);
    }
}

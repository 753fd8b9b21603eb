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
#include "gemm/skinny_warp.cuh"

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
    static constexpr int kSlot = SkinnySums<NT, G>::kSlot;
    // Groups of a block with this number of row tiles. A block may begin in the middle of a pair; then no block has one tile more.
    AQ_HD static int groups(int tiles) { return ((tiles + 1) / 2 + G - 1) / G; }
    static int64_t bytes(int m, int64_t groups, int cluster_size) {
        return (int64_t)kSkinnyWarps * kRing + (groups + kSkinnyWarps) * kSlot * 4 +
               (cluster_size > 1 ? (groups * m * G + cluster_size) * 128 : 0);
    }
};

// What a block computes: the row tiles tile0 .. tile1 - 1 and `chunks` column chunks from chunk0 on, in steps of G pairs of row tiles (a
// group) x one chunk.
template <int G>
struct SkinnyShare {
    int rank, tile0, tile1, pair0, groups, chunk0, chunks, steps;
    bool wide;  // has one chunk more than the ranks after it

    __device__ __forceinline__ explicit SkinnyShare(const SkinnyArgs &a) {
        rank = a.cluster_size > 1 ? (int)cluster_rank() : 0;
        const int cluster = blockIdx.x >> a.log_cluster;
        tile0 = cluster * a.tiles_each + min(cluster, a.tiles_more), tile1 = tile0 + a.tiles_each + (cluster < a.tiles_more);
        pair0 = tile0 >> 1, groups = (((tile1 + 1) >> 1) - pair0 + G - 1) / G;
        chunk0 = rank * a.chunks_each + min(rank, a.chunks_more), wide = rank < a.chunks_more, chunks = a.chunks_each + wide;
        steps = groups * chunks;
    }
    // The steps of a warp end where those of the next one begin.
    __device__ __forceinline__ int begin(int warp) const { return steps * warp / kSkinnyWarps; }
};

// The copies that a warp issues for itself. Only this block's tiles of a pair are copied; results from the other tile's old bytes are not
// stored.
template <int G>
struct SkinnyCopies {
    int group, chunks = 0, steps;   // of the next copy; left to copy, of this group and of all
    int stride[G], bytes[G], skip;  // skip: of a pair's stage; only the block's first pair can have one tile of another block before it
    const uint8_t *from[G];

    __device__ __forceinline__ void seek(const SkinnyArgs &a, const SkinnyShare<G> &share, int chunk) {
        const int tile0 = share.tile0, tile1 = share.tile1, pair0 = share.pair0 + group * G;
#pragma unroll
        for (int h = 0; h < G; h++) {
            const int pair = pair0 + h, first = max(tile0, 2 * pair);
            bytes[h] = max(0, min(tile1, 2 * pair + 2) - first) * kChunk;
            if (h == 0) skip = (first & 1) * kChunk;
            from[h] = a.packed + chunk_at(first, share.chunk0 + chunk, a.tiles, a.chunks);
            stride[h] = tiles_in_block(first / kBlockTiles, a.tiles) * kChunk;
        }
        chunks = share.chunks - chunk;
    }
    // Copy pair PAIR of the group; after the last pair go on to the next step.
    template <int PAIR>
    __device__ __forceinline__ void issue(const SkinnyArgs &a, const SkinnyShare<G> &share, uint32_t stage, uint32_t bar) {
        pipeline_copy(PAIR == 0 ? stage + skip : stage, from[PAIR], bytes[PAIR], bar);
        from[PAIR] += stride[PAIR];
        if (PAIR == G - 1) {
            steps--;
            if (--chunks == 0 && steps) group++, seek(a, share, 0);
        }
    }
};

// The stage that a warp reads next, of STAGES with a barrier each.
template <int STAGES>
struct SkinnyStage {
    uint32_t at, bar, parity = 0;

    __device__ __forceinline__ void advance(uint32_t ring, uint32_t bars) {
        if (STAGES == 1 || at != ring) at = ring, bar = bars, parity ^= 1;
        else at += 2 * kChunk, bar += 8;
    }
};

// Multiply one pair of row tiles, and refill its stage. The last pair of a step loads the activations of chunk `next` if there is another step.
template <int PAIR, bool HALF, int NT, int G, int STAGES, bool WHOLE>
__device__ __forceinline__ void multiply_pair(const SkinnyArgs &a, const SkinnyShare<G> &share, uint32_t ring, uint32_t bars, int lane,
                                              int next, bool more, SkinnyStage<STAGES> &stage, SkinnyCopies<G> &copies,
                                              SkinnyTokens<NT, WHOLE> &x, SkinnySums<NT, G> &sums) {
    mbarrier_wait(stage.bar, stage.parity);
    SkinnyCodes codes;
    codes.read(stage.at, lane);
    if (copies.steps) copies.template issue<(PAIR + STAGES) % G>(a, share, stage.at + codes.all_read(a.zero), stage.bar);
    stage.advance(ring, bars);
#pragma unroll
    for (int q = 0; q < 2; q++) {
        codes.multiply<HALF, sums.kChains>(q, x.values[q], sums.values[PAIR]);
        if (PAIR == G - 1 && more) x.load(q, next);
    }
}

// Store the result of item `item` = (group of rows, token, pair of row tiles); this lane has one of its 32 rows.
template <int G>
__device__ __forceinline__ void skinny_store(const SkinnyArgs &a, const SkinnyShare<G> &share, int item, int lane, float sum) {
    const int u = item / G, t = divide(u, a.by_m), token = u - t * a.m;
    const int n = (share.pair0 + t * G + item % G) * 32 + lane;
    if (n >= share.tile0 * kRows && n < share.tile1 * kRows && n < a.n) store_typed(a.out, token * a.n + n, sum * a.scale, a.out_type);
}

// Add the partial sums of all warps in order, a warp those of 32 rows of a token (an item), and store the result; in a cluster send it to the
// item's owner, the block that adds the sums of all ranks.
template <int NT, int G, int STAGES>
__device__ __forceinline__ void skinny_reduce(const SkinnyArgs &a, const SkinnyShare<G> &share, float *slots, int warp, int lane) {
    using Shape = SkinnyShape<NT, G, STAGES>;
    constexpr int kSlot = Shape::kSlot, kPitch = SkinnySums<NT, G>::kPitch;
    const int items = share.groups * a.m * G, each = (items + a.cluster_size - 1) >> a.log_cluster;
    float *peer_sums = slots + (Shape::groups(a.tiles_each + (a.tiles_more > 0)) + kSkinnyWarps) * kSlot;
    const int lane_begin = share.begin(lane), lane_end = share.begin(lane + 1);  // lane i has warp i's part of the steps
    if (a.cluster_size > 1) cluster_wait();                                      // every block of the cluster has started
    for (int item = warp; item < items; item += kSkinnyWarps) {
        const int u = item / G, t = divide(u, a.by_m), token = u - t * a.m;
        const uint32_t contributors =
            __ballot_sync(~0u, max(lane_begin, t * share.chunks) < min(lane_end, t * share.chunks + share.chunks));
        const float *from = slots + t * kSlot + token * kPitch + item % G * 32 + lane;
        float sum = 0.f;
#pragma unroll
        for (int w = 0; w < kSkinnyWarps; w++)
            if (contributors >> w & 1) sum += from[w * kSlot];
        if (a.cluster_size == 1) {
            skinny_store(a, share, item, lane, sum);
        } else {
            int owner = 0, mine = item;
            while (mine >= each) mine -= each, owner++;
            store_peer4(peer_at(smem_at(peer_sums + (share.rank * each + mine) * 32 + lane), owner), sum);
        }
    }
    if (a.cluster_size == 1) return;
    cluster_arrive();
    cluster_wait();
    const int first = share.rank * each, count = min(each, items - first);
#pragma unroll 1
    for (int mine = warp; mine < count; mine += kSkinnyWarps) {
        float sum = 0.f;
        for (int peer = 0; peer < a.cluster_size; peer++) sum += peer_sums[(peer * each + mine) * 32 + lane];
        skinny_store(a, share, first + mine, lane, sum);
    }
}

// NT: 1 for 8 tokens, 2 for 16; G: pairs of row tiles per step; WHOLE: K is a multiple of a chunk.
template <int NT, bool HALF, int G, int STAGES, bool WHOLE>
__global__ void __launch_bounds__(32 * kSkinnyWarps, 1) skinny_kernel(const SkinnyArgs a) {
    using Shape = SkinnyShape<NT, G, STAGES>;
    extern __shared__ __align__(128) uint8_t smem[];
    const int lane = threadIdx.x & 31, warp = __shfl_sync(~0u, (int)threadIdx.x >> 5, 0);
    const uint32_t ring = smem_at(smem) + warp * (STAGES * Shape::kStageBytes),
                   bars = smem_at(smem) + kSkinnyWarps * STAGES * Shape::kStageBytes + warp * (STAGES * 8);
    float *slots = (float *)(smem + kSkinnyWarps * Shape::kRing);
    pipeline_init(bars, STAGES);
    if (a.cluster_size > 1) cluster_arrive_relaxed();

    const SkinnyShare<G> share(a);
    const int begin = share.begin(warp), end = share.begin(warp + 1);
    int group = share.chunks ? divide(begin, share.wide ? a.by_chunks[1] : a.by_chunks[0]) : 0,
        chunk = begin - group * share.chunks;  // of the next step

    SkinnyCopies<G> copies;
    copies.group = group, copies.steps = end - begin;
    if (copies.steps) copies.seek(a, share, chunk), copies.template issue<0>(a, share, ring, bars);
    if (STAGES == 2) {
        if (copies.steps) copies.template issue<G - 1>(a, share, ring + Shape::kStageBytes, bars + 8);
    }
    if (a.pdl) {  // weights do not depend on the previous kernel; activations and the output do
        allow_next_kernel();
        wait_for_previous_kernel();
    }

    const int g = lane >> 2, l = lane & 3;
    SkinnyTokens<NT, WHOLE> x;
    x.last = a.chunks - 1 - share.chunk0, x.columns = a.k - share.chunk0 * kCols - l * 16;
#pragma unroll
    for (int t = 0; t < NT; t++)  // a lane without a token reads the last token; its column is not stored
        x.at[t] = a.x + min(8 * t + g, a.m - 1) * a.ldx + (share.chunk0 + chunk) * kCols + l * 16;
    if (begin < end) x.load(0, chunk), x.load(1, chunk);

    SkinnySums<NT, G> sums;
    SkinnyStage<STAGES> stage{ring, bars};
#pragma unroll 1
    for (int left = end - begin; left; left--) {
        const int next = chunk + 1 == share.chunks ? 0 : chunk + 1;
        x.move(next ? kCols : (1 - share.chunks) * kCols);
        if (G == 2) multiply_pair<0, HALF>(a, share, ring, bars, lane, next, true, stage, copies, x, sums);
        multiply_pair<G - 1, HALF>(a, share, ring, bars, lane, next, left > 1, stage, copies, x, sums);
        chunk = next;
        if (!next) {
            sums.drain_to(slots + (group + warp) * Shape::kSlot + 2 * l * sums.kPitch + g);
            group++;
        }
    }
    if (begin < end && chunk != 0) sums.drain_to(slots + (group + warp) * Shape::kSlot + 2 * l * sums.kPitch + g);
    __syncthreads();
    skinny_reduce<NT, G, STAGES>(a, share, slots, warp, lane);
}

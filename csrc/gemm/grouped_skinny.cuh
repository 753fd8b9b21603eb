// W4A16 products of a mixture's experts for few tokens per expert, limited by the memory bandwidth of the weights of the chosen experts.
//
// The grid is one block per SM. The work is a sequence of steps of 32 G rows x 128 columns, ordered by (tile of tokens, group of rows,
// column); blocks get equal shares of its groups, and the warps of a block equal parts of the block's steps. So no warp waits between
// the products of two experts, and all SMs end at about the same time, whatever the router chose. A warp's pipeline is that of the dense
// kernel (skinny.cuh): it issues its own bulk copies, and refills a stage when the bytes are in registers.
// A group that a warp computes whole is stored from its registers. Where a part begins or ends within a group, the partial sums go to
// shared memory and are added at the end in the order of K: results repeat to the bit for the same alignment.
#pragma once
#include "gemm/skinny_warp.cuh"

struct GroupedSkinnyArgs {
    const uint8_t *packed;
    const uint16_t *x;
    void *out;
    const float *scales;
    const int32_t *sorted_pairs, *tile_experts, *padded;
    int64_t ldx, n, expert_bytes;
    float scale;
    int pairs, experts, most_tiles, k, tiles, chunks, groups, pdl;  // groups: of one tile of tokens
    uint32_t zero;                                                  // 0; the compiler must not know its value
    uint32_t by_chunks, by_groups, by_blocks, by_top_k;             // reciprocals (skinny_warp.cuh)
};

// Shared memory of a block: each warp's one pipeline stage, in which it leaves the sums of a group that it only began; the sums of a group
// that it did not begin; which pairs and which scale the begun group has; the barriers.
template <int NT, int G>
struct GroupedSkinnyShape {
    static constexpr int kWarps = NT == 4 ? 12 : 16, kTokens = 8 * NT, kStageBytes = 2 * kChunk, kPitch = SkinnySums<NT, G>::kPitch,
                         kSlotBytes = SkinnySums<NT, G>::kSlot * 4;
    static constexpr int kStage = kStageBytes > kSlotBytes ? kStageBytes : kSlotBytes;
    static constexpr int kHeads = kWarps * kStage, kTables = kHeads + kWarps * kSlotBytes, kTable = kTokens + 1;
    static constexpr int kBarriers = (kTables + kWarps * kTable * 4 + 7) / 8 * 8, kBytes = kBarriers + kWarps * 8;
    static_assert(kStage % 128 == 0);

    // Of a warp's part: the sums of the group that it only began, and of the group that it did not begin; of the begun group each token's pair,
    // and then its scale.
    static __device__ __forceinline__ float *begun(uint8_t *smem, int warp) { return (float *)(smem + warp * kStage); }
    static __device__ __forceinline__ float *ended(uint8_t *smem, int warp) { return (float *)(smem + kHeads + warp * kSlotBytes); }
    static __device__ __forceinline__ int *table(uint8_t *smem, int warp) { return (int *)(smem + kTables) + warp * kTable; }
};

// The copies that a warp issues for itself: pairs of row tiles of one group, chunk by chunk, then of the next group or tile of tokens.
template <int G>
struct GroupedCopies {
    int tile, group, chunks = 0, stride = 0, second_bytes = 0, steps;  // tile, group: of the next copy; chunks and steps: left to copy
    const uint8_t *from;

    __device__ __forceinline__ void seek(const GroupedSkinnyArgs &a, int chunk) {
        const int expert = a.tile_experts[tile], first = 2 * G * group;
        // of an expert of another rank nothing is stored
        from =
            a.packed + ((unsigned)expert < (unsigned)a.experts ? expert : 0) * a.expert_bytes + chunk_at(first, chunk, a.tiles, a.chunks);
        stride = tiles_in_block(first / kBlockTiles, a.tiles) * kChunk;
        second_bytes = first + 2 < a.tiles ? 2 * kChunk : 0;
        chunks = a.chunks - chunk;
    }
    template <int PAIR>
    __device__ __forceinline__ void issue(const GroupedSkinnyArgs &a, uint32_t stage, uint32_t bar) {
        pipeline_copy(stage, from + PAIR * 2 * kChunk, PAIR ? second_bytes : 2 * kChunk, bar);
        if (PAIR == G - 1) {
            from += stride;
            steps--;
            if (--chunks == 0 && steps) {
                if (++group == a.groups) group = 0, tile++;
                seek(a, 0);
            }
        }
    }
};

// The tokens of a tile, as this lane needs them: of token 8 t + lane / 4 its pair, -1 if nothing is stored, and the factor of the sums.
template <int NT>
struct GroupedTile {
    int pair[NT] = {};
    float scale = 0.f;

    // Read tile `tile`, and set rows to its rows of x.
    __device__ __forceinline__ void enter(const GroupedSkinnyArgs &a, int tile, int lane, const uint16_t *(&rows)[NT]) {
        const int expert = a.tile_experts[tile], g = lane >> 2, l = lane & 3;
        const bool here = (unsigned)expert < (unsigned)a.experts;
        int row0 = 0;
#pragma unroll
        for (int t = 0; t < NT; t++) {
            const int entry = a.sorted_pairs[tile * 8 * NT + 8 * t + g];
            const bool there = (unsigned)entry < (unsigned)a.pairs;
            const int row = there ? divide(entry, a.by_top_k) : 0;
            if (t == 0) row0 = __shfl_sync(~0u, row, 0);
            pair[t] = there && here ? entry : -1;
            rows[t] = a.x + (there ? row : row0) * a.ldx + l * 16;  // without a token: a row that is read anyway
        }
        scale = here ? a.scales[expert] * a.scale : 0.f;
    }
};

// Store a group that this warp has computed whole.
template <bool HALF, int NT, int G>
__device__ __forceinline__ void store_group(const GroupedSkinnyArgs &a, const GroupedTile<NT> &tile, int group, int lane,
                                            SkinnySums<NT, G> &sums) {
    using Out = std::conditional_t<HALF, __half, __nv_bfloat16>;
    int of_token[NT][2];
#pragma unroll
    for (int t = 0; t < NT; t++)
#pragma unroll
        for (int j = 0; j < 2; j++) of_token[t][j] = __shfl_sync(~0u, tile.pair[t], (2 * (lane & 3) + j) * 4);
    sums.drain([&](int h, int r, int t, int i, float sum) {
        const int p = of_token[t][i & 1];
        const int64_t row = (int64_t)(group * G + h) * 32 + 16 * r + 8 * (i >> 1) + (lane >> 2);
        if (p >= 0 && row < a.n) store_as((Out *)a.out + p * a.n + row, sum * tile.scale);
    });
}

// Multiply one pair of row tiles, and refill the stage. The last pair of a step loads the activations of chunk `next` if there is another step.
template <int PAIR, bool HALF, int NT, int G, bool WHOLE>
__device__ __forceinline__ void multiply_pair(const GroupedSkinnyArgs &a, uint32_t stage, uint32_t bar, uint32_t &parity, int lane,
                                              int next, bool more, GroupedCopies<G> &copies, SkinnyTokens<NT, WHOLE> &x,
                                              SkinnySums<NT, G> &sums) {
    mbarrier_wait(bar, parity);
    SkinnyCodes codes;
    codes.read(stage, lane);
    if (copies.steps) copies.template issue<(PAIR + 1) % G>(a, stage + codes.all_read(a.zero), bar);
    parity ^= 1;
#pragma unroll
    for (int q = 0; q < 2; q++) {
        codes.multiply<HALF, sums.kChains>(q, x.values[q], sums.values[PAIR]);
        if (PAIR == G - 1 && more) x.load(q, next);
    }
}

// Add the parts of the group in which this warp's steps began, in the order of K, and store it; unless a warp before it began in the same
// group, too: that one adds it.
template <int NT, bool HALF, int G>
__device__ __forceinline__ void store_divided_group(const GroupedSkinnyArgs &a, uint8_t *smem, int group0, int total_steps, int warp,
                                                    int lane) {
    using Shape = GroupedSkinnyShape<NT, G>;
    using Out = std::conditional_t<HALF, __half, __nv_bfloat16>;
    constexpr int kWarps = Shape::kWarps;
    const int begin = total_steps * warp / kWarps, end = total_steps * (warp + 1) / kWarps;
    const int of_block = divide(begin, a.by_chunks), start = of_block * a.chunks;
    if (begin == start || begin == end) return;
    const int lane_begin = total_steps * lane / kWarps,
              lane_end = total_steps * (lane + 1) / kWarps;  // lane i has warp i's part of the steps
    const uint32_t contributors = __ballot_sync(~0u, lane < kWarps && max(lane_begin, start) < min(lane_end, start + a.chunks));
    const uint32_t others = contributors & (contributors - 1);
    if (__ffs((int)others) - 1 != warp) return;
    const int owner = __ffs((int)contributors) - 1;  // began the group
    const int64_t row0 = (int64_t)(group0 + of_block - divide(group0 + of_block, a.by_groups) * a.groups) * G * 32;
    const int *pairs = Shape::table(smem, owner);
    const float scale = __int_as_float(pairs[Shape::kTokens]);
#pragma unroll 1
    for (int token = 0; token < Shape::kTokens; token++) {
        const int p = pairs[token];
        if (p < 0) continue;
#pragma unroll
        for (int h = 0; h < G; h++) {
            const int at = token * Shape::kPitch + 32 * h + lane;
            float sum = Shape::begun(smem, owner)[at];
#pragma unroll
            for (int w = 1; w < kWarps; w++)
                if (others >> w & 1) sum += Shape::ended(smem, w)[at];
            if (row0 + 32 * h + lane < a.n) store_as((Out *)a.out + p * a.n + row0 + 32 * h + lane, sum * scale);
        }
    }
}

// NT: tokens of a tile / 8; G: pairs of row tiles per step; WHOLE: K is a multiple of a chunk.
template <int NT, bool HALF, int G, bool WHOLE>
__global__ void __launch_bounds__(32 * GroupedSkinnyShape<NT, G>::kWarps, 1) grouped_skinny_kernel(const GroupedSkinnyArgs a) {
    using Shape = GroupedSkinnyShape<NT, G>;
    constexpr int kWarps = Shape::kWarps;
    extern __shared__ __align__(128) uint8_t smem[];
    const int lane = threadIdx.x & 31, warp = __shfl_sync(~0u, (int)threadIdx.x >> 5, 0);
    const uint32_t stage = smem_at(smem) + warp * Shape::kStage, bar = smem_at(smem) + Shape::kBarriers + warp * 8;
    pipeline_init(bar, 1);
    if (a.pdl) {
        allow_next_kernel();
        wait_for_previous_kernel();  // which may have made the alignment
    }

    const int all_groups = min(*a.padded / Shape::kTokens, a.most_tiles) * a.groups;
    const int each = divide(all_groups, a.by_blocks), more = all_groups - each * (int)gridDim.x;
    const int group0 = (int)blockIdx.x * each + min((int)blockIdx.x, more), groups = each + ((int)blockIdx.x < more);
    const int total_steps = groups * a.chunks;
    const int begin = total_steps * warp / kWarps, end = total_steps * (warp + 1) / kWarps;
    const int first_group = group0 + divide(begin, a.by_chunks);
    int tile = divide(first_group, a.by_groups), group = first_group - tile * a.groups;  // of the step computed next; group: in the tile
    int chunk = begin - (first_group - group0) * a.chunks;

    GroupedCopies<G> copies;
    copies.tile = tile, copies.group = group, copies.steps = end - begin, copies.from = a.packed;
    if (copies.steps) copies.seek(a, chunk), copies.template issue<0>(a, stage, bar);

    GroupedTile<NT> tokens, next_tokens;
    SkinnyTokens<NT, WHOLE> x;
    x.last = a.chunks - 1, x.columns = a.k - (lane & 3) * 16;
    if (begin < end) {
        tokens.enter(a, tile, lane, x.at);
        x.move(chunk * kCols);
        x.load(0, chunk), x.load(1, chunk);
    }

    SkinnySums<NT, G> sums;
    const int offset = sums.offset(lane);
    uint32_t parity = 0;
    bool from_start = chunk == 0;  // whether this warp has computed the present group from its first column
#pragma unroll 1
    for (int left = end - begin; left; left--) {
        const int next = chunk + 1 == a.chunks ? 0 : chunk + 1;
        if (next == 0 && left > 1 && group + 1 == a.groups) next_tokens.enter(a, tile + 1, lane, x.at);
        else x.move(next ? kCols : (1 - a.chunks) * kCols);
        if (G == 2) multiply_pair<0, HALF>(a, stage, bar, parity, lane, next, true, copies, x, sums);
        multiply_pair<G - 1, HALF>(a, stage, bar, parity, lane, next, left > 1, copies, x, sums);
        chunk = next;
        if (next) continue;
        if (from_start) store_group<HALF>(a, tokens, group, lane, sums);
        else sums.drain_to(Shape::ended(smem, warp) + offset);
        from_start = true;
        if (++group == a.groups) group = 0, tile++, tokens = next_tokens;
    }
    if (begin < end && chunk) {
        __syncwarp();  // every lane has read the stage that may be reused
        sums.drain_to((from_start ? Shape::begun(smem, warp) : Shape::ended(smem, warp)) + offset);
        int *table = Shape::table(smem, warp);
        if ((lane & 3) == 0)
#pragma unroll
            for (int t = 0; t < NT; t++) table[8 * t + (lane >> 2)] = tokens.pair[t];
        if (lane == 0) table[Shape::kTokens] = __float_as_int(tokens.scale);
    }
    __syncthreads();
    store_divided_group<NT, HALF, G>(a, smem, group0, total_steps, warp, lane);
}

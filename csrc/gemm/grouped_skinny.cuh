// W4A16 products of a mixture's experts for few tokens per expert, limited by the memory bandwidth of the weights of the chosen experts.
//
// The grid is one block per SM. The work is a sequence of steps of 32 G rows x 128 columns, ordered by (tile of tokens, group of rows,
// column); blocks get equal shares of its groups, and the warps of a block equal parts of the block's steps. So no warp waits between
// the products of two experts, and all SMs end at about the same time, whatever the router chose. A warp's pipeline is that of the dense
// kernel (skinny.cuh): it issues its own bulk copies, and refills a stage when the bytes are in registers.
// A group that a warp computes whole is stored from its registers. Where a part begins or ends within a group, the partial sums go to
// shared memory and are added at the end in the order of K: results repeat to the bit for the same alignment.
#pragma once
#include "gemm/skinny.cuh"

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
    uint32_t by_chunks, by_groups, by_blocks, by_top_k;             // reciprocals (skinny.cuh)
};

// Shared memory of a block: each warp's one pipeline stage, in which it leaves the sums of a group that it only began; the sums of a group
// that it did not begin; which pairs and which scale the begun group has; the barriers.
template <int NT, int G>
struct GroupedSkinnyShape {
    static constexpr int kWarps = NT == 4 ? 12 : 16, kTokens = 8 * NT, kStageBytes = 2 * kChunk, kPitch = 32 * G + 4,
                         kSlotBytes = kTokens * kPitch * 4;
    static constexpr int kStage = kStageBytes > kSlotBytes ? kStageBytes : kSlotBytes;
    static constexpr int kHeads = kWarps * kStage, kTables = kHeads + kWarps * kSlotBytes, kTable = kTokens + 1;
    static constexpr int kBarriers = (kTables + kWarps * kTable * 4 + 7) / 8 * 8, kBytes = kBarriers + kWarps * 8;
    static constexpr int kChains = NT == 1 ? 2 : 1;  // independent sums, to hide the latency of mma
    static_assert(kStage % 128 == 0);
};

// NT: tokens of a tile / 8; G: pairs of row tiles per step; WHOLE: K is a multiple of a chunk.
template <int NT, bool HALF, int G, bool WHOLE>
__global__ void __launch_bounds__(32 * GroupedSkinnyShape<NT, G>::kWarps, 1) grouped_skinny_kernel(const GroupedSkinnyArgs a) {
    using Shape = GroupedSkinnyShape<NT, G>;
    using Out = std::conditional_t<HALF, __half, __nv_bfloat16>;
    constexpr int kWarps = Shape::kWarps, kStageBytes = Shape::kStageBytes, kPitch = Shape::kPitch, kChains = Shape::kChains,
                  kTokens = Shape::kTokens;
    extern __shared__ __align__(128) uint8_t smem[];
    const int lane = threadIdx.x & 31, warp = __shfl_sync(~0u, (int)threadIdx.x >> 5, 0);
    const uint32_t stage = smem_at(smem) + warp * Shape::kStage, bar = smem_at(smem) + Shape::kBarriers + warp * 8;
    const auto begun = [&](int of_warp) { return (float *)(smem + of_warp * Shape::kStage); };
    const auto ended = [&](int of_warp) { return (float *)(smem + Shape::kHeads + of_warp * Shape::kSlotBytes); };
    const auto table = [&](int of_warp) { return (int *)(smem + Shape::kTables) + of_warp * Shape::kTable; };
    pipeline_init(bar, 1);
    if (a.pdl) {
        allow_next_kernel();
        wait_for_previous_kernel();  // which may have made the alignment
    }

    const int all_groups = min(*a.padded / kTokens, a.most_tiles) * a.groups;
    const int each = divide(all_groups, a.by_blocks), more = all_groups - each * (int)gridDim.x;
    const int group0 = (int)blockIdx.x * each + min((int)blockIdx.x, more), groups = each + ((int)blockIdx.x < more);
    const int total_steps = groups * a.chunks;
    const int begin = total_steps * warp / kWarps, end = total_steps * (warp + 1) / kWarps;
    const int first_group = group0 + divide(begin, a.by_chunks);
    int tile = divide(first_group, a.by_groups), group = first_group - tile * a.groups;  // of the step computed next; group: in the tile
    int chunk = begin - (first_group - group0) * a.chunks;

    int fetch_tile = tile, fetch_group = group, fetch_left = 0, fetch_stride = 0, second_bytes = 0, to_fetch = end - begin;
    const uint8_t *from = a.packed;
    const auto seek = [&](int at_chunk) {
        const int expert = a.tile_experts[fetch_tile], first = 2 * G * fetch_group;
        // of an expert of another rank nothing is stored
        from = a.packed + ((unsigned)expert < (unsigned)a.experts ? expert : 0) * a.expert_bytes +
               chunk_at(first, at_chunk, a.tiles, a.chunks);
        fetch_stride = tiles_in_block(first / kBlockTiles, a.tiles) * kChunk;
        second_bytes = first + 2 < a.tiles ? kStageBytes : 0;
        fetch_left = a.chunks - at_chunk;
    };
    const auto fetch = [&](auto which, uint32_t to) {
        constexpr int h = decltype(which)::value;
        pipeline_copy(to, from + h * kStageBytes, h ? second_bytes : kStageBytes, bar);
        if (h == G - 1) {
            from += fetch_stride;
            to_fetch--;
            if (--fetch_left == 0 && to_fetch) {
                if (++fetch_group == a.groups) fetch_group = 0, fetch_tile++;
                seek(0);
            }
        }
    };
    constexpr std::integral_constant<int, 0> kFirst;
    constexpr std::integral_constant<int, G - 1> kLast;
    if (to_fetch) seek(chunk), fetch(kFirst, stage);
    pipeline_commit();

    const int g = lane >> 2, l = lane & 3;
    const uint16_t *x_row[NT] = {}, *x[NT] = {};
    int pair[NT] = {}, next_pair[NT] = {};  // of token 8 t + g of the tile; -1: nothing to store
    float scale = 0.f, next_scale = 0.f;
    // The tokens of a tile: their rows of x from now on; what its stores need, into two of the variables above.
    const auto enter = [&](int of_tile, int(&pair_of)[NT], float &scale_of) {
        const int expert = a.tile_experts[of_tile];
        const bool here = (unsigned)expert < (unsigned)a.experts;
        int row0 = 0;
#pragma unroll
        for (int t = 0; t < NT; t++) {
            const int entry = a.sorted_pairs[of_tile * kTokens + 8 * t + g];
            const bool there = (unsigned)entry < (unsigned)a.pairs;
            const int row = there ? divide(entry, a.by_top_k) : 0;
            if (t == 0) row0 = __shfl_sync(~0u, row, 0);
            pair_of[t] = there && here ? entry : -1;
            x_row[t] = a.x + (there ? row : row0) * a.ldx + l * 16;  // without a token: a row that is read anyway
        }
        scale_of = here ? a.scales[expert] * a.scale : 0.f;
    };
    uint4 xs[2][2][NT];  // [64 columns][16 bytes of 32][8 tokens]
    const auto load_x = [&](int q, int of_chunk) {
        if (WHOLE || of_chunk + 1 < a.chunks) {
#pragma unroll
            for (int t = 0; t < NT; t++)
#pragma unroll
                for (int i = 0; i < 2; i++) xs[q][i][t] = load_global16(x[t] + q * 64 + i * 8);
        } else {  // zeros beyond K: the padded codes are zeros, but 0 * NaN is not 0
            const bool there = of_chunk * kCols + q * 64 + l * 16 < a.k;
#pragma unroll
            for (int t = 0; t < NT; t++)
#pragma unroll
                for (int i = 0; i < 2; i++) xs[q][i][t] = there ? load_global16(x[t] + q * 64 + i * 8) : make_uint4(0, 0, 0, 0);
        }
    };
    if (begin < end) {
        enter(tile, pair, scale);
#pragma unroll
        for (int t = 0; t < NT; t++) x[t] = x_row[t] + chunk * kCols;
        load_x(0, chunk), load_x(1, chunk);
    }

    float acc[G][2][kChains][NT][4] = {};
    const auto each_sum = [&](auto &&take) {  // take(pair of row tiles, row tile, tokens / 8, register, sum)
#pragma unroll
        for (int h = 0; h < G; h++)
#pragma unroll
            for (int r = 0; r < 2; r++)
#pragma unroll
                for (int t = 0; t < NT; t++)
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        take(h, r, t, i, kChains == 2 ? acc[h][r][0][t][i] + acc[h][r][kChains - 1][t][i] : acc[h][r][0][t][i]);
#pragma unroll
                        for (int c = 0; c < kChains; c++) acc[h][r][c][t][i] = 0.f;
                    }
    };
    const auto keep = [&](float *slot) {
        float *to = slot + 2 * l * kPitch + g;
        each_sum([&](int h, int r, int t, int i, float sum) { to[(8 * t + (i & 1)) * kPitch + 32 * h + 16 * r + 8 * (i >> 1)] = sum; });
    };
    const auto store_group = [&]() {
        int of_token[NT][2];
#pragma unroll
        for (int t = 0; t < NT; t++)
#pragma unroll
            for (int j = 0; j < 2; j++) of_token[t][j] = __shfl_sync(~0u, pair[t], (2 * l + j) * 4);
        each_sum([&](int h, int r, int t, int i, float sum) {
            const int p = of_token[t][i & 1];
            const int64_t row = (int64_t)(group * G + h) * 32 + 16 * r + 8 * (i >> 1) + g;
            if (p >= 0 && row < a.n) store_as((Out *)a.out + p * a.n + row, sum * scale);
        });
    };
    uint32_t parity = 0;
    const auto half_step = [&](auto which, int next,
                               bool more_steps) {  // one pair of row tiles; the last pair of a step reloads the activations
        constexpr int h = decltype(which)::value;
        pipeline_wait<1>(bar, parity);
        SkinnyCodes codes;
        codes.read(stage, lane);
        if (to_fetch) fetch(std::integral_constant<int, (h + 1) % G>{}, stage + codes.all_read(a.zero));
        pipeline_commit();
        parity ^= 1;
#pragma unroll
        for (int q = 0; q < 2; q++) {
            codes.multiply<HALF, kChains>(q, xs[q], acc[h]);
            if (h == G - 1 && more_steps) load_x(q, next);
        }
    };
    bool from_start = chunk == 0;  // whether this warp has computed the present group from its first column
#pragma unroll 1
    for (int left = end - begin; left; left--) {
        const int next = chunk + 1 == a.chunks ? 0 : chunk + 1;
        if (next == 0 && left > 1 && group + 1 == a.groups) enter(tile + 1, next_pair, next_scale);
#pragma unroll
        for (int t = 0; t < NT; t++) x[t] = next ? x[t] + kCols : x_row[t];
        if (G == 2) half_step(kFirst, next, true);
        half_step(kLast, next, left > 1);
        chunk = next;
        if (next) continue;
        if (from_start) store_group();
        else keep(ended(warp));
        from_start = true;
        if (++group == a.groups) {
            group = 0, tile++, scale = next_scale;
#pragma unroll
            for (int t = 0; t < NT; t++) pair[t] = next_pair[t];
        }
    }
    if (begin < end && chunk) {
        __syncwarp();  // every lane has read the stage that may be reused
        keep(from_start ? begun(warp) : ended(warp));
        if (l == 0)
#pragma unroll
            for (int t = 0; t < NT; t++) table(warp)[8 * t + g] = pair[t];
        if (lane == 0) table(warp)[kTokens] = __float_as_int(scale);
    }
    __syncthreads();

    // The group in which this warp's part began, unless a warp before it began in the same group, too: that one adds it.
    const int of_block = divide(begin, a.by_chunks), start = of_block * a.chunks;
    if (begin == start || begin == end) return;
    const int lane_begin = total_steps * lane / kWarps,
              lane_end = total_steps * (lane + 1) / kWarps;  // lane i has warp i's part of the steps
    const uint32_t contributors = __ballot_sync(~0u, lane < kWarps && max(lane_begin, start) < min(lane_end, start + a.chunks));
    const uint32_t others = contributors & (contributors - 1);
    if (__ffs((int)others) - 1 != warp) return;
    const int owner = __ffs((int)contributors) - 1;  // began the group
    const int64_t row0 = (int64_t)(group0 + of_block - divide(group0 + of_block, a.by_groups) * a.groups) * G * 32;
    const float of_owner = __int_as_float(table(owner)[kTokens]);
#pragma unroll 1
    for (int token = 0; token < kTokens; token++) {
        const int p = table(owner)[token];
        if (p < 0) continue;
#pragma unroll
        for (int h = 0; h < G; h++) {
            const int at = token * kPitch + 32 * h + lane;
            float sum = begun(owner)[at];
#pragma unroll
            for (int w = 1; w < kWarps; w++)
                if (others >> w & 1) sum += ended(w)[at];
            if (row0 + 32 * h + lane < a.n) store_as((Out *)a.out + p * a.n + row0 + 32 * h + lane, sum * of_owner);
        }
    }
}

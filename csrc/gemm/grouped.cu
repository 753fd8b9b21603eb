// W4A16 products of a mixture's experts in one launch: the tiles of tiled.cuh, each with the tokens of one expert.
//
// The router's choices (pairs of a token and an expert) come sorted by expert and padded to whole tiles, in the form of vLLM's
// moe_align_block_size, so one alignment serves all of a layer's products: sorted_pairs [tiles x tile_tokens] has the numbers of pairs,
// `pairs` where a tile is not full; tile_experts [tiles] the expert of each tile; *padded the entries that are used. Nothing is read back
// to the host: the grid is for the most tiles possible, and blocks without a tile end at once. Pair p reads row p / top_k of x and writes
// row p of out.
#include <algorithm>

#include "gemm/grouped.cuh"
#include "gemm/tiled.cuh"

namespace {

constexpr int kMostTokens = 128, kTableAt = 512;  // after the barriers
constexpr int kMostStages = 8;

// The few-token kernel's plans, each the fastest on an H200 up to this mean number of pairs per expert.
struct FewTokens {
    int64_t most_per_expert;
    aq_grouped_plan plan;
};
constexpr FewTokens kFewTokens[] = {{5, {8, 1, 1, 2}}, {20, {16, 1, 1, 4}}, {20, {16, 1, 1, 2}}, {160, {32, 1, 1, 2}}};

// The table in shared memory: per token of the tile 1 + its pair, 0 without one, then its row of x; then the expert's scale.
struct Experts {
    static constexpr int kHead = kTableAt + 2 * 4 * kMostTokens + 128;
    const float *scales;
    const int *sorted_pairs, *tile_experts, *padded;
    int64_t expert_bytes;
    int pairs, top_k, experts;

    static __device__ __forceinline__ int *table() {
        extern __shared__ __align__(128) uint8_t smem[];
        return (int *)(smem + kTableAt);
    }
    static __device__ __forceinline__ bool has(int token) { return table()[token] > 0; }
    static __device__ __forceinline__ int64_t pair(int token) { return table()[token] - 1; }
    static __device__ __forceinline__ int64_t row(int token) { return table()[kMostTokens + token]; }
    static __device__ __forceinline__ float scale() { return __int_as_float(table()[2 * kMostTokens]); }
    // Return the tokens up to the last pair: what the blocks of a cluster divide at the end.
    static __device__ __forceinline__ int tokens(int most) {
        int count = 0;
#pragma unroll 1
        for (int first = 0; first < most; first += 32) {
            const int token = first + (threadIdx.x & 31);
            const uint32_t there = __ballot_sync(~0u, token < most && has(min(token, most - 1)));
            if (there) count = first + 32 - __clz(there);
        }
        return count;
    }
    __device__ __forceinline__ int64_t weight_at(int token_tile) const { return tile_experts[token_tile] * expert_bytes; }

    // Fill the table. Returns false for a block without work: beyond the tiles that are used, or an expert of another rank.
    __device__ __forceinline__ bool begin(const TiledArgs &a, int tile_tokens) const {
        if (a.pdl) {
            allow_next_kernel();
            wait_for_previous_kernel();  // which may have made the alignment
        }
        // the row tiles of one tile of tokens are next to each other
        const int token_tile = blockIdx.x / a.cluster_size / a.n_tiles;
        if ((int64_t)token_tile * tile_tokens >= *padded) return false;
        const int expert = tile_experts[token_tile];
        if (expert < 0 || expert >= experts) return false;
        if (threadIdx.x < tile_tokens) {
            const int pair = sorted_pairs[(int64_t)token_tile * tile_tokens + threadIdx.x];
            const bool there = pair >= 0 && pair < pairs;
            table()[threadIdx.x] = there ? pair + 1 : 0;
            table()[kMostTokens + threadIdx.x] = there ? pair / top_k : 0;
        }
        if (threadIdx.x == 0) table()[2 * kMostTokens] = __float_as_int(scales[expert]);
        return true;  // the barriers' __syncthreads orders the table, too
    }
};
static_assert(Experts::kHead % 128 == 0 && Tokens128::kBM == kMostTokens);

// A product in which every expert that can have a token has an equal number of them.
Shape shape_of_expert(const aq_grouped_shape &s) {
    const int64_t active = std::max<int64_t>(1, std::min(s.pairs, s.experts));
    return Shape(ceil_div(s.pairs, active), s.n, s.k);
}

const char *tiles_problem(const aq_grouped_shape &s, const aq_limits &limits, const aq_grouped_plan &plan, int64_t tiles, aq_needs *needs) {
    if (plan.step_tiles != kTiledRows / kRows) return "step_tiles must be 16 for more than 32 tokens";
    const char *problem = tiled_problem(shape_of_expert(s), limits, TiledPlan{plan.tile_tokens, plan.cluster_size, plan.stages}, needs);
    if (problem) return problem;
    if (tiles * ceil_div(s.n, kTiledRows) * plan.cluster_size >= 1ll << 31) return "the product has too many tiles";
    needs->smem_bytes += Experts::kHead - OneProduct::kHead;
    return needs->smem_bytes > limits.smem_bytes ? "stages is too large: they do not fit into shared memory" : nullptr;
}

int run_tiles(const GroupedProduct &p, const aq_grouped_plan &plan, const aq_needs &needs) {
    const aq_grouped_shape &s = p.shape;
    const Shape each = shape_of_expert(s);
    const bool half = p.type == AQ_F16;
    TiledArgs a{};
    a.packed = p.packed, a.x = p.x, a.out = p.out, a.ldx = p.ldx, a.n = s.n, a.scale = half ? 1.f : kUndo, a.m = (int)s.pairs,
    a.k = (int)s.k;
    a.n_tiles = (int)ceil_div(s.n, kTiledRows), a.m_tiles = (int)p.tiles, a.tiles = each.tiles, a.chunks = each.chunks;
    a.cluster_size = plan.cluster_size, a.stages = plan.stages, a.out_type = p.type, a.pdl = p.pdl;
    const Experts of{p.scales,     p.sorted_pairs, p.tile_experts, p.padded, (int64_t)aq_packed_bytes(s.n, s.k),
                     (int)s.pairs, (int)s.top_k,   (int)s.experts};
    const int64_t blocks = p.tiles * a.n_tiles;
    if (plan.tile_tokens == 64) return launch_tiles(Tokens64{}, half, blocks, needs.smem_bytes, p.stream, a, of);
    return launch_tiles(Tokens128{}, half, blocks, needs.smem_bytes, p.stream, a, of);
}

const char *shape_problem(const aq_grouped_shape &s) {
    constexpr int64_t kMost = 1ll << 30;
    if (s.pairs < 1 || s.experts < 1 || s.top_k < 1 || s.n < 1 || s.k < 16 || s.k % 16)
        return "the shape must be positive, K a multiple of 16";
    if (s.pairs > kMost || s.experts > kMost || s.n > kMost || s.k > kMost || s.top_k > s.pairs)
        return "the shape is too large, or top_k exceeds the pairs";
    return nullptr;
}

// As aq_grouped_problem, for an alignment with space for `tiles` tiles of tokens.
const char *problem_of(const aq_grouped_shape &s, const aq_limits &limits, const aq_grouped_plan &plan, int64_t tiles, aq_needs *needs) {
    if (const char *problem = shape_problem(s)) return problem;
    if (const char *problem = device_problem(limits)) return problem;
    if (tiles >= 1ll << 31) return "the product has too many tiles";
    if (plan.tile_tokens == 8 || plan.tile_tokens == 16 || plan.tile_tokens == 32)
        return grouped_skinny_problem(s, limits, plan, tiles, needs);
    if (plan.tile_tokens == 64 || plan.tile_tokens == 128) return tiles_problem(s, limits, plan, tiles, needs);
    return "tile_tokens must be 8, 16, 32, 64 or 128";
}

}  // namespace

extern "C" int aq_plan_grouped(const aq_grouped_shape *shape, int tile_tokens, const aq_limits *limits, aq_grouped_plan *plan) {
    const aq_grouped_shape &s = *shape;
    aq_needs needs;
    if (shape_problem(s) || device_problem(*limits)) return AQ_GEMM_NO_PLAN;
    if (tile_tokens <= 32)
        for (const FewTokens &few : kFewTokens) {
            if (tile_tokens ? few.plan.tile_tokens != tile_tokens : s.pairs > few.most_per_expert * s.experts) continue;
            *plan = few.plan;
            if (!aq_grouped_problem(shape, limits, plan, &needs)) return 0;
        }
    TiledPlan tiled;
    if (!plan_tiled(shape_of_expert(s), std::max<int64_t>(1, std::min(s.pairs, s.experts)), *limits, &tiled)) return AQ_GEMM_NO_PLAN;
    for (const int tokens : {std::max(tiled.tile_tokens, 64), 64, 128})
        for (int stages = kMostStages; stages >= 2 && (!tile_tokens || tile_tokens == tokens); stages--) {
            *plan = aq_grouped_plan{tokens, tiled.tile_tokens == tokens ? tiled.cluster_size : 1, stages, kTiledRows / kRows};
            if (!aq_grouped_problem(shape, limits, plan, &needs)) return 0;
        }
    return AQ_GEMM_NO_PLAN;
}

extern "C" int64_t aq_grouped_tiles(const aq_grouped_shape *shape, int tile_tokens) {
    return std::min(shape->pairs, shape->experts) + shape->pairs / tile_tokens;
}

extern "C" const char *aq_grouped_problem(const aq_grouped_shape *shape, const aq_limits *limits, const aq_grouped_plan *plan,
                                          aq_needs *needs) {
    return problem_of(*shape, *limits, *plan, aq_grouped_tiles(shape, std::max(plan->tile_tokens, 1)), needs);
}

extern "C" int aq_grouped(const void *x, int64_t ldx, const uint8_t *packed, int64_t packed_bytes, const float *scales,
                          const int32_t *sorted_pairs, const int32_t *tile_experts, const int32_t *padded, int64_t tiles, void *out,
                          const aq_grouped_shape *shape, int type, const aq_grouped_plan *plan, int pdl, void *stream) {
    if (shape_problem(*shape)) return AQ_GEMM_BAD_PLAN;
    if (packed_bytes % shape->experts || packed_bytes / shape->experts != (int64_t)aq_packed_bytes(shape->n, shape->k))
        return AQ_GEMM_OTHER_SHAPE;
    DeviceState state;
    int status = current_device(&state);
    if (status) return status;
    aq_needs needs;
    if (tiles < 1 || problem_of(*shape, state.limits, *plan, tiles, &needs)) return AQ_GEMM_BAD_PLAN;
    bool programmatic = pdl > 0;
    if (pdl < 0 && (status = programmatic_possible((cudaStream_t)stream, &programmatic))) return status;
    const GroupedProduct p{*shape,       (const uint16_t *)x, ldx, packed, scales, sorted_pairs, tile_experts, padded, tiles, out, type,
                           programmatic, (cudaStream_t)stream};
    return plan->tile_tokens <= 32 ? run_grouped_skinny(p, *plan, state.limits, needs) : run_tiles(p, *plan, needs);
}

// The few-token kernel for a mixture's experts: its instantiations, what a plan needs, and the launch.
#include <algorithm>

#include "gemm/grouped_skinny.cuh"
#include "gemm/grouped.cuh"

namespace {

// Each number of tokens has the step that is the fastest on an H200; 16 tokens have the other one, too, for devices with less shared memory.
template <int NT, bool HALF>
int launch_step(const GroupedSkinnyArgs &args, const aq_grouped_plan &plan, Launch how) {
    how.threads = 32 * GroupedSkinnyShape<NT, 1>::kWarps;
    if (args.k % kCols) return launch<grouped_skinny_kernel<NT, HALF, 1, false>>(how, args);
    if constexpr (NT == 2)
        if (plan.step_tiles == 4) return launch<grouped_skinny_kernel<NT, HALF, 2, true>>(how, args);
    return launch<grouped_skinny_kernel<NT, HALF, 1, true>>(how, args);
}

template <int NT>
int launch_type(const GroupedSkinnyArgs &args, const aq_grouped_plan &plan, const Launch &how, bool half) {
    return half ? launch_step<NT, true>(args, plan, how) : launch_step<NT, false>(args, plan, how);
}

// Groups of rows of one tile of tokens.
int groups_of(const aq_grouped_shape &s, const aq_grouped_plan &plan) { return (row_tiles(s.n) + plan.step_tiles - 1) / plan.step_tiles; }

}  // namespace

const char *grouped_skinny_problem(const aq_grouped_shape &s, const aq_limits &limits, const aq_grouped_plan &plan, int64_t tiles,
                                   aq_needs *needs) {
    if (plan.stages != 1) return "stages must be 1 for up to 32 tokens";
    if (plan.step_tiles != 2 && (plan.step_tiles != 4 || plan.tile_tokens != 16)) return "step_tiles must be 2, or 4 for 16 tokens";
    if (plan.cluster_size != 1) return "cluster_size must be 1 for up to 32 tokens";
    if (s.k % kCols && plan.step_tiles != 2) return "K is not a multiple of 128: step_tiles must be 2";
    // The kernel divides by multiplication with reciprocals of 32 bits. No product here overflows, because those before it are in range.
    constexpr int64_t kMost = 1ll << 32;
    constexpr const char *kTooMany = "the product has too many tiles of up to 32 tokens";
    const int64_t groups = groups_of(s, plan), all = tiles * groups, blocks = limits.sms, chunks = column_chunks(s.k);
    if (all >= ceil_div(kMost, std::max(blocks, groups))) return kTooMany;
    const int64_t steps = (all / blocks + 1) * chunks;
    if (steps >= ceil_div(kMost, chunks) || steps * (kSkinnyWarps + 16) >= kMost / 2 || s.pairs * s.top_k >= kMost) return kTooMany;
    const int bytes = plan.tile_tokens == 8    ? GroupedSkinnyShape<1, 1>::kBytes
                      : plan.tile_tokens == 32 ? GroupedSkinnyShape<4, 1>::kBytes
                      : plan.step_tiles == 2   ? GroupedSkinnyShape<2, 1>::kBytes
                                               : GroupedSkinnyShape<2, 2>::kBytes;
    *needs = aq_needs{bytes, 0};
    return needs->smem_bytes > limits.smem_bytes ? "the partial sums do not fit into shared memory" : nullptr;
}

int run_grouped_skinny(const GroupedProduct &p, const aq_grouped_plan &plan, const aq_limits &limits, const aq_needs &needs) {
    const aq_grouped_shape &s = p.shape;
    const bool half = p.type == AQ_F16;
    GroupedSkinnyArgs a{};
    a.packed = p.packed, a.x = p.x, a.out = p.out, a.scales = p.scales, a.sorted_pairs = p.sorted_pairs, a.tile_experts = p.tile_experts,
    a.padded = p.padded;
    a.ldx = p.ldx, a.n = s.n, a.expert_bytes = (int64_t)aq_packed_bytes(s.n, s.k), a.scale = half ? 1.f : kUndo;
    a.pairs = (int)s.pairs, a.experts = (int)s.experts, a.most_tiles = (int)p.tiles, a.k = (int)s.k, a.tiles = row_tiles(s.n),
    a.chunks = column_chunks(s.k);
    a.groups = groups_of(s, plan), a.pdl = p.pdl;
    a.by_chunks = reciprocal(a.chunks), a.by_groups = reciprocal(a.groups), a.by_blocks = reciprocal(limits.sms),
    a.by_top_k = reciprocal((int)s.top_k);
    const Launch how{dim3((unsigned)limits.sms), 0, p.stream, p.pdl, needs.smem_bytes};
    if (plan.tile_tokens == 8) return launch_type<1>(a, plan, how, half);
    return plan.tile_tokens == 16 ? launch_type<2>(a, plan, how, half) : launch_type<4>(a, plan, how, half);
}

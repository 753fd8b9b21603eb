// The few-token kernel: its instantiations, what a plan needs, and the launch.
#include <algorithm>

#include "gemm/paths.cuh"
#include "gemm/skinny.cuh"

namespace {

int log2_of(int v) {
    int l = 0;
    while (v >> (l + 1)) l++;
    return l;
}

template <int NT, bool HALF>
int launch_step(const SkinnyArgs &args, const aq_skinny_plan &plan, const Launch &how) {
    if (args.k % kCols) return launch<skinny_kernel<NT, HALF, 1, 1, false>>(how, args);
    if constexpr (NT == 1)
        if (plan.warp_stages == 2) {
            if (plan.step_tiles == 2) return launch<skinny_kernel<1, HALF, 1, 2, true>>(how, args);
            return launch<skinny_kernel<1, HALF, 2, 2, true>>(how, args);
        }
    if (plan.step_tiles == 2) return launch<skinny_kernel<NT, HALF, 1, 1, true>>(how, args);
    return launch<skinny_kernel<NT, HALF, 2, 1, true>>(how, args);
}

template <int NT, int G, int STAGES>
int64_t shared_bytes(int64_t m, int row_tiles_of_a_block, int cluster_size) {
    using Shared = SkinnyShape<NT, G, STAGES>;
    return Shared::bytes((int)m, Shared::groups(row_tiles_of_a_block), cluster_size);
}

}  // namespace

const char *skinny_problem(const Shape &shape, const aq_limits &limits, const aq_skinny_plan &plan, aq_needs *needs) {
    if (shape.m < 1 || shape.m > 16) return "it has more than 16 tokens";
    if (plan.cluster_size != 1 && plan.cluster_size != 2 && plan.cluster_size != 4 && plan.cluster_size != 8)
        return "cluster_size must be 1, 2, 4 or 8";
    if (!cluster_possible(limits, plan.cluster_size)) return "this device has no clusters: cluster_size must be 1";
    if (plan.warp_stages != 1 && plan.warp_stages != 2) return "warp_stages must be 1 or 2";
    if (plan.step_tiles != 2 && plan.step_tiles != 4) return "step_tiles must be 2 or 4";
    if (plan.warp_stages == 2 && shape.m > 8) return "warp_stages must be 1 for more than 8 tokens";
    if (shape.k % kCols && (plan.warp_stages != 1 || plan.step_tiles != 2))
        return "K is not a multiple of 128: warp_stages must be 1 and step_tiles 2";
    if (plan.blocks < 1 || plan.blocks % plan.cluster_size) return "blocks must be a positive multiple of cluster_size";
    const int clusters = plan.blocks / plan.cluster_size, pairs = plan.step_tiles / 2;
    if (clusters > shape.tiles / 2) return "blocks is larger than cluster_size times the pairs of row tiles";
    const int tiles = (shape.tiles + clusters - 1) / clusters, chunks = (shape.chunks + plan.cluster_size - 1) / plan.cluster_size;
    // The kernel divides by multiplication with reciprocals of 32 bits, and multiplies the number of steps by the number of warps.
    const int64_t groups = ((tiles + 1) / 2 + pairs - 1) / pairs, steps = groups * chunks;
    if (steps * (chunks + 1) >= 1ll << 32 || steps * kSkinnyWarps >= 1ll << 31) return "blocks is too small for this shape";
    // The memory is that of the most tokens of the instantiation, so that a plan is valid for all of them.
    int64_t bytes;
    if (shape.m > 8)
        bytes = pairs == 1 ? shared_bytes<2, 1, 1>(16, tiles, plan.cluster_size) : shared_bytes<2, 2, 1>(16, tiles, plan.cluster_size);
    else if (plan.warp_stages == 1)
        bytes = pairs == 1 ? shared_bytes<1, 1, 1>(8, tiles, plan.cluster_size) : shared_bytes<1, 2, 1>(8, tiles, plan.cluster_size);
    else bytes = pairs == 1 ? shared_bytes<1, 1, 2>(8, tiles, plan.cluster_size) : shared_bytes<1, 2, 2>(8, tiles, plan.cluster_size);
    if (bytes > limits.smem_bytes) return "blocks is too small: the partial sums do not fit into shared memory";
    *needs = aq_needs{(int)bytes, 0};
    return nullptr;
}

int run_skinny(const Product &p, const aq_skinny_plan &plan, const aq_needs &needs) {
    const int clusters = plan.blocks / plan.cluster_size;
    SkinnyArgs a{};
    a.packed = p.packed, a.x = p.x, a.out = p.out, a.ldx = p.ldx, a.n = p.shape.n, a.scale = p.scale, a.m = (int)p.shape.m,
    a.k = (int)p.shape.k;
    a.tiles = p.shape.tiles, a.chunks = p.shape.chunks, a.cluster_size = plan.cluster_size, a.out_type = p.out_type, a.pdl = p.pdl;
    a.log_cluster = log2_of(plan.cluster_size);
    a.tiles_each = a.tiles / clusters, a.tiles_more = a.tiles % clusters;
    a.chunks_each = a.chunks / plan.cluster_size, a.chunks_more = a.chunks % plan.cluster_size;
    for (int i = 0; i < 2; i++) a.by_chunks[i] = reciprocal(a.chunks_each + i);
    a.by_m = reciprocal(a.m);
    const Launch how{dim3((unsigned)plan.blocks), 32 * kSkinnyWarps, needs.smem_bytes, plan.cluster_size, p.pdl, p.stream};
    const bool half = p.x_type == AQ_F16;
    if (a.m <= 8) return half ? launch_step<1, true>(a, plan, how) : launch_step<1, false>(a, plan, how);
    return half ? launch_step<2, true>(a, plan, how) : launch_step<2, false>(a, plan, how);
}

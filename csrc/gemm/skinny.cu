// The few-token kernel: its instantiations, what a plan needs, and the launch.
#include <algorithm>

#include "gemm/paths.cuh"
#include "gemm/skinny.cuh"

namespace {

// Up to 16 tokens: a block has all tokens and a share of the row tiles of 16 rows.
struct SkinnyPlan {
    int blocks;
    int cluster_size;  // blocks that share K
    int warp_stages;   // pipeline stages of a warp, 1 or 2
    int step_tiles;    // row tiles per step, 2 or 4
};

int log2_of(int v) {
    int l = 0;
    while (v >> (l + 1)) l++;
    return l;
}

template <int NT, bool HALF>
int launch_step(const SkinnyArgs &args, const SkinnyPlan &plan, const Launch &how) {
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

const char *problem(const Shape &shape, const aq_limits &limits, const SkinnyPlan &plan, aq_needs *needs) {
    if (shape.m < 1 || shape.m > 16) return "it has more than 16 tokens";
    if (plan.cluster_size != 1 && plan.cluster_size != 2 && plan.cluster_size != 4 && plan.cluster_size != 8)
        return "cluster_size must be 1, 2, 4 or 8";
    if (plan.warp_stages != 1 && plan.warp_stages != 2) return "warp_stages must be 1 or 2";
    if (plan.step_tiles != 2 && plan.step_tiles != 4) return "step_tiles must be 2 or 4";
    if (plan.warp_stages == 2 && shape.m > 8) return "warp_stages must be 1 for more than 8 tokens";
    if (shape.k % kCols && (plan.warp_stages != 1 || plan.step_tiles != 2))
        return "K is not a multiple of 128: warp_stages must be 1 and step_tiles 2";
    if (plan.blocks < 1 || plan.blocks % plan.cluster_size) return "blocks must be a positive multiple of cluster_size";
    const int clusters = plan.blocks / plan.cluster_size, pairs = plan.step_tiles / 2;
    if (clusters > shape.tiles / 2) return "blocks is larger than cluster_size times the pairs of row tiles";
    const int tiles = ceil_div(shape.tiles, clusters), chunks = ceil_div(shape.chunks, plan.cluster_size);
    // The kernel divides by multiplication with reciprocals of 32 bits, and multiplies the number of steps by the number of warps.
    const int64_t groups = ceil_div((tiles + 1) / 2, pairs), steps = groups * chunks;
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

// The plan must be equal for all m in 1..8 and in 9..16, because the result's bits must not depend on m.
double plan(const Shape &shape, const aq_limits &limits, SkinnyPlan *best) {
    if (shape.m > 16) return kNever;
    double best_cost = kNever;
    for (int pairs = 1; pairs <= (shape.k % kCols ? 1 : 2); pairs++)
        for (int size = 1; size <= 2; size *= 2)  // clusters of 4 are not all resident: twice as slow
            for (int waves = 1; waves <= 16; waves *= 2) {
                const int clusters = std::min(resident(limits.sms, size) / size * waves, shape.tiles / 2);
                if (!clusters) continue;
                const int rows = ceil_div(shape.tiles, clusters), columns = ceil_div(shape.chunks, size);
                const int steps = ceil_div((rows + 1) / 2, pairs) * pairs * columns;  // of 32 rows
                // A second pipeline stage helps if a warp has many steps and there are few tokens.
                const int warp_stages = shape.m <= 8 && shape.k % kCols == 0 && size == 1 && steps * waves >= 12 * kSkinnyWarps ? 2 : 1;
                const SkinnyPlan tried{clusters * size, size, warp_stages, 2 * pairs};
                aq_needs needs;
                if (problem(shape, limits, tried, &needs)) continue;
                // In units of tiles x chunks that an SM streams and decodes, plus measured costs: twice as many loads of activations,
                // a cluster, and about one microsecond per additional wave.
                const double cost =
                    (.5 * rows * columns + steps) * waves * (pairs == 1 ? 1.04 : 1.) + (size > 1 ? 35. : 0.) + 30. * (waves - 1);
                if (cost < best_cost) {
                    best_cost = cost;
                    *best = tried;
                }
            }
    if (best_cost == kNever) return kNever;
    if (shape.m <= 8) return 0.;
    // Measured on an H200, by the packed weights' size. Up to 8 tokens this kernel is always the fastest.
    return 3. + .272e-6 * (double)shape.tiles * shape.chunks * kChunk;
}

int run(const Product &p, const SkinnyPlan &plan, const aq_needs &needs) {
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
    const Launch how{dim3((unsigned)plan.blocks), 32 * kSkinnyWarps, p.stream, p.pdl, needs.smem_bytes, plan.cluster_size};
    const bool half = p.x_type == AQ_F16;
    if (a.m <= 8) return half ? launch_step<1, true>(a, plan, how) : launch_step<1, false>(a, plan, how);
    return half ? launch_step<2, true>(a, plan, how) : launch_step<2, false>(a, plan, how);
}

}  // namespace

const Path skinny_path = make_path<SkinnyPlan, plan, problem, run>("skinny", "blocks cluster_size warp_stages step_tiles");

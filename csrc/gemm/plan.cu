// Planning: the kernel, its tile and the split of K, from the device's multiprocessors and shared memory; and the launch.
#include <algorithm>

#include "gemm/paths.cuh"
#include "gemm/skinny.cuh"
#include "gemm/tiled.cuh"
#include "gemm/wgmma.cuh"

namespace {

constexpr int kMaxSplit = 8;
constexpr double kNever = 1e30;

// Resident blocks in clusters of `size`. A cluster must be inside one GPC, so some multiprocessors of a GPC stay unused.
// From an occupancy query on an H200: 132, 132, 128, 120 (GPCs of 16 and 18). A rule, because a query is too slow here.
int resident(int sms, int size) { return size <= 2 ? sms / size * size : sms / (size == 4 ? 33 : 44) * (size == 4 ? 32 : 40); }

// The plan must be equal for all m in 1..8 and in 9..16, because the result's bits must not depend on m.
bool plan_skinny(const Shape &shape, const aq_limits &limits, aq_skinny_plan *best) {
    double best_cost = kNever;
    for (int pairs = 1; pairs <= (shape.k % kCols ? 1 : 2); pairs++)
        for (int size = 1; size <= (limits.major >= 9 ? 2 : 1); size *= 2)  // clusters of 4 are not all resident: twice as slow
            for (int waves = 1; waves <= 16; waves *= 2) {
                const int clusters = std::min(resident(limits.sms, size) / size * waves, shape.tiles / 2);
                if (!clusters) continue;
                const int rows = (shape.tiles + clusters - 1) / clusters, columns = (shape.chunks + size - 1) / size;
                const int steps = ((rows + 1) / 2 + pairs - 1) / pairs * pairs * columns;  // of 32 rows
                // A second pipeline stage helps if a warp has many steps and there are few tokens.
                const int warp_stages = shape.m <= 8 && shape.k % kCols == 0 && size == 1 && steps * waves >= 12 * kSkinnyWarps ? 2 : 1;
                const aq_skinny_plan plan{clusters * size, size, warp_stages, 2 * pairs};
                aq_needs needs;
                if (skinny_problem(shape, limits, plan, &needs)) continue;
                // In units of tiles x chunks that an SM streams and decodes, plus measured costs: twice as many loads of activations,
                // a cluster, and about one microsecond per additional wave.
                const double cost =
                    (.5 * rows * columns + steps) * waves * (pairs == 1 ? 1.04 : 1.) + (size > 1 ? 35. : 0.) + 30. * (waves - 1);
                if (cost < best_cost) {
                    best_cost = cost;
                    *best = plan;
                }
            }
    return best_cost != kNever;
}

}  // namespace

bool plan_tiled(const Shape &shape, int64_t products, const aq_limits &limits, aq_tiled_plan *best) {
    double best_cost = kNever;
    for (const int tokens : {16, 64, 128}) {
        if (tokens > 16 && shape.m <= tokens / 4) continue;
        const int64_t tiles = products * ((shape.n + kTiledRows - 1) / kTiledRows) * ((shape.m + tokens - 1) / tokens);
        for (int size = 1; size <= (limits.major >= 9 ? kMaxSplit : 1); size *= 2) {
            aq_tiled_plan plan{tokens, size, 8};
            aq_needs needs;
            while (plan.stages > 1 && tiled_problem(shape, limits, plan, &needs)) plan.stages--;
            const int at_once = resident(limits.sms, size) / size;
            if (plan.stages < 2 || at_once < 1) continue;
            // in units of one token's work on one chunk of 256 rows: the multiplication, or the decode if there are few tokens; then
            // the pipeline's fill and the reduction of partial tiles
            const double chunk = std::max(tokens, 24) + 24, waves = (double)((tiles + at_once - 1) / at_once);
            const double cost = waves * (((shape.chunks + size - 1) / size + 3) * chunk + (size > 1 ? 200 * size : 60));
            if (cost < best_cost) {
                best_cost = cost;
                *best = plan;
            }
        }
    }
    return best_cost != kNever;
}

namespace {

// Microseconds, fitted to measurements on an H200. step: 256 rows x 128 columns (or 128 x 256), with permuted activations; low: a step of
// 192 rows; permute, permute2: additional cost per step of the in-place permutation, with one part of K and with two; add: the fix-up
// kernel's reduction over the workspace.
struct WgmmaCost {
    int tokens;
    double step, low, permute, permute2, add;
};
constexpr WgmmaCost kWgmmaCosts[] = {
    {16, .58, .54, .02, 0., 4.2}, {32, .60, .58, .03, .12, 4.2}, {64, .84, .655, .09, .4, 4.1}, {128, 1.36, 0., 0., 0., 5.5}};

constexpr double kWgmmaStart = 3.2, kWgmmaPermute = 1.2, kWgmmaCluster = 2.8;
constexpr double kWgmmaPart = .35, kWgmmaUneven = 3.5;        // per part of a stream-K tile; if the parts are not equal
constexpr int kFewSteps = 16, kFewStages = 4;                 // if a block has few steps, more stages than that all arrive late
constexpr int kWgmmaMaxStages = 16, kPermuteResident = 4096;  // shared memory of the permutation kernel, which is resident at the same time
// Microseconds of the few-token kernel for 9 to 16 tokens on an H200, by the packed weights' size. Up to 8 tokens it is always faster.
double skinny_us(const Shape &shape) { return 3. + .272e-6 * (double)shape.tiles * shape.chunks * kChunk; }

double plan_wgmma(const Shape &shape, const aq_limits &limits, aq_wgmma_plan *best) {
    double best_us = kNever;
    const int sms = limits.sms, tiles = shape.tiles, chunks = shape.chunks;
    for (const WgmmaCost &c : kWgmmaCosts) {
        const int64_t m_tiles = (shape.m + c.tokens - 1) / c.tokens;
        if (m_tiles * (tiles + 15) / 16 * chunks > INT32_MAX / 4) continue;
        const auto consider = [&](int cluster_size, int rows, int permute_first, int blocks, int stream_k_tiles, double us) {
            if (us >= best_us) return;
            const int halves = rows == 128 ? 2 : 1,
                      taken = kWgmmaHead + wgmma_reduce_bytes(c.tokens, cluster_size, halves) + (permute_first ? kPermuteResident : 0);
            const bool few = cluster_size == 1 && c.tokens == 64 && stream_k_tiles > 0 &&
                             (int64_t)stream_k_tiles * chunks <= (int64_t)kFewSteps * blocks;
            const int stages = std::min(few ? kFewStages : kWgmmaMaxStages, (limits.smem_bytes - taken) / wgmma_stage(c.tokens, halves));
            const aq_wgmma_plan plan{c.tokens, rows, blocks, cluster_size, stages, stream_k_tiles, permute_first};
            aq_needs needs;
            if (wgmma_problem(shape, limits, plan, &needs)) return;
            best_us = us;
            *best = plan;
        };
        for (int permute_first = c.tokens == 128; permute_first < 2; permute_first++) {
            const double start = kWgmmaStart + (permute_first ? kWgmmaPermute : 0.);
            for (int halves = 1; halves <= (c.tokens == 16 ? 1 : c.tokens == 128 ? 0 : 2); halves++) {
                const int64_t all = (tiles * halves + kBlockTiles - 1) / kBlockTiles * m_tiles;
                if (chunks % halves || chunks / halves < 2 || all * 2 > resident(sms, 2)) continue;
                const double step = c.step + (permute_first ? 0. : halves == 1 ? c.permute : c.permute2);
                consider(2, 256 / halves, permute_first, (int)all * 2, (int)all, start + (chunks / halves + 1) / 2 * step + kWgmmaCluster);
            }
            const int64_t all = (tiles + kBlockTiles - 1) / kBlockTiles * m_tiles;
            const auto shares = [&](int blocks, int stream_k_tiles) {
                const int64_t steps =
                    (all - stream_k_tiles + blocks - 1) / blocks * chunks + ((int64_t)stream_k_tiles * chunks + blocks - 1) / blocks;
                const double more =
                    stream_k_tiles ? c.add + kWgmmaPart * blocks / stream_k_tiles + (blocks % stream_k_tiles ? kWgmmaUneven : 0.) : 0.;
                consider(1, 256, permute_first, blocks, stream_k_tiles,
                         start + (double)steps * (c.step + (permute_first ? 0. : c.permute)) + more);
            };
            const int64_t waves = (all + sms - 1) / sms;
            shares((int)((all + waves - 1) / waves), 0);
            if (all % sms) shares(sms, (int)(all % sms));
            if (all % sms && all > sms) shares(sms, (int)(all % sms) + sms);
            if (all <= sms / 2) shares((int)(sms / all * all), (int)all);
            const int64_t lower = (tiles + 11) / 12 * m_tiles, low_waves = (lower + sms - 1) / sms;
            if (c.tokens < 128)
                consider(1, 192, permute_first, (int)((lower + low_waves - 1) / low_waves), 0,
                         start + (double)low_waves * chunks * (c.low + (permute_first ? 0. : c.permute)));
        }
    }
    return best_us;
}

const char *product_problem(int64_t m, int64_t n, int64_t k, const aq_limits &limits) {
    constexpr int64_t kMost = (1ll << 31) - kBlockTiles * kRows;  // rows and columns are counted in 32 bits
    if (m < 1 || n < 1 || k < 16 || k % 16 || m > kMost || n > kMost || k > kMost)
        return "the shape must be positive, K a multiple of 16, and all below 2^31";
    const Shape shape(m, n, k);
    if ((int64_t)shape.tiles * shape.chunks >= 1ll << 31) return "the weight has too many chunks";
    return limits.sms < 1 ? "the device must have a multiprocessor" : nullptr;
}

}  // namespace

extern "C" int aq_plan_w4a16(int64_t m, int64_t n, int64_t k, int path, const aq_limits *limits, aq_plan *plan) {
    if (product_problem(m, n, k, *limits)) return AQ_GEMM_NO_PLAN;
    const Shape shape(m, n, k);
    aq_skinny_plan skinny;
    aq_wgmma_plan wgmma;
    const bool skinny_fits = path <= AQ_PATH_SKINNY && m <= 16 && plan_skinny(shape, *limits, &skinny);
    if (path == AQ_PATH_SKINNY && !skinny_fits) return AQ_GEMM_NO_PLAN;
    const bool wgmma_possible = path != AQ_PATH_SKINNY && path != AQ_PATH_TILED && limits->wgmma && !(skinny_fits && m <= 8);
    const double wgmma_us = wgmma_possible ? plan_wgmma(shape, *limits, &wgmma) : kNever;
    if (skinny_fits && (path == AQ_PATH_SKINNY || m <= 8 || skinny_us(shape) <= wgmma_us)) {
        plan->path = AQ_PATH_SKINNY, plan->of.skinny = skinny;
        return 0;
    }
    if (wgmma_us < kNever) {
        plan->path = AQ_PATH_WGMMA, plan->of.wgmma = wgmma;
        return 0;
    }
    plan->path = AQ_PATH_TILED;
    return path != AQ_PATH_WGMMA && plan_tiled(shape, 1, *limits, &plan->of.tiled) ? 0 : AQ_GEMM_NO_PLAN;
}

extern "C" const char *aq_plan_problem(int64_t m, int64_t n, int64_t k, const aq_limits *limits, const aq_plan *plan, aq_needs *needs) {
    if (const char *problem = product_problem(m, n, k, *limits)) return problem;
    const Shape shape(m, n, k);
    switch (plan->path) {
    case AQ_PATH_SKINNY: return skinny_problem(shape, *limits, plan->of.skinny, needs);
    case AQ_PATH_TILED: return tiled_problem(shape, *limits, plan->of.tiled, needs);
    case AQ_PATH_WGMMA: return wgmma_problem(shape, *limits, plan->of.wgmma, needs);
    default: return "path must be skinny, tiled or wgmma";
    }
}

extern "C" int aq_w4a16(const void *x, int64_t ldx, const uint8_t *packed, float tensor_scale, void *out, void *workspace,
                        int64_t workspace_bytes, int64_t m, int64_t n, int64_t k, int x_type, int out_type, const aq_plan *plan, int pdl,
                        void *stream) {
    DeviceState state;
    int status = current_device(&state);
    if (status) return status;
    aq_needs needs;
    if (aq_plan_problem(m, n, k, &state.limits, plan, &needs)) return AQ_GEMM_BAD_PLAN;
    if (workspace && workspace_bytes < needs.workspace_bytes) return AQ_GEMM_SMALL_WORKSPACE;
    Product p{Shape(m, n, k),
              (const uint16_t *)x,
              ldx,
              packed,
              x_type == AQ_F16 ? tensor_scale : tensor_scale * kUndo,
              out,
              workspace,
              x_type,
              out_type,
              pdl != 0,
              (cudaStream_t)stream};
    StreamMemory own(p.stream);
    if (!workspace && needs.workspace_bytes) {
        if ((status = own.allocate((size_t)needs.workspace_bytes))) return status;
        p.workspace = own.get();
        // In a graph the node before the first kernel is now the allocation, on which a launch cannot depend programmatically.
        bool captured = false;
        if (p.pdl && (status = stream_is_captured(p.stream, &captured))) return status;
        p.pdl = p.pdl && !captured;
    }
    switch (plan->path) {
    case AQ_PATH_SKINNY: status = run_skinny(p, plan->of.skinny, needs); break;
    case AQ_PATH_TILED: status = run_tiled(p, plan->of.tiled, needs); break;
    default: status = run_wgmma(p, plan->of.wgmma, needs);
    }
    const int freed = own.release();
    return status ? status : freed;
}

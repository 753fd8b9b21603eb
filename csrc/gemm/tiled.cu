// The many-token kernel by mma.sync: what a plan needs, the choice of a plan, and the launch.
#include <algorithm>
#include <array>

#include "gemm/tiled.cuh"

namespace {

constexpr int kMaxStages = 32, kMaxSplit = 8;

// Call `visit` with the tile of `tile_tokens`. Returns false if there is none.
template <class Visit, class... Shapes>
bool with_tile(TileList<Shapes...>, int tile_tokens, Visit visit) {
    return ((Shapes::kBM == tile_tokens && (visit(Shapes{}), true)) || ...);
}

template <class... Shapes>
constexpr std::array<int, sizeof...(Shapes)> tokens_of(TileList<Shapes...>) {
    return {Shapes::kBM...};
}

}  // namespace

const char *tiled_problem(const Shape &shape, const aq_limits &limits, const TiledPlan &plan, aq_needs *needs) {
    int stage_bytes = 0, out_bytes = 0;
    const auto measure = [&](auto tile) { stage_bytes = tile.kStage, out_bytes = tile.kOutBytes; };
    if (!with_tile(Tiles{}, plan.tile_tokens, measure)) return kNoSuchTile;
    if (plan.cluster_size != 1 && plan.cluster_size != 2 && plan.cluster_size != 4 && plan.cluster_size != 8)
        return "cluster_size must be 1, 2, 4 or 8";
    if (plan.cluster_size > shape.chunks) return "cluster_size is larger than the number of 128-column chunks";
    if (plan.stages < 2 || plan.stages > kMaxStages) return "stages must be 2 to 32";
    const int64_t tiles = ceil_div(shape.n, kTiledRows) * ceil_div(shape.m, plan.tile_tokens);
    if (tiles * plan.cluster_size >= 1ll << 31 || shape.m >= 1ll << 31) return "the product has too many tiles";
    const int64_t bytes = OneProduct::kHead + std::max(plan.stages * stage_bytes, out_bytes);
    if (bytes > limits.smem_bytes) return "stages is too large: they do not fit into shared memory";
    *needs = aq_needs{(int)bytes, 0};
    return nullptr;
}

bool plan_tiled(const Shape &shape, int64_t products, const aq_limits &limits, TiledPlan *best) {
    double best_cost = kNever;
    for (const int tokens : tokens_of(Tiles{})) {
        if (tokens > 16 && shape.m <= tokens / 4) continue;
        const int64_t tiles = products * ceil_div(shape.n, kTiledRows) * ceil_div(shape.m, tokens);
        for (int size = 1; size <= kMaxSplit; size *= 2) {
            TiledPlan plan{tokens, size, 8};
            aq_needs needs;
            while (plan.stages > 1 && tiled_problem(shape, limits, plan, &needs)) plan.stages--;
            const int at_once = resident(limits.sms, size) / size;
            if (plan.stages < 2 || at_once < 1) continue;
            // in units of one token's work on one chunk of 256 rows: the multiplication, or the decode if there are few tokens; then
            // the pipeline's fill and the reduction of partial tiles
            const double chunk = std::max(tokens, 24) + 24, waves = (double)ceil_div(tiles, at_once);
            const double cost = waves * ((ceil_div(shape.chunks, size) + 3) * chunk + (size > 1 ? 200 * size : 60));
            if (cost < best_cost) {
                best_cost = cost;
                *best = plan;
            }
        }
    }
    return best_cost != kNever;
}

namespace {

// For a product that has no better path.
double plan(const Shape &shape, const aq_limits &limits, TiledPlan *best) {
    return plan_tiled(shape, 1, limits, best) ? kLastResort : kNever;
}

int run(const Product &p, const TiledPlan &plan, const aq_needs &needs) {
    const int n_tiles = (int)ceil_div(p.shape.n, kTiledRows), m_tiles = (int)ceil_div(p.shape.m, plan.tile_tokens);
    TiledArgs a{};
    a.packed = p.packed, a.x = p.x, a.out = p.out, a.ldx = p.ldx, a.n = p.shape.n, a.scale = p.scale, a.m = (int)p.shape.m,
    a.k = (int)p.shape.k;
    a.n_tiles = n_tiles, a.m_tiles = m_tiles, a.tiles = p.shape.tiles, a.chunks = p.shape.chunks;
    a.cluster_size = plan.cluster_size, a.stages = plan.stages, a.out_type = p.out_type, a.pdl = p.pdl;
    const int64_t blocks = (int64_t)n_tiles * m_tiles;
    const bool half = p.x_type == AQ_F16;
    int status = AQ_GEMM_BAD_PLAN;
    with_tile(Tiles{}, plan.tile_tokens,
              [&](auto tile) { status = launch_tiles(tile, half, blocks, needs.smem_bytes, p.stream, a, OneProduct{}); });
    return status;
}

}  // namespace

const Path tiled_path = make_path<TiledPlan, plan, tiled_problem, run>("tiled", "tile_tokens cluster_size stages");

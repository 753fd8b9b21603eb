// Planning: the kernel, its tile and the split of K, from the device's multiprocessors and shared memory; and the launch.
#include <algorithm>

#include "gemm/gemm.h"
#include "gemm/launch.cuh"

namespace {

constexpr int kMaxSplit = 8;
constexpr double kNever = 1e30;

int device_limits(int *sms, int *smem, int *major) {
    int dev = 0;
    cudaError_t e = cudaGetDevice(&dev);
    if (e == cudaSuccess) e = cudaDeviceGetAttribute(sms, cudaDevAttrMultiProcessorCount, dev);
    if (e == cudaSuccess) e = cudaDeviceGetAttribute(smem, cudaDevAttrMaxSharedMemoryPerBlockOptin, dev);
    if (e == cudaSuccess) e = cudaDeviceGetAttribute(major, cudaDevAttrComputeCapabilityMajor, dev);
    return (int)e;
}

// Resident blocks in clusters of `split`. A cluster must be inside one GPC, so some multiprocessors of a GPC stay unused.
// From an occupancy query on an H200: 132, 132, 128, 120 (GPCs of 16 and 18). A rule, because a query is too slow here.
int resident(int sms, int split) { return split <= 2 ? sms / split * split : sms / (split == 4 ? 33 : 44) * (split == 4 ? 32 : 40); }

int64_t skinny_bytes(int m, int g, int warp_stages, int tiles, int split) {
    if (m > 8) return g == 1 ? SkinnyShape<2, 1, 1>::bytes(m, SkinnyShape<2, 1, 1>::groups(tiles), split) : SkinnyShape<2, 2, 1>::bytes(m, SkinnyShape<2, 2, 1>::groups(tiles), split);
    const int64_t one = g == 1 ? SkinnyShape<1, 1, 1>::bytes(m, SkinnyShape<1, 1, 1>::groups(tiles), split) : SkinnyShape<1, 2, 1>::bytes(m, SkinnyShape<1, 2, 1>::groups(tiles), split);
    return one + (int64_t)(warp_stages - 1) * kSkinnyWarps * SkinnyShape<1, 1, 1>::kRing;
}

// The plan must be equal for all m in 1..8 and in 9..16, because the result's bits must not depend on m. Shared memory is
// therefore computed for the largest m of the range.
bool plan_skinny(int m, int64_t k, int tiles, int chunks, int sms, int limit, bool clusters_exist, aq_plan *best) {
    const int max_tokens = m <= 8 ? 8 : 16;
    double best_cost = kNever;
    for (int g = 1; g <= (k % kCols ? 1 : 2); g++)
        for (int split = 1; split <= (clusters_exist ? 2 : 1); split *= 2)  // clusters of 4 are not all resident: twice as slow
            for (int waves = 1; waves <= 16; waves *= 2) {
                const int clusters = std::min(resident(sms, split) / split * waves, tiles / 2);
                if (!clusters) continue;
                const int rows = (tiles + clusters - 1) / clusters, columns = (chunks + split - 1) / split;
                const int steps = ((rows + 1) / 2 + g - 1) / g * g * columns;  // of 32 rows
                // A second pipeline stage helps if a warp has many steps and there are few tokens.
                const int warp_stages = max_tokens == 8 && k % kCols == 0 && split == 1 && steps * waves >= 12 * kSkinnyWarps ? 2 : 1;
                const int64_t bytes = skinny_bytes(max_tokens, g, warp_stages, rows, split);
                if (bytes > limit) continue;
                // In units of tiles x chunks that an SM streams and decodes, plus measured costs: twice as many loads of activations,
                // a cluster, and about one microsecond per additional wave.
                const double cost = (.5 * rows * columns + steps) * waves * (g == 1 ? 1.04 : 1.) + (split > 1 ? 35. : 0.) + 30. * (waves - 1);
                if (cost < best_cost) {
                    best_cost = cost;
                    *best = aq_plan{AQ_PATH_SKINNY, warp_stages, split, 2 * g, clusters * split, (int)bytes, 0, 0, 0, 0};
                }
            }
    return best_cost != kNever;
}

int log2_of(int v) {
    int l = 0;
    while (v >> (l + 1)) l++;
    return l;
}
// ceil(2^32 / d); 0 means d = 1, because 2^32 does not fit
uint32_t reciprocal(int d) { return d <= 1 ? 0u : (uint32_t)(((1ull << 32) + (unsigned)d - 1) / (unsigned)d); }

struct Tile {
    int tokens, bn, stage, out;
};
constexpr Tile kTiles[] = {
    {16, TileShape<8, 2, 2, 2>::kBN, TileShape<8, 2, 2, 2>::kStage, TileShape<8, 2, 2, 2>::kOutBytes},
    {64, TileShape<8, 2, 2, 8>::kBN, TileShape<8, 2, 2, 8>::kStage, TileShape<8, 2, 2, 8>::kOutBytes},
    {128, TileShape<8, 1, 2, 16>::kBN, TileShape<8, 1, 2, 16>::kStage, TileShape<8, 1, 2, 16>::kOutBytes},
};

double plan_tiled(int64_t m, int64_t n, int64_t k, int sms, int limit, bool clusters_exist, aq_plan *best) {
    double best_cost = kNever;
    const int chunks = (int)((k + kCols - 1) / kCols);
    for (const Tile &t : kTiles) {
        if (t.tokens > 16 && m <= t.tokens / 4) continue;
        const int stages = std::min(8, (limit - 1024) / t.stage);
        if (stages < 2 || 1024 + std::max(stages * t.stage, t.out) > limit) continue;
        const int64_t tiles = ((n + t.bn - 1) / t.bn) * ((m + t.tokens - 1) / t.tokens);
        for (int split = 1; split <= (clusters_exist ? kMaxSplit : 1) && split <= chunks; split *= 2) {
            const int at_once = resident(sms, split) / split;
            if (at_once < 1) continue;
            // in units of one token's work on one chunk of 256 rows: the multiplication, or the decode if there are few tokens; then
            // the pipeline's fill and the reduction of partial tiles
            const double chunk = std::max(t.tokens, 24) + 24, waves = (double)((tiles + at_once - 1) / at_once);
            const double cost = waves * (((chunks + split - 1) / split + 3) * chunk + (split > 1 ? 200 * split : 60));
            if (cost < best_cost) {
                best_cost = cost;
                *best = aq_plan{AQ_PATH_TILED, t.tokens, split, stages, (int)(tiles * split),
                                1024 + std::max(stages * t.stage, t.out), 0, 0, 0, 0};
            }
        }
    }
    return best_cost;
}

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
constexpr double kWgmmaPart = .35, kWgmmaUneven = 3.5;  // per part of a stream-K tile; if the parts are not equal
// Microseconds of the few-token kernel for 9 to 16 tokens on an H200, by the packed weights' size. Up to 8 tokens it is always faster.
double skinny_us(int tiles, int chunks) { return 3. + .272e-6 * (double)tiles * chunks * kChunk; }

double plan_wgmma(int64_t m, int tiles, int chunks, int sms, int limit, aq_plan *best) {
    double best_us = kNever;
    for (const WgmmaCost &c : kWgmmaCosts) {
        const int64_t m_tiles = (m + c.tokens - 1) / c.tokens;
        if (m_tiles * (tiles + 15) / 16 * chunks > INT32_MAX / 4) continue;
        const auto consider = [&](int split, int rows, int permuted, int blocks, int stream_k_tiles, double us) {
            const int halves = rows == 128 ? 2 : 1, reduce_bytes = wgmma_reduce_bytes(c.tokens, split, halves), stage = wgmma_stage(c.tokens, halves);
            const int stages = std::min(16, (limit - kWgmmaHead - reduce_bytes - (permuted ? 4096 : 0)) / stage);  // the permutation kernel is resident at the same time
            if (stages < 2 || us >= best_us) return;
            best_us = us;
            const WgmmaSpace space = wgmma_space(c.tokens, (int)m_tiles, chunks, permuted, stream_k_tiles, split, blocks);
            *best = aq_plan{AQ_PATH_WGMMA, c.tokens, split, stages, blocks, kWgmmaHead + stages * stage + reduce_bytes, stream_k_tiles, rows, permuted,
                            (int64_t)(space.image + space.sums)};
        };
        for (int permuted = c.tokens == 128; permuted < 2; permuted++) {
            const double start = kWgmmaStart + (permuted ? kWgmmaPermute : 0.);
            for (int halves = 1; halves <= (c.tokens == 16 ? 1 : c.tokens == 128 ? 0 : 2); halves++) {
                const int64_t all = (tiles * halves + kBlockTiles - 1) / kBlockTiles * m_tiles;
                if (chunks % halves || chunks / halves < 2 || all * 2 > resident(sms, 2)) continue;
                const double step = c.step + (permuted ? 0. : halves == 1 ? c.permute : c.permute2);
                consider(2, 256 / halves, permuted, (int)all * 2, (int)all, start + (chunks / halves + 1) / 2 * step + kWgmmaCluster);
            }
            const int64_t all = (tiles + kBlockTiles - 1) / kBlockTiles * m_tiles;
            const auto shares = [&](int blocks, int stream_k_tiles) {
                if (stream_k_tiles && (!shares_fit(blocks, stream_k_tiles, chunks) || stream_k_tiles * chunks < blocks)) return;  // every block needs at least one chunk
                const int64_t steps = (all - stream_k_tiles + blocks - 1) / blocks * chunks + ((int64_t)stream_k_tiles * chunks + blocks - 1) / blocks;
                const double more = stream_k_tiles ? c.add + kWgmmaPart * blocks / stream_k_tiles + (blocks % stream_k_tiles ? kWgmmaUneven : 0.) : 0.;
                consider(1, 256, permuted, blocks, stream_k_tiles, start + (double)steps * (c.step + (permuted ? 0. : c.permute)) + more);
            };
            const int64_t waves = (all + sms - 1) / sms;
            shares((int)((all + waves - 1) / waves), 0);
            if (all % sms) shares(sms, (int)(all % sms));
            if (all % sms && all > sms) shares(sms, (int)(all % sms) + sms);
            if (all <= sms / 2) shares((int)(sms / all * all), (int)all);
            const int64_t lower = (tiles + 11) / 12 * m_tiles, low_waves = (lower + sms - 1) / sms;
            if (c.tokens < 128) consider(1, 192, permuted, (int)((lower + low_waves - 1) / low_waves), 0, start + (double)low_waves * chunks * (c.low + (permuted ? 0. : c.permute)));
        }
    }
    return best_us;
}

}  // namespace

extern "C" int aq_plan_w4a16(int64_t m, int64_t n, int64_t k, int path, aq_plan *plan) {
    int sms, limit, major;
    const int e = device_limits(&sms, &limit, &major);
    if (e) return e;
    const int tiles = row_tiles(n), chunks = column_chunks(k);
    const bool skinny_fits = path <= AQ_PATH_SKINNY && m <= 16 && plan_skinny((int)m, k, tiles, chunks, sms, limit, major >= 9, plan);
    if (path == AQ_PATH_SKINNY) return skinny_fits ? 0 : AQ_GEMM_NO_PLAN;
    if (skinny_fits && m <= 8) return 0;
    aq_plan wide{};
    const bool wgmma_possible = path != AQ_PATH_TILED && major == 9 && wgmma_runs();
    const double wide_us = wgmma_possible ? plan_wgmma(m, tiles, chunks, sms, limit, &wide) : kNever;
    if (skinny_fits && skinny_us(tiles, chunks) <= wide_us) return 0;
    if (wide_us < kNever) {
        *plan = wide;
        return 0;
    }
    if (path == AQ_PATH_WGMMA || plan_tiled(m, n, k, sms, limit, major >= 9, plan) == kNever) return AQ_GEMM_NO_PLAN;
    return 0;
}

extern "C" int aq_w4a16(const void *x, int64_t ldx, const uint8_t *packed, float tensor_scale, void *out, void *workspace,
                        int64_t m, int64_t n, int64_t k, int x_type, int out_type, const aq_plan *plan, int pdl, void *stream) {
    const bool half = x_type == AQ_F16;
    const float scale = half ? tensor_scale : tensor_scale * kUndo;
    const int tiles = row_tiles(n), chunks = column_chunks(k);
    const Launch how{plan->blocks, 0, plan->smem, plan->split, pdl, (cudaStream_t)stream};
    if (plan->path == AQ_PATH_SKINNY) {
        SkinnyArgs a{};
        a.packed = packed, a.x = (const uint16_t *)x, a.out = out, a.ldx = ldx, a.n = n, a.scale = scale, a.m = (int)m, a.k = (int)k;
        a.tiles = tiles, a.chunks = chunks, a.split = plan->split, a.out_type = out_type, a.pdl = pdl;
        const int clusters = plan->blocks / plan->split;
        a.log_split = log2_of(plan->split);
        a.tiles_each = tiles / clusters, a.tiles_more = tiles % clusters;
        a.chunks_each = chunks / plan->split, a.chunks_more = chunks % plan->split;
        for (int i = 0; i < 2; i++) a.by_chunks[i] = reciprocal(a.chunks_each + i);
        a.by_m = reciprocal((int)m);
        return launch_skinny(a, half, plan->width, plan->stages, how);
    }
    if (plan->path == AQ_PATH_WGMMA) {
        WgmmaArgs a{};
        a.packed = packed, a.out = out, a.n = n, a.scale = scale, a.m = (int)m, a.halves = plan->rows == 128 ? 2 : 1;
        a.row_tiles = plan->rows / kRows, a.n_tiles = (tiles + a.row_tiles - 1) / a.row_tiles;
        a.m_tiles = (int)((m + plan->width - 1) / plan->width), a.tiles = tiles, a.chunks = chunks, a.steps = chunks / a.halves;
        a.stream_k_tiles = plan->stream_k_tiles, a.stages = plan->stages, a.out_type = out_type, a.pdl = pdl;
        if (a.stream_k_tiles && (!shares_fit(plan->blocks, a.stream_k_tiles, a.steps) || a.stream_k_tiles * a.steps < plan->blocks)) return AQ_GEMM_NO_PLAN;
        // The two blocks of a cluster compute one tile, and only such blocks compute two parts of K in parallel. With 128 tokens there are
        // too few registers for the in-place permutation.
        const bool clusters = plan->split == 2 && plan->width < 128 && a.stream_k_tiles == a.n_tiles * a.m_tiles && plan->blocks == 2 * a.stream_k_tiles;
        const bool halves = a.halves == 1 || (clusters && chunks % 2 == 0 && (plan->width == 32 || plan->width == 64));
        const bool rows = plan->rows == 256 || plan->rows == 128 || (plan->rows == 192 && plan->split == 1 && !a.stream_k_tiles && plan->width < 128);
        if ((plan->split != 1 && !clusters) || !halves || !rows || (plan->width == 128 && !plan->permuted)) return AQ_GEMM_NO_PLAN;
        return launch_wgmma(a, (const uint16_t *)x, ldx, (int)k, plan->permuted, half, plan->width, workspace, how);
    }
    const int bn = kTiles[plan->width == 16 ? 0 : plan->width == 64 ? 1 : 2].bn;
    const TiledArgs a{packed, (const uint16_t *)x, out, ldx, n, scale, (int)m, (int)k, (int)((n + bn - 1) / bn),
                      (int)((m + plan->width - 1) / plan->width), tiles, chunks, plan->split, plan->stages, out_type, pdl};
    return launch_tiled(a, half, plan->width, how);
}

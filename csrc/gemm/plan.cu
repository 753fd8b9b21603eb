// Which kernel, how many warps, how K is split: chosen from the device's multiprocessors and shared memory, then launched.
#include <algorithm>

#include "gemm/gemm.h"
#include "gemm/launch.cuh"

namespace {

constexpr int kMaxSplit = 8;

int device_limits(int *sms, int *smem, int *major) {
    int dev = 0;
    cudaError_t e = cudaGetDevice(&dev);
    if (e == cudaSuccess) e = cudaDeviceGetAttribute(sms, cudaDevAttrMultiProcessorCount, dev);
    if (e == cudaSuccess) e = cudaDeviceGetAttribute(smem, cudaDevAttrMaxSharedMemoryPerBlockOptin, dev);
    if (e == cudaSuccess) e = cudaDeviceGetAttribute(major, cudaDevAttrComputeCapabilityMajor, dev);
    return (int)e;
}

// Blocks that can be resident in clusters of `split`: a cluster lives in one GPC, and a GPC's odd multiprocessors stay out.
// Measured on an H200 by occupancy query: 132, 132, 128, 120 (GPCs of 16 and 18); a rule serves where a query cannot be made.
int resident(int sms, int split) { return split <= 2 ? sms / split * split : sms / (split == 4 ? 33 : 44) * (split == 4 ? 32 : 40); }

int skinny_bytes(int m, int nt, int tiles, int pairs, int warps, int stages, int split, int blocks, int *x_at, int *slots_at, int *pitch) {
    const int clusters = blocks / split, most_tiles = (tiles + clusters - 1) / clusters, most_pairs = (pairs + split - 1) / split;
    *pitch = most_pairs * kColsPadded * 2 + 16;
    *x_at = 1024 + warps * stages * kPair;
    const int64_t slots = *x_at + (int64_t)m * *pitch, all = slots + (int64_t)(most_tiles + warps) * 8 * nt * kSlotPitch * 4;
    *slots_at = (int)slots;
    return all > INT32_MAX ? INT32_MAX : (int)all;
}

bool plan_skinny(int m, int tiles, int pairs, int sms, int limit, bool clusters_exist, aq_plan *best) {
    const int nt = m <= 8 ? 1 : 2;
    int64_t best_cost = INT64_MAX;
    for (int split = 1; split <= (clusters_exist ? kMaxSplit : 1); split *= 2) {
        const int blocks = std::min(resident(sms, split), tiles * split);
        if (blocks < split) continue;
        for (int warps = 16; warps >= 4; warps /= 2)
            for (int stages = warps == 16 ? 2 : 64 / warps / 2; stages >= 2; stages /= 2) {
                int x_at, slots_at, pitch;
                const int bytes = skinny_bytes(m, nt, tiles, pairs, warps, stages, split, blocks, &x_at, &slots_at, &pitch);
                if (bytes > limit) continue;
                const int clusters = blocks / split;
                const int64_t line = (int64_t)((tiles + clusters - 1) / clusters) * ((pairs + split - 1) / split);
                // in chunk pairs streamed by a block, plus what a split, fewer warps and a shallow ring were seen to cost
                const int64_t cost = (line + warps - 1) / warps * warps + (split == 1 ? 0 : split == 2 ? 8 : 8 * split) +
                                     (16 - warps) * 2 + (warps * stages < 32 ? 16 : 0);
                if (cost < best_cost) {
                    best_cost = cost;
                    *best = aq_plan{AQ_PATH_SKINNY, warps, split, stages, blocks, bytes};
                }
            }
    }
    return best_cost != INT64_MAX;
}

struct Tile {
    int tokens, bn, stage, out;
};
constexpr Tile kTiles[] = {
    {16, TileShape<8, 1, 2, 2>::kBN, TileShape<8, 1, 2, 2>::kStage, TileShape<8, 1, 2, 2>::kOutBytes},
    {64, TileShape<8, 1, 2, 8>::kBN, TileShape<8, 1, 2, 8>::kStage, TileShape<8, 1, 2, 8>::kOutBytes},
    {128, TileShape<4, 2, 4, 8>::kBN, TileShape<4, 2, 4, 8>::kStage, TileShape<4, 2, 4, 8>::kOutBytes},
};

bool plan_tiled(int64_t m, int64_t n, int64_t k, int sms, int limit, bool clusters_exist, aq_plan *best) {
    double best_cost = 1e30;
    const int chunks = (int)((k + kCols - 1) / kCols);
    for (const Tile &t : kTiles) {
        if (t.tokens > 16 && m <= t.tokens / 4) continue;
        const int stages = std::min(8, (limit - 1024) / t.stage);
        if (stages < 2 || 1024 + std::max(stages * t.stage, t.out) > limit) continue;
        const int64_t tiles = ((n + t.bn - 1) / t.bn) * ((m + t.tokens - 1) / t.tokens);
        for (int split = 1; split <= (clusters_exist ? kMaxSplit : 1) && split <= chunks; split *= 2) {
            const int at_once = resident(sms, split) / split;
            if (at_once < 1) continue;
            // in units of one token's work on one chunk of 256 rows: the math, or the decode where tokens are few; then the pipeline's
            // fill and the adding of partial tiles
            const double chunk = std::max(t.tokens, 24) + 8, waves = (double)((tiles + at_once - 1) / at_once);
            const double cost = waves * (((chunks + split - 1) / split + 3) * chunk + (split > 1 ? 60 + 20 * split : 30));
            if (cost < best_cost) {
                best_cost = cost;
                *best = aq_plan{AQ_PATH_TILED, t.tokens, split, stages, (int)(tiles * split),
                                1024 + std::max(stages * t.stage, t.out)};
            }
        }
    }
    return best_cost < 1e30;
}

}  // namespace

extern "C" int aq_plan_w4a16(int64_t m, int64_t n, int64_t k, int path, aq_plan *plan) {
    int sms, limit, major;
    const int e = device_limits(&sms, &limit, &major);
    if (e) return e;
    const int tiles = (int)((n + kRows - 1) / kRows), pairs = (int)((k + kColsPadded - 1) / kColsPadded);
    if (path != AQ_PATH_TILED && m <= 16 && plan_skinny((int)m, tiles, pairs, sms, limit, major >= 9, plan)) return 0;
    if (path != AQ_PATH_SKINNY && plan_tiled(m, n, k, sms, limit, major >= 9, plan)) return 0;
    return AQ_GEMM_NO_PLAN;
}

extern "C" int aq_w4a16(const void *x, int64_t ldx, const uint8_t *packed, float tensor_scale, void *out, int64_t m, int64_t n,
                        int64_t k, int x_type, int out_type, const aq_plan *plan, int pdl, void *stream) {
    const bool half = x_type == AQ_F16;
    const float scale = half ? tensor_scale : tensor_scale * kUndo;
    const int tiles = (int)((n + kRows - 1) / kRows), pairs = (int)((k + kColsPadded - 1) / kColsPadded);
    const Launch how{plan->blocks, 0, plan->smem, plan->split, pdl, (cudaStream_t)stream};
    if (plan->path == AQ_PATH_SKINNY) {
        SkinnyArgs a{packed, (const uint16_t *)x, out, ldx, n, scale, (int)m, (int)k, tiles, pairs, plan->split, plan->stages,
                     0, 0, 0, out_type, pdl};
        skinny_bytes((int)m, m <= 8 ? 1 : 2, tiles, pairs, plan->warps, plan->stages, plan->split, plan->blocks, &a.x_at, &a.slots_at,
                     &a.pitch);
        return launch_skinny(a, half, plan->warps, how);
    }
    const int bn = kTiles[plan->warps == 16 ? 0 : plan->warps == 64 ? 1 : 2].bn;
    const TiledArgs a{packed, (const uint16_t *)x, out, ldx, n, scale, (int)m, (int)k, (int)((n + bn - 1) / bn),
                      (int)((m + plan->warps - 1) / plan->warps), pairs, plan->split, plan->stages, out_type, pdl};
    return launch_tiled(a, half, plan->warps, how);
}

// The Hopper kernel: its instantiations, the tensor map of the activations, the kernel that permutes the activations, what a plan needs,
// and the launches.
//
// A product is up to three kernels on one stream. Each is launched with programmatic dependence on the kernel before it and completes
// only after griddepcontrol.wait in at least one of its blocks. Another thread may put kernels of its own between them: if each of those
// also completes only after the one before it, as ordinary kernels and the ones of this module do, the order is the stream's.
#include <algorithm>

#include "gemm/paths.cuh"
#include "gemm/wgmma.cuh"

namespace {

// Tiles of tile_rows x tile_tokens by wgmma.
struct WgmmaPlan {
    int tile_tokens;  // 16, 32, 64 or 128
    int tile_rows;    // 256, 192, or 128 (its block computes two parts of K in parallel)
    int blocks;
    int cluster_size;    // blocks that share K, 1 or 2
    int stages;          // pipeline stages of a block
    int stream_k_tiles;  // tiles that are computed stream-K: all blocks get equal shares of them along K
    int permute_first;   // 1 if a separate kernel permutes the activations, 0 if the blocks do it in place
    int add_in_launch;  // 1 if the blocks add the parts of stream-K tiles, 0 if a fix-up kernel does; the permutation kernel clears their flags
};

constexpr int kPermuteThreads = 128, kMaxBlocks = 65535, kMaxStages = 16;  // a block's barriers are three arrays of 16

struct PermuteArgs {
    const uint16_t *x;
    uint8_t *image;
    int64_t ldx;
    int m, k, log_tokens, parts, rows, pdl;  // parts: 64-column parts per row; rows: rows of 128 bytes in the image
    uint32_t *flags = nullptr;               // these are set to 0
    int flag_count = 0;
};

// The image of the activations: [tile of tokens][64 columns][token][128 bytes]. A block writes 64 rows of it, a thread one unit of each of four
// rows. With 32 registers it can be resident at the same time as the blocks of wgmma_kernel, of this product and of the previous one.
__global__ void __maxnreg__(32) permute_kernel(const PermuteArgs a) {
    if (threadIdx.x == 0) allow_next_kernel();
    if (a.pdl) wait_for_previous_kernel();
    for (int i = blockIdx.x * kPermuteThreads + threadIdx.x; i < a.flag_count; i += gridDim.x * kPermuteThreads) a.flags[i] = 0;
    const int unit = threadIdx.x & 7;
    uint32_t w[4][4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const int row = blockIdx.x * 64 + j * 16 + (threadIdx.x >> 3), tile_part = row >> a.log_tokens, tile = tile_part / a.parts;
        const int token = (tile << a.log_tokens) + row - (tile_part << a.log_tokens), column0 = (tile_part - tile * a.parts) * 64;
        const uint16_t *from = a.x + token * a.ldx + column0;
#pragma unroll
        for (int l = 0; l < 4; l++)  // zeros beyond M and K: the padded codes are zeros, but 0 * NaN is not 0
            w[j][l] = token < a.m && column0 + image_column(unit, l) < a.k ? *(const uint32_t *)(from + image_column(unit, l)) : 0u;
    }
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const int row = blockIdx.x * 64 + j * 16 + (threadIdx.x >> 3);
        if (row < a.rows)
            *(uint4 *)(a.image + (int64_t)row * 128 + image_unit(row, unit) * 16) = make_uint4(w[j][0], w[j][1], w[j][2], w[j][3]);
    }
}

// The driver's function that makes a tensor map, or null if the driver has none.
auto tensor_map_encoder() {
    static const auto encoder = [] {
        void *at = nullptr;
        cudaDriverEntryPointQueryResult result;
        const int status = status_of(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &at, 12000, cudaEnableDefault, &result));
        return status == 0 && result == cudaDriverEntryPointSuccess ? (decltype(&cuTensorMapEncodeTiled))at : nullptr;
    }();
    return encoder;
}

// 64 columns x the tokens of a tile per copy; zeros beyond M and K: the padded codes are zeros, but 0 * NaN is not 0.
int make_tensor_map(const Product &p, int tile_tokens, CUtensorMap *map) {
    const cuuint64_t size[2] = {(cuuint64_t)p.shape.k, (cuuint64_t)p.shape.m}, pitch[1] = {(cuuint64_t)p.ldx * 2};
    const cuuint32_t box[2] = {64, (cuuint32_t)tile_tokens}, each[2] = {1, 1};
    const CUresult r =
        tensor_map_encoder()(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, (void *)p.x, size, pitch, box, each, CU_TENSOR_MAP_INTERLEAVE_NONE,
                             CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return r == CUDA_SUCCESS ? 0 : (int)cudaErrorInvalidValue;
}

int launch_permute(const Product &p, const WgmmaPlan &plan, uint8_t *image, const WgmmaSpace &space) {
    int log_tokens = 0;
    while (1 << log_tokens < plan.tile_tokens) log_tokens++;
    const int rows = (int)(space.image / 128);
    PermuteArgs args{p.x, image, p.ldx, (int)p.shape.m, (int)p.shape.k, log_tokens, p.shape.chunks * 2, rows, p.pdl};
    args.flags = (uint32_t *)(image + space.image + space.sums), args.flag_count = (int)(space.flags / sizeof(uint32_t));
    return launch<permute_kernel>(Launch{dim3((unsigned)(rows + 63) / 64), kPermuteThreads, p.stream, p.pdl}, args);
}

template <int TOKENS, bool ADD>
int launch_product(const WgmmaArgs &args, const CUtensorMap &map, bool half, const Launch &how) {
    return half ? launch<wgmma_kernel<TOKENS, true, ADD>>(how, args, how.cluster_size, map)
                : launch<wgmma_kernel<TOKENS, false, ADD>>(how, args, how.cluster_size, map);
}

template <int TOKENS>
int launch_tokens(const WgmmaArgs &args, const CUtensorMap &map, bool half, bool add, const Launch &how) {
    if constexpr (TOKENS > 16)
        if (add) return launch_product<TOKENS, true>(args, map, half, how);
    const int status = launch_product<TOKENS, false>(args, map, half, how);
    if (status || !args.stream_k_tiles || how.cluster_size > 1) return status;
    const int units = args.stream_k_tiles * kWarps * (TOKENS / 16);
    return launch<fixup_kernel<TOKENS>>(Launch{dim3((unsigned)(units / kFixupWarps)), 32 * kFixupWarps, how.stream, true}, args,
                                        (int)how.blocks.x);
}

WgmmaSpace space_of(const Shape &shape, const WgmmaPlan &plan) {
    return wgmma_space(plan.tile_tokens, (int)ceil_div(shape.m, plan.tile_tokens), shape.chunks, plan.permute_first,
                       plan.stream_k_tiles && plan.cluster_size == 1, plan.add_in_launch, plan.blocks);
}

const char *problem(const Shape &shape, const aq_limits &limits, const WgmmaPlan &plan, aq_needs *needs) {
    if (!limits.wgmma) return "this device, or the code for it, has no wgmma";
    if (plan.tile_tokens != 16 && plan.tile_tokens != 32 && plan.tile_tokens != 64 && plan.tile_tokens != 128)
        return "tile_tokens must be 16, 32, 64 or 128";
    if (plan.tile_rows != 256 && plan.tile_rows != 192 && plan.tile_rows != 128) return "tile_rows must be 256, 192 or 128";
    if (plan.cluster_size != 1 && plan.cluster_size != 2) return "cluster_size must be 1 or 2";
    if (plan.permute_first != 0 && plan.permute_first != 1) return "permute_first must be 0 or 1";
    // With 128 tokens there are too few registers for the in-place permutation.
    if (plan.tile_tokens == 128 && !plan.permute_first) return "permute_first must be 1 for tiles of 128 tokens";
    if (plan.add_in_launch != 0 && plan.add_in_launch != 1) return "add_in_launch must be 0 or 1";
    if (plan.add_in_launch && (!plan.permute_first || !plan.stream_k_tiles || plan.cluster_size != 1 || plan.tile_tokens == 16))
        return "add_in_launch needs permute_first 1, cluster_size 1, stream_k_tiles, and at least 32 tokens per tile";
    const int halves = plan.tile_rows == 128 ? 2 : 1, steps = shape.chunks / halves;
    if (halves == 2 && (plan.cluster_size != 2 || (plan.tile_tokens != 32 && plan.tile_tokens != 64)))
        return "tile_rows 128 needs cluster_size 2 and tile_tokens 32 or 64";
    if (halves == 2 && shape.chunks % 2) return "tile_rows 128 needs an even number of 128-column chunks";
    if (plan.tile_rows == 192 && (plan.cluster_size != 1 || plan.stream_k_tiles || plan.tile_tokens == 128))
        return "tile_rows 192 needs cluster_size 1, stream_k_tiles 0 and at most 64 tokens per tile";
    const int64_t tile_row_tiles = plan.tile_rows / kRows, m_tiles = ceil_div(shape.m, plan.tile_tokens);
    const int64_t tiles = ceil_div(shape.tiles, tile_row_tiles) * m_tiles;
    if (shape.m >= 1ll << 31 || tiles * shape.chunks > INT32_MAX / 4 || m_tiles * shape.chunks * plan.tile_tokens >= 1ll << 30)
        return "the product has too many tiles";
    if (plan.stream_k_tiles < 0 || plan.stream_k_tiles > tiles) return "stream_k_tiles must be between 0 and the number of tiles";
    if (plan.blocks < 1 || plan.blocks > kMaxBlocks) return "blocks must be 1 to 65535";
    if (plan.stream_k_tiles && (!shares_fit(plan.blocks, plan.stream_k_tiles, steps) || (int64_t)plan.stream_k_tiles * steps < plan.blocks))
        return "blocks must be at most the number of steps of the stream-K tiles";
    // The two blocks of a cluster compute one tile.
    if (plan.cluster_size == 2 && (plan.tile_tokens == 128 || plan.stream_k_tiles != tiles || plan.blocks != 2 * tiles))
        return "cluster_size 2 needs stream_k_tiles equal to the number of tiles, twice as many blocks, and at most 64 tokens per tile";
    if (plan.stages < 2 || plan.stages > kMaxStages) return "stages must be 2 to 16";
    const int64_t bytes = kWgmmaHead + (int64_t)plan.stages * wgmma_stage(plan.tile_tokens, halves) +
                          wgmma_reduce_bytes(plan.tile_tokens, plan.cluster_size, halves);
    if (bytes > limits.smem_bytes) return "stages is too large: they do not fit into shared memory";
    const WgmmaSpace space = space_of(shape, plan);
    *needs = aq_needs{(int)bytes, (int64_t)(space.image + space.sums + space.flags)};
    return nullptr;
}

// Microseconds, fitted to measurements on an H200. step: 256 rows x 128 columns (or 128 x 256), with permuted activations; low: a step of
// 192 rows; permute, permute2: additional cost per step of the in-place permutation, with one part of K and with two; add: the fix-up
// kernel's reduction over the workspace; launch, launch_part, launch_uneven: the sums in the launch, per part of a tile, if the parts are
// not equal.
struct WgmmaCost {
    int tokens;
    double step, low, permute, permute2, add, launch, launch_part, launch_uneven;
};
constexpr WgmmaCost kWgmmaCosts[] = {{16, .58, .54, .02, 0., 4.2, 0., 0., 0.},
                                     {32, .60, .58, .03, .12, 4.2, 2.5, .48, 2.7},
                                     {64, .84, .655, .09, .4, 4.1, 1.35, .87, 2.7},
                                     {128, 1.36, 0., 0., 0., 5.5, 0., 2.65, 4.6}};

constexpr double kWgmmaStart = 3.2, kWgmmaPermute = 1.2, kWgmmaCluster = 2.8;
constexpr double kWgmmaPart = .35, kWgmmaUneven = 3.5;  // per part of a stream-K tile; if the parts are not equal
// If all tiles are stream-K, though the blocks could compute one whole tile each and the rest in few parts (4.7 at 5120x17408, M = 1,024).
constexpr double kWgmmaAllSplit = 4., kFewLeft = 5.;
// Sums in the launch: not measured as faster with more parts of a tile or more waves of tiles; with 32 tokens, more stages are slower.
constexpr double kFewParts = 2.5;
constexpr int kAddWaves = 2, kAddStages = 4;
constexpr int kFewSteps = 16, kFewStages = 4;                 // if a block has few steps, more stages than that all arrive late
constexpr int kWgmmaMaxStages = 16, kPermuteResident = 4096;  // shared memory of the permutation kernel, which is resident at the same time
double plan(const Shape &shape, const aq_limits &limits, WgmmaPlan *best) {
    double best_us = kNever;
    if (!limits.wgmma) return kNever;
    const int sms = limits.sms, tiles = shape.tiles, chunks = shape.chunks;
    for (const WgmmaCost &c : kWgmmaCosts) {
        const int64_t m_tiles = ceil_div(shape.m, c.tokens);
        if (m_tiles * (tiles + 15) / 16 * chunks > INT32_MAX / 4) continue;
        const auto consider = [&](int cluster_size, int rows, int permute_first, int blocks, int stream_k_tiles, int add, double us) {
            if (us >= best_us) return;
            const int halves = rows == 128 ? 2 : 1,
                      taken = kWgmmaHead + wgmma_reduce_bytes(c.tokens, cluster_size, halves) + (permute_first ? kPermuteResident : 0);
            const bool few = cluster_size == 1 && c.tokens == 64 && stream_k_tiles > 0 &&
                             (int64_t)stream_k_tiles * chunks <= (int64_t)kFewSteps * blocks;
            const int most = few ? kFewStages : add && c.tokens == 32 ? kAddStages : kWgmmaMaxStages;
            const int stages = std::min(most, (limits.smem_bytes - taken) / wgmma_stage(c.tokens, halves));
            const WgmmaPlan tried{c.tokens, rows, blocks, cluster_size, stages, stream_k_tiles, permute_first, add};
            aq_needs needs;
            if (problem(shape, limits, tried, &needs)) return;
            best_us = us;
            *best = tried;
        };
        for (int permute_first = c.tokens == 128; permute_first < 2; permute_first++) {
            const double start = kWgmmaStart + (permute_first ? kWgmmaPermute : 0.);
            for (int halves = 1; halves <= (c.tokens == 16 ? 1 : c.tokens == 128 ? 0 : 2); halves++) {
                const int64_t all = ceil_div(tiles * halves, kBlockTiles) * m_tiles;
                if (chunks % halves || chunks / halves < 2 || all * 2 > resident(sms, 2)) continue;
                const double step = c.step + (permute_first ? 0. : halves == 1 ? c.permute : c.permute2);
                consider(2, 256 / halves, permute_first, (int)all * 2, (int)all, 0,
                         start + (chunks / halves + 1) / 2 * step + kWgmmaCluster);
            }
            const int64_t all = ceil_div(tiles, kBlockTiles) * m_tiles;
            const auto shares = [&](int blocks, int stream_k_tiles) {
                const int64_t steps = ceil_div(all - stream_k_tiles, blocks) * chunks + ceil_div((int64_t)stream_k_tiles * chunks, blocks);
                const double us = start + (double)steps * (c.step + (permute_first ? 0. : c.permute));
                if (!stream_k_tiles) return consider(1, 256, permute_first, blocks, 0, 0, us);
                const double parts = (double)blocks / stream_k_tiles;
                const bool uneven = blocks % stream_k_tiles;
                const bool all_split = stream_k_tiles == all && all > blocks && blocks <= kFewLeft * (double)(all - blocks);
                consider(1, 256, permute_first, blocks, stream_k_tiles, 0,
                         us + c.add + kWgmmaPart * parts + (uneven ? kWgmmaUneven : 0.) + (all_split ? kWgmmaAllSplit : 0.));
                if (c.tokens > 16 && permute_first && parts <= kFewParts && stream_k_tiles <= blocks && all <= kAddWaves * sms)
                    consider(1, 256, 1, blocks, stream_k_tiles, 1, us + c.launch + c.launch_part * parts + (uneven ? c.launch_uneven : 0.));
            };
            const int64_t waves = ceil_div(all, sms);
            shares((int)ceil_div(all, waves), 0);
            if (all % sms) shares(sms, (int)(all % sms));
            if (all % sms && all > sms) shares(sms, (int)(all % sms) + sms);
            if (all <= sms / 2) shares((int)(sms / all * all), (int)all);
            const int64_t lower = (tiles + 11) / 12 * m_tiles, low_waves = ceil_div(lower, sms);
            if (c.tokens < 128)
                consider(1, 192, permute_first, (int)ceil_div(lower, low_waves), 0, 0,
                         start + (double)low_waves * chunks * (c.low + (permute_first ? 0. : c.permute)));
        }
    }
    return best_us;
}

int run(const Product &p, const WgmmaPlan &plan, const aq_needs &needs) {
    WgmmaArgs a{};
    a.packed = p.packed, a.out = p.out, a.n = p.shape.n, a.scale = p.scale, a.m = (int)p.shape.m, a.halves = plan.tile_rows == 128 ? 2 : 1;
    a.row_tiles = plan.tile_rows / kRows, a.n_tiles = ceil_div(p.shape.tiles, a.row_tiles);
    a.m_tiles = (int)ceil_div(p.shape.m, plan.tile_tokens), a.tiles = p.shape.tiles, a.chunks = p.shape.chunks,
    a.steps = a.chunks / a.halves;
    a.stream_k_tiles = plan.stream_k_tiles, a.stages = plan.stages, a.out_type = p.out_type, a.pdl = p.pdl;
    const WgmmaSpace space = space_of(p.shape, plan);
    uint8_t *at = (uint8_t *)p.workspace;
    a.image = plan.permute_first ? at : nullptr, a.sums = (float *)(at + space.image);
    CUtensorMap map{};
    const int status = plan.permute_first ? launch_permute(p, plan, at, space) : make_tensor_map(p, plan.tile_tokens, &map);
    if (status) return status;
    const Launch how{dim3((unsigned)plan.blocks), kWgmmaThreads,    p.stream,
                     p.pdl || plan.permute_first, needs.smem_bytes, plan.cluster_size};
    const bool half = p.x_type == AQ_F16, add = plan.add_in_launch;
    if (plan.tile_tokens == 16) return launch_tokens<16>(a, map, half, add, how);
    if (plan.tile_tokens == 32) return launch_tokens<32>(a, map, half, add, how);
    if (plan.tile_tokens == 64) return launch_tokens<64>(a, map, half, add, how);
    return launch_tokens<128>(a, map, half, add, how);
}

}  // namespace

bool wgmma_exists() { return tensor_map_encoder() && kernel_exists<wgmma_kernel<64, false, false>>(kWgmmaThreads); }

const Path wgmma_path = make_path<WgmmaPlan, plan, problem, run>(
    "wgmma", "tile_tokens tile_rows blocks cluster_size stages stream_k_tiles permute_first add_in_launch");

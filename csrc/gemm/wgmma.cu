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

constexpr int kPermuteThreads = 128, kMaxBlocks = 65535, kMaxStages = 16;  // a block's barriers are three arrays of 16

struct PermuteArgs {
    const uint16_t *x;
    uint8_t *image;
    int64_t ldx;
    int m, k, log_tokens, parts, rows, pdl;  // parts: 64-column parts per row; rows: rows of 128 bytes in the image
};

// The image of the activations: [tile of tokens][64 columns][token][128 bytes]. A block writes 64 rows of it, a thread one unit of each of four
// rows. With 32 registers it can be resident at the same time as the blocks of wgmma_kernel, of this product and of the previous one.
__global__ void __maxnreg__(32) permute_kernel(const PermuteArgs a) {
    if (threadIdx.x == 0) allow_next_kernel();
    if (a.pdl) wait_for_previous_kernel();
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

int launch_permute(const Product &p, const aq_wgmma_plan &plan, uint8_t *image, size_t image_bytes) {
    int log_tokens = 0;
    while (1 << log_tokens < plan.tile_tokens) log_tokens++;
    const int rows = (int)(image_bytes / 128);
    const PermuteArgs args{p.x, image, p.ldx, (int)p.shape.m, (int)p.shape.k, log_tokens, p.shape.chunks * 2, rows, p.pdl};
    return launch<permute_kernel>(Launch{dim3((unsigned)(rows + 63) / 64), kPermuteThreads, 0, 1, p.pdl, p.stream}, args);
}

template <int TOKENS>
int launch_tokens(const WgmmaArgs &args, const CUtensorMap &map, bool half, const Launch &how) {
    const int status = half ? launch<wgmma_kernel<TOKENS, true>>(how, args, how.cluster_size, map)
                            : launch<wgmma_kernel<TOKENS, false>>(how, args, how.cluster_size, map);
    if (status || !args.stream_k_tiles || how.cluster_size > 1) return status;
    const int units = args.stream_k_tiles * kWarps * (TOKENS / 16);
    return launch<fixup_kernel<TOKENS>>(Launch{dim3((unsigned)(units / kFixupWarps)), 32 * kFixupWarps, 0, 1, true, how.stream}, args,
                                        (int)how.blocks.x);
}

WgmmaSpace space_of(const Shape &shape, const aq_wgmma_plan &plan) {
    return wgmma_space(plan.tile_tokens, (int)((shape.m + plan.tile_tokens - 1) / plan.tile_tokens), shape.chunks, plan.permute_first,
                       plan.stream_k_tiles, plan.cluster_size, plan.blocks);
}

}  // namespace

bool wgmma_exists() { return tensor_map_encoder() && kernel_exists<wgmma_kernel<64, false>>(kWgmmaThreads); }

const char *wgmma_problem(const Shape &shape, const aq_limits &limits, const aq_wgmma_plan &plan, aq_needs *needs) {
    if (!limits.wgmma) return "this device, or the code for it, has no wgmma";
    if (plan.tile_tokens != 16 && plan.tile_tokens != 32 && plan.tile_tokens != 64 && plan.tile_tokens != 128)
        return "tile_tokens must be 16, 32, 64 or 128";
    if (plan.tile_rows != 256 && plan.tile_rows != 192 && plan.tile_rows != 128) return "tile_rows must be 256, 192 or 128";
    if (plan.cluster_size != 1 && plan.cluster_size != 2) return "cluster_size must be 1 or 2";
    if (plan.permute_first != 0 && plan.permute_first != 1) return "permute_first must be 0 or 1";
    // With 128 tokens there are too few registers for the in-place permutation.
    if (plan.tile_tokens == 128 && !plan.permute_first) return "permute_first must be 1 for tiles of 128 tokens";
    const int halves = plan.tile_rows == 128 ? 2 : 1, steps = shape.chunks / halves;
    if (halves == 2 && (plan.cluster_size != 2 || (plan.tile_tokens != 32 && plan.tile_tokens != 64)))
        return "tile_rows 128 needs cluster_size 2 and tile_tokens 32 or 64";
    if (halves == 2 && shape.chunks % 2) return "tile_rows 128 needs an even number of 128-column chunks";
    if (plan.tile_rows == 192 && (plan.cluster_size != 1 || plan.stream_k_tiles || plan.tile_tokens == 128))
        return "tile_rows 192 needs cluster_size 1, stream_k_tiles 0 and at most 64 tokens per tile";
    const int64_t tile_row_tiles = plan.tile_rows / kRows, m_tiles = (shape.m + plan.tile_tokens - 1) / plan.tile_tokens;
    const int64_t tiles = (shape.tiles + tile_row_tiles - 1) / tile_row_tiles * m_tiles;
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
    *needs = aq_needs{(int)bytes, (int64_t)(space.image + space.sums)};
    return nullptr;
}

int run_wgmma(const Product &p, const aq_wgmma_plan &plan, const aq_needs &needs) {
    WgmmaArgs a{};
    a.packed = p.packed, a.out = p.out, a.n = p.shape.n, a.scale = p.scale, a.m = (int)p.shape.m, a.halves = plan.tile_rows == 128 ? 2 : 1;
    a.row_tiles = plan.tile_rows / kRows, a.n_tiles = (p.shape.tiles + a.row_tiles - 1) / a.row_tiles;
    a.m_tiles = (int)((p.shape.m + plan.tile_tokens - 1) / plan.tile_tokens), a.tiles = p.shape.tiles, a.chunks = p.shape.chunks,
    a.steps = a.chunks / a.halves;
    a.stream_k_tiles = plan.stream_k_tiles, a.stages = plan.stages, a.out_type = p.out_type, a.pdl = p.pdl;
    const WgmmaSpace space = space_of(p.shape, plan);
    uint8_t *at = (uint8_t *)p.workspace;
    a.image = plan.permute_first ? at : nullptr, a.sums = (float *)(at + space.image);
    CUtensorMap map{};
    const int status = plan.permute_first ? launch_permute(p, plan, at, space.image) : make_tensor_map(p, plan.tile_tokens, &map);
    if (status) return status;
    const Launch how{dim3((unsigned)plan.blocks), kWgmmaThreads, needs.smem_bytes, plan.cluster_size,
                     p.pdl || plan.permute_first, p.stream};
    const bool half = p.x_type == AQ_F16;
    if (plan.tile_tokens == 16) return launch_tokens<16>(a, map, half, how);
    if (plan.tile_tokens == 32) return launch_tokens<32>(a, map, half, how);
    if (plan.tile_tokens == 64) return launch_tokens<64>(a, map, half, how);
    return launch_tokens<128>(a, map, half, how);
}

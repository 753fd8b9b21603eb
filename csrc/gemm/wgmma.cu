// Instantiations of the Hopper kernel, the tensor map of the activations, and the kernel that permutes the activations.
#include "gemm/launch.cuh"

namespace {

constexpr int kPermuteThreads = 128;

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
        if (row < a.rows) *(uint4 *)(a.image + (int64_t)row * 128 + image_unit(row, unit) * 16) = make_uint4(w[j][0], w[j][1], w[j][2], w[j][3]);
    }
}

template <int TOKENS>
int launch_shape(const WgmmaArgs &args, const CUtensorMap &map, bool half, Launch how) {
    how.threads = kWgmmaThreads;
    const int e = half ? launch_with(wgmma_kernel<TOKENS, true>, args, how, how.split, map) : launch_with(wgmma_kernel<TOKENS, false>, args, how, how.split, map);
    if (e || !args.stream_k_tiles || how.split > 1) return e;
    const int units = args.stream_k_tiles * kWarps * (TOKENS / 16);
    const Launch last{units / kFixupWarps, 32 * kFixupWarps, 0, 1, 1, how.stream};
    return launch_with(fixup_kernel<TOKENS>, args, last, how.blocks);
}

// The driver's function that makes a tensor map, or null if the driver has none.
auto tensor_map_encoder() {
    static const auto encoder = [] {
        void *at = nullptr;
        cudaDriverEntryPointQueryResult result;
        const cudaError_t e = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &at, 12000, cudaEnableDefault, &result);
        return e == cudaSuccess && result == cudaDriverEntryPointSuccess ? (decltype(&cuTensorMapEncodeTiled))at : nullptr;
    }();
    return encoder;
}

}  // namespace

int launch_wgmma(WgmmaArgs args, const uint16_t *x, int64_t ldx, int k, bool permuted, bool half, int tokens, void *workspace, Launch how) {
    const WgmmaSpace space = wgmma_space(tokens, args.m_tiles, args.chunks, permuted, args.stream_k_tiles, how.split, how.blocks);
    uint8_t *at = (uint8_t *)workspace;
    args.image = permuted ? at : nullptr, args.sums = (float *)(at + space.image);
    CUtensorMap map{};
    if (permuted) {
        int log_tokens = 0;
        while (1 << log_tokens < tokens) log_tokens++;
        const int rows = (int)(space.image / 128);
        const PermuteArgs permute_args{x, at, ldx, args.m, k, log_tokens, args.chunks * 2, rows, how.pdl};
        const Launch first{(rows + 63) / 64, kPermuteThreads, 0, 1, how.pdl, how.stream};
        const int e = launch_with(permute_kernel, permute_args, first);
        if (e) return e;
        how.pdl = 1;
    } else {
        // 64 columns x the tokens of a tile per copy; zeros beyond M and K: the padded codes are zeros, but 0 * NaN is not 0
        const cuuint64_t size[2] = {(cuuint64_t)k, (cuuint64_t)args.m}, pitch[1] = {(cuuint64_t)ldx * 2};
        const cuuint32_t box[2] = {64, (cuuint32_t)tokens}, each[2] = {1, 1};
        const CUresult r = tensor_map_encoder()(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, (void *)x, size, pitch, box, each, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                                CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
        if (r != CUDA_SUCCESS) return (int)cudaErrorInvalidValue;
    }
    if (tokens == 16) return launch_shape<16>(args, map, half, how);
    if (tokens == 32) return launch_shape<32>(args, map, half, how);
    if (tokens == 64) return launch_shape<64>(args, map, half, how);
    return launch_shape<128>(args, map, half, how);
}

bool wgmma_runs() {
    cudaFuncAttributes attr;
    return tensor_map_encoder() && cudaFuncGetAttributes(&attr, wgmma_kernel<64, false>) == cudaSuccess && attr.maxThreadsPerBlock >= kWgmmaThreads;
}

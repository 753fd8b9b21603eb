// The Hopper kernel's instances, and the small kernel before it that writes the activations as wgmma reads them.
#include <algorithm>

#include "gemm/launch.cuh"

namespace {

constexpr int kArrangeThreads = 128;

struct ArrangeArgs {
    const uint16_t *x;
    uint8_t *image;
    uint32_t *arrived;
    int64_t ldx, pieces;
    int m, k, tokens, parts, counters, pdl;  // parts: 64-column parts of a row
};

// A thread makes 16 bytes of the image: [tile of tokens][64 columns][token][128 bytes, swizzled]. Unit 2 i + h of a token's eight, word l,
// holds columns 16 l + 4 i + 2 h and the next.
__global__ void __launch_bounds__(kArrangeThreads) arrange_kernel(const ArrangeArgs a) {
    if (threadIdx.x == 0) let_next_kernel_start();
    if (a.pdl) wait_for_previous_kernel();
    const int64_t first = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, stride = (int64_t)gridDim.x * blockDim.x;
    for (int64_t i = first; i < a.counters; i += stride) a.arrived[i] = 0;
    for (int64_t i = first; i < a.pieces; i += stride) {
        const int unit = (int)i & 7;
        const int64_t row = i >> 3, tile_part = row / a.tokens;
        const int in_tile = (int)(row - tile_part * a.tokens), tile = (int)(tile_part / a.parts), part = (int)(tile_part - (int64_t)tile * a.parts);
        const int token = tile * a.tokens + in_tile, column = part * 64 + unit * 2;
        uint32_t w[4];
#pragma unroll
        for (int l = 0; l < 4; l++) {  // beyond M and K: zeros, since padded codes are zeros and 0 * NaN is not
            const bool there = token < a.m && column + 16 * l < a.k;
            w[l] = there ? *(const uint32_t *)(a.x + token * a.ldx + column + 16 * l) : 0u;
        }
        *(uint4 *)(a.image + row * 128 + ((unit ^ (in_tile & 7)) << 4)) = make_uint4(w[0], w[1], w[2], w[3]);
    }
}

template <int TOKENS>
int launch_shape(const WgmmaArgs &args, bool half, Launch how) {
    how.threads = WgmmaShape<TOKENS>::kThreads;
    return half ? launch_with(wgmma_kernel<TOKENS, true>, args, how) : launch_with(wgmma_kernel<TOKENS, false>, args, how);
}

}  // namespace

int launch_wgmma(WgmmaArgs args, const uint16_t *x, int64_t ldx, int k, bool half, int tokens, void *workspace, Launch how) {
    const WgmmaSpace space = wgmma_space(tokens, args.m_tiles, args.chunks, args.shared, how.blocks);
    uint8_t *at = (uint8_t *)workspace;
    args.image = at, args.sums = (float *)(at + space.image), args.arrived = (uint32_t *)(at + space.image + space.sums);
    ArrangeArgs arrange{x, at, args.arrived, ldx, (int64_t)(space.image / 16), args.m, k, tokens, args.chunks * 2, (int)(space.counters / 4), how.pdl};
    // few blocks where the work is small: they lie beside the multiplying kernel's, and must not keep those out
    const int64_t per_block = kArrangeThreads * 4;
    const Launch first{(int)std::min<int64_t>((arrange.pieces + per_block - 1) / per_block, 2112), kArrangeThreads, 0, 1, how.pdl, how.stream};
    const int e = launch_with(arrange_kernel, arrange, first);
    if (e) return e;
    how.pdl = 1;
    if (tokens == 16) return launch_shape<16>(args, half, how);
    if (tokens == 32) return launch_shape<32>(args, half, how);
    if (tokens == 64) return launch_shape<64>(args, half, how);
    if (tokens == 128) return launch_shape<128>(args, half, how);
    return launch_shape<256>(args, half, how);
}

bool wgmma_runs() {
    cudaFuncAttributes attr;
    return cudaFuncGetAttributes(&attr, wgmma_kernel<64, false>) == cudaSuccess && attr.maxThreadsPerBlock >= WgmmaShape<64>::kThreads;
}

// Instances of the Hopper kernel, and whether the code that runs here holds them.
#include "gemm/launch.cuh"

namespace {
template <int TOKENS, int KS>
int launch_shape(const WgmmaArgs &args, bool half, Launch how) {
    how.threads = kWgmmaThreads;
    return half ? launch_with(wgmma_kernel<TOKENS, KS, true>, args, how) : launch_with(wgmma_kernel<TOKENS, KS, false>, args, how);
}
}  // namespace

int launch_wgmma(const WgmmaArgs &args, bool half, int tokens, int parts, Launch how) {
    if (tokens == 32) return parts == 1 ? launch_shape<32, 1>(args, half, how) : launch_shape<32, 2>(args, half, how);
    return parts == 1 ? launch_shape<64, 1>(args, half, how) : launch_shape<64, 2>(args, half, how);
}

bool wgmma_runs() {
    cudaFuncAttributes attr;
    return cudaFuncGetAttributes(&attr, wgmma_kernel<32, 1, false>) == cudaSuccess && attr.maxThreadsPerBlock >= kWgmmaThreads;
}

// Instantiations of the many-token kernel: 256 rows x 16, 64 or 128 tokens.
#include "gemm/launch.cuh"

namespace {
template <int WR, int KS, int TR, int TC>
int launch_shape(const TiledArgs &args, bool half, Launch how) {
    how.threads = 32 * WR * KS;
    return half ? launch_with(tiled_kernel<WR, KS, TR, TC, true>, args, how) : launch_with(tiled_kernel<WR, KS, TR, TC, false>, args, how);
}
}  // namespace

int launch_tiled(const TiledArgs &args, bool half, int tokens, Launch how) {
    if (tokens == 16) return launch_shape<8, 2, 2, 2>(args, half, how);
    if (tokens == 64) return launch_shape<8, 2, 2, 8>(args, half, how);
    return launch_shape<8, 1, 2, 16>(args, half, how);
}

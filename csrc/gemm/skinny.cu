// Instances of the few-token kernel.
#include "gemm/gemm.h"
#include "gemm/launch.cuh"

namespace {
template <int NT, bool HALF>
int launch_step(const SkinnyArgs &args, int step_tiles, Launch how) {
    if (args.k % kCols) return step_tiles == 2 ? launch_with(skinny_kernel<NT, HALF, 2, false>, args, how) : AQ_GEMM_NO_PLAN;
    if (step_tiles == 4) return launch_with(skinny_kernel<NT, HALF, 4, true>, args, how);
    return launch_with(skinny_kernel<NT, HALF, 2, true>, args, how);
}
}  // namespace

int launch_skinny(const SkinnyArgs &args, bool half, int warps, int step_tiles, Launch how) {
    how.threads = 32 * warps;
    if (args.m <= 8) return half ? launch_step<1, true>(args, step_tiles, how) : launch_step<1, false>(args, step_tiles, how);
    return half ? launch_step<2, true>(args, step_tiles, how) : launch_step<2, false>(args, step_tiles, how);
}

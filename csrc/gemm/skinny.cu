// Instantiations of the few-token kernel.
#include "gemm/gemm.h"
#include "gemm/launch.cuh"

namespace {
template <int NT, bool HALF>
int launch_step(const SkinnyArgs &args, int stages, int step_tiles, Launch how) {
    if (args.k % kCols) return stages == 1 && step_tiles == 2 ? launch_with(skinny_kernel<NT, HALF, 1, 1, false>, args, how) : AQ_GEMM_NO_PLAN;
    if (stages == 1) {
        if (step_tiles == 2) return launch_with(skinny_kernel<NT, HALF, 1, 1, true>, args, how);
        return launch_with(skinny_kernel<NT, HALF, 2, 1, true>, args, how);
    }
    if constexpr (NT == 1) {
        if (step_tiles == 2) return launch_with(skinny_kernel<1, HALF, 1, 2, true>, args, how);
        return launch_with(skinny_kernel<1, HALF, 2, 2, true>, args, how);
    }
    return AQ_GEMM_NO_PLAN;
}
}  // namespace

int launch_skinny(const SkinnyArgs &args, bool half, int stages, int step_tiles, Launch how) {
    how.threads = 32 * kSkinnyWarps;
    if (args.m <= 8) return half ? launch_step<1, true>(args, stages, step_tiles, how) : launch_step<1, false>(args, stages, step_tiles, how);
    return half ? launch_step<2, true>(args, stages, step_tiles, how) : launch_step<2, false>(args, stages, step_tiles, how);
}

// Instances of the few-token kernel.
#include "gemm/launch.cuh"

int launch_skinny(const SkinnyArgs &args, bool half, int warps, Launch how) {
    how.threads = 32 * warps;
    if (args.m <= 8) return half ? launch_with(skinny_kernel<1, true>, args, how) : launch_with(skinny_kernel<1, false>, args, how);
    return half ? launch_with(skinny_kernel<2, true>, args, how) : launch_with(skinny_kernel<2, false>, args, how);
}

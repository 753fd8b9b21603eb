// Launch with clusters and programmatic dependent launch, for all W4A16 kernels.
#pragma once
#include "gemm/skinny.cuh"
#include "gemm/tiled.cuh"
#include "gemm/wgmma.cuh"

struct Launch {
    int blocks, threads, smem, split, pdl;
    cudaStream_t stream;
};

template <typename Args, typename... More>
int launch_with(void (*kernel)(Args, More...), const Args &args, const Launch &how, More... more) {
    cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, how.smem);
    if (e != cudaSuccess) return (int)e;
    cudaLaunchAttribute attrs[2];
    unsigned count = 0;
    if (how.split > 1) {
        attrs[count].id = cudaLaunchAttributeClusterDimension;
        attrs[count].val.clusterDim.x = (unsigned)how.split;
        attrs[count].val.clusterDim.y = attrs[count].val.clusterDim.z = 1;
        count++;
    }
    if (how.pdl) {
        attrs[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attrs[count].val.programmaticStreamSerializationAllowed = 1;
        count++;
    }
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3((unsigned)how.blocks);
    config.blockDim = dim3((unsigned)how.threads);
    config.dynamicSmemBytes = (size_t)how.smem;
    config.stream = how.stream;
    config.attrs = attrs;
    config.numAttrs = count;
    e = cudaLaunchKernelEx(&config, kernel, args, more...);
    return (int)(e != cudaSuccess ? e : cudaGetLastError());
}

int launch_skinny(const SkinnyArgs &args, bool half, int stages, int step_tiles, Launch how);
int launch_tiled(const TiledArgs &args, bool half, int tokens, Launch how);
// args: without the pointers into the workspace, which are set here. x: M rows of K columns, ldx elements apart. permuted: a separate kernel
// permutes x first.
int launch_wgmma(WgmmaArgs args, const uint16_t *x, int64_t ldx, int k, bool permuted, bool half, int tokens, void *workspace, Launch how);
bool wgmma_runs();

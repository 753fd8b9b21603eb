// Devices, their limits, and error texts.
#include <cstdio>

#include "gemm/gemm.h"
#include <cuda_runtime.h>

extern "C" const char *aq_error_text(int status) {
    if (status == AQ_GEMM_NO_PLAN) return "no kernel of this path fits this shape on this device";
    if (status == AQ_GEMM_NO_NATIVE) return "this device has no native FP4 instruction (it needs sm_120a or sm_121a code)";
    return cudaGetErrorString((cudaError_t)status);
}

extern "C" int aq_device_count(int *count) { return (int)cudaGetDeviceCount(count); }

extern "C" int aq_device_info(int device, aq_device *out) {
    cudaDeviceProp p;
    cudaError_t e = cudaGetDeviceProperties(&p, device);
    if (e != cudaSuccess) return (int)e;
    snprintf(out->name, sizeof out->name, "%.127s", p.name);
    out->major = p.major;
    out->minor = p.minor;
    out->sms = p.multiProcessorCount;
    out->smem_block = (int)p.sharedMemPerBlockOptin;
    out->l2_bytes = p.l2CacheSize;
    out->memory_bytes = p.totalGlobalMem;
    if ((e = cudaDeviceGetAttribute(&out->clock_khz, cudaDevAttrClockRate, device)) != cudaSuccess) return (int)e;
    if ((e = cudaDriverGetVersion(&out->driver)) != cudaSuccess) return (int)e;
    return (int)cudaRuntimeGetVersion(&out->runtime);
}

extern "C" int aq_pointer_device(const void *pointer, int *device) {
    cudaPointerAttributes a;
    const cudaError_t e = cudaPointerGetAttributes(&a, pointer);
    *device = e == cudaSuccess && (a.type == cudaMemoryTypeDevice || a.type == cudaMemoryTypeManaged) ? a.device : -1;
    return (int)e;
}

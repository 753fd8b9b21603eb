// Fake quantization on the GPU in ModelOpt's encoding, with the same values as the C codec (csrc/nvfp4).
// All steps use round-to-nearest intrinsics: a fused multiply-add or an approximate division would change near-ties.
// Source of the order of operations: ModelOpt's kernels/quantization.
#include <cuda_fp8.h>

#include "gemm/numerics.cuh"
#include "gemm/launch.cuh"

namespace {

constexpr int kBlock = 16;

__device__ uint32_t e4m3_of(float v) { return __nv_cvt_float_to_fp8(v, __NV_SATFINITE, __NV_E4M3); }
__device__ float e4m3_value(uint32_t byte) { return __half2float(__half(__nv_cvt_fp8_to_halfraw((__nv_fp8_storage_t)byte, __NV_E4M3))); }

// ties to even on {0, .5, 1, 1.5, 2, 3, 4, 6}; NaN gives 7
__device__ uint32_t e2m1_magnitude(float a) {
    return a <= .25f ? 0u : a < .75f ? 1u : a <= 1.25f ? 2u : a < 1.75f ? 3u : a <= 2.5f ? 4u : a < 3.5f ? 5u : a <= 5.f ? 6u : 7u;
}
__device__ float e2m1_value(uint32_t idx) {  // 0, .5, then (1 + m/2) * 2^(e - 1)
    return idx < 2 ? .5f * idx : __uint_as_float((126u + (idx >> 1)) << 23 | (idx & 1u) << 22);
}

template <typename T>
__device__ float widen(T v);
template <>
__device__ float widen<float>(float v) {
    return v;
}
template <>
__device__ float widen<__half>(__half v) {
    return __half2float(v);
}
template <>
__device__ float widen<__nv_bfloat16>(__nv_bfloat16 v) {
    return __bfloat162float(v);
}

template <typename T>
__device__ float load_block(const T *x, float (&v)[kBlock]) {
    union {
        uint4 q[kBlock * sizeof(T) / 16];
        T t[kBlock];
    } u;
#pragma unroll
    for (int i = 0; i < (int)(kBlock * sizeof(T) / 16); i++) u.q[i] = ((const uint4 *)x)[i];
    float amax = 0.f;
#pragma unroll
    for (int i = 0; i < kBlock; i++) {
        v[i] = widen<T>(u.t[i]);
        amax = fmaxf(amax, fabsf(v[i]));
    }
    return amax;
}

// Dynamic activation quantization like ModelOpt's GPU op: no lower clamp on the scale byte, and steps under 1e-5 become 1.
template <typename T>
__global__ void fake_quant_kernel(const T *x, int64_t blocks, float ts, T *out) {
    const int64_t b = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (b >= blocks) return;
    float v[kBlock];
    const float amax = load_block(x + b * kBlock, v);
    const float s = e4m3_value(e4m3_of(fminf(__fdiv_rn(amax, __fmul_rn(6.f, ts)), 448.f)));
    float step = __fmul_rn(s, ts);
    if (!(step >= 1e-5f)) step = 1.f;
    union {
        uint4 q[kBlock * sizeof(T) / 16];
        T t[kBlock];
    } u;
#pragma unroll
    for (int i = 0; i < kBlock; i++) {
        const float mag = __fmul_rn(e2m1_value(e2m1_magnitude(__fdiv_rn(fabsf(v[i]), step))), step);
        store_as(u.t + i, v[i] >= 0.f ? mag : __fsub_rn(0.f, mag));  // a negative number that rounds to zero becomes +0.0, as in ModelOpt
    }
#pragma unroll
    for (int i = 0; i < (int)(kBlock * sizeof(T) / 16); i++) ((uint4 *)(out + b * kBlock))[i] = u.q[i];
}

// A thread per block of 16 elements.
constexpr int kThreads = 128;
Launch grid(int64_t blocks, void *stream) { return Launch{dim3((unsigned)ceil_div(blocks, kThreads)), kThreads, (cudaStream_t)stream}; }

template <typename T>
int fake_quant(const void *x, int64_t blocks, float ts, void *out, void *stream) {
    return launch<fake_quant_kernel<T>>(grid(blocks, stream), (const T *)x, blocks, ts, (T *)out);
}

}  // namespace

extern "C" int aq_fake_quant(const void *x, int type, int64_t blocks, float ts, void *out, void *stream) {
    if (type == AQ_F32) return fake_quant<float>(x, blocks, ts, out, stream);
    if (type == AQ_F16) return fake_quant<__half>(x, blocks, ts, out, stream);
    return fake_quant<__nv_bfloat16>(x, blocks, ts, out, stream);
}

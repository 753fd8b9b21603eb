// Pack, unpack and fake quantization on the GPU in ModelOpt's encoding, with the same bytes as the C codec (csrc/nvfp4).
// All steps use round-to-nearest intrinsics: a fused multiply-add or an approximate division would change near-ties.
// Source of the order of operations: ModelOpt qtensor/nvfp4_tensor.py (pack) and kernels/quantization (fake quant).
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
__device__ float widen<float>(float v) { return v; }
template <>
__device__ float widen<__half>(__half v) { return __half2float(v); }
template <>
__device__ float widen<__nv_bfloat16>(__nv_bfloat16 v) { return __bfloat162float(v); }

// NaN as the C codec writes it: positive and quiet, without payload.
template <typename T>
__device__ T quiet_nan();
template <>
__device__ float quiet_nan<float>() { return __uint_as_float(0x7FC00000u); }
template <>
__device__ __half quiet_nan<__half>() { return __ushort_as_half(0x7E00u); }
template <>
__device__ __nv_bfloat16 quiet_nan<__nv_bfloat16>() { return __ushort_as_bfloat16(0x7FC0u); }

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

template <typename T>
__global__ void pack_kernel(const T *x, int64_t blocks, float ts, uint8_t *codes, uint8_t *scales, DeviceReport *report) {
    const int64_t b = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (b >= blocks) return;
    float v[kBlock];
    const float amax = load_block(x + b * kBlock, v);
    uint32_t bad = 0;  // a bit per element that is NaN or infinite
#pragma unroll
    for (int i = 0; i < kBlock; i++) bad |= (uint32_t)!(fabsf(v[i]) <= 3.402823466e38f) << i;
    if (bad) report_bad(report, (unsigned long long)(b * kBlock + __ffs((int)bad) - 1), (unsigned long long)__popc(bad));
    float t = __fdiv_rn(amax, __fmul_rn(6.f, ts));
    if (t == 0.f) t = 1.f;
    const uint32_t s = e4m3_of(fminf(fmaxf(t, 1.f / 512), 448.f));
    const float step = __fmul_rn(e4m3_value(s), ts);
    uint32_t lo = 0, hi = 0;
#pragma unroll
    for (int i = 0; i < kBlock; i++) {
        const float q = __fdiv_rn(v[i], step);
        const uint32_t code = e2m1_magnitude(fabsf(q)) | (q < 0.f ? 8u : 0u);  // no sign if the quotient underflows to -0
        if (i < 8) lo |= code << 4 * i;
        else hi |= code << 4 * (i - 8);
    }
    *(uint2 *)(codes + b * (kBlock / 2)) = make_uint2(lo, hi);
    scales[b] = (uint8_t)s;
}

template <typename T>
__global__ void unpack_kernel(const uint8_t *codes, const uint8_t *scales, int64_t blocks, float ts, T *out, DeviceReport *report) {
    const int64_t b = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (b >= blocks) return;
    if ((scales[b] & 0x7Fu) == 0x7Fu) report_bad(report, (unsigned long long)b, 1);
    const uint2 c = *(const uint2 *)(codes + b * (kBlock / 2));
    const float step = __fmul_rn(e4m3_value(scales[b]), ts);
    union {
        uint4 q[kBlock * sizeof(T) / 16];
        T t[kBlock];
    } u;
#pragma unroll
    for (int i = 0; i < kBlock; i++) {
        const uint32_t code = (i < 8 ? c.x >> 4 * i : c.y >> 4 * (i - 8)) & 15u;
        const float mag = e2m1_value(code & 7u);
        const float v = __fmul_rn(code & 8u ? -mag : mag, step);
        if (v == v) store_as(u.t + i, v);
        else u.t[i] = quiet_nan<T>();  // the scale is NaN, or the step is infinite and the element zero
    }
#pragma unroll
    for (int i = 0; i < (int)(kBlock * sizeof(T) / 16); i++) ((uint4 *)(out + b * kBlock))[i] = u.q[i];
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
Launch grid(int64_t blocks, void *stream) { return Launch{dim3((unsigned)((blocks + kThreads - 1) / kThreads)), kThreads, 0, 1, false, (cudaStream_t)stream}; }

template <typename T>
int pack(const void *x, int64_t blocks, float ts, uint8_t *codes, uint8_t *scales, DeviceReport *report, void *stream) {
    return launch<pack_kernel<T>>(grid(blocks, stream), (const T *)x, blocks, ts, codes, scales, report);
}
template <typename T>
int unpack(const uint8_t *codes, const uint8_t *scales, int64_t blocks, float ts, void *out, DeviceReport *report, void *stream) {
    return launch<unpack_kernel<T>>(grid(blocks, stream), codes, scales, blocks, ts, (T *)out, report);
}
template <typename T>
int fake_quant(const void *x, int64_t blocks, float ts, void *out, void *stream) {
    return launch<fake_quant_kernel<T>>(grid(blocks, stream), (const T *)x, blocks, ts, (T *)out);
}

}  // namespace

extern "C" int aq_pack(const void *x, int type, int64_t blocks, float ts, uint8_t *codes, uint8_t *scales, aq_report *report, void *stream) {
    ReportMemory memory(report, (cudaStream_t)stream);
    int status = memory.prepare();
    if (status) return status;
    if (type == AQ_F32) status = pack<float>(x, blocks, ts, codes, scales, memory.get(), stream);
    else if (type == AQ_F16) status = pack<__half>(x, blocks, ts, codes, scales, memory.get(), stream);
    else status = pack<__nv_bfloat16>(x, blocks, ts, codes, scales, memory.get(), stream);
    return status ? status : memory.read();
}

extern "C" int aq_unpack(const uint8_t *codes, const uint8_t *scales, int64_t blocks, float ts, void *out, int type, aq_report *report, void *stream) {
    ReportMemory memory(report, (cudaStream_t)stream);
    int status = memory.prepare();
    if (status) return status;
    if (type == AQ_F32) status = unpack<float>(codes, scales, blocks, ts, out, memory.get(), stream);
    else if (type == AQ_F16) status = unpack<__half>(codes, scales, blocks, ts, out, memory.get(), stream);
    else status = unpack<__nv_bfloat16>(codes, scales, blocks, ts, out, memory.get(), stream);
    return status ? status : memory.read();
}

extern "C" int aq_fake_quant(const void *x, int type, int64_t blocks, float ts, void *out, void *stream) {
    if (type == AQ_F32) return fake_quant<float>(x, blocks, ts, out, stream);
    if (type == AQ_F16) return fake_quant<__half>(x, blocks, ts, out, stream);
    return fake_quant<__nv_bfloat16>(x, blocks, ts, out, stream);
}

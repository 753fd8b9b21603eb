// Decoding of repacked weights, and stores of the three output types.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "gemm/fragments.cuh"
#include "gemm/ptx.cuh"

// A warp releases a slot with one arrival for its 32 lanes. racecheck tracks only the arriving lane, so with -DAQ_RACECHECK each lane
// arrives (no false hazards; 20 % slower at 64 tokens).
#ifdef AQ_RACECHECK
constexpr int kReleaseArrivals = 32;
#else
constexpr int kReleaseArrivals = 1;
#endif

// The 8 codes of one repacked word times their two scales, as the four A registers: exact, value * 2^-8.
__device__ __forceinline__ void decode8(uint32_t w, uint32_t scale0, uint32_t scale1, uint32_t (&a)[4]) {
    constexpr uint32_t kMinusZero = 0x80008000u;  // a * b - 0
#pragma unroll
    for (int j = 0; j < 4; j++) a[j] = fma_bf16x2(field_of(w, j), j & 1 ? scale1 : scale0, kMinusZero);
}
// scale_word of byte `which` of four; one permute copies the byte to both halves
__device__ __forceinline__ uint32_t scale_pair(uint32_t bytes, int which) {
    return __byte_perm(bytes, 0, 0x4040 | which | which << 8) * 16u + kScaleBias;
}
constexpr float kUndo = 256.0f;  // 2^8

// For fp16 activations: the exact bf16 value (at most 6 significant bits) as fp16, multiplied by 2^8.
__device__ __forceinline__ uint32_t bf16x2_to_f16x2(uint32_t v) {
    return to_f16x2(__uint_as_float(v << 16) * kUndo, __uint_as_float(v & 0xFFFF0000u) * kUndo);
}

template <typename T>
__device__ __forceinline__ void store_as(T *p, float v);
template <>
__device__ __forceinline__ void store_as<float>(float *p, float v) {
    *p = v;
}
template <>
__device__ __forceinline__ void store_as<__half>(__half *p, float v) {
    *p = __float2half_rn(v);
}
template <>
__device__ __forceinline__ void store_as<__nv_bfloat16>(__nv_bfloat16 *p, float v) {
    *p = __float2bfloat16_rn(v);
}
// One of the three output types, chosen at run time: epilogues are short, so templates would add code and no speed.
__device__ __forceinline__ void store_typed(void *out, int64_t at, float v, int type) {
    if (type == 0) store_as((float *)out + at, v);
    else if (type == 1) store_as((__half *)out + at, v);
    else store_as((__nv_bfloat16 *)out + at, v);
}
// Two floats as the bits of two 16-bit numbers.
__device__ __forceinline__ uint32_t pair_of(float lo, float hi, int type) { return type == 1 ? to_f16x2(lo, hi) : to_bf16x2(lo, hi); }

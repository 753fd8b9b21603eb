// W4A4: FP4 activations x FP4 weights, both with E4M3 block scales, on mma.m16n8k64.block_scale if the GPU has it.
//
// On other GPUs that one instruction is replaced by an emulation that takes the same fragments from the same lanes, so layouts, scale
// lanes and epilogue are those that run on sm_120a and sm_121a. The emulation computes, to the bit:
//     acc = (((acc + T0) + T1) + T2) + T3,  T_b = (sum over 16 columns of a * w) * (sfa * sfb)
// where each T_b is exact (12-bit sum times 8-bit product of scales) and each addition rounds to nearest in fp32.
#include "gemm/numerics.cuh"
#include "gemm/launch.cuh"

namespace {

constexpr int kWarps = 4, kColsOfWarp = 64, kNT = kColsOfWarp / 8;

struct Args {
    const uint8_t *a, *a_scale, *w, *w_scale;
    void *out;
    int64_t m, n, k;
    float alpha;
    int out_type, fault;
};

__device__ float ue4m3_value(uint32_t byte) {  // like the instruction: 0x7F is NaN
    const uint32_t e = (byte >> 3) & 15u, m = byte & 7u;
    if (e == 15 && m == 7) return __uint_as_float(0x7FC00000u);
    return e ? __uint_as_float((e + 120u) << 23 | m << 20) : (float)m * (1.f / 512);
}
__device__ int e2m1_twice(uint32_t code) {  // 2 * value, an integer
    const int mag = (int)(0xC8643210u >> 4 * (code & 7u) & 15u);
    return code & 8u ? -mag : mag;
}

__device__ void emulated(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], uint32_t sfa, uint32_t sfb, int lane) {
    const int g = lane >> 2, l = lane & 3;
    constexpr uint32_t all = 0xFFFFFFFFu;
    int sums[4][4] = {};  // [block of 16 columns][element of d]
    for (int from = 0; from < 4; from++) {
        uint32_t ar[4], br[2][2];
        for (int i = 0; i < 4; i++) ar[i] = __shfl_sync(all, a[i], 4 * g + from);
        for (int c = 0; c < 2; c++)
            for (int i = 0; i < 2; i++) br[c][i] = __shfl_sync(all, b[i], 4 * (2 * l + c) + from);
        for (int e = 0; e < 4; e++)
            for (int i = 0; i < 2; i++) {
                int sum = 0;
                for (int j = 0; j < 8; j++)
                    sum += e2m1_twice(ar[(e >> 1) + 2 * i] >> 4 * j & 15u) * e2m1_twice(br[e & 1][i] >> 4 * j & 15u);
                const int block = (8 * from + 32 * i) / 16;
                for (int q = 0; q < 4; q++) sums[q][e] += q == block ? sum : 0;
            }
    }
    for (int e = 0; e < 4; e++) {
        const uint32_t fa = __shfl_sync(all, sfa, fp4_sfa_lane(g + 8 * (e >> 1)));
        const uint32_t fb = __shfl_sync(all, sfb, fp4_sfb_lane(2 * l + (e & 1)));
        for (int q = 0; q < 4; q++) {
            const float scale = __fmul_rn(ue4m3_value(fa >> 8 * q & 255u), ue4m3_value(fb >> 8 * q & 255u));
            d[e] = __fadd_rn(d[e], __fmul_rn(.25f * (float)sums[q][e], scale));
        }
    }
}

// Rows of codes are k/2 bytes, and k is a multiple of 16: eight codes are all inside or all outside, and a word is 4-byte aligned.
__device__ __forceinline__ uint32_t codes8(const uint8_t *codes, int64_t row, int64_t rows, int64_t col, int64_t k) {
    return row < rows && col < k ? __ldg((const uint32_t *)(codes + row * (k / 2) + col / 2)) : 0u;
}
// The instruction ignores a scale's sign, so a negative scale, which is invalid, is made NaN: then the results that use it are NaN.
__device__ __forceinline__ uint32_t negative_as_nan(uint32_t scales) { return scales | (scales >> 7 & 0x01010101u) * 0x7Fu; }
__device__ __forceinline__ uint32_t scales4(const uint8_t *scales, int64_t row, int64_t rows, int64_t col, int64_t k) {
    if (row >= rows) return 0u;
    const uint8_t *p = scales + row * (k / 16) + col / 16;
    if (k % 64 == 0) return negative_as_nan(__ldg((const uint32_t *)p));
    uint32_t v = 0;
    for (int b = 0; b < 4; b++)
        if (col + 16 * b < k) v |= (uint32_t)p[b] << 8 * b;
    return negative_as_nan(v);
}

// A warp computes 16 tokens x 64 outputs. There is no pipeline: this is a validation kernel, and shared data is in the L1.
template <bool NATIVE>
__device__ __forceinline__ void product(const Args &p) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int64_t m0 = (int64_t)blockIdx.y * 16, n0 = ((int64_t)blockIdx.x * kWarps + warp) * kColsOfWarp;
    if (n0 >= p.n) return;
    float d[kNT][4] = {};
    const int sfa_row = (lane >> 2) + 8 * (lane & 1);  // inverse of fp4_sfa_lane; lanes 2 and 3 of a quad are not used
    for (int64_t k0 = 0; k0 < p.k; k0 += 64) {
        uint32_t a[4];
#pragma unroll
        for (int i = 0; i < 4; i++) a[i] = codes8(p.a, m0 + fp4_a_row(lane, i), p.m, k0 + fp4_a_col(lane, i), p.k);
        if (p.fault == AQ_FAULT_FRAGMENT) {
            const uint32_t t = a[1];
            a[1] = a[2], a[2] = t;
        }
        int row = sfa_row;
        if (p.fault == AQ_FAULT_LANE) row ^= 8;
        const uint32_t sfa = scales4(p.a_scale, m0 + row, p.m, k0, p.k);
#pragma unroll
        for (int t = 0; t < kNT; t++) {
            const int64_t col = n0 + 8 * t + fp4_b_col(lane);
            uint32_t b[2];
#pragma unroll
            for (int i = 0; i < 2; i++) b[i] = codes8(p.w, col, p.n, k0 + fp4_b_row(lane, i), p.k);
            if (p.fault == AQ_FAULT_NIBBLES)
#pragma unroll
                for (int i = 0; i < 2; i++) b[i] = (b[i] & 0x0F0F0F0Fu) << 4 | (b[i] >> 4 & 0x0F0F0F0Fu);
            const uint32_t sfb = scales4(p.w_scale, p.fault == AQ_FAULT_SCALES ? col ^ 1 : col, p.n, k0, p.k);
#if AQ_NATIVE_FP4
            if (NATIVE) mma_fp4_m16n8k64(d[t], a, b, sfa, sfb);
#endif
            if (!NATIVE) emulated(d[t], a, b, sfa, sfb, lane);
        }
    }
    const int g = lane >> 2, l = lane & 3;
#pragma unroll
    for (int t = 0; t < kNT; t++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const int64_t row = m0 + g + 8 * (e >> 1), col = n0 + 8 * t + 2 * l + (e & 1);
            if (row < p.m && col < p.n) store_typed(p.out, row * p.n + col, d[t][e] * p.alpha, p.out_type);
        }
}

__global__ void __launch_bounds__(32 * kWarps) emulated_kernel(const Args p) { product<false>(p); }

// Without code for the instruction this is a stub; aq_limits recognises it by its launch bound.
#if AQ_NATIVE_FP4 || !defined(__CUDA_ARCH__)
__global__ void __launch_bounds__(32 * kWarps) native_kernel(const Args p) {
#if AQ_NATIVE_FP4
    product<true>(p);
#endif
}
#else
__global__ void __launch_bounds__(32) native_kernel(const Args) {}
#endif

}  // namespace

bool native_fp4_exists() { return kernel_exists<native_kernel>(32 * kWarps); }

extern "C" int aq_w4a4(const uint8_t *a, const uint8_t *a_scale, const uint8_t *w, const uint8_t *w_scale, float alpha, void *out,
                       int64_t m, int64_t n, int64_t k, int out_type, int mode, int fault, void *stream) {
    DeviceState state;
    const int status = current_device(&state);
    if (status) return status;
    if (mode == AQ_FP4_NATIVE && !state.limits.native_fp4) return AQ_GEMM_NO_NATIVE;
    const Args args{a, a_scale, w, w_scale, out, m, n, k, alpha, out_type, fault};
    const int per_block = kWarps * kColsOfWarp;
    const Launch how{dim3((unsigned)ceil_div(n, per_block), (unsigned)((m + 15) / 16)), 32 * kWarps, (cudaStream_t)stream};
    return mode != AQ_FP4_EMULATED && state.limits.native_fp4 ? launch<native_kernel>(how, args) : launch<emulated_kernel>(how, args);
}

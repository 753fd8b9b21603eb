// What a warp of the few-token kernels does (skinny.cuh, grouped_skinny.cuh): it copies repacked weights into its own pipeline stages, decodes
// them from there into mma's A fragments, multiplies by activations that it has in registers, and keeps the sums there.
#pragma once
#include <type_traits>

#include "gemm/numerics.cuh"

constexpr int kSkinnyWarps = 16;

// ceil(2^32 / d); 0 means d = 1, because 2^32 does not fit
inline uint32_t reciprocal(int d) { return d <= 1 ? 0u : (uint32_t)(((1ull << 32) + (unsigned)d - 1) / (unsigned)d); }
// x / d from the host's reciprocal(d): exact for x * d < 2^32
__device__ __forceinline__ int divide(int x, uint32_t reciprocal) { return reciprocal ? (int)__umulhi((uint32_t)x, reciprocal) : x; }

// ---- a warp's own pipeline: the warp issues copies for itself ----
__device__ __forceinline__ void pipeline_init(uint32_t bars, int count) {
    if ((threadIdx.x & 31) < count) mbarrier_init(bars + (threadIdx.x & 31) * 8, 1);
    mbarrier_init_fence();
    async_fence_shared();
    __syncwarp();
}
__device__ __forceinline__ void pipeline_copy(uint32_t to, const uint8_t *from, uint32_t bytes, uint32_t bar) {
    const uint32_t lane = threadIdx.x & 31;
    if (lane == 0) {
        mbarrier_expect(bar, bytes);
        if (bytes) bulk_copy<true>(to, from, bytes, bar);
    }
}
// A lane's part of a stage: its words of the two row tiles and their scales.
struct SkinnyCodes {
    uint4 words[2][2];  // [row tile][64 columns]
    uint32_t scales[2];
    __device__ __forceinline__ void read(uint32_t stage, int lane) {
#pragma unroll
        for (int r = 0; r < 2; r++) scales[r] = load_shared4(stage + lane * 4 + r * kChunk + kCodes);
#pragma unroll
        for (int q = 0; q < 2; q++)
#pragma unroll
            for (int r = 0; r < 2; r++) words[r][q] = load_shared16(stage + lane * 16 + r * kChunk + q * 512);
    }
    // Returns 0 after every lane has read its bytes. A copy whose address depends on it cannot start before the reads are complete.
    __device__ __forceinline__ uint32_t all_read(uint32_t zero) const {
        const uint32_t some = scales[0] | scales[1] | words[0][0].x | words[0][1].x | words[1][0].x | words[1][1].x;
        __syncwarp();  // orders the lanes' reads; only their values show that they are complete
        return (uint32_t)__any_sync(~0u, (some & zero) != 0);
    }
    // sums += weights of 64 columns x activations: [row tile][chain][8 tokens][register], xs [16 bytes of 32][8 tokens].
    template <bool HALF, int CHAINS, int NT>
    __device__ __forceinline__ void multiply(int q, const uint4 (&xs)[2][NT], float (&sums)[2][CHAINS][NT][4]) const {
        uint32_t s[2][2];
#pragma unroll
        for (int r = 0; r < 2; r++) s[r][0] = scale_pair(scales[r], q * 2), s[r][1] = scale_pair(scales[r], q * 2 + 1);
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const uint4 &w = words[r][q];
                uint32_t f[4];
                decode8(i == 0 ? w.x : i == 1 ? w.y : i == 2 ? w.z : w.w, s[r][0], s[r][1], f);
                if (HALF)
#pragma unroll
                    for (int j = 0; j < 4; j++) f[j] = bf16x2_to_f16x2(f[j]);
#pragma unroll
                for (int t = 0; t < NT; t++) {
                    const uint4 &v = xs[i >> 1][t];
                    mma_m16n8k16<HALF>(sums[r][i % CHAINS][t], f, i & 1 ? v.z : v.x, i & 1 ? v.w : v.y);
                }
            }
    }
};

// A lane's activations of one step, mma's B fragments: 8 NT tokens x 128 columns. WHOLE: K is a multiple of a chunk.
template <int NT, bool WHOLE>
struct SkinnyTokens {
    const uint16_t *at[NT];  // of token 8 t + lane / 4: this lane's first column of the chunk that is loaded next
    int last, columns;       // unless WHOLE: the chunk that is partly filled, and the columns from this lane's first one to K
    uint4 values[2][2][NT];  // [64 columns][16 bytes of 32][8 tokens]

    __device__ __forceinline__ void move(int columns_on) {
#pragma unroll
        for (int t = 0; t < NT; t++) at[t] += columns_on;
    }
    __device__ __forceinline__ void load(int q, int chunk) {
        if (WHOLE || chunk != last) {
#pragma unroll
            for (int t = 0; t < NT; t++)
#pragma unroll
                for (int i = 0; i < 2; i++) values[q][i][t] = load_global16(at[t] + q * 64 + i * 8);
        } else {  // zeros beyond K: the padded codes are zeros, but 0 * NaN is not 0
            const bool there = chunk * kCols + q * 64 < columns;
#pragma unroll
            for (int t = 0; t < NT; t++)
#pragma unroll
                for (int i = 0; i < 2; i++) values[q][i][t] = there ? load_global16(at[t] + q * 64 + i * 8) : make_uint4(0, 0, 0, 0);
        }
    }
};

// A warp's sums of G pairs of row tiles x 8 NT tokens.
template <int NT, int G>
struct SkinnySums {
    static constexpr int kChains = NT == 1 ? 2 : 1;  // independent sums, to hide the latency of mma
    static constexpr int kPitch = 32 * G + 4;        // floats between tokens in shared memory
    static constexpr int kSlot = 8 * NT * kPitch;    // floats of all
    float values[G][2][kChains][NT][4] = {};

    // Call take(pair of row tiles, row tile, tokens / 8, register, sum) for each, and begin again with zeros.
    template <typename Take>
    __device__ __forceinline__ void drain(const Take &take) {
#pragma unroll
        for (int h = 0; h < G; h++)
#pragma unroll
            for (int r = 0; r < 2; r++)
#pragma unroll
                for (int t = 0; t < NT; t++)
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        float sum = values[h][r][0][t][i];
                        if (kChains == 2) sum += values[h][r][kChains - 1][t][i];
                        take(h, r, t, i, sum);
#pragma unroll
                        for (int c = 0; c < kChains; c++) values[h][r][c][t][i] = 0.f;
                    }
    }
    // The same into shared memory, [token][kPitch]. to: the address of the tokens' sums, plus this lane's offset.
    static __device__ __forceinline__ int offset(int lane) { return 2 * (lane & 3) * kPitch + (lane >> 2); }
    __device__ __forceinline__ void drain_to(float *to) {
        drain([&](int h, int r, int t, int i, float sum) { to[(8 * t + (i & 1)) * kPitch + 32 * h + 16 * r + 8 * (i >> 1)] = sum; });
    }
};

// PTX wrappers: barriers, asynchronous copies, the two mma shapes, clusters, and their replacements before sm_90.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <stdint.h>

#include "gemm/fragments.cuh"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define AQ_HOPPER 1
#else
#define AQ_HOPPER 0
#endif

__device__ __forceinline__ uint32_t smem_at(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }

// ---- mbarrier ----
__device__ __forceinline__ void bar_init(uint64_t *bar, uint32_t count) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(smem_at(bar)), "r"(count) : "memory");
}
__device__ __forceinline__ void bar_fence() {
#if AQ_HOPPER
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}
__device__ __forceinline__ void bar_arrive(uint64_t *bar) {
    asm volatile("{ .reg .b64 t; mbarrier.arrive.shared.b64 t, [%0]; }" ::"r"(smem_at(bar)) : "memory");
}
__device__ __forceinline__ void bar_wait(uint64_t *bar, uint32_t parity) {
    uint32_t done;
    do {
#if AQ_HOPPER
        asm volatile(
            "{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
            : "=r"(done)
            : "r"(smem_at(bar)), "r"(parity)
            : "memory");
#else
        // test_wait also takes a parity from sm_80 on
        asm volatile(
            "{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
            : "=r"(done)
            : "r"(smem_at(bar)), "r"(parity)
            : "memory");
#endif
    } while (!done);
}

// ---- filling shared memory ----
// From sm_90 on one thread issues a bulk copy of contiguous bytes; before, every thread copies its share in 16-byte units.
constexpr uint32_t kBulkArrivals = AQ_HOPPER ? 1 : 0;  // arrivals at a full barrier, in addition to one per thread

__device__ __forceinline__ void copy16(void *dst, const void *src, bool there) {  // writes zeros if not `there`
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(smem_at(dst)), "l"(src), "r"(there ? 16 : 0) : "memory");
}
__device__ __forceinline__ void arrive_when_copied(uint64_t *bar) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(smem_at(bar)) : "memory");
}
__device__ __forceinline__ void copy_piece(void *dst, const void *src, uint32_t bytes, uint64_t *bar) {
#if AQ_HOPPER
    if (threadIdx.x == 0) {
        asm volatile("{ .reg .b64 t; mbarrier.arrive.expect_tx.shared.b64 t, [%0], %1; }" ::"r"(smem_at(bar)), "r"(bytes) : "memory");
        asm volatile(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(smem_at(dst)), "l"(src),
            "r"(bytes), "r"(smem_at(bar))
            : "memory");
    }
#else
    for (uint32_t at = threadIdx.x * 16; at < bytes; at += blockDim.x * 16) copy16((uint8_t *)dst + at, (const uint8_t *)src + at, true);
#endif
}
// A warp releases a slot with one arrival for its 32 lanes. racecheck tracks only the arriving lane, so with -DAQ_RACECHECK each lane
// arrives (no false hazards; 20 % slower at 64 tokens).
#ifdef AQ_RACECHECK
constexpr int kReleaseArrivals = 32;
#else
constexpr int kReleaseArrivals = 1;
#endif
// ---- a warp's own pipeline: the warp issues copies for itself ----
__device__ __forceinline__ void warp_bars_init(uint32_t bars, int count) {
#if AQ_HOPPER
    if ((threadIdx.x & 31) < count) asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(bars + (threadIdx.x & 31) * 8) : "memory");
    bar_fence();
    __syncwarp();
#endif
}
constexpr uint64_t kEvictFirst = 0x12F0000000000000ull;  // result of createpolicy.fractional.L2::evict_first for all lines: weights are read once
__device__ __forceinline__ void warp_copy(uint32_t dst, const uint8_t *src, uint32_t bytes, uint32_t bar) {
    const uint32_t lane = threadIdx.x & 31;
#if AQ_HOPPER
    if (lane == 0) {
        asm volatile("{ .reg .b64 t; mbarrier.arrive.expect_tx.shared.b64 t, [%0], %1; }" ::"r"(bar), "r"(bytes) : "memory");
        if (bytes)
            asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(dst),
                         "l"(src), "r"(bytes), "r"(bar), "l"(kEvictFirst)
                         : "memory");
    }
#else
    for (uint32_t at = lane * 16; at < bytes; at += 512) asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(dst + at), "l"(src + at) : "memory");
#endif
}
__device__ __forceinline__ void warp_copies_end() {
#if !AQ_HOPPER
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
__device__ __forceinline__ void warp_wait(uint32_t bar, uint32_t parity, int stages) {
#if AQ_HOPPER
    uint32_t done;
    do {
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                     : "=r"(done) : "r"(bar), "r"(parity) : "memory");
    } while (!done);
#else
    if (stages > 1) asm volatile("cp.async.wait_group 1;" ::: "memory");  // of the two stages in flight, the older one must be complete
    else asm volatile("cp.async.wait_group 0;" ::: "memory");
    __syncwarp();
#endif
}
// Weights are read once: not allocated in the L1, evicted first from the L2.
__device__ __forceinline__ uint4 stream16(const void *p) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}
__device__ __forceinline__ uint32_t stream4(const void *p) {
    uint32_t v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.u32 %0, [%1];" : "=r"(v) : "l"(p));
    return v;
}

// ---- programmatic dependent launch ----
__device__ __forceinline__ void wait_for_previous_kernel() {
#if AQ_HOPPER
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void allow_next_kernel() {
#if AQ_HOPPER
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// ---- clusters; before sm_90 there is one block ----
__device__ __forceinline__ uint32_t cluster_rank() {
#if AQ_HOPPER
    uint32_t r;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
    return r;
#else
    return 0;
#endif
}
__device__ __forceinline__ void cluster_sync(int size) {
#if AQ_HOPPER
    if (size > 1) {
        asm volatile("barrier.cluster.arrive.aligned;\n barrier.cluster.wait.aligned;" ::: "memory");
        return;
    }
#endif
    __syncthreads();
}
__device__ __forceinline__ float4 load_peer4(const float *p, uint32_t rank, int size) {
#if AQ_HOPPER
    if (size > 1) {
        uint32_t at;
        float4 v;
        asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"(smem_at(p)), "r"(rank));
        asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(at) : "memory");
        return v;
    }
#endif
    return *(const float4 *)p;
}
// No block may exit while another one reads its shared memory. No data is published here, so no fence is needed.
__device__ __forceinline__ void cluster_wait_before_exit() {
#if AQ_HOPPER
    asm volatile("barrier.cluster.arrive.relaxed.aligned;\n barrier.cluster.wait.aligned;" ::: "memory");
#endif
}

// After cluster_wait every block of the cluster has started. No block may write to another one's shared memory before.
__device__ __forceinline__ void cluster_arrive(int size) {
#if AQ_HOPPER
    if (size > 1) asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_wait(int size) {
#if AQ_HOPPER
    if (size > 1) asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void store_peer(float *p, uint32_t rank, float v) {
#if AQ_HOPPER
    uint32_t at;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"(smem_at(p)), "r"(rank));
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(at), "f"(v) : "memory");
#endif
}

// ---- arithmetic ----
__device__ __forceinline__ uint32_t mul2_bf16(uint32_t a, uint32_t b) {
    uint32_t d;  // a * b - 0: exact here, and the only form that sm_80 has
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(0x80008000u));
    return d;
}
// The 8 codes of one repacked word times their two scales, as the four A registers: exact, value * 2^-8.
__device__ __forceinline__ void decode8(uint32_t w, uint32_t scale0, uint32_t scale1, uint32_t (&a)[4]) {
#pragma unroll
    for (int j = 0; j < 4; j++) a[j] = mul2_bf16(field_of(w, j), j & 1 ? scale1 : scale0);
}
// scale_word of byte `which` of four; one permute copies the byte to both halves
__device__ __forceinline__ uint32_t scale_pair(uint32_t bytes, int which) {
    return __byte_perm(bytes, 0, 0x4040 | which | which << 8) * 16u + kScaleBias;
}
constexpr float kUndo = 256.0f;  // 2^8

// For fp16 activations: the exact bf16 value (at most 6 significant bits) as fp16, multiplied by 2^8.
__device__ __forceinline__ uint32_t bf16x2_to_f16x2(uint32_t v) {
    const float lo = __uint_as_float(v << 16) * kUndo, hi = __uint_as_float(v & 0xFFFF0000u) * kUndo;
    uint32_t d;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(hi), "f"(lo));
    return d;
}
template <bool HALF>
__device__ __forceinline__ void mma16816(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    if (HALF)
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    else
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <typename T>
__device__ __forceinline__ void store_as(T *p, float v);
template <>
__device__ __forceinline__ void store_as<float>(float *p, float v) { *p = v; }
template <>
__device__ __forceinline__ void store_as<__half>(__half *p, float v) { *p = __float2half_rn(v); }
template <>
__device__ __forceinline__ void store_as<__nv_bfloat16>(__nv_bfloat16 *p, float v) { *p = __float2bfloat16_rn(v); }
// One of the three output types, chosen at run time: epilogues are short, so templates would add code and no speed.
__device__ __forceinline__ void store_typed(void *out, int64_t at, float v, int type) {
    if (type == 0) store_as((float *)out + at, v);
    else if (type == 1) store_as((__half *)out + at, v);
    else store_as((__nv_bfloat16 *)out + at, v);
}
// Store four adjacent elements of a row of `out`; columns from `n` on do not exist.
__device__ __forceinline__ void store4(void *out, int64_t row, int64_t col, int64_t n, float4 v, float scale, int type) {
    const float f[4] = {v.x * scale, v.y * scale, v.z * scale, v.w * scale};
    if (type == 2 && col + 3 < n && n % 4 == 0 && (((uintptr_t)out & 7) == 0)) {
        __nv_bfloat162 lo = __floats2bfloat162_rn(f[0], f[1]), hi = __floats2bfloat162_rn(f[2], f[3]);
        *(uint2 *)((__nv_bfloat16 *)out + row + col) = make_uint2(*(uint32_t *)&lo, *(uint32_t *)&hi);
        return;
    }
#pragma unroll
    for (int i = 0; i < 4; i++)
        if (col + i < n) store_typed(out, row + col + i, f[i], type);
}

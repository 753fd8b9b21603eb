// PTX wrappers for the wgmma kernel: the asynchronous multiplication, copies into shared memory, barriers by address.
#pragma once
#include <cuda.h>

#include "gemm/device.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define AQ_WGMMA 1
#else
#define AQ_WGMMA 0
#endif

#if AQ_WGMMA
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N>
__device__ __forceinline__ void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }

// Shared-memory operand: rows of 128 bytes, 128-byte swizzle, 8 rows = 1024 bytes apart.
// The low half of the matrix descriptor; the high half is 64 | 1 << 30.
__device__ __forceinline__ uint32_t operand_at(uint32_t smem) { return (smem & 0x3FFFF) >> 4 | 1u << 16; }

#define AQ_D8(d, i) \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define AQ_D16(d, i) AQ_D8(d, i), AQ_D8(d, i + 8)
#define AQ_D32(d, i) AQ_D16(d, i), AQ_D16(d, i + 16)
#define AQ_WGMMA_ASM(N, TYPE, REGS, A0, A1, A2, A3, B, ...)                                                                  \
    asm volatile("{ .reg .b64 b; mov.b64 b, {" B ", 0x40000040}; wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" REGS "}, {" A0 "," A1 "," A2 "," A3 "}, b, 1, 1, 1, 0; }" \
                 : __VA_ARGS__                                                                                                  \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b))
#define AQ_WGMMA_BOTH(N, ...)                               \
    if constexpr (HALF) AQ_WGMMA_ASM(N, "f16", __VA_ARGS__); \
    else AQ_WGMMA_ASM(N, "bf16", __VA_ARGS__)
#define AQ_L8 "%0,%1,%2,%3,%4,%5,%6,%7"
#define AQ_L16 AQ_L8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define AQ_L32 AQ_L16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define AQ_L64 AQ_L32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47" ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"

// d += A (16 x 16 per warp, registers) x B (16 columns of TOKENS tokens, shared memory); asynchronous.
template <int TOKENS, bool HALF>
__device__ __forceinline__ void wgmma(float (&d)[TOKENS / 2], const uint32_t (&a)[4], uint32_t b) {
    if constexpr (TOKENS == 16) {
        AQ_WGMMA_BOTH(16, AQ_L8, "%8", "%9", "%10", "%11", "%12", AQ_D8(d, 0));
    } else if constexpr (TOKENS == 32) {
        AQ_WGMMA_BOTH(32, AQ_L16, "%16", "%17", "%18", "%19", "%20", AQ_D16(d, 0));
    } else if constexpr (TOKENS == 64) {
        AQ_WGMMA_BOTH(64, AQ_L32, "%32", "%33", "%34", "%35", "%36", AQ_D32(d, 0));
    } else {
        AQ_WGMMA_BOTH(128, AQ_L64, "%64", "%65", "%66", "%67", "%68", AQ_D32(d, 0), AQ_D32(d, 32));
    }
}

// ---- shared memory by its address ----
__device__ __forceinline__ void wait_at(uint32_t bar, uint32_t parity) {
    asm volatile(
        "{ .reg .pred p;\n AGAIN: mbarrier.try_wait.parity.shared.b64 p, [%0], %1;\n @p bra DONE;\n bra AGAIN;\n DONE: }" ::"r"(bar), "r"(parity)
        : "memory");
}
__device__ __forceinline__ void arrive_at(uint32_t bar) {
    asm volatile("{ .reg .b64 t; mbarrier.arrive.shared.b64 t, [%0]; }" ::"r"(bar) : "memory");
}
__device__ __forceinline__ uint4 load16(uint32_t at) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at));
    return v;
}
__device__ __forceinline__ void store16(uint32_t at, uint32_t x, uint32_t y, uint32_t z, uint32_t w) {
    asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(at), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
}
__device__ __forceinline__ uint32_t load4(uint32_t at) {
    uint32_t v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(at));
    return v;
}
__device__ __forceinline__ void bulk_copy(uint32_t to, const uint8_t *from, uint32_t bytes, uint32_t bar) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from), "r"(bytes),
                 "r"(bar)
                 : "memory");
}
__device__ __forceinline__ void box_copy(uint32_t to, const CUtensorMap *map, int column, int token, uint32_t bar) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(to), "l"(map),
                 "r"(column), "r"(token), "r"(bar)
                 : "memory");
}
__device__ __forceinline__ uint32_t pair_of(float lo, float hi, int type) {
    uint32_t d;
    if (type == 1) asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(hi), "f"(lo));
    else asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(hi), "f"(lo));
    return d;
}
#endif

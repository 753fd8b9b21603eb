// The PTX instructions of the kernels, one wrapper each, and nothing else. Shared memory is addressed by 32-bit addresses (smem_at).
// The source of each form is the PTX ISA's section of that name.
#pragma once
#include <cuda_runtime.h>
#include <stdint.h>

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#error "the kernels need bulk copies, clusters and programmatic dependent launch: compute capability 9.0 or later (ANNIE_QUANT_ARCHS)"
#endif
// sm_90a only: the asynchronous warpgroup multiplication.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define AQ_WGMMA 1
#else
#define AQ_WGMMA 0
#endif
// sm_120a and sm_121a only: the FP4 multiplication with block scales.
#if defined(__CUDA_ARCH_FEAT_SM120_ALL) || defined(__CUDA_ARCH_FEAT_SM121_ALL) ||                                                          \
    (defined(__CUDA_ARCH_FAMILY_SPECIFIC__) && __CUDA_ARCH_FAMILY_SPECIFIC__ >= 1200)
#define AQ_NATIVE_FP4 1
#else
#define AQ_NATIVE_FP4 0
#endif

__device__ __forceinline__ uint32_t smem_at(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }
// Hide a value's origin from the compiler, or force its computation to be here: no instruction, or one move.
__device__ __forceinline__ uint32_t opaque(uint32_t v) {
    uint32_t result;
    asm volatile("mov.u32 %0, %1;" : "=r"(result) : "r"(v));
    return result;
}
__device__ __forceinline__ void compute_here(uint32_t &v) { asm volatile("" : "+r"(v)); }
__device__ __forceinline__ void compute_here(int64_t &v) { asm volatile("" : "+l"(v)); }
__device__ __forceinline__ int lane_id() {
    int lane;
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
    return lane;
}

// ---- mbarriers ----
__device__ __forceinline__ void mbarrier_init(uint32_t bar, uint32_t count) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}
__device__ __forceinline__ void mbarrier_arrive(uint32_t bar) {
    asm volatile("{ .reg .b64 t; mbarrier.arrive.shared.b64 t, [%0]; }" ::"r"(bar) : "memory");
}
// Wait until the phase with this parity is complete.
__device__ __forceinline__ void mbarrier_wait(uint32_t bar, uint32_t parity) {
    uint32_t done;
    do {
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                     : "=r"(done)
                     : "r"(bar), "r"(parity)
                     : "memory");
    } while (!done);
}

// ---- asynchronous copies from global to shared memory ----
// 16 bytes, of which `bytes` are read; the rest is zeros.
__device__ __forceinline__ void copy_async16(uint32_t to, const void *from, uint32_t bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void copy_async_arrive(uint32_t bar) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(bar) : "memory");
}

// After the initialisation of mbarriers, before other blocks and the copy engine use them.
__device__ __forceinline__ void mbarrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
// Order this thread's accesses before those of the copy engine and of wgmma.
__device__ __forceinline__ void async_fence_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void async_fence_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }
__device__ __forceinline__ void mbarrier_expect(uint32_t bar, uint32_t bytes) {
    asm volatile("{ .reg .b64 t; mbarrier.arrive.expect_tx.shared.b64 t, [%0], %1; }" ::"r"(bar), "r"(bytes) : "memory");
}
// The result of createpolicy.fractional.L2::evict_first for all lines, for bytes that are read once.
constexpr uint64_t kEvictFirst = 0x12F0000000000000ull;
template <bool EVICT_FIRST = false>
__device__ __forceinline__ void bulk_copy(uint32_t to, const void *from, uint32_t bytes, uint32_t bar) {
    if constexpr (EVICT_FIRST)
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(to),
                     "l"(from), "r"(bytes), "r"(bar), "l"(kEvictFirst)
                     : "memory");
    else
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from),
                     "r"(bytes), "r"(bar)
                     : "memory");
}
// A box of a two-dimensional tensor, its first element at (column, row); map is a CUtensorMap in parameter memory.
__device__ __forceinline__ void tensor_copy(uint32_t to, const void *map, int column, int row, uint32_t bar) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(to),
                 "l"(map), "r"(column), "r"(row), "r"(bar)
                 : "memory");
}

// ---- loads and stores ----
__device__ __forceinline__ uint4 load_shared16(uint32_t at) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at));
    return v;
}
__device__ __forceinline__ uint32_t load_shared4(uint32_t at) {
    uint32_t v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(at));
    return v;
}
__device__ __forceinline__ void store_shared16(uint32_t at, uint32_t x, uint32_t y, uint32_t z, uint32_t w) {
    asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(at), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
}
// An ordinary load of memory that the previous kernel may write: not moved before wait_for_previous_kernel.
__device__ __forceinline__ uint4 load_global16(const void *p) {
    uint4 v;
    asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
    return v;
}

// A flag in global memory: what this thread and the lanes of its warp before the last __syncwarp wrote is visible to who reads it.
__device__ __forceinline__ void store_release(uint32_t *flag, uint32_t v) {
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(flag), "r"(v) : "memory");
}
__device__ __forceinline__ uint32_t load_acquire(const uint32_t *flag) {
    uint32_t v = 1;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(flag) : "memory");
    return v;
}

// ---- programmatic dependent launch ----
__device__ __forceinline__ void wait_for_previous_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void allow_next_kernel() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// ---- clusters ----
__device__ __forceinline__ uint32_t cluster_rank() {
    uint32_t rank = 0;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
// Arrive and publish this block's writes.
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
// Arrive without publishing anything.
__device__ __forceinline__ void cluster_arrive_relaxed() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
// The address of another block's shared memory that has the address `at` in this block.
__device__ __forceinline__ uint32_t peer_at(uint32_t at, uint32_t rank) {
    uint32_t result;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(result) : "r"(at), "r"(rank));
    return result;
}
__device__ __forceinline__ float4 load_peer16(uint32_t at) {
    float4 v;
    asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(at) : "memory");
    return v;
}
__device__ __forceinline__ void store_peer4(uint32_t at, float v) {
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(at), "f"(v) : "memory");
}
__device__ __forceinline__ void store_peer16(uint32_t at, float x, float y, float z, float w) {
    asm volatile("st.shared::cluster.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(at), "f"(x), "f"(y), "f"(z), "f"(w) : "memory");
}

// ---- arithmetic ----
__device__ __forceinline__ uint32_t fma_bf16x2(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t d;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}
__device__ __forceinline__ uint32_t to_f16x2(float lo, float hi) {
    uint32_t d;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(hi), "f"(lo));
    return d;
}
__device__ __forceinline__ uint32_t to_bf16x2(float lo, float hi) {
    uint32_t d;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(hi), "f"(lo));
    return d;
}

// ---- matrix multiplications of a warp ----
template <bool HALF>
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    if (HALF)
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    else
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
#if AQ_NATIVE_FP4
__device__ __forceinline__ void mma_fp4_m16n8k64(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], uint32_t scale_a,
                                                 uint32_t scale_b) {
    asm volatile("mma.sync.aligned.kind::mxf4nvf4.block_scale.scale_vec::4X.m16n8k64.row.col.f32.e2m1.e2m1.f32.ue4m3 "
                 "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3}, {%10}, {%11,%12}, {%13}, {%14,%15};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(scale_a), "h"((uint16_t)0), "h"((uint16_t)0),
                   "r"(scale_b), "h"((uint16_t)0), "h"((uint16_t)0));
}
#endif

#if AQ_WGMMA
// ---- sm_90a: the multiplication of a warpgroup, its registers, and a transposed store ----
// As mbarrier_wait, but the compiler does not see the loop: then the multiplication's loop has the code that tests/perf/gemm.md measured. Around the
// other form it releases a stage 28 instructions later at 128 tokens. The few-token kernel would spill with this form on sm_121a.
__device__ __forceinline__ void mbarrier_wait_hidden_loop(uint32_t bar, uint32_t parity) {
    asm volatile(
        "{ .reg .pred p;\n AGAIN: mbarrier.try_wait.parity.shared.b64 p, [%0], %1;\n @p bra DONE;\n bra AGAIN;\n DONE: }" ::"r"(bar),
        "r"(parity)
        : "memory");
}
template <int REGISTERS>
__device__ __forceinline__ void raise_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS>
__device__ __forceinline__ void lower_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int BARRIER, int THREADS>
__device__ __forceinline__ void named_barrier() {
    asm volatile("bar.sync %0, %1;" ::"n"(BARRIER), "n"(THREADS) : "memory");
}
__device__ __forceinline__ void store_matrices_transposed(uint32_t at, const uint32_t (&v)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(at), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3])
                 : "memory");
}
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Shared-memory operand: rows of 128 bytes, 128-byte swizzle, 8 rows = 1024 bytes apart.
// The low half of the matrix descriptor; the high half is 64 | 1 << 30.
__device__ __forceinline__ uint32_t operand_at(uint32_t smem) { return (smem & 0x3FFFF) >> 4 | 1u << 16; }

#define AQ_D8(d, i)                                                                                                                        \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define AQ_D16(d, i) AQ_D8(d, i), AQ_D8(d, i + 8)
#define AQ_D32(d, i) AQ_D16(d, i), AQ_D16(d, i + 16)
#define AQ_WGMMA_ASM(N, TYPE, REGS, A0, A1, A2, A3, B, ...)                                                                                \
    asm volatile("{ .reg .b64 b; mov.b64 b, {" B ", 0x40000040}; wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" REGS  \
                 "}, {" A0 "," A1 "," A2 "," A3 "}, b, 1, 1, 1, 0; }"                                                                      \
                 : __VA_ARGS__                                                                                                             \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b))
#define AQ_WGMMA_BOTH(N, ...)                                                                                                              \
    if constexpr (HALF) AQ_WGMMA_ASM(N, "f16", __VA_ARGS__);                                                                               \
    else AQ_WGMMA_ASM(N, "bf16", __VA_ARGS__)
#define AQ_L8 "%0,%1,%2,%3,%4,%5,%6,%7"
#define AQ_L16 AQ_L8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define AQ_L32 AQ_L16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define AQ_L64                                                                                                                             \
    AQ_L32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"                                                              \
           ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"

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
#undef AQ_D8
#undef AQ_D16
#undef AQ_D32
#undef AQ_L8
#undef AQ_L16
#undef AQ_L32
#undef AQ_L64
#undef AQ_WGMMA_ASM
#undef AQ_WGMMA_BOTH
#endif

// W4A16 on Hopper's wgmma (sm_90a): the transposed product, with decoded weights as the register operand.
//
// Before the multiplying kernel a small one writes the activations once more, in the very bytes that wgmma reads: the order of columns
// that the repacked weights fix, 128-byte swizzle, tile after tile, zeros beyond M and K. So both operands of a step come by one bulk
// copy each, and one thread is all the producer that a block needs.
//
// A block makes 64 rows a warpgroup x TOKENS tokens. A warp's 16 rows x 16 columns of decoded weights are wgmma's A fragment as they are
// mma.sync's, so the repacked layout is the same. Blocks are persistent. Of the tiles, `shared` many are cut along K into equal shares
// for all blocks; a third kernel adds a tile's parts in the order of K. The others are made whole, block by block.
#pragma once
#include "gemm/device.cuh"

struct WgmmaArgs {
    const uint8_t *packed, *image;
    float *sums;  // two partial tiles a block
    void *out;
    int64_t n;
    float scale;
    int m, n_tiles, m_tiles, tiles, chunks, shared, stages, out_type, pdl;
};

constexpr int kTokenGroup = 8;  // tiles of tokens that run side by side, for the L2
constexpr int kWarps = 16, kWgmmaThreads = 32 * kWarps + 128;  // consumers, each 16 rows, and a warpgroup for the producer
// Registers of a thread at the start, of a consumer, of the producer. A block has 61440 in all: what is left of 65536 lets one block of
// the kernels before and after it lie beside.
constexpr int kRegisters = 96, kConsumerRegisters = 112, kProducerRegisters = 32;
constexpr int kWgmmaHead = 1024 + 512 * kWarps, kWeights = kWarps * kChunk;  // barriers and 512 bytes a warp; a step's weights
AQ_HD constexpr int wgmma_stage(int tokens) { return kWeights + tokens * 256; }
static_assert(kWarps == kBlockTiles, "a block of the repacked weights is what the consumers of a block share");

// Bytes of the workspace: the activations' image, and two partial tiles a block.
struct WgmmaSpace {
    size_t image, sums;
};
inline WgmmaSpace wgmma_space(int tokens, int m_tiles, int chunks, int shared, int blocks) {
    return {(size_t)m_tiles * chunks * tokens * 256, shared ? (size_t)2 * blocks * kWarps * kRows * tokens * 4 : 0};
}

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
// The low half of its description; the high half, 64 | 1 << 30, says so.
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

// d += A (16 x 16 a warp, registers) x B (16 columns of TOKENS tokens, shared memory); asynchronous.
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

// Where a tile lies: tokens fastest within a group, then weights, so that blocks that run together share both.
struct TileAt {
    int mt, nt;
    __device__ TileAt(const WgmmaArgs &a, int tile) {
        const int group = tile / (kTokenGroup * a.n_tiles), in_group = tile - group * kTokenGroup * a.n_tiles;
        const int width = min(kTokenGroup, a.m_tiles - group * kTokenGroup);
        nt = in_group / width;
        mt = group * kTokenGroup + in_group - nt * width;
    }
};

// What this block does, piece by piece: its share of the shared tiles, then whole ones.
struct Pieces {
    int at, end, next_whole, tile = 0, c0 = 0, c1 = 0;
    __device__ explicit Pieces(const WgmmaArgs &a)
        : at(share_of(blockIdx.x, gridDim.x, a.shared, a.chunks)), end(share_of(blockIdx.x + 1, gridDim.x, a.shared, a.chunks)),
          next_whole(a.shared + blockIdx.x) {}
    __device__ bool next(const WgmmaArgs &a) {
        if (at < end) {
            tile = at / a.chunks, c0 = at - tile * a.chunks, c1 = min(a.chunks, c0 + end - at);
            at += c1 - c0;
            return true;
        }
        if (next_whole >= a.n_tiles * a.m_tiles) return false;
        tile = next_whole, c0 = 0, c1 = a.chunks;
        next_whole += gridDim.x;
        return true;
    }
};

// Addresses in shared memory. All of it is the same for a warp, and is computed so that the compiler knows.
struct Ring {
    uint32_t full, empty, stages;
    int count, slot = 0, turn = 0;
    __device__ void step() {
        if (++slot == count) slot = 0, turn++;
    }
    __device__ uint32_t full_at() const { return full + slot * 8; }
};
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
__device__ __forceinline__ uint32_t load4(uint32_t at) {
    uint32_t v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(at));
    return v;
}

// Where the producer is: the pieces' steps one after the other.
template <int TOKENS>
struct Source {
    Pieces pieces;
    const uint8_t *weights = nullptr, *x = nullptr;
    uint32_t bytes = 0;
    int left = 0;
    __device__ Source(const WgmmaArgs &a) : pieces(a) { seek(a); }
    __device__ void seek(const WgmmaArgs &a) {
        if (!pieces.next(a)) return;
        const TileAt at(a, pieces.tile);
        bytes = (uint32_t)(tiles_in_block(at.nt, a.tiles) * kChunk);
        weights = a.packed + chunk_at(at.nt * kBlockTiles, 0, a.tiles, a.chunks) + (int64_t)pieces.c0 * bytes;
        x = a.image + ((int64_t)at.mt * a.chunks + pieces.c0) * (TOKENS * 256);
        left = pieces.c1 - pieces.c0;
    }
    __device__ void on(const WgmmaArgs &a) {
        weights += bytes, x += TOKENS * 256;
        if (--left == 0) seek(a);
    }
};

__device__ __forceinline__ void bulk_copy(uint32_t to, const uint8_t *from, uint32_t bytes, uint32_t bar) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from), "r"(bytes),
                 "r"(bar)
                 : "memory");
}

constexpr int kEarly = 4;  // steps whose weights are asked for before their activations are there; more would be in these ones' way

// One thread. Weights never depend on the kernels before, so the first of them do not wait for those.
template <int TOKENS>
__device__ void produce(const WgmmaArgs &a, Ring ring) {
    const auto bring_weights = [&](const Source<TOKENS> &s) {
        asm volatile("{ .reg .b64 t; mbarrier.arrive.expect_tx.shared.b64 t, [%0], %1; }" ::"r"(ring.full_at()), "r"(s.bytes + TOKENS * 256)
                     : "memory");
        bulk_copy(ring.stages + ring.slot * wgmma_stage(TOKENS), s.weights, s.bytes, ring.full_at());
    };
    const auto bring_x = [&](const Source<TOKENS> &s) {
        bulk_copy(ring.stages + ring.slot * wgmma_stage(TOKENS) + kWeights, s.x, TOKENS * 256, ring.full_at());
    };
    Source<TOKENS> from(a);
    {
        Source<TOKENS> first = from;
        for (; ring.slot < min(kEarly, ring.count) && first.left; ring.slot++, first.on(a)) bring_weights(first);
    }
    wait_for_previous_kernel();
    asm volatile("fence.proxy.async.global;" ::: "memory");  // the copies see what other threads wrote
    const int early = ring.slot;
    for (ring.slot = 0; ring.slot < early; ring.slot++, from.on(a)) bring_x(from);
    if (ring.slot == ring.count) ring.slot = 0, ring.turn = 1;
    for (; from.left; ring.step(), from.on(a)) {
        if (ring.turn) wait_at(ring.empty + ring.slot * 8, (ring.turn - 1) & 1);
        bring_weights(from);
        bring_x(from);
    }
}

// Where a block's part of a shared tile lies: two places a block, for the first tile of its share and for the last; in a place, the
// warps' accumulators, four of a lane together.
template <int TOKENS>
__device__ float4 *part_at(const WgmmaArgs &a, int block, int blocks, int tile, int warp, int lane) {
    const bool second = share_of(block, blocks, a.shared, a.chunks) / a.chunks != tile;
    return (float4 *)a.sums + ((int64_t)(2 * block + second) * kWarps + warp) * (TOKENS / 2 / 4 * 32) + lane;
}

__device__ __forceinline__ uint32_t pair_of(float lo, float hi, int type) {
    uint32_t d;
    if (type == 1) asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(hi), "f"(lo));
    else asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(hi), "f"(lo));
    return d;
}

// 16 rows x TOKENS tokens of a warp's accumulators to out[token][row]. Where rows come in eights of 16 bits, 16 x 16 at a time are turned
// over in the warp's 512 bytes of shared memory, so that a lane stores 16 bytes.
template <int TOKENS>
__device__ void store_rows(const WgmmaArgs &a, int64_t row0, int token0, const float (&acc)[TOKENS / 2], uint8_t *turn, int lane) {
    if (a.out_type != 0 && a.n % 8 == 0 && ((uintptr_t)a.out & 15) == 0) {
        // matrices of stmatrix: rows 0-7 and 8-15 of tokens 0-7, then of 8-15; a lane names token (lane & 7) + 8 (lane >> 4), half (lane >> 3) & 1
        const int to_token = (lane & 7) + (lane >> 4) * 8, to_half = (lane >> 3) & 1, of_token = lane >> 1, of_half = lane & 1;
        const uint32_t to = smem_at(turn) + to_token * 32 + (to_half ^ (to_token >> 2 & 1)) * 16;
        const uint4 *of = (const uint4 *)(turn + of_token * 32 + (of_half ^ (of_token >> 2 & 1)) * 16);
        const bool row_there = row0 + of_half * 8 < a.n;
        uint16_t *out = (uint16_t *)a.out + (int64_t)(token0 + of_token) * a.n + row0 + of_half * 8;
#pragma unroll
        for (int i = 0; i < TOKENS / 2; i += 8, out += 16 * a.n) {
            uint32_t v[4];
#pragma unroll
            for (int j = 0; j < 4; j++) v[j] = pair_of(acc[i + 2 * j] * a.scale, acc[i + 2 * j + 1] * a.scale, a.out_type);
            asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]) : "memory");
            __syncwarp();
            const uint4 row = *of;
            __syncwarp();
            if (row_there && token0 + i * 2 + of_token < a.m) *(uint4 *)out = row;
        }
        return;
    }
    const int64_t row = row0 + (lane >> 2);
    int token = token0 + (lane & 3) * 2;
    int64_t to = token * a.n + row;
#pragma unroll
    for (int i = 0; i < TOKENS / 2; i += 4, token += 8, to += 8 * a.n) {
        asm volatile("" : "+l"(to));  // or the compiler keeps every address in registers, and spills
#pragma unroll
        for (int v = 0; v < 4; v++)
            if (token + (v & 1) < a.m && row + (v >> 1) * 8 < a.n)
                store_typed(a.out, to + (v & 1) * a.n + (v >> 1) * 8, acc[i + v] * a.scale, a.out_type);
    }
}

template <int TOKENS, bool HALF>
__device__ void consume(const WgmmaArgs &a, Ring ring, uint8_t *turn, int warp) {
    constexpr int kPer = 2;  // multiplications of a group; while one group is under way, the next one's weights are decoded
    int lane;
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));  // once: the compiler would read it anew in the loop
    const uint32_t codes_at = ring.stages + warp * kChunk + lane * 16, scales_at = ring.stages + warp * kChunk + scale_at(0, lane);
    const uint32_t x_at = operand_at(ring.stages + kWeights);
    float acc[TOKENS / 2];
    for (Pieces p(a); p.next(a);) {
#pragma unroll
        for (int i = 0; i < TOKENS / 2; i++) acc[i] = 0.f;
        int before = -1;  // the slot that the last step read
        for (int c = p.c0; c < p.c1; c++, ring.step()) {
            wait_at(ring.full_at(), ring.turn & 1);
            // a reduction's result lies in a uniform register, and so does all that follows from it: fewer instructions than one by one
            const uint32_t at = __reduce_or_sync(0xFFFFFFFFu, ring.slot * wgmma_stage(TOKENS)), x = x_at + at / 16;
            const uint32_t scales = load4(scales_at + at);
            const uint4 codes[2] = {load16(codes_at + at), load16(codes_at + at + word_at(1, 0, 0))};
            uint32_t f[2][kPer][4];
#pragma unroll
            for (int g = 0; g < 8 / kPer; g++) {
                const int q = g * kPer / 4;
                const uint32_t w[4] = {codes[q].x, codes[q].y, codes[q].z, codes[q].w};
                const uint32_t s0 = scale_pair(scales, 2 * q), s1 = scale_pair(scales, 2 * q + 1);
                uint32_t(&to)[kPer][4] = f[g & 1];
                wgmma_wait<1>();  // the fragments `to` are free again
                if (g == 1 && before >= 0 && lane < kBack) arrive_at(ring.empty + before * 8);
#pragma unroll
                for (int i = 0; i < kPer; i++) {
                    decode8(w[(g * kPer + i) % 4], s0, s1, to[i]);
                    if (HALF)
#pragma unroll
                        for (int j = 0; j < 4; j++) to[i][j] = bf16x2_to_f16x2(to[i][j]);
                }
                wgmma_fence();
#pragma unroll
                for (int i = 0; i < kPer; i++) wgmma<TOKENS, HALF>(acc, to[i], x + (q * (TOKENS * 128) + (g * kPer + i) % 4 * 32) / 16);
                wgmma_commit();
            }
            before = ring.slot;
        }
        wgmma_wait<0>();
        if (lane < kBack) arrive_at(ring.empty + before * 8);
        if (p.c1 - p.c0 < a.chunks) {
            float4 *to = part_at<TOKENS>(a, blockIdx.x, gridDim.x, p.tile, warp, lane);
#pragma unroll
            for (int i = 0; i < TOKENS / 2; i += 4, to += 32) __stcg(to, make_float4(acc[i], acc[i + 1], acc[i + 2], acc[i + 3]));
            continue;
        }
        const TileAt at(a, p.tile);
        store_rows<TOKENS>(a, (int64_t)(at.nt * kBlockTiles + warp) * 16, at.mt * TOKENS, acc, turn + warp * 512, lane);
    }
}
#endif

// Without sm_90a code there is a stub whose bound tells the planner to look elsewhere.
template <int TOKENS, bool HALF>
__global__ void
#if AQ_WGMMA || !defined(__CUDA_ARCH__)
__maxnreg__(kRegisters)
#else
__launch_bounds__(32)
#endif
    wgmma_kernel(const WgmmaArgs a) {
#if AQ_WGMMA
    extern __shared__ __align__(1024) uint8_t shared[];
    uint32_t base;
    asm volatile("mov.u32 %0, %1;" : "=r"(base) : "r"(smem_at(shared)));
    const Ring ring{base, base + 128, base + kWgmmaHead, a.stages};
    const int warp = __shfl_sync(0xFFFFFFFFu, threadIdx.x >> 5, 0);
    if (threadIdx.x == 0) {
        for (int s = 0; s < a.stages; s++) bar_init((uint64_t *)shared + s, 1), bar_init((uint64_t *)shared + 16 + s, kBack * kWarps);
        bar_fence();
    }
    __syncthreads();
    if (a.pdl || a.shared) let_next_kernel_start();
    if (warp < kWarps) {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kConsumerRegisters));
        consume<TOKENS, HALF>(a, ring, shared + 1024, warp);
    } else {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kProducerRegisters));
        if (threadIdx.x == 32 * kWarps) produce<TOKENS>(a, ring);
    }
#endif
}

constexpr int kAddWarps = 2;

// The parts of the shared tiles that several blocks made: a warp takes 16 rows x 16 tokens.
template <int TOKENS>
__global__ void __launch_bounds__(32 * kAddWarps, 16) add_kernel(const WgmmaArgs a, int blocks) {
#if AQ_WGMMA
    __shared__ __align__(16) uint8_t turn[kAddWarps * 512];
    const int lane = threadIdx.x & 31, unit = blockIdx.x * kAddWarps + (threadIdx.x >> 5);
    const int part = unit % (TOKENS / 16), warp = unit / (TOKENS / 16) % kWarps, tile = unit / (TOKENS / 16 * kWarps);
    const int first = sharer_of(tile * a.chunks, blocks, a.shared, a.chunks), last = sharer_of(tile * a.chunks + a.chunks - 1, blocks, a.shared, a.chunks);
    const TileAt at(a, tile);
    if (a.pdl) let_next_kernel_start();
    wait_for_previous_kernel();
    if (first == last) return;
    float sum[8] = {};
#pragma unroll 4
    for (int b = first; b <= last; b++) {
        const float4 *from = part_at<TOKENS>(a, b, blocks, tile, warp, lane) + part * 64;
        const float4 v = __ldcg(from), w = __ldcg(from + 32);
        sum[0] += v.x, sum[1] += v.y, sum[2] += v.z, sum[3] += v.w, sum[4] += w.x, sum[5] += w.y, sum[6] += w.z, sum[7] += w.w;
    }
    store_rows<16>(a, (int64_t)(at.nt * kBlockTiles + warp) * 16, at.mt * TOKENS + part * 16, sum, turn + (threadIdx.x >> 5) * 512, lane);
#endif
}

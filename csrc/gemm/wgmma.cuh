// W4A16 on Hopper's wgmma (sm_90a): the transposed product, with decoded weights as the register operand.
//
// Before the multiplying kernel a small one writes the activations once more, in the very bytes that wgmma reads: the order of columns
// that the repacked weights fix, 128-byte swizzle, tile after tile, zeros beyond M and K. So both operands of a step come by one bulk
// copy each, and one thread is all the producer that a block needs.
//
// A block makes 64 rows a warpgroup x TOKENS tokens. A warp's 16 rows x 16 columns of decoded weights are wgmma's A fragment as they are
// mma.sync's, so the repacked layout is the same. Blocks are persistent. Of the tiles, `shared` many are cut along K into equal shares
// for all blocks; a tile that several blocks have part of is added up, in the order of K, by the warps that come to it last. The
// others are made whole, block by block.
#pragma once
#include "gemm/device.cuh"

struct WgmmaArgs {
    const uint8_t *packed, *image;
    float *sums;        // two partial tiles a block
    uint32_t *arrived;  // of each shared tile and warp: how many partial tiles are written
    void *out;
    int64_t n;
    float scale;
    int m, n_tiles, m_tiles, tiles, chunks, shared, stages, out_type, pdl;
};

constexpr int kTokenGroup = 8;  // tiles of tokens that run side by side, for the L2

template <int TOKENS>
struct WgmmaShape {
    static constexpr int kGroups = TOKENS == 256 ? 2 : 4, kWarps = 4 * kGroups, kThreads = 32 * kWarps + 128;
    // registers of a consumer: a block starts with 65536 / kThreads each, and its producers give up what they do not need
    static constexpr int kRegisters = TOKENS == 256 ? 232 : 112, kProducerRegisters = TOKENS == 256 ? 40 : 32;
    static constexpr int kTileTiles = kWarps;  // row tiles of 16
    static constexpr int kHead = 1024 + 512 * kWarps, kWeights = kTileTiles * kChunk, kStage = kWeights + TOKENS * 256;
    static constexpr int kSums = TOKENS / 2;  // of a thread
};

struct WgmmaTile {
    int tokens, rows, stage, head;
};
template <int TOKENS>
constexpr WgmmaTile wgmma_tile() {
    using S = WgmmaShape<TOKENS>;
    return {TOKENS, S::kTileTiles * kRows, S::kStage, S::kHead};
}
constexpr WgmmaTile kWgmmaTiles[] = {wgmma_tile<16>(), wgmma_tile<32>(), wgmma_tile<64>(), wgmma_tile<128>(), wgmma_tile<256>()};

// Bytes of the workspace: the activations' image, the blocks' partial tiles, the counters of partial tiles.
struct WgmmaSpace {
    size_t image, sums, counters;
};
inline WgmmaSpace wgmma_space(int tokens, int m_tiles, int chunks, int shared, int blocks) {
    const int rows = tokens == 256 ? 128 : 256;
    return {(size_t)m_tiles * chunks * tokens * 256, shared ? (size_t)2 * blocks * rows * tokens * 4 : 0, (size_t)shared * (rows / 16) * 4};
}

// The share of block b in the shared tiles starts at this chunk of them; it ends where the next begins.
AQ_HD int share_of(int b, int blocks, int shared, int chunks) { return (int)((int64_t)shared * chunks * b / blocks); }
// The block whose share holds chunk u of the shared tiles (every share holds at least one).
AQ_HD int sharer_of(int u, int blocks, int shared, int chunks) {
    return (int)((((int64_t)u + 1) * blocks - 1) / ((int64_t)shared * chunks));
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
#define AQ_D64(d, i) AQ_D32(d, i), AQ_D32(d, i + 32)
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
#define AQ_L128 AQ_L64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79" ",%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95" \
    ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111" ",%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"

// d += A (16 x 16 a warp, registers) x B (16 columns of TOKENS tokens, shared memory); asynchronous.
template <int TOKENS, bool HALF>
__device__ __forceinline__ void wgmma(float (&d)[TOKENS / 2], const uint32_t (&a)[4], uint32_t b) {
    if constexpr (TOKENS == 16) {
        AQ_WGMMA_BOTH(16, AQ_L8, "%8", "%9", "%10", "%11", "%12", AQ_D8(d, 0));
    } else if constexpr (TOKENS == 32) {
        AQ_WGMMA_BOTH(32, AQ_L16, "%16", "%17", "%18", "%19", "%20", AQ_D16(d, 0));
    } else if constexpr (TOKENS == 64) {
        AQ_WGMMA_BOTH(64, AQ_L32, "%32", "%33", "%34", "%35", "%36", AQ_D32(d, 0));
    } else if constexpr (TOKENS == 128) {
        AQ_WGMMA_BOTH(128, AQ_L64, "%64", "%65", "%66", "%67", "%68", AQ_D64(d, 0));
    } else {
        AQ_WGMMA_BOTH(256, AQ_L128, "%128", "%129", "%130", "%131", "%132", AQ_D64(d, 0), AQ_D64(d, 64));
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

struct Ring {
    uint64_t *full, *empty;
    uint8_t *stages;
    int count, slot = 0, turn = 0;
    __device__ void step() {
        if (++slot == count) slot = 0, turn++;
    }
};

// Where the producer is: the pieces' steps one after the other.
template <int TOKENS>
struct Source {
    using S = WgmmaShape<TOKENS>;
    Pieces pieces;
    const uint8_t *weights = nullptr, *x = nullptr;
    uint32_t weights_step = 0;
    uint32_t bytes = 0;
    int left = 0;
    __device__ Source(const WgmmaArgs &a) : pieces(a) { seek(a); }
    __device__ void seek(const WgmmaArgs &a) {
        if (!pieces.next(a)) return;
        const TileAt at(a, pieces.tile);
        const int tile = at.nt * S::kTileTiles, of_block = tiles_in_block(tile / kBlockTiles, a.tiles);
        bytes = (uint32_t)min(S::kTileTiles, of_block - tile % kBlockTiles) * kChunk;
        weights_step = (uint32_t)(of_block * kChunk);
        weights = a.packed + chunk_at(tile, 0, a.tiles, a.chunks) + (int64_t)pieces.c0 * weights_step;
        x = a.image + ((int64_t)at.mt * a.chunks + pieces.c0) * (TOKENS * 256);
        left = pieces.c1 - pieces.c0;
    }
    __device__ void on(const WgmmaArgs &a) {
        weights += weights_step, x += TOKENS * 256;
        if (--left == 0) seek(a);
    }
};

__device__ __forceinline__ void bulk_copy(uint8_t *to, const uint8_t *from, uint32_t bytes, uint64_t *bar) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(smem_at(to)), "l"(from),
                 "r"(bytes), "r"(smem_at(bar))
                 : "memory");
}

// One thread. Weights never depend on the kernels before, so the ring's first turn of them does not wait for those.
template <int TOKENS>
__device__ void produce(const WgmmaArgs &a, Ring ring) {
    using S = WgmmaShape<TOKENS>;
    const auto bring_weights = [&](const Source<TOKENS> &s) {
        uint64_t *bar = ring.full + ring.slot;
        asm volatile("{ .reg .b64 t; mbarrier.arrive.expect_tx.shared.b64 t, [%0], %1; }" ::"r"(smem_at(bar)), "r"(s.bytes + TOKENS * 256)
                     : "memory");
        bulk_copy(ring.stages + (size_t)ring.slot * S::kStage, s.weights, s.bytes, bar);
    };
    const auto bring_x = [&](const Source<TOKENS> &s) {
        bulk_copy(ring.stages + (size_t)ring.slot * S::kStage + S::kWeights, s.x, TOKENS * 256, ring.full + ring.slot);
    };
    Source<TOKENS> from(a);
    {
        Source<TOKENS> first = from;
        for (; ring.slot < ring.count && first.left; ring.slot++, first.on(a)) bring_weights(first);
    }
    wait_for_previous_kernel();
    asm volatile("fence.proxy.async.global;" ::: "memory");  // the copies see what other threads wrote
    const int brought = ring.slot;
    for (ring.slot = 0; ring.slot < brought; ring.slot++, from.on(a)) bring_x(from);
    ring.slot = 0, ring.turn = 1;
    for (; from.left; ring.step(), from.on(a)) {
        bar_wait(ring.empty + ring.slot, (ring.turn - 1) & 1);
        bring_weights(from);
        bring_x(from);
    }
}

// The warp's part of a tile that other blocks have parts of, too: written down; whoever is last adds all of them, in the order of K.
template <int TOKENS>
__device__ bool add_up(const WgmmaArgs &a, const Pieces &p, float (&acc)[TOKENS / 2], int warp, int lane) {
    using S = WgmmaShape<TOKENS>;
    constexpr int kQuads = S::kSums / 4, kBatch = kQuads < 16 ? kQuads : 16;
    const int blocks = gridDim.x;
    const auto part_of = [&](int b) {  // a block has two places: for the first tile of its share, and for the last
        const bool second = share_of(b, blocks, a.shared, a.chunks) / a.chunks != p.tile;
        return (float4 *)a.sums + ((int64_t)(2 * b + second) * S::kWarps + warp) * (kQuads * 32) + lane;
    };
    float4 *mine = part_of(blockIdx.x);
#pragma unroll
    for (int i = 0; i < kQuads; i++) __stcg(mine + i * 32, make_float4(acc[4 * i], acc[4 * i + 1], acc[4 * i + 2], acc[4 * i + 3]));
    __threadfence();
    __syncwarp();
    const int first = sharer_of(p.tile * a.chunks, blocks, a.shared, a.chunks);
    const int last = sharer_of(p.tile * a.chunks + a.chunks - 1, blocks, a.shared, a.chunks);
    uint32_t before = 0;
    if (lane == 0) before = atomicAdd(a.arrived + p.tile * S::kWarps + warp, 1u);
    if (__shfl_sync(0xFFFFFFFFu, before, 0) != (uint32_t)(last - first)) return false;
    __threadfence();
#pragma unroll
    for (int i = 0; i < S::kSums; i++) acc[i] = 0.f;
    for (int b = first; b <= last; b++) {
        const float4 *part = part_of(b);
#pragma unroll
        for (int i0 = 0; i0 < kQuads; i0 += kBatch) {
            float4 v[kBatch];
#pragma unroll
            for (int i = 0; i < kBatch; i++) v[i] = __ldcg(part + (i0 + i) * 32);
#pragma unroll
            for (int i = 0; i < kBatch; i++) {
                float *to = acc + 4 * (i0 + i);
                to[0] += v[i].x, to[1] += v[i].y, to[2] += v[i].z, to[3] += v[i].w;
            }
        }
    }
    return true;
}

__device__ __forceinline__ uint32_t pair_of(float lo, float hi, int type) {
    uint32_t d;
    if (type == 1) asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(hi), "f"(lo));
    else asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(hi), "f"(lo));
    return d;
}

// A warp's 16 rows x TOKENS tokens to out[token][row]. Where rows come in eights of 16 bits, 16 x 16 at a time are turned over in the
// warp's 512 bytes of shared memory, so that a lane stores 16 bytes.
template <int TOKENS>
__device__ void store_tile(const WgmmaArgs &a, const Pieces &p, const float (&acc)[TOKENS / 2], int row_tile, uint8_t *turn, int lane) {
    const TileAt at(a, p.tile);
    const int64_t row0 = (int64_t)(at.nt * WgmmaShape<TOKENS>::kTileTiles + row_tile) * 16;
    const int token0 = at.mt * TOKENS;
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
__device__ void consume(const WgmmaArgs &a, Ring ring, uint8_t *turn) {
    using S = WgmmaShape<TOKENS>;
    const int lane = threadIdx.x & 31, warp = __shfl_sync(0xFFFFFFFFu, threadIdx.x >> 5, 0);
    float acc[S::kSums];
    for (Pieces p(a); p.next(a);) {
#pragma unroll
        for (int i = 0; i < S::kSums; i++) acc[i] = 0.f;
        int before = -1;  // the slot that the last step read
        for (int c = p.c0; c < p.c1; c++, ring.step()) {
            bar_wait(ring.full + ring.slot, ring.turn & 1);
            const uint8_t *stage = ring.stages + (size_t)ring.slot * S::kStage, *weights = stage + warp * kChunk;
            const uint32_t x = operand_at(smem_at(stage + S::kWeights));
            uint32_t f[2][2][4];
            const uint32_t scales = *(const uint32_t *)(weights + scale_at(0, lane));
#pragma unroll
            for (int q = 0; q < 2; q++) {
                const uint4 codes = *(const uint4 *)(weights + word_at(q, lane, 0));
                const uint32_t w[4] = {codes.x, codes.y, codes.z, codes.w};
                const uint32_t s0 = scale_pair(scales, 2 * q), s1 = scale_pair(scales, 2 * q + 1);
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    wgmma_wait<1>();  // the fragments f[h] are free again
                    if (q == 0 && h == 1 && before >= 0 && lane < kBack) bar_arrive(ring.empty + before);
#pragma unroll
                    for (int i = 0; i < 2; i++) {
                        decode8(w[2 * h + i], s0, s1, f[h][i]);
                        if (HALF)
#pragma unroll
                            for (int j = 0; j < 4; j++) f[h][i][j] = bf16x2_to_f16x2(f[h][i][j]);
                    }
                    wgmma_fence();
#pragma unroll
                    for (int i = 0; i < 2; i++) wgmma<TOKENS, HALF>(acc, f[h][i], x + (q * (TOKENS * 128) + (2 * h + i) * 32) / 16);
                    wgmma_commit();
                }
            }
            before = ring.slot;
        }
        wgmma_wait<0>();
        if (lane < kBack) bar_arrive(ring.empty + before);
        if (p.c1 - p.c0 < a.chunks && !add_up<TOKENS>(a, p, acc, warp, lane)) continue;
        store_tile<TOKENS>(a, p, acc, warp, turn + warp * 512, lane);
    }
}
#endif

// Without sm_90a code there is a stub whose bound tells the planner to look elsewhere.
template <int TOKENS, bool HALF>
__global__ void
#if AQ_WGMMA || !defined(__CUDA_ARCH__)
__launch_bounds__(WgmmaShape<TOKENS>::kThreads, 1)
#else
__launch_bounds__(32)
#endif
    wgmma_kernel(const WgmmaArgs a) {
#if AQ_WGMMA
    using S = WgmmaShape<TOKENS>;
    extern __shared__ __align__(1024) uint8_t shared[];
    const Ring ring{(uint64_t *)shared, (uint64_t *)shared + 16, shared + S::kHead, a.stages};
    if (threadIdx.x == 32 * S::kWarps) {
        for (int s = 0; s < a.stages; s++) bar_init(ring.full + s, 1), bar_init(ring.empty + s, kBack * S::kWarps);
        bar_fence();
    }
    __syncthreads();
    if (a.pdl) let_next_kernel_start();
    if (threadIdx.x < 32 * S::kWarps) {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(S::kRegisters));
        consume<TOKENS, HALF>(a, ring, shared + 1024);
    } else {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(S::kProducerRegisters));
        if (threadIdx.x == 32 * S::kWarps) produce<TOKENS>(a, ring);
    }
#endif
}

// W4A16 on Hopper's wgmma (sm_90a): the transposed product, with decoded weights as the register operand.
//
// A block makes 256 / KS rows x TOKENS tokens. Four warpgroups of consumers each own 64 rows (with KS = 2, two of them share rows and
// take the two chunks of a stage); one warpgroup of producers keeps a ring full: a warp for the weights' bulk copies, three that bring
// activations through registers into the order of columns that the repacked weights have, with the 128-byte swizzle. A warp's 16 rows
// x 16 columns of decoded weights are wgmma's A fragment as they are mma.sync's, so the repacked layout is the same.
// Blocks are persistent: producers run on into the next tile while consumers store. Blocks of a cluster split K; each member then owns
// a share of every accumulator, gets the others' shares pushed into its shared memory, and adds them in rank order.
#pragma once
#include "gemm/device.cuh"

struct WgmmaArgs {
    const uint8_t *packed;
    const uint16_t *x;
    void *out;
    int64_t ldx, n;
    float scale;
    int m, k, n_tiles, m_tiles, tiles, chunks, split, stages, out_type, pdl;
};

constexpr int kWgmmaHead = 1024, kConsumerWarps = 16, kWgmmaThreads = 32 * (kConsumerWarps + 4);
// Warps that bring activations. There must be at least so many stages: a warp that leaves steps to others may otherwise miss two turns
// of a barrier, whose parity then repeats.
constexpr int kXWarps = 3;
constexpr int kTokenGroup = 8;  // tiles of tokens that run side by side, for the L2

template <int TOKENS, int KS>
struct WgmmaShape {
    static constexpr int kTileRows = 256 / KS, kTileTiles = 16 / KS;
    static constexpr int kWeights = kBlockTiles * kChunk, kStage = kWeights + KS * TOKENS * 256;
    static constexpr int kSums = TOKENS / 2;  // of a thread
};
// shared memory for the shares that `members` push
constexpr int pushed_bytes(int tokens, int members) { return 256 * 4 * tokens / members * (members - 1); }

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

#define AQ_D4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define AQ_D16(d, i) AQ_D4(d, i), AQ_D4(d, i + 4), AQ_D4(d, i + 8), AQ_D4(d, i + 12)
#define AQ_WGMMA_ASM(N, TYPE, REGS, A0, A1, A2, A3, B, ...)                                                                  \
    asm volatile("{ .reg .b64 b; mov.b64 b, {" B ", 0x40000040}; wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" REGS "}, {" A0 "," A1 "," A2 "," A3 "}, b, 1, 1, 1, 0; }" \
                 : __VA_ARGS__                                                                                                  \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b))
#define AQ_WGMMA_BOTH(N, ...)                               \
    if constexpr (HALF) AQ_WGMMA_ASM(N, "f16", __VA_ARGS__); \
    else AQ_WGMMA_ASM(N, "bf16", __VA_ARGS__)
#define AQ_L16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define AQ_L32 AQ_L16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"

// d += A (16 x 16 a warp, registers) x B (16 columns of TOKENS tokens, shared memory); asynchronous.
template <int TOKENS, bool HALF>
__device__ __forceinline__ void wgmma(float (&d)[TOKENS / 2], const uint32_t (&a)[4], uint32_t b) {
    if constexpr (TOKENS == 32) {
        AQ_WGMMA_BOTH(32, AQ_L16, "%16", "%17", "%18", "%19", "%20", AQ_D16(d, 0));
    } else {
        AQ_WGMMA_BOTH(64, AQ_L32, "%32", "%33", "%34", "%35", "%36", AQ_D16(d, 0), AQ_D16(d, 16));
    }
}

// ---- between blocks of a cluster ----
__device__ __forceinline__ uint32_t at_rank(const void *p, uint32_t rank) {
    uint32_t at;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"(smem_at(p)), "r"(rank));
    return at;
}
template <int V>
__device__ __forceinline__ void push(uint32_t at, const float *v) {
    if constexpr (V == 4) asm volatile("st.shared::cluster.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(at), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]) : "memory");
    else if constexpr (V == 2) asm volatile("st.shared::cluster.v2.f32 [%0], {%1,%2};" ::"r"(at), "f"(v[0]), "f"(v[1]) : "memory");
    else asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(at), "f"(v[0]) : "memory");
}
__device__ __forceinline__ void arrive_at(uint32_t bar) {
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(bar) : "memory");
}
__device__ __forceinline__ void wait_for_cluster(uint64_t *bar, uint32_t parity) {
    uint32_t done;
    do {
        asm volatile(
            "{ .reg .pred p; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
            : "=r"(done)
            : "r"(smem_at(bar)), "r"(parity)
            : "memory");
    } while (!done);
}

// The tile that comes `at`-th: tokens fastest within a group, then weights, so that blocks that run together share both.
template <int TOKENS, int KS>
struct TileAt {
    int m0, nt;
    __device__ TileAt(const WgmmaArgs &a, int at) {
        const int group = at / (kTokenGroup * a.n_tiles), in_group = at - group * kTokenGroup * a.n_tiles;
        const int width = min(kTokenGroup, a.m_tiles - group * kTokenGroup);
        nt = in_group / width;
        m0 = (group * kTokenGroup + in_group - nt * width) * TOKENS;
    }
};

template <int TOKENS, int KS>
struct Ring {
    uint64_t *full, *empty;
    uint8_t *stages;
    int count, slot = 0, turn = 0;
    __device__ void step(int by) {
        slot += by;
        while (slot >= count) slot -= count, turn++;
    }
    __device__ uint8_t *stage() const { return stages + (size_t)slot * WgmmaShape<TOKENS, KS>::kStage; }
    __device__ void wait_empty() const {
        if (turn) bar_wait(empty + slot, (turn - 1) & 1);
    }
};


// What this block does: its tiles, and its share of K in steps of KS chunks.
template <int TOKENS, int KS>
struct Work {
    int first, stride, last, c0, c1;
    __device__ explicit Work(const WgmmaArgs &a) {
        const int rank = a.split > 1 ? (int)cluster_rank() : 0;
        first = blockIdx.x / a.split, stride = gridDim.x / a.split, last = a.n_tiles * a.m_tiles;
        c0 = a.chunks * rank / a.split, c1 = a.chunks * (rank + 1) / a.split;
    }
};

// One thread: weights of step after step, as far ahead as the ring allows.
template <int TOKENS, int KS>
__device__ void bring_weights(const WgmmaArgs &a, Ring<TOKENS, KS> ring) {
    using S = WgmmaShape<TOKENS, KS>;
    const Work<TOKENS, KS> work(a);
    for (int it = work.first; it < work.last; it += work.stride) {
        const int tile = TileAt<TOKENS, KS>(a, it).nt * S::kTileTiles;
        const int of_block = tiles_in_block(tile / kBlockTiles, a.tiles);
        const uint32_t bytes = (uint32_t)min(S::kTileTiles, of_block - tile % kBlockTiles) * kChunk;
        const uint8_t *from = a.packed + chunk_at(tile, 0, a.tiles, a.chunks);
        for (int c = work.c0; c < work.c1; c += KS, ring.step(1)) {
            ring.wait_empty();
            const uint32_t bar = smem_at(ring.full + ring.slot);
            asm volatile("{ .reg .b64 t; mbarrier.arrive.expect_tx.shared.b64 t, [%0], %1; }" ::"r"(bar), "r"(bytes * KS) : "memory");
            for (int p = 0; p < KS; p++)  // beyond the share's end its last chunk again, times zeros: no branch among the wgmma
                asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                                 smem_at(ring.stage() + p * (S::kTileTiles * kChunk))),
                             "l"(from + (int64_t)min(c + p, work.c1 - 1) * of_block * kChunk), "r"(bytes), "r"(bar)
                             : "memory");
        }
    }
}

// One of kXWarps warps: the activations of every kXWarps-th step. A batch of registers is on its way while the one before is stored.
template <int TOKENS, int KS>
struct Activations {
    static constexpr int kParts = 2 * KS, kUnits = kParts * TOKENS / 8;  // of 8 tokens x 64 columns
    static constexpr int kBatch = kUnits < 4 ? kUnits : 4, kBatches = kUnits / kBatch;
    uint4 v[kBatch][2];

    // A lane takes 32 bytes of a token, a load 8 tokens. `x` lies at the step's first column and this lane's token and 16 columns of it;
    // `columns` and `tokens` are what is left from there on.
    __device__ __forceinline__ void load(const uint16_t *x, int64_t ldx, int columns, int tokens, int batch) {
#pragma unroll
        for (int i = 0; i < kBatch; i++) {
            const int token = (batch * (kBatch / kParts) + i / kParts) * 8, q = i % kParts;
            const bool there = token < tokens && q * 64 < columns;  // beyond: zeros, since padded codes are zeros and 0 * NaN is not
            const uint4 *from = (const uint4 *)(x + token * ldx + q * 64);
#pragma unroll
            for (int j = 0; j < 2; j++) v[i][j] = there ? __ldg(from + j) : make_uint4(0, 0, 0, 0);
        }
    }
    // columns 16 l + 4 i + 2 h of the 64 go to word l of the 16 bytes 2 i + h
    __device__ __forceinline__ void store(uint8_t *x, int batch, int lane) const {
        const int t = lane >> 2;
        x += batch * (kBatch / kParts) * 1024 + t * 128 + (lane & 3) * 4;
#pragma unroll
        for (int i = 0; i < kBatch; i++) {
            uint8_t *row = x + i % kParts * (TOKENS * 128) + i / kParts * 1024;
#pragma unroll
            for (int j = 0; j < 2; j++) {
                const uint32_t w[4] = {v[i][j].x, v[i][j].y, v[i][j].z, v[i][j].w};
#pragma unroll
                for (int p = 0; p < 4; p++) *(uint32_t *)(row + (((j * 4 + p) ^ t) << 4)) = w[p];
            }
        }
    }
};

template <int TOKENS, int KS>
__device__ void bring_activations(const WgmmaArgs &a, Ring<TOKENS, KS> ring, int which, int lane) {
    using S = WgmmaShape<TOKENS, KS>;
    using X = Activations<TOKENS, KS>;
    const Work<TOKENS, KS> work(a);
    const int whole = (work.c1 - work.c0 + KS - 1) / KS * KS, end = min(a.k, work.c1 * kCols);
    int it = work.first, c = work.c0, batch = 0, columns = 0, tokens = 0;
    const uint16_t *x = a.x;
    const auto on = [&](int steps) {  // to the step so much further on
        c += steps * KS;
        while (it < work.last && c >= work.c0 + whole) it += work.stride, c -= whole;
        if (it >= work.last) return;
        const int m0 = TileAt<TOKENS, KS>(a, it).m0, column = c * kCols + (lane & 3) * 16, t = lane >> 2;
        x = a.x + (int64_t)(m0 + t) * a.ldx + column;
        columns = end - column, tokens = a.m - m0 - t;
    };
    const auto get = [&](X &v) {
        v.load(x, a.ldx, columns, tokens, batch);
        if (++batch == X::kBatches) batch = 0, on(kXWarps);
    };
    ring.step(which);
    int stored = 0;
    const auto put = [&](const X &v) {
        if (stored == 0) ring.wait_empty();
        v.store(ring.stage() + S::kWeights, stored, lane);
        if (++stored == X::kBatches) {
            stored = 0;
            asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
            __syncwarp();
            if (lane == 0) bar_arrive(ring.full + ring.slot);
            ring.step(kXWarps);
        }
    };
    on(which);
    if (it >= work.last) return;
    X even, odd;
    get(even);
    while (true) {  // two sets of registers by name: a copy between them would wait for the loads
        bool more = it < work.last;
        if (more) get(odd);
        put(even);
        if (!more) return;
        more = it < work.last;
        if (more) get(even);
        put(odd);
        if (!more) return;
    }
}

template <int TOKENS, int KS, bool HALF>
__device__ void consume(const WgmmaArgs &a, Ring<TOKENS, KS> ring, uint64_t *got, uint64_t *back, float *pushed) {
    using S = WgmmaShape<TOKENS, KS>;
    constexpr int kSums = S::kSums, kRowGroups = 4 / KS, V = kSums / 8;  // floats pushed together
    const Work<TOKENS, KS> work(a);
    const int lane = threadIdx.x & 31, warp = __shfl_sync(0xFFFFFFFFu, threadIdx.x >> 5, 0), group = warp >> 2, thread = threadIdx.x & 127;
    const int rows_of = group % kRowGroups, part = group / kRowGroups;
    const int members = a.split * KS, me = (a.split > 1 ? (int)cluster_rank() : 0) * KS + part;
    const int run = kSums / members, log_run = 31 - __clz(run);
    const int row_tile = rows_of * 4 + (warp & 3);
    const uint32_t weights_at = (part * S::kTileTiles + row_tile) * kChunk, x_at = S::kWeights + part * (TOKENS * 256);
    bool cluster_waits = a.split > 1;
    int turn = 0;
    float acc[kSums];
    for (int it = work.first; it < work.last; it += work.stride, turn++) {
#pragma unroll
        for (int i = 0; i < kSums; i++) acc[i] = 0.f;
        int before = -1;  // the slot that the last step read
        for (int c = work.c0; c < work.c1; c += KS, ring.step(1)) {
            bar_wait(ring.full + ring.slot, ring.turn & 1);
            const uint8_t *weights = ring.stage() + weights_at;
            const uint32_t x = operand_at(smem_at(ring.stage() + x_at));
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
        if (before >= 0 && lane < kBack) bar_arrive(ring.empty + before);
        const TileAt<TOKENS, KS> tile(a, it);
        if (members > 1) {
            if (cluster_waits) {
                asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
                cluster_waits = false;
            }
            if (turn) wait_for_cluster(back + warp, (turn - 1) & 1);
            const int per_group = run * (members - 1) * 128;  // floats
#pragma unroll
            for (int i = 0; i < kSums; i += V) {
                const int owner = i >> log_run, slot = me - (me > owner);
                const int to_group = rows_of + owner % KS * kRowGroups;
                if (owner != me)
                    push<V>(at_rank(pushed + to_group * per_group + (slot * run + (i & (run - 1))) * 128 + thread * V, owner / KS), acc + i);
            }
            asm volatile("fence.acq_rel.cluster;" ::: "memory");
            __syncwarp();
            const int other = lane + (lane >= me), to_warp = (rows_of + other % KS * kRowGroups) * 4 + (warp & 3);
            if (lane < members - 1) arrive_at(at_rank(got + to_warp, other / KS));
            wait_for_cluster(got + warp, turn & 1);
            const float *mine = pushed + group * per_group + thread * V;
#pragma unroll
            for (int i = 0; i < kSums; i += V)
                if (i >> log_run == me) {
                    float sum[V];
#pragma unroll
                    for (int v = 0; v < V; v++) sum[v] = me ? mine[(i & (run - 1)) * 128 + v] : acc[i + v];
                    for (int from = 1; from < members; from++)
#pragma unroll
                        for (int v = 0; v < V; v++)
                            sum[v] += from == me ? acc[i + v] : mine[((from - (from > me)) * run + (i & (run - 1))) * 128 + v];
#pragma unroll
                    for (int v = 0; v < V; v++) acc[i + v] = sum[v];
                }
            __syncwarp();
            if (lane < members - 1) arrive_at(at_rank(back + to_warp, other / KS));
        }
        const int64_t row = (int64_t)(tile.nt * S::kTileTiles + row_tile) * 16 + (lane >> 2);
        int token = tile.m0 + (lane & 3) * 2;
        int64_t at = token * a.n + row;
#pragma unroll
        for (int i = 0; i < kSums; i += 4, token += 8, at += 8 * a.n) {
            asm volatile("" : "+l"(at));  // or the compiler keeps every address in registers, and spills
#pragma unroll
            for (int v = 0; v < 4; v++)
                if ((members == 1 || (i + v) >> log_run == me) && token + (v & 1) < a.m && row + (v >> 1) * 8 < a.n)
                    store_typed(a.out, at + (v & 1) * a.n + (v >> 1) * 8, acc[i + v] * a.scale, a.out_type);
        }
    }
    if (cluster_waits) asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}
#endif

// Without sm_90a code there is a stub whose bound tells the planner to look elsewhere.
template <int TOKENS, int KS, bool HALF>
__global__ void
#if AQ_WGMMA || !defined(__CUDA_ARCH__)
__launch_bounds__(kWgmmaThreads, 1)
#else
__launch_bounds__(32)
#endif
    wgmma_kernel(const WgmmaArgs a) {
#if AQ_WGMMA
    using S = WgmmaShape<TOKENS, KS>;
    extern __shared__ __align__(1024) uint8_t shared[];
    uint64_t *full = (uint64_t *)shared, *empty = full + 16, *got = empty + 16, *back = got + 16;
    Ring<TOKENS, KS> ring{full, empty, shared + kWgmmaHead, a.stages};
    float *pushed = (float *)(shared + kWgmmaHead + a.stages * S::kStage);
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    if (threadIdx.x == 32 * kConsumerWarps) {
        const int others = a.split * KS - 1;
        for (int s = 0; s < a.stages; s++) bar_init(full + s, 2), bar_init(empty + s, kBack * kConsumerWarps);
        for (int w = 0; w < kConsumerWarps; w++) bar_init(got + w, others ? others : 1), bar_init(back + w, others ? others : 1);
        bar_fence();
    }
    __syncthreads();
    if (a.split > 1) asm volatile("barrier.cluster.arrive.release;" ::: "memory");
    if (warp >= kConsumerWarps) {
        if (a.pdl) let_next_kernel_start();
        if (warp == kConsumerWarps) {
            if (lane == 0) bring_weights<TOKENS, KS>(a, ring);
            __syncwarp();
        } else {
            if (a.pdl) wait_for_previous_kernel();  // weights never depend on the kernel before; activations and the output do
            bring_activations<TOKENS, KS>(a, ring, warp - kConsumerWarps - 1, lane);
        }
        if (a.split > 1) asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
    } else {
        consume<TOKENS, KS, HALF>(a, ring, got, back, pushed);
    }
    if (a.split > 1)  // no block leaves while another may still arrive at its barriers
        asm volatile("barrier.cluster.arrive.relaxed;\n barrier.cluster.wait;" ::: "memory");
#endif
}

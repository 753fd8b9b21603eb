// W4A16 for few tokens (M <= 16): a stream of weights, with everything else arranged so that it never stops.
//
// One block an SM, with an equal share of the rows (or, in a cluster, of the columns). A block's work is the line (rows, columns) of
// steps, R row tiles x 128 columns each; its warps take equal stretches of it. Each warp has its own ring in shared memory, filled by
// bulk copies that it orders itself, so no warp waits for another before the end: it decodes a step into mma's A fragments, and
// orders later ones into places whose bytes it has used. The activations are mma's B fragments, by plain loads through the L1, a
// step ahead. A warp leaves partial sums in shared memory where its stretch leaves a row of steps; they are added in a fixed order at
// the end, across a cluster too, so results repeat to the bit. The tensor scale is applied once, there, in fp32.
#pragma once
#include "gemm/device.cuh"

struct SkinnyArgs {
    const uint8_t *packed;
    const uint16_t *x;
    void *out;
    int64_t ldx, n;
    float scale;
    int m, k, tiles, chunks, split, out_type, pdl;
    uint32_t zero;  // 0, which the compiler cannot know
    // quotients made by the host: an integer division costs a block a tenth of a microsecond, and the whole launch lasts ten
    int log_split, log_warps, rows_each, rows_more, chunks_each, chunks_more;
    uint32_t by_chunks[2], by_m;  // ceil(2^32 / d) for d = chunks_each, chunks_each + 1 and m
};

// Shared memory of a block: rings, their barriers, partial sums [row of steps + warp][token][kPitch], and in a cluster what its
// blocks send each other [rank][item][32].
template <int NT, int R>
struct SkinnyShape {
    static constexpr int kStages = R == 2 ? 3 : 1, kStep = R * kChunk, kRing = kStages * (kStep + 8);
    static constexpr int kStepRows = R * kRows, kPitch = kStepRows + 4, kSlot = 8 * NT * kPitch;
    static constexpr int kChains = NT * R == 2 ? 2 : 1;  // independent sums, against the latency of mma
    static int64_t bytes(int m, int64_t rows, int warps, int split) {
        return (int64_t)warps * kRing + (rows + warps) * kSlot * 4 + (split > 1 ? (rows * m * (R / 2) + split) * 128 : 0);
    }
};

// x / d by the host's ceil(2^32 / d): exact for x * d < 2^32
__device__ __forceinline__ int over(int x, uint32_t reciprocal) { return reciprocal ? (int)__umulhi((uint32_t)x, reciprocal) : x; }

__device__ __forceinline__ uint4 shared16(uint32_t at) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at));
    return v;
}
__device__ __forceinline__ uint32_t shared4(uint32_t at) {
    uint32_t v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(at));
    return v;
}
// Activations may be written by the kernel before: an ordinary load, which stays behind wait_for_previous_kernel.
__device__ __forceinline__ uint4 load_x16(const void *p) {
    uint4 v;
    asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
    return v;
}

// NT: 8 tokens or 16; R: row tiles of a step; WHOLE: K is a multiple of a chunk.
template <int NT, bool HALF, int R, bool WHOLE>
__global__ void __launch_bounds__(512, 1) skinny_kernel(const SkinnyArgs a) {
    using Shape = SkinnyShape<NT, R>;
    constexpr int kStages = Shape::kStages, kStep = Shape::kStep, kPitch = Shape::kPitch, kSlot = Shape::kSlot, kChains = Shape::kChains;
    extern __shared__ __align__(128) uint8_t smem[];
    const int lane = threadIdx.x & 31, warp = __shfl_sync(~0u, (int)threadIdx.x >> 5, 0), warps = 1 << a.log_warps;
    const uint32_t ring = smem_at(smem) + warp * (kStages * kStep), bars = smem_at(smem) + warps * (kStages * kStep) + warp * (kStages * 8);
    float *slots = (float *)(smem + warps * Shape::kRing);
    warp_bars_init(bars, kStages);
    cluster_begin(a.split);

    const int rank = a.split > 1 ? (int)cluster_rank() : 0, cluster = blockIdx.x >> a.log_split;
    const int row0 = cluster * a.rows_each + min(cluster, a.rows_more), rows = a.rows_each + (cluster < a.rows_more);  // rows of steps
    const int chunk0 = rank * a.chunks_each + min(rank, a.chunks_more), wide = rank < a.chunks_more, chunks = a.chunks_each + wide;
    const int line = rows * chunks;
    const int begin = line * warp >> a.log_warps, end = line * (warp + 1) >> a.log_warps;
    int row = chunks ? over(begin, wide ? a.by_chunks[1] : a.by_chunks[0]) : 0, chunk = begin - row * chunks;  // of the step computed next

    // Of a last row with fewer tiles only those are fetched; what is computed from the others' old bytes is never stored.
    int fetch_row = row, fetch_left = 0, to_fetch = end - begin, stride = 0, bytes = kStep;
    const uint8_t *from = nullptr;
    const auto seek = [&](int at_chunk) {
        const int tile = R * (row0 + fetch_row);
        from = a.packed + chunk_at(tile, chunk0 + at_chunk, a.tiles, a.chunks);
        stride = tiles_in_block(tile / kBlockTiles, a.tiles) * kChunk;
        if (R > 2) bytes = min(R, a.tiles - tile) * kChunk;
        fetch_left = chunks - at_chunk;
    };
    const auto fetch = [&](uint32_t slot, uint32_t bar) {
        warp_copy(slot, from, bytes, bar);
        from += stride;
        to_fetch--;
        if (--fetch_left == 0 && to_fetch) fetch_row++, seek(0);
    };
    if (to_fetch) seek(chunk);
#pragma unroll 1
    for (int s = 0; s < max(1, kStages - 1); s++) {
        if (to_fetch) fetch(ring + s * kStep, bars + s * 8);
        warp_copies_end();
    }
    if (a.pdl) {  // weights never depend on the kernel before; activations and the output do
        let_next_kernel_start();
        wait_for_previous_kernel();
    }

    const int g = lane >> 2, l = lane & 3;
    const int last = a.chunks - 1 - chunk0;  // unless WHOLE, the chunk that K fills in part
    const uint16_t *x_row[NT], *x[NT];  // a lane whose token does not exist reads the last one; its column is never stored
#pragma unroll
    for (int t = 0; t < NT; t++) {
        x_row[t] = a.x + min(8 * t + g, a.m - 1) * a.ldx + chunk0 * kCols + l * 16;
        x[t] = x_row[t] + chunk * kCols;
    }
    uint4 xs[2][2][NT];  // [64 columns][16 bytes of 32][8 tokens]
    const auto load_x = [&](int q, int of_chunk) {
        if (WHOLE || of_chunk != last) {
#pragma unroll
            for (int t = 0; t < NT; t++)
#pragma unroll
                for (int i = 0; i < 2; i++) xs[q][i][t] = load_x16(x[t] + q * 64 + i * 8);
        } else {  // beyond K: zeros, since padded codes are zeros and 0 * NaN is not
            const bool there = (chunk0 + of_chunk) * kCols + q * 64 + l * 16 < a.k;
#pragma unroll
            for (int t = 0; t < NT; t++)
#pragma unroll
                for (int i = 0; i < 2; i++) xs[q][i][t] = there ? load_x16(x[t] + q * 64 + i * 8) : make_uint4(0, 0, 0, 0);
        }
    };
    if (begin < end) load_x(0, chunk), load_x(1, chunk);

    float acc[R][kChains][NT][4] = {};
    const auto flush = [&]() {
        float *to = slots + (row + warp) * kSlot + 2 * l * kPitch + g;
#pragma unroll
        for (int r = 0; r < R; r++)
#pragma unroll
            for (int t = 0; t < NT; t++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    float sum = acc[r][0][t][i];
                    if (kChains == 2) sum += acc[r][kChains - 1][t][i];
                    to[(8 * t + (i & 1)) * kPitch + 16 * r + 8 * (i >> 1)] = sum;
#pragma unroll
                    for (int c = 0; c < kChains; c++) acc[r][c][t][i] = 0.f;
                }
    };
    uint32_t slot = ring, bar = bars, parity = 0;
#pragma unroll 1
    for (int left = end - begin; left; left--) {
        warp_wait(bar, parity, kStages);
        if (kStages > 1) {  // the place of the step before, whose bytes have all been used
            const bool first = slot == ring;
            __syncwarp();
            if (to_fetch) fetch(first ? ring + (kStages - 1) * kStep : slot - kStep, first ? bars + (kStages - 1) * 8 : bar - 8);
            warp_copies_end();
        }
        uint32_t scales[R];
#pragma unroll
        for (int r = 0; r < R; r++) scales[r] = shared4(slot + lane * 4 + r * kChunk + kCodes);
        const int next = chunk + 1 == chunks ? 0 : chunk + 1;
#pragma unroll
        for (int t = 0; t < NT; t++) x[t] = next ? x[t] + kCols : x_row[t];
#pragma unroll
        for (int q = 0; q < 2; q++) {
            uint4 codes[R];
#pragma unroll
            for (int r = 0; r < R; r++) codes[r] = shared16(slot + lane * 16 + r * kChunk + q * 512);
            if (kStages == 1 && q == 1) {  // the address waits for the last bytes read, so that no copy overtakes them
                uint32_t seen = codes[0].x;
#pragma unroll
                for (int r = 1; r < R; r++) seen |= codes[r].x;
                __syncwarp();
                if (to_fetch) fetch(slot + (seen & a.zero), bar);
                warp_copies_end();
            }
            uint32_t s[R][2];
#pragma unroll
            for (int r = 0; r < R; r++) s[r][0] = scale_pair(scales[r], q * 2), s[r][1] = scale_pair(scales[r], q * 2 + 1);
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int r = 0; r < R; r++) {
                    uint32_t f[4];
                    decode8(i == 0 ? codes[r].x : i == 1 ? codes[r].y : i == 2 ? codes[r].z : codes[r].w, s[r][0], s[r][1], f);
                    if (HALF)
#pragma unroll
                        for (int j = 0; j < 4; j++) f[j] = bf16x2_to_f16x2(f[j]);
#pragma unroll
                    for (int t = 0; t < NT; t++) {
                        const uint4 &v = xs[q][i >> 1][t];
                        mma16816<HALF>(acc[r][i % kChains][t], f, i & 1 ? v.z : v.x, i & 1 ? v.w : v.y);
                    }
                }
        }
        if (left > 1) load_x(0, next), load_x(1, next);
        if (kStages == 1 || bar == bars + (kStages - 1) * 8) slot = ring, bar = bars, parity ^= 1;
        else slot += kStep, bar += 8;
        chunk = next;
        if (!next) {
            flush();
            row++;
        }
    }
    if (begin < end && chunk != 0) flush();
    __syncthreads();

    // A warp adds what the warps hold of 32 rows of a token, in order, and stores it or sends it to the block that adds the ranks'.
    constexpr int kParts = R / 2;
    const int items = rows * a.m * kParts, each = (items + a.split - 1) >> a.log_split;
    float *sent = slots + (a.rows_each + (a.rows_more > 0) + warps) * kSlot;
    const auto store = [&](int item, float sum) {
        const int u = item / kParts, t = over(u, a.by_m), token = u - t * a.m;
        const int64_t n = (int64_t)(row0 + t) * Shape::kStepRows + item % kParts * 32 + lane;
        if (n < a.n) store_typed(a.out, token * a.n + n, sum * a.scale, a.out_type);
    };
    cluster_begun(a.split);
    for (int e = warp; e < items; e += warps) {
        const int u = e / kParts, t = over(u, a.by_m), token = u - t * a.m;
        const float *from_slot = slots + t * kSlot + token * kPitch + e % kParts * 32 + lane;
        float sum = 0.f;
#pragma unroll 8
        for (int w = 0; w < warps; w++)
            if (max(line * w >> a.log_warps, t * chunks) < min(line * (w + 1) >> a.log_warps, t * chunks + chunks)) sum += from_slot[w * kSlot];
        if (a.split == 1) {
            store(e, sum);
        } else {
            int owner = 0, mine = e;
            while (mine >= each) mine -= each, owner++;
            store_peer(sent + (rank * each + mine) * 32 + lane, owner, sum);
        }
    }
    if (a.split == 1) return;
    cluster_sync(a.split);
    for (int e = warp; e < each && rank * each + e < items; e += warps) {
        float sum = 0.f;
        for (int peer = 0; peer < a.split; peer++) sum += sent[(peer * each + e) * 32 + lane];
        store(rank * each + e, sum);
    }
}

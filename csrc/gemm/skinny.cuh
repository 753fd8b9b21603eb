// W4A16 for few tokens (M <= 16): a stream of weights, with everything else arranged so that it never stops.
//
// One block an SM. The weights go from memory to registers, 2304 contiguous bytes a warp and step (32 rows x 128 columns), and the
// activations beside them as mma fragments, from the L1 after a block's first touch: nothing waits for all of them. A block's work
// is the line (rows, columns); its warps take equal stretches of it and leave partial sums in shared memory where a stretch leaves
// a row; blocks of a cluster share K the same way. The sums are then added in a fixed order, so results repeat to the bit. No
// barrier inside the loop; the tensor scale is applied once, at the end, in fp32.
#pragma once
#include "gemm/device.cuh"

struct SkinnyArgs {
    const uint8_t *packed;
    const uint16_t *x;
    void *out;
    int64_t ldx, n;
    float scale;
    int m, k, tiles, chunks, split, out_type, pdl;
    // quotients made by the host: an integer division costs a block a tenth of a microsecond, and the whole launch lasts ten
    int log_split, log_warps, rows_each, rows_more, chunks_each, chunks_more;
    uint32_t by_chunks[2], by_m;  // ceil(2^32 / d) for d = chunks_each, chunks_each + 1 and m
};

constexpr int kStep = 2 * kChunk, kStepRows = 2 * kRows;
constexpr int kDepth = 1;  // steps on their way for a warp; 2 and 3 were measured and are no faster: other warps cover the wait
constexpr int kSlotPitch = kStepRows + 4;  // floats between tokens of a partial sum, so that a quad's stores do not collide

// x / d by the host's ceil(2^32 / d): exact for x * d < 2^32
__device__ __forceinline__ int over(int x, uint32_t reciprocal) { return reciprocal ? (int)__umulhi((uint32_t)x, reciprocal) : x; }

template <int NT>
struct Step {
    uint4 codes[4];      // [row tile][64 columns]
    uint32_t scales[2];  // [row tile]
    uint4 x[4][NT];      // [32 columns][8 tokens]: mma's B fragments, four columns of two mma each
};
template <int NT, bool HALF>
__global__ void __launch_bounds__(512, 1) skinny_kernel(const SkinnyArgs a) {
    constexpr int kChains = NT == 1 ? 2 : 1;  // independent sums, against the latency of mma
    extern __shared__ __align__(128) float slots[];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int rank = a.split > 1 ? (int)cluster_rank() : 0;
    const int cluster = blockIdx.x >> a.log_split;
    const int row0 = cluster * a.rows_each + min(cluster, a.rows_more), rows = a.rows_each + (cluster < a.rows_more);
    const int chunk0 = rank * a.chunks_each + min(rank, a.chunks_more), wide = rank < a.chunks_more, chunks = a.chunks_each + wide;
    const int line = rows * chunks;
    const int begin = line * warp >> a.log_warps, end = line * (warp + 1) >> a.log_warps;

    int row = chunks ? over(begin, wide ? a.by_chunks[1] : a.by_chunks[0]) : 0, chunk = begin - row * chunks;  // of the step computed next
    int fetch_row = row, fetch_chunk = chunk, fetched = begin;
    const uint8_t *from = nullptr;
    int stride = 0;
    const auto seek = [&]() {
        const int tile = 2 * (row0 + fetch_row);
        from = a.packed + chunk_at(tile, chunk0 + fetch_chunk, a.tiles, a.chunks);
        stride = tiles_in_block(tile / kBlockTiles, a.tiles) * kChunk;
    };
    const int g = lane >> 2, l = lane & 3;
    const uint16_t *x[NT];  // a lane whose token does not exist reads the last one; its column is never stored
#pragma unroll
    for (int t = 0; t < NT; t++) x[t] = a.x + min(8 * t + g, a.m - 1) * a.ldx + l * 16;
    const auto fetch_weights = [&](Step<NT> &s) {
#pragma unroll
        for (int i = 0; i < 4; i++) s.codes[i] = stream16(from + lane * 16 + (i >> 1) * kChunk + (i & 1) * 512);
#pragma unroll
        for (int i = 0; i < 2; i++) s.scales[i] = stream4(from + lane * 4 + i * kChunk + kCodes);
    };
    const auto fetch_x = [&](Step<NT> &s, int chunk) {  // beyond K: zeros, since padded codes are zeros and 0 * NaN is not
        const int column = (chunk0 + chunk) * kCols;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int at = column + (i >> 1) * 64 + (i & 1) * 8;
#pragma unroll
            for (int t = 0; t < NT; t++) s.x[i][t] = at + l * 16 < a.k ? __ldg((const uint4 *)(x[t] + at)) : make_uint4(0, 0, 0, 0);
        }
    };
    const auto advance = [&]() {
        fetched++;
        from += stride;
        if (++fetch_chunk == chunks) {
            fetch_chunk = 0, fetch_row++;
            seek();
        }
    };
    Step<NT> ring[kDepth];
    if (begin < end) seek();
    {  // weights never depend on the kernel before; activations and the output do
        int chunk_of[kDepth];
#pragma unroll
        for (int d = 0; d < kDepth; d++) {
            chunk_of[d] = fetch_chunk;
            if (fetched < end) {
                fetch_weights(ring[d]);
                advance();
            }
        }
        if (a.pdl) {
            let_next_kernel_start();
            wait_for_previous_kernel();
        }
#pragma unroll
        for (int d = 0; d < kDepth; d++)
            if (begin + d < end) fetch_x(ring[d], chunk_of[d]);
    }

    float acc[2][kChains][NT][4] = {};
    const auto flush = [&]() {
        float *slot = slots + (row + warp) * (8 * NT * kSlotPitch);
#pragma unroll
        for (int r = 0; r < 2; r++)
#pragma unroll
            for (int t = 0; t < NT; t++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    float sum = acc[r][0][t][i];
                    if (kChains == 2) sum += acc[r][kChains - 1][t][i];
                    slot[(8 * t + 2 * l + (i & 1)) * kSlotPitch + 16 * r + g + 8 * (i >> 1)] = sum;
#pragma unroll
                    for (int c = 0; c < kChains; c++) acc[r][c][t][i] = 0.f;
                }
    };
    const auto compute = [&](const Step<NT> &s) {
#pragma unroll
        for (int q = 0; q < 2; q++) {
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const uint32_t s0 = scale_pair(s.scales[r], q * 2), s1 = scale_pair(s.scales[r], q * 2 + 1);
                const uint4 &c = s.codes[2 * r + q];
                const uint32_t w[4] = {c.x, c.y, c.z, c.w};
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    uint32_t f[4];
                    decode8(w[i], s0, s1, f);
                    if (HALF)
#pragma unroll
                        for (int j = 0; j < 4; j++) f[j] = bf16x2_to_f16x2(f[j]);
#pragma unroll
                    for (int t = 0; t < NT; t++) {
                        const uint4 &x = s.x[2 * q + (i >> 1)][t];
                        mma16816<HALF>(acc[r][i % kChains][t], f, i & 1 ? x.z : x.x, i & 1 ? x.w : x.y);
                    }
                }
            }
        }
        if (++chunk == chunks) {
            flush();
            chunk = 0, row++;
        }
    };
    for (int at = begin; at < end; at += kDepth) {
#pragma unroll
        for (int d = 0; d < kDepth; d++)
            if (at + d < end) {
                compute(ring[d]);
                if (fetched < end) {
                    fetch_weights(ring[d]);
                    fetch_x(ring[d], fetch_chunk);
                    advance();
                }
            }
    }
    if (begin < end && chunk != 0) flush();
    cluster_sync(a.split);

    // Every output is the sum, over ranks and then warps in order, of the partial sums that hold it; a warp takes 32 rows of a token.
    const int items = rows * a.m, warps = 1 << a.log_warps;
    for (int e = (items * rank >> a.log_split) + warp; e < items * (rank + 1) >> a.log_split; e += warps) {
        const int t = over(e, a.by_m), token = e - t * a.m;
        float sum = 0.f;
        for (int peer = 0; peer < a.split; peer++) {
            const int p = a.chunks_each + (peer < a.chunks_more), len = rows * p;
            const float *slot = slots + t * (8 * NT * kSlotPitch) + token * kSlotPitch + lane;
#pragma unroll 4
            for (int w = 0; w < warps; w++, slot += 8 * NT * kSlotPitch) {
                const int from_w = max(len * w >> a.log_warps, t * p), to_w = min(len * (w + 1) >> a.log_warps, t * p + p);
                if (from_w < to_w) sum += load_peer(slot, peer, a.split);
            }
        }
        const int64_t n = (int64_t)(row0 + t) * kStepRows + lane;
        if (n < a.n) store_typed(a.out, token * a.n + n, sum * a.scale, a.out_type);
    }
    if (a.split > 1) cluster_leave();
}

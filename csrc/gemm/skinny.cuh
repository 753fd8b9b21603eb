// W4A16 for few tokens (M <= 16): a stream of weights, with everything else arranged so that it never stops.
//
// One block an SM. Each warp has its own ring of chunk pairs (16 rows x 256 columns, 2304 bytes) filled by bulk copies, and no
// block-wide barrier inside the loop. A block's work is the line (row tile, column pair); its warps take equal stretches of it
// and leave partial sums in shared memory when a stretch leaves a tile; blocks of a cluster share K the same way. The sums are
// then added in a fixed order, so results repeat to the bit. The tensor scale is applied once, at the end, in fp32.
#pragma once
#include "gemm/device.cuh"

struct SkinnyArgs {
    const uint8_t *packed;
    const uint16_t *x;
    void *out;
    int64_t ldx, n;
    float scale;
    int m, k, tiles, pairs, split, stages, slots_at, x_at, pitch, out_type, pdl;
};

constexpr int kPair = 2 * kChunk;
constexpr int kSlotPitch = 20;  // floats between columns of a partial tile: 16 rows, padded so that a quad's stores do not collide

__device__ __forceinline__ int share(int total, int part, int parts) { return (int)((int64_t)total * part / parts); }

template <int NT, bool HALF>
__global__ void __launch_bounds__(512, 1) skinny_kernel(const SkinnyArgs a) {
    extern __shared__ __align__(128) uint8_t smem[];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    const int rank = a.split > 1 ? (int)cluster_rank() : 0;
    const int cluster = blockIdx.x / a.split, clusters = gridDim.x / a.split;
    const int tile0 = share(a.tiles, cluster, clusters), tiles = share(a.tiles, cluster + 1, clusters) - tile0;
    const int pair0 = share(a.pairs, rank, a.split), pairs = share(a.pairs, rank + 1, a.split) - pair0;
    const int line = tiles * pairs;
    const int begin = share(line, warp, warps), end = share(line, warp + 1, warps);

    uint64_t *full = (uint64_t *)smem + warp * a.stages;
    uint8_t *ring = smem + 1024 + (size_t)warp * a.stages * kPair;
    uint8_t *xs = smem + a.x_at;
    float *slots = (float *)(smem + a.slots_at);

    if (lane < a.stages) bar_init(full + lane, kProducers);
    bar_fence();
    __syncwarp();

    // where the next copy comes from: advances along the line
    int tile = pairs ? begin / pairs : 0, pair = begin - tile * pairs;  // of the pair computed next
    int fetch_tile = tile, fetch_pair = pair, fetched = begin;
    const int64_t row_bytes = (int64_t)a.pairs * kPair;
    const uint8_t *base = a.packed + (int64_t)tile0 * row_bytes + (int64_t)pair0 * kPair;
    const auto fetch = [&](int slot) {
        if (fetched < end) {
            const uint8_t *src = base + fetch_tile * row_bytes + (int64_t)fetch_pair * kPair;
            expect_bytes(full + slot, kPair, lane);
            copy_lane(ring + slot * kPair, src, kPair, full + slot, lane == 0, lane);
            copies_issued(full + slot);
            if (++fetch_pair == pairs) fetch_pair = 0, fetch_tile++;
            fetched++;
        }
    };
    for (int s = 0; s < a.stages; s++) fetch(s);

    if (a.pdl) {
        let_next_kernel_start();
        wait_for_previous_kernel();
    }
    {  // this block's columns of the activations; beyond K: zeros, since the padded codes are zeros and 0 * NaN is not
        const int vectors = pairs * 32, from = pair0 * kColsPadded;
        for (int i = threadIdx.x; i < a.m * vectors; i += blockDim.x) {
            const int token = i / vectors, v = i - token * vectors;
            uint4 val = make_uint4(0, 0, 0, 0);
            if (from + v * 8 < a.k) val = *(const uint4 *)(a.x + token * a.ldx + from + v * 8);
            *(uint4 *)(xs + (size_t)token * a.pitch + v * 16) = val;
        }
    }
    __syncthreads();

    const int g = lane >> 2, l = lane & 3;
    const uint8_t *xrow[NT];  // a lane whose token does not exist reads the last one; its column is never stored
#pragma unroll
    for (int t = 0; t < NT; t++) xrow[t] = xs + (size_t)min(8 * t + g, a.m - 1) * a.pitch + l * 32;

    float acc[2][NT][4];
#pragma unroll
    for (int p = 0; p < 2; p++)
#pragma unroll
        for (int t = 0; t < NT; t++)
#pragma unroll
            for (int r = 0; r < 4; r++) acc[p][t][r] = 0.f;
    const auto flush = [&]() {
        float *slot = slots + (size_t)(tile + warp) * (8 * NT * kSlotPitch);
#pragma unroll
        for (int t = 0; t < NT; t++)
#pragma unroll
            for (int r = 0; r < 4; r++) {
                slot[(8 * t + 2 * l + (r & 1)) * kSlotPitch + g + 8 * (r >> 1)] = acc[0][t][r] + acc[1][t][r];
                acc[0][t][r] = acc[1][t][r] = 0.f;
            }
    };

    int slot = 0;
    uint32_t parity = 0;
    for (int at = begin; at < end; at++) {
        bar_wait(full + slot, parity);
        const uint8_t *chunk = ring + slot * kPair;
        uint4 words[4];
        uint32_t scales[2];
#pragma unroll
        for (int c = 0; c < 4; c++) words[c] = *(const uint4 *)(chunk + (c >> 1) * kChunk + word_at(c & 1, lane, 0));
#pragma unroll
        for (int c = 0; c < 2; c++) scales[c] = *(const uint32_t *)(chunk + c * kChunk + scale_at(0, lane));
        __syncwarp();
        fetch(slot);
        if (++slot == a.stages) slot = 0, parity ^= 1;

        const int column = pair * (kColsPadded * 2);
#pragma unroll
        for (int c = 0; c < 4; c++) {
            const uint32_t s0 = scale_pair(scales[c >> 1], (c & 1) * 2), s1 = scale_pair(scales[c >> 1], (c & 1) * 2 + 1);
            const uint32_t w[4] = {words[c].x, words[c].y, words[c].z, words[c].w};
#pragma unroll
            for (int h = 0; h < 2; h++) {
                uint4 b[NT];
#pragma unroll
                for (int t = 0; t < NT; t++) b[t] = *(const uint4 *)(xrow[t] + column + c * 128 + h * 16);
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    uint32_t f[4];
                    decode8(w[2 * h + i], s0, s1, f);
                    if (HALF)
#pragma unroll
                        for (int r = 0; r < 4; r++) f[r] = bf16x2_to_f16x2(f[r]);
#pragma unroll
                    for (int t = 0; t < NT; t++) mma16816<HALF>(acc[i][t], f, i ? b[t].z : b[t].x, i ? b[t].w : b[t].y);
                }
            }
        }
        if (++pair == pairs) {
            flush();
            pair = 0, tile++;
        }
    }
    if (begin < end && pair != 0) flush();
    cluster_sync(a.split);

    // Every output is the sum, over ranks and then warps in order, of the partial tiles that hold it.
    const int rows = tiles * kRows, outputs = rows * a.m;
    const int first = share(outputs, rank, a.split), last = share(outputs, rank + 1, a.split);
    for (int e = first + threadIdx.x; e < last; e += blockDim.x) {
        const int token = e / rows, r = e - token * rows, t = r / kRows;
        float sum = 0.f;
        for (int peer = 0; peer < a.split; peer++) {
            const int p = share(a.pairs, peer + 1, a.split) - share(a.pairs, peer, a.split), len = tiles * p;
            if (!p) continue;
            const int w0 = (int)((((int64_t)t * p + 1) * warps - 1) / len), w1 = (int)((((int64_t)t * p + p) * warps - 1) / len);
            for (int w = w0; w <= w1; w++)
                sum += load_peer(slots + (size_t)(t + w) * (8 * NT * kSlotPitch) + token * kSlotPitch + (r & 15), peer, a.split);
        }
        const int64_t row = (int64_t)tile0 * kRows + r;
        if (row < a.n) store_typed(a.out, token * a.n + row, sum * a.scale, a.out_type);
    }
    if (a.split > 1) cluster_sync(a.split);  // no block leaves while another reads its sums
}

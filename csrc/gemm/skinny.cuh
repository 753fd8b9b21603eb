// W4A16 for few tokens (M <= 16): a stream of weights, with everything else arranged so that it never stops.
//
// One block an SM. The weights go from memory to registers, 2304 contiguous bytes a warp and step (32 rows x 128 columns), two steps
// ahead; the activations lie in shared memory. A block's work is the line (rows, columns); its warps take equal stretches of it and
// leave partial sums in shared memory where a stretch leaves a row; blocks of a cluster share K the same way. The sums are then added
// in a fixed order, so results repeat to the bit. No barrier inside the loop; the tensor scale is applied once, at the end, in fp32.
#pragma once
#include "gemm/device.cuh"

struct SkinnyArgs {
    const uint8_t *packed;
    const uint16_t *x;
    void *out;
    int64_t ldx, n;
    float scale;
    int m, k, tiles, chunks, split, slots_at, pitch, out_type, pdl;
};

constexpr int kStep = 2 * kChunk, kStepRows = 2 * kRows;
constexpr int kSlotPitch = kStepRows + 4;  // floats between tokens of a partial sum, so that a quad's stores do not collide

__device__ __forceinline__ int share(int total, int part, int parts) { return (int)((unsigned)(total * part) / (unsigned)parts); }

struct Step {
    uint4 codes[4];      // [row tile][64 columns]
    uint32_t scales[2];  // [row tile]
};
__device__ __forceinline__ void load_step(Step &s, const uint8_t *from) {  // `from` has the lane's 16 bytes added
#pragma unroll
    for (int i = 0; i < 4; i++) s.codes[i] = stream16(from + (i >> 1) * kChunk + (i & 1) * 512);
}
__device__ __forceinline__ void load_scales(Step &s, const uint8_t *from) {  // and this one its 4 bytes
#pragma unroll
    for (int i = 0; i < 2; i++) s.scales[i] = stream4(from + i * kChunk + kCodes);
}

template <int NT, bool HALF>
__global__ void __launch_bounds__(512, 1) skinny_kernel(const SkinnyArgs a) {
    constexpr int kChains = NT == 1 ? 2 : 1;  // independent sums, against the latency of mma
    extern __shared__ __align__(128) uint8_t xs[];
    float *slots = (float *)(xs + a.slots_at);
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int rank = a.split > 1 ? (int)cluster_rank() : 0;
    const int cluster = blockIdx.x / a.split, clusters = gridDim.x / a.split;
    const int all_rows = a.tiles / 2;  // in steps of 32
    const int row0 = share(all_rows, cluster, clusters), rows = share(all_rows, cluster + 1, clusters) - row0;
    const int chunk0 = share(a.chunks, rank, a.split), chunks = share(a.chunks, rank + 1, a.split) - chunk0;
    const int line = rows * chunks, warps = min((int)blockDim.x >> 5, line);
    const int begin = warp < warps ? share(line, warp, warps) : line, end = warp < warps ? share(line, warp + 1, warps) : line;

    int row = chunks ? begin / chunks : 0, chunk = begin - row * chunks;  // of the step computed next
    int fetch_row = row, fetch_chunk = chunk, fetched = begin;
    const uint8_t *from = nullptr;
    int stride = 0;
    const auto seek = [&]() {
        const int tile = 2 * (row0 + fetch_row);
        from = a.packed + chunk_at(tile, chunk0 + fetch_chunk, a.tiles, a.chunks);
        stride = tiles_in_block(tile / kBlockTiles, a.tiles) * kChunk;
    };
    const auto fetch = [&](Step &s) {
        if (fetched < end) {
            load_step(s, from + lane * 16);
            load_scales(s, from + lane * 4);
            fetched++;
            from += stride;
            if (++fetch_chunk == chunks) {
                fetch_chunk = 0, fetch_row++;
                seek();
            }
        }
    };
    Step ring[2];
    if (begin < end) seek();
    if (a.pdl) {  // weights never depend on the kernel before; activations and the output do
        fetch(ring[0]);
        fetch(ring[1]);
        let_next_kernel_start();
        wait_for_previous_kernel();
    }
    {  // this block's columns of the activations; beyond K: zeros, since the padded codes are zeros and 0 * NaN is not
        const int vectors = chunks * 16, first = chunk0 * kCols;
        for (int token = 0; token < a.m; token++)
            for (int v = threadIdx.x; v < vectors; v += blockDim.x)
                copy16(xs + token * a.pitch + v * 16, first + v * 8 < a.k ? a.x + token * a.ldx + first + v * 8 : a.x,
                       first + v * 8 < a.k);
    }
    if (!a.pdl) {
        fetch(ring[0]);
        fetch(ring[1]);
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();

    const int g = lane >> 2, l = lane & 3;
    const uint8_t *xrow[NT];  // a lane whose token does not exist reads the last one; its column is never stored
#pragma unroll
    for (int t = 0; t < NT; t++) xrow[t] = xs + min(8 * t + g, a.m - 1) * a.pitch + l * 32;

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
    const auto compute = [&](const Step &s) {
        const int column = chunk * (kCols * 2);
#pragma unroll
        for (int q = 0; q < 2; q++) {
            uint4 b[2][NT];
#pragma unroll
            for (int h = 0; h < 2; h++)
#pragma unroll
                for (int t = 0; t < NT; t++) b[h][t] = *(const uint4 *)(xrow[t] + column + q * 128 + h * 16);
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
                        const uint4 &x = b[i >> 1][t];
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
    for (int at = begin; at < end; at += 2) {
        compute(ring[0]);
        fetch(ring[0]);
        if (at + 1 < end) {
            compute(ring[1]);
            fetch(ring[1]);
        }
    }
    if (begin < end && chunk != 0) flush();
    cluster_sync(a.split);

    // Every output is the sum, over ranks and then warps in order, of the partial sums that hold it; a warp takes 32 rows of a token.
    const int items = rows * a.m, last = share(items, rank + 1, a.split);
    for (int e = share(items, rank, a.split) + warp; e < last; e += blockDim.x >> 5) {
        const int t = e / a.m, token = e - t * a.m;
        float sum = 0.f;
        for (int peer = 0; peer < a.split; peer++) {
            const int p = share(a.chunks, peer + 1, a.split) - share(a.chunks, peer, a.split), len = rows * p;
            if (!p) continue;
            const int active = min((int)blockDim.x >> 5, len);
            const int w0 = ((t * p + 1) * active - 1) / len, w1 = ((t * p + p) * active - 1) / len;
            const float *slot = slots + (t + w0) * (8 * NT * kSlotPitch) + token * kSlotPitch + lane;
            for (int w = w0; w <= w1; w++, slot += 8 * NT * kSlotPitch) sum += load_peer(slot, peer, a.split);
        }
        const int64_t n = (int64_t)(row0 + t) * kStepRows + lane;
        if (n < a.n) store_typed(a.out, token * a.n + n, sum * a.scale, a.out_type);
    }
    if (a.split > 1) cluster_sync(a.split);  // no block leaves while another reads its sums
}

// One-time repack of a checkpoint's weight (row-major codes, linear scales) into the chunks that the kernels read.
// Reads and writes 0.5625 bytes per weight; a thread writes one 32-bit word or one scale byte.
#include "common/scales.h"
#include "gemm/numerics.cuh"
#include "gemm/launch.cuh"

namespace {

struct Source {
    const uint8_t *codes, *scales;
    int64_t n, k;
    int fault;
};

__device__ uint32_t scale_byte(const Source &s, int64_t row, int64_t col) {
    if (s.fault == AQ_FAULT_SCALES) row ^= 1;
    if (s.fault == AQ_FAULT_LANE) col ^= 16;
    if (row >= s.n || col >= s.k) return 0;
    return s.scales[row * (s.k / 16) + col / 16];
}

__device__ uint32_t code_at(const Source &s, int64_t row, int64_t col) {
    if (row >= s.n || col >= s.k) return 0;
    const uint32_t byte = s.codes[row * (s.k / 2) + col / 2];
    const bool high = (col & 1) != (s.fault == AQ_FAULT_NIBBLES);
    return high ? byte >> 4 : byte & 15u;
}

__global__ void repack_kernel(Source s, uint8_t *packed, int tiles, int chunks, DeviceReport *report) {
    // a block writes one chunk: 256 words of codes, then 128 scale bytes
    const int tile = blockIdx.x / chunks, chunk = blockIdx.x - tile * chunks;
    const int64_t row0 = (int64_t)tile * kRows, col0 = (int64_t)chunk * kCols;
    uint8_t *to = packed + chunk_at(tile, chunk, tiles, chunks);
    const int t = threadIdx.x;
    {
        const int q = t >> 7, lane = (t >> 2) & 31, i = t & 3;
        uint32_t word = 0;
        for (int j = 0; j < 4; j++) {
            int jj = j;
            if (s.fault == AQ_FAULT_FRAGMENT) jj = j == 1 ? 2 : j == 2 ? 1 : j;
            const int64_t row = row0 + row_at(lane, jj);
            for (int half = 0; half < 2; half++) {
                const int64_t col = col0 + column_at(q, lane, i, jj, half);
                if (scale_byte(s, row, col) & 0x7Fu) word |= code_field(code_at(s, row, col), j, half);
            }
        }
        *(uint32_t *)(to + word_at(q, lane, i)) = word;
    }
    if (t < 128) {
        const int q = t >> 6, lane = (t >> 1) & 31, h = t & 1;
        const int64_t row = row0 + (lane >> 2) + 8 * h, col = col0 + q * 64 + (lane & 3) * 16;
        const uint32_t byte = scale_byte(s, row, col);
        if (byte >= AQ_FIRST_INVALID_SCALE) report_bad(report, (unsigned long long)(row * (s.k / 16) + col / 16), 1);
        to[scale_at(q, lane) + h] = (uint8_t)e5m3(byte & 0x7Fu);
    }
}

}  // namespace

// Bytes that are not used follow the chunks, one per column that the last chunk lacks: so the size tells K.
extern "C" size_t aq_packed_bytes(int64_t n, int64_t k) {
    const int64_t missing = (int64_t)column_chunks(k) * kCols - k;
    return (size_t)row_tiles(n) * (size_t)column_chunks(k) * kChunk + (size_t)missing;
}

extern "C" int aq_repack(const uint8_t *codes, const uint8_t *scales, uint8_t *packed, int64_t n, int64_t k, int fault, aq_report *report,
                         void *stream) {
    const Source s{codes, scales, n, k, fault};
    const int tiles = row_tiles(n), chunks = column_chunks(k);
    ReportMemory memory(report, (cudaStream_t)stream);
    int status = memory.prepare();
    if (status) return status;
    const Launch how{dim3((unsigned)tiles * (unsigned)chunks), 256, (cudaStream_t)stream};
    status = launch<repack_kernel>(how, s, packed, tiles, chunks, memory.get());
    return status ? status : memory.read();
}

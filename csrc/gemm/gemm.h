/* Launchers of the NVFP4 GEMM kernels in plain C: they take device pointers and return a status. No Python, no allocation.
 *
 * Number format: NVFP4 as ModelOpt stores it. A weight [n, k] is codes uint8 [n, k/2] (low nibble = even column), block scales
 * E4M3 [n, k/16] in row-major order and one float tensor scale; w = e2m1(code) * e4m3(scale) * tensor_scale.
 * Status: 0 success, > 0 a cudaError_t, < 0 one of AQ_GEMM_*.
 */
#ifndef ANNIE_QUANT_GEMM_H
#define ANNIE_QUANT_GEMM_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { AQ_F32 = 0, AQ_F16 = 1, AQ_BF16 = 2 };
enum { AQ_PATH_AUTO = 0, AQ_PATH_SKINNY = 1, AQ_PATH_TILED = 2, AQ_PATH_WGMMA = 3 };
enum { AQ_FP4_AUTO = 0, AQ_FP4_NATIVE = 1, AQ_FP4_EMULATED = 2 };
enum { AQ_GEMM_NO_PLAN = -1, AQ_GEMM_NO_NATIVE = -2 };

/* Planted faults for the negative controls of validate-gpu: with each, the comparison with the oracle must fail. */
enum { AQ_FAULT_NONE = 0, AQ_FAULT_NIBBLES = 1, AQ_FAULT_SCALES = 2, AQ_FAULT_FRAGMENT = 3, AQ_FAULT_LANE = 4 };

typedef struct {
    int path;     /* AQ_PATH_* */
    int width;    /* skinny: pipeline stages per warp; tiled, wgmma: tokens per tile */
    int split;    /* blocks per cluster; they share K */
    int stages;   /* skinny: row tiles per step; tiled, wgmma: pipeline stages */
    int blocks;   /* blocks launched */
    int smem;     /* dynamic shared memory per block, bytes */
    int stream_k_tiles; /* wgmma: tiles that are computed stream-K: all blocks get equal shares of them along K */
    int rows;     /* wgmma: rows per tile: 256, 192, or 128 (its block computes two parts of K in parallel) */
    int permuted; /* wgmma: 1 if a separate kernel permutes the activations first */
    int64_t workspace; /* bytes of device memory that belong to the launch until it ends; 0 for most plans */
} aq_plan;

typedef struct {
    char name[128];
    int major, minor, sms, clock_khz, smem_block, l2_bytes, driver, runtime;
    size_t memory_bytes;
} aq_device;

const char *aq_error_text(int status);
int aq_device_count(int *count);
int aq_device_info(int device, aq_device *out);
int aq_pointer_device(const void *pointer, int *device);

size_t aq_packed_bytes(int64_t n, int64_t k);
/* *bad is set to the smallest index of a scale byte that is NaN or negative, and not changed if there is none. */
int aq_repack(const uint8_t *codes, const uint8_t *scales, uint8_t *packed, int64_t n, int64_t k, unsigned long long *bad,
              int fault, void *stream);
int aq_plan_w4a16(int64_t m, int64_t n, int64_t k, int path, aq_plan *plan);
int aq_w4a16(const void *x, int64_t ldx, const uint8_t *packed, float tensor_scale, void *out, void *workspace, int64_t m, int64_t n,
             int64_t k, int x_type, int out_type, const aq_plan *plan, int pdl, void *stream);

int aq_w4a4(const uint8_t *a, const uint8_t *a_scale, const uint8_t *w, const uint8_t *w_scale, float alpha, void *out, int64_t m,
            int64_t n, int64_t k, int out_type, int mode, int fault, void *stream);
/* *native = 1 if the code for the current device has the native FP4 instruction. */
int aq_fp4_native(int *native);

int aq_pack(const void *x, int type, int64_t blocks, float tensor_scale, uint8_t *codes, uint8_t *scales, void *stream);
int aq_unpack(const uint8_t *codes, const uint8_t *scales, int64_t blocks, float tensor_scale, void *out, int type, void *stream);
int aq_fake_quant(const void *x, int type, int64_t blocks, float tensor_scale, void *out, void *stream);

#ifdef __cplusplus
}
#endif
#endif

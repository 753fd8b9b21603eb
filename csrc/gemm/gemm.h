/* Launchers of the NVFP4 GEMM kernels in plain C: they take device pointers and return a status. No Python.
 *
 * Number format: NVFP4 as ModelOpt stores it. A weight [n, k] is codes uint8 [n, k/2] (low nibble = even column), block scales
 * E4M3 [n, k/16] in row-major order and one float tensor scale; w = e2m1(code) * e4m3(scale) * tensor_scale.
 * Status: 0 success, > 0 a cudaError_t, < 0 one of AQ_GEMM_*. A CUDA error that is returned is also cleared, so that it does not
 * appear again in a later call. Errors of other calls are neither returned nor cleared.
 * All functions can be called from several threads at the same time, also on one stream.
 */
#ifndef ANNIE_QUANT_GEMM_H
#define ANNIE_QUANT_GEMM_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { AQ_F32 = 0, AQ_F16 = 1, AQ_BF16 = 2 };
enum { AQ_FP4_AUTO = 0, AQ_FP4_NATIVE = 1, AQ_FP4_EMULATED = 2 };
enum { AQ_GEMM_NO_PLAN = -1, AQ_GEMM_NO_NATIVE = -2, AQ_GEMM_BAD_PLAN = -3, AQ_GEMM_SMALL_WORKSPACE = -4, AQ_GEMM_OTHER_SHAPE = -5 };

/* Planted faults for the negative controls of validate-gpu: with each, the comparison with the oracle must fail. */
enum { AQ_FAULT_NONE = 0, AQ_FAULT_NIBBLES = 1, AQ_FAULT_SCALES = 2, AQ_FAULT_FRAGMENT = 3, AQ_FAULT_LANE = 4 };

/* What a plan depends on. */
typedef struct {
    int sms;        /* multiprocessors */
    int smem_bytes; /* dynamic shared memory that a block can have */
    int major;      /* compute capability */
    int wgmma;      /* 1 if the code for the device has wgmma and the driver can make tensor maps */
    int native_fp4; /* 1 if the code for the device has the FP4 instruction */
} aq_limits;

/* A kernel for W4A16 products. Paths have the numbers 1, 2, ... */
typedef struct {
    const char *name;
    const char *fields; /* the names of its plan's fields, separated by spaces */
    int field_count;
} aq_path;
/* Return NULL if there is no path of this number. */
const aq_path *aq_path_of(int number);

enum { AQ_PATH_AUTO = 0, AQ_MOST_FIELDS = 8 };
typedef struct {
    int path;
    int fields[AQ_MOST_FIELDS];
} aq_plan;

/* Memory of one launch. */
typedef struct {
    int smem_bytes;          /* dynamic shared memory per block */
    int64_t workspace_bytes; /* device memory that belongs to the launch until it ends; 0 for most plans */
} aq_needs;

/* Values that an operation does not accept: their number, and the smallest index; count = 0 if there are none. */
typedef struct {
    int64_t count, first;
} aq_report;

typedef struct {
    char name[128];
    int major, minor, sms, clock_khz, smem_block, l2_bytes, driver, runtime;
    size_t memory_bytes;
} aq_device;

const char *aq_error_text(int status);
int aq_device_count(int *count);
int aq_device_info(int device, aq_device *out);
int aq_pointer_device(const void *pointer, int *device);
/* The limits of the current device, read once. */
int aq_current_limits(aq_limits *out);

/* The functions with a report wait for the stream if the report is not NULL. */
/* The bytes of a repacked weight. The size differs for all K of one number of rows, so that a product with another K is refused. */
size_t aq_packed_bytes(int64_t n, int64_t k);
/* report: block scales that are NaN or negative. */
int aq_repack(const uint8_t *codes, const uint8_t *scales, uint8_t *packed, int64_t n, int64_t k, int fault, aq_report *report,
              void *stream);

int aq_plan_w4a16(int64_t m, int64_t n, int64_t k, int path, const aq_limits *limits, aq_plan *plan);
/* Return NULL and set *needs if the plan can compute this product on such a device, else what is wrong with it. */
const char *aq_plan_problem(int64_t m, int64_t n, int64_t k, const aq_limits *limits, const aq_plan *plan, aq_needs *needs);
/* workspace: NULL for memory that is allocated and freed in the order of the stream, also in a stream that is captured. */
int aq_w4a16(const void *x, int64_t ldx, const uint8_t *packed, float tensor_scale, void *out, void *workspace, int64_t workspace_bytes,
             int64_t m, int64_t n, int64_t k, int x_type, int out_type, const aq_plan *plan, int pdl, void *stream);

/* The same for a layer, with x and out of one type: plans are kept per device and shape, and programmatic dependence on the kernel before
 * is used where the device and a stream's capture allow it: the weight is read before the stream's previous kernel has ended, which
 * must not write it. out must not overlap an operand. The workspace has at least the bytes of aq_linear_workspace, or is NULL. */
int aq_linear_workspace(int64_t m, int64_t n, int64_t k, int64_t *bytes);
int aq_linear(const void *x, int64_t ldx, const uint8_t *packed, int64_t packed_bytes, float tensor_scale, void *out, void *workspace,
              int64_t workspace_bytes, int64_t m, int64_t n, int64_t k, int type, void *stream);

/* The products of a mixture's experts in one launch (grouped.cu): pair p, of a token p / top_k and the expert that the router chose for it,
 * reads row p / top_k of x [pairs / top_k, k] and writes row p of out [pairs, n]. */
typedef struct {
    int64_t pairs, experts, top_k, n, k;
} aq_grouped_shape;

typedef struct {
    int tile_tokens;  /* 8, 16 or 32: the few-token kernel (grouped_skinny.cuh); 64 or 128: tiles of 256 rows by mma.sync */
    int cluster_size; /* blocks that share K; 1 for up to 32 tokens */
    int stages;       /* pipeline stages: 1 per warp for up to 32 tokens; else of a block */
    int step_tiles;   /* row tiles per step: 2, or 4 for 16 tokens; 16 for tiles of 256 rows */
} aq_grouped_plan;

/* tile_tokens: as the alignment has them; 0 for the best. */
int aq_plan_grouped(const aq_grouped_shape *shape, int tile_tokens, const aq_limits *limits, aq_grouped_plan *plan);
const char *aq_grouped_problem(const aq_grouped_shape *shape, const aq_limits *limits, const aq_grouped_plan *plan, aq_needs *needs);
/* The most tiles of tokens that the pairs can need. */
int64_t aq_grouped_tiles(const aq_grouped_shape *shape, int tile_tokens);
/* packed: experts repacked weights one after the other.  scales: float [experts] on the device.  sorted_pairs [tiles * plan->tile_tokens],
 * tile_experts [tiles], padded [1]: on the device, in the form of vLLM's moe_align_block_size for blocks of plan->tile_tokens.
 * Rows of out whose expert is not in 0 .. experts - 1 are not written.  pdl: -1 for where the device and a stream's capture allow it. */
int aq_grouped(const void *x, int64_t ldx, const uint8_t *packed, int64_t packed_bytes, const float *scales, const int32_t *sorted_pairs,
               const int32_t *tile_experts, const int32_t *padded, int64_t tiles, void *out, const aq_grouped_shape *shape, int type,
               const aq_grouped_plan *plan, int pdl, void *stream);

int aq_w4a4(const uint8_t *a, const uint8_t *a_scale, const uint8_t *w, const uint8_t *w_scale, float alpha, void *out, int64_t m,
            int64_t n, int64_t k, int out_type, int mode, int fault, void *stream);

int aq_fake_quant(const void *x, int type, int64_t blocks, float tensor_scale, void *out, void *stream);

#ifdef __cplusplus
}
#endif
#endif

/* ggml's K-quants and their fallback types: blocks, encoders, decoders. Source of the rules: ggml-quants.c of llama.cpp.
 *
 * The bytes equal llama.cpp's only with the same sums in the same order and without fused multiply-adds. So every file here is
 * compiled with -ffp-contract=off, and the SIMD variants use one lane per sub-block: each lane adds in order.
 */
#ifndef AQ_NVFP4_KQUANT_H
#define AQ_NVFP4_KQUANT_H

#include "formats.h"

#include <stdbool.h>

struct block_q4_k {
    uint16_t d, dmin;
    uint8_t scales[12];
    uint8_t qs[128];
};
struct block_q5_k {
    uint16_t d, dmin;
    uint8_t scales[12];
    uint8_t qh[32];
    uint8_t qs[128];
};
struct block_q6_k {
    uint8_t ql[128];
    uint8_t qh[64];
    int8_t scales[16];
    uint16_t d;
};
struct block_q5_0 {
    uint16_t d;
    uint8_t qh[4];
    uint8_t qs[16];
};
struct block_q4_0 {
    uint16_t d;
    uint8_t qs[16];
};
struct block_q8_0 {
    uint16_t d;
    int8_t qs[32];
};
_Static_assert(sizeof(struct block_q4_k) == 144, "Q4_K");
_Static_assert(sizeof(struct block_q5_k) == 176, "Q5_K");
_Static_assert(sizeof(struct block_q6_k) == 210, "Q6_K");
_Static_assert(sizeof(struct block_q5_0) == 22, "Q5_0");
_Static_assert(sizeof(struct block_q4_0) == 18, "Q4_0");
_Static_assert(sizeof(struct block_q8_0) == 34, "Q8_0");

/* Result of the search for one sub-block (the codes are in L, one byte each): scale and negated minimum. */
struct affine {
    float scale, minus_min;
};

#define KQ_TYPES 6

/* The functions that differ by variant: the decoders, and the searches that take nearly all the time. All variants give the same bytes.
 * affine_8: eight sub-blocks of 32, x and weight [8][32], L [8][32].
 * symmetric_16: sixteen sub-blocks of 16 with codes -32..31, weight [16][16] or NULL for x^2, L [16][16] + 32. */
struct kq_kernels {
    void (*affine_8)(const float *x, const float *weight, int top, float low, float by, int tries, int weighted, uint8_t *L,
                     struct affine *out);
    void (*symmetric_16)(const float *x, const float *weight, uint8_t *L, float *scale);
    void (*decode[KQ_TYPES])(const void *raw, size_t blocks, float *out); /* in the order of KQ_TYPE */
};

void serial_affine_8(const float *x, const float *weight, int top, float low, float by, int tries, int weighted, uint8_t *L,
                     struct affine *out);
void serial_symmetric_16(const float *x, const float *weight, uint8_t *L, float *scale);

struct kq_type {
    const char *name;
    size_t block; /* elements */
    size_t bytes;
    size_t scales_at, scales; /* the place of the block's float16 scales, and their number */
    /* One block. weight: one per element, or NULL; row_square: mean of x^2 over the row. */
    void (*encode)(const struct kq_kernels *kernels, const float *x, const float *weight, float row_square, void *out);
};

extern const struct kq_type KQ_TYPE[KQ_TYPES];

/* Whether a block's scales are finite: llama.cpp refuses a file with others. */
bool kq_scales_finite(const struct kq_type *type, const uint8_t *block);

/* Used by all encoders. */
int nearest_int(float f);
float search_symmetric(int n, int top, const float *x, const float *weight, uint8_t *L);

#endif

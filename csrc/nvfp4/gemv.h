/* y = x W^T for a few rows of x, directly from packed NVFP4: each weight is decoded in registers, once for all rows of x.
 *
 * A weight is value * step with step = float32(scale * tensor_scale), rounded to float32 as unpack does. Sums are float32, fused, in an
 * order that depends only on the columns: a row of x gives the same y alone and among other rows, in every variant.
 */
#ifndef AQ_NVFP4_GEMV_H
#define AQ_NVFP4_GEMV_H

#include "codec.h"

#define GEMV_TOKENS 4 /* rows of x that share one decoding */

struct gemv_plan {
    int kind; /* of x and y */
    int group;
    size_t tokens, rows, columns; /* x [tokens, columns], W [rows, columns] */
    float tensor_scale;
    bool divides; /* tensor_scale is a divisor, as in compressed-tensors */
};

enum gemv_result { GEMV_DONE, GEMV_NO_MEMORY, GEMV_INVALID_SCALE };

/* codes [rows, columns / 2], scales [rows, columns / group], y [tokens, rows]. */
enum gemv_result gemv(const struct gemv_plan *plan, const void *x, const uint8_t *codes, const uint8_t *scales, void *y);

/* One row of W times up to GEMV_TOKENS rows of x. x: float32, rows `stride` apart, each 32 columns as 16 even ones and then 16
 * odd ones; step: one per 16 columns. Sums over the first `columns`, a multiple of 32, into y. */
typedef void (*gemv_row)(const uint8_t *codes, const float *step, const float *x, size_t stride, size_t columns, int tokens, float *y);

/* The steps of `n` block scales, from the plan's tensor scale. */
typedef void (*gemv_steps)(const struct gemv_plan *plan, const uint8_t *scales, size_t n, float *to);

#endif

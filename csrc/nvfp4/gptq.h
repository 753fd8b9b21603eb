/* GPTQ with NVFP4: columns are rounded one after the other, and the error of each is corrected in the columns that follow. */
#ifndef AQ_NVFP4_GPTQ_H
#define AQ_NVFP4_GPTQ_H

#include "codec.h"

#define GPTQ_WINDOW 128 /* columns that are finished before the columns to their right are updated */
#define GPTQ_LANES 16   /* columns that subtract_errors_four processes */

/* The functions that differ by variant; all variants give the same bytes.
 * subtract_errors: w[k] -= sum over j < terms of e[j] * u[j * stride + k], in order of j, for k < count.
 * subtract_errors_four: the same for GPTQ_LANES columns of four rows of w, `stride` apart, whose errors are GPTQ_WINDOW apart;
 * panel: the factor's columns, GPTQ_LANES per term. */
struct gptq_kernels {
    void (*subtract_errors)(size_t count, size_t terms, const float *e, const float *u, size_t stride, float *w);
    void (*subtract_errors_four)(size_t terms, const float *e, const float *panel, size_t stride, float *w);
};

/* A weight matrix [rows, columns], row-major. `codec` defines the choice of block scales: kind float32, a group that divides
 * GPTQ_WINDOW; its `weight` (one per column, or NULL) is used in the search for the scale. */
struct gptq_plan {
    struct pack_plan codec;
    size_t rows, columns;
    const float *factor; /* [columns, columns]: upper Cholesky factor of the inverse Hessian */
};

/* Round w in place to its dequantized values. errors: scratch of rows * GPTQ_WINDOW floats; codes[rows, columns / 2],
 * scales[rows, columns / group]. Returns 1, 0 if an update gave a number that is not finite, -1 without memory. */
int gptq(const struct gptq_plan *plan, float *w, float *errors, uint8_t *codes, uint8_t *scales);

#endif

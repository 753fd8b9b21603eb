/* GPTQ under NVFP4: columns are rounded one after the other, and what rounding cost is taken out of those to come. */
#ifndef AQ_NVFP4_GPTQ_H
#define AQ_NVFP4_GPTQ_H

#include "codec.h"

#define GPTQ_WINDOW 128 /* columns that are finished before the columns right of them hear of it */

/* A weight matrix [rows, columns], row-major. `codec` says how block scales are chosen: kind float32, a group that divides
 * GPTQ_WINDOW; its `weight` (one a column, or NULL) counts in the scale search. */
struct gptq_plan {
    struct pack_plan codec;
    size_t rows, columns;
    const float *factor; /* [columns, columns]: upper Cholesky factor of the inverse Hessian */
};

/* Rounds w in place to its dequantized values. errors: scratch of rows * GPTQ_WINDOW floats; codes[rows, columns / 2],
 * scales[rows, columns / group]. False where an update made a number that is not finite. */
bool gptq(const struct gptq_plan *plan, float *w, float *errors, uint8_t *codes, uint8_t *scales);

#endif

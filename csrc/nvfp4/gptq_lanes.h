/* The updates of GPTQ, one source for all variants. They run over columns without sums across lanes, so every vector width gives the same
 * bytes; products are rounded before they are subtracted (-ffp-contract=off).
 */
#ifndef AQ_NVFP4_GPTQ_LANES_H
#define AQ_NVFP4_GPTQ_LANES_H

#include "gptq.h"
#include "lanes.h"

/* w[0..count) -= sum over j of e[j] * u[j * stride ..], in order of j; four rows of u per pass over w. */
static void subtract_errors(size_t count, size_t terms, const float *e, const float *u, size_t stride, float *w)
{
    size_t j = 0;
    for (; j + 4 <= terms; j += 4) {
        const float *a = u + j * stride, *b = a + stride, *c = b + stride, *d = c + stride;
        const float p = e[j], q = e[j + 1], r = e[j + 2], s = e[j + 3];
        for (size_t k = 0; k < count; k++)
            w[k] = (((w[k] - p * a[k]) - q * b[k]) - r * c[k]) - s * d[k];
    }
    for (; j < terms; j++) {
        const float *a = u + j * stride, p = e[j];
        for (size_t k = 0; k < count; k++)
            w[k] -= p * a[k];
    }
}

/* Sixteen columns of four rows, which stay in registers while all errors of the window are subtracted. */
static void subtract_errors_four(size_t terms, const float *e, const float *panel, size_t stride, float *w)
{
    f32x16 a = f32x16_load(w), b = f32x16_load(w + stride), c = f32x16_load(w + 2 * stride), d = f32x16_load(w + 3 * stride);
    for (size_t j = 0; j < terms; j++) {
        const f32x16 u = f32x16_load(panel + j * GPTQ_LANES);
        a = f32x16_less_product(a, f32x16_all(e[j]), u);
        b = f32x16_less_product(b, f32x16_all(e[GPTQ_WINDOW + j]), u);
        c = f32x16_less_product(c, f32x16_all(e[2 * GPTQ_WINDOW + j]), u);
        d = f32x16_less_product(d, f32x16_all(e[3 * GPTQ_WINDOW + j]), u);
    }
    f32x16_store(w, a), f32x16_store(w + stride, b), f32x16_store(w + 2 * stride, c), f32x16_store(w + 3 * stride, d);
}

#endif

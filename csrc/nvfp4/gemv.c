/* Products with packed weights: x is expanded once, rows of W are distributed over threads, and the variant in use has the row kernel. */
#include "gemv.h"

#include "parallel.h"
#include "variant.h"

#include <omp.h>
#include <stdlib.h>

enum {
    PIECE = 32,        /* columns that a kernel processes at once */
    LINE = 16,         /* floats in a cache line */
    HANDOUT = 1 << 17, /* weights per unit of work of a thread */
    ALONE = 1 << 18,   /* with fewer weights a second thread takes more time than it saves */
};

/* Reorder x for the kernels. Columns after the last multiple of 32 stay in order. */
static void spread(const struct gemv_plan *plan, const void *x, float *to)
{
    const size_t whole = plan->columns / PIECE * PIECE;
    for (size_t t = 0; t < plan->tokens; t++) {
        const size_t start = t * plan->columns;
        for (size_t k = 0; k < plan->columns; k++) {
            size_t in = k % PIECE, at = k < whole ? k - in + in / 2 + (in & 1) * (PIECE / 2) : k;
            to[start + at] = load_as_float(x, plan->kind, start + k);
        }
    }
}

/* The last 16 columns if K is not a multiple of 32. */
static float tail(const uint8_t *codes, float step, const float *x)
{
    float sum = 0;
    for (size_t k = 0; k < 16; k++) {
        uint8_t c = k & 1 ? codes[k / 2] >> 4 : codes[k / 2] & 15;
        float w = E2M1_VALUE[c & 7] * step;
        sum += (c & 8 ? -w : w) * x[k]; /* -ffp-contract=off: the same in every build */
    }
    return sum;
}

bool gemv(const struct gemv_plan *plan, const void *x, const uint8_t *codes, const uint8_t *scales, void *y)
{
    const struct kernels *kernels = kernels_current();
    const size_t columns = plan->columns, whole = columns / PIECE * PIECE, groups_of_16 = columns / 16;
    const size_t per_scale = (size_t)plan->group / 16, row_scales = columns / (size_t)plan->group;
    const size_t some = 1 + HANDOUT / columns;
    const int team = plan->rows <= ALONE / columns ? 1 : threads_get();
    float *expanded_x = aligned_alloc(64, plan->tokens * columns * sizeof(float)); /* each sixteen columns in one cache line */
    const size_t own_steps = (groups_of_16 + LINE - 1) / LINE * LINE; /* threads that write to one cache line wait for each other */
    float *steps = aligned_alloc(64, (size_t)team * own_steps * sizeof(float));
    const bool enough = expanded_x && steps;
    if (!enough)
        goto cleanup;
    spread(plan, x, expanded_x);
#pragma omp parallel for schedule(dynamic) num_threads(team)
    for (size_t first = 0; first < plan->rows; first += some) {
        float *step = steps + (size_t)omp_get_thread_num() * own_steps;
        const size_t last = plan->rows - first < some ? plan->rows : first + some;
        for (size_t r = first; r < last; r++) {
            const uint8_t *c = codes + r * (columns / 2), *s = scales + r * row_scales;
            kernels->gemv_steps(plan, s, row_scales, step);
            for (size_t i = groups_of_16; per_scale > 1 && i-- > 0;)
                step[i] = step[i / per_scale];
            for (size_t t = 0; t < plan->tokens; t += GEMV_TOKENS) {
                const int n = (int)(plan->tokens - t < GEMV_TOKENS ? plan->tokens - t : GEMV_TOKENS);
                float sums[GEMV_TOKENS];
                kernels->gemv(c, step, expanded_x + t * columns, columns, whole, n, sums);
                for (int j = 0; j < n; j++) {
                    const size_t token = t + (size_t)j;
                    if (whole < columns)
                        sums[j] += tail(c + whole / 2, step[groups_of_16 - 1], expanded_x + token * columns + whole);
                    store_from_float(y, plan->kind, token * plan->rows + r, sums[j]);
                }
            }
        }
    }
cleanup:
    free(expanded_x);
    free(steps);
    return enough;
}

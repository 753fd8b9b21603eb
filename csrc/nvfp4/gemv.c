/* Products with packed weights: x is expanded once, rows of W are distributed over threads, and the variant in use has the row kernel. */
#include "gemv.h"

#include "pool.h"
#include "variant.h"

#include <stdatomic.h>
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

struct gemv_job {
    const struct kernels *kernels;
    const struct gemv_plan *plan;
    const uint8_t *codes, *scales;
    void *y;
    const float *x; /* expanded */
    float *steps;   /* of one row, per worker */
    size_t steps_of_worker, rows_of_unit;
    atomic_bool invalid; /* a block scale is */
};

/* The sign of a NaN depends on the order of operands that the compiler chose. */
static float one_nan(float v)
{
    return v == v ? v : bits_float(0x7fc00000u);
}

static void multiply_row(struct gemv_job *job, size_t r, float *step)
{
    const struct gemv_plan *plan = job->plan;
    const size_t columns = plan->columns, whole = columns / PIECE * PIECE, groups_of_16 = columns / 16;
    const size_t per_scale = (size_t)plan->group / 16, row_scales = columns / (size_t)plan->group;
    const uint8_t *codes = job->codes + r * (columns / 2), *scales = job->scales + r * row_scales;
    if (!scales_valid(scales, row_scales))
        atomic_store(&job->invalid, true);
    job->kernels->gemv_steps(plan, scales, row_scales, step);
    for (size_t i = groups_of_16; per_scale > 1 && i-- > 0;)
        step[i] = step[i / per_scale];
    for (size_t t = 0; t < plan->tokens; t += GEMV_TOKENS) {
        const int n = (int)(plan->tokens - t < GEMV_TOKENS ? plan->tokens - t : GEMV_TOKENS);
        float sums[GEMV_TOKENS];
        job->kernels->gemv(codes, step, job->x + t * columns, columns, whole, n, sums);
        for (int j = 0; j < n; j++) {
            const size_t token = t + (size_t)j;
            if (whole < columns)
                sums[j] += tail(codes + whole / 2, step[groups_of_16 - 1], job->x + token * columns + whole);
            store_from_float(job->y, plan->kind, token * plan->rows + r, one_nan(sums[j]));
        }
    }
}

static void multiply_unit(void *context, size_t unit, int worker)
{
    struct gemv_job *job = context;
    const size_t first = unit * job->rows_of_unit, left = job->plan->rows - first;
    const size_t last = first + (left < job->rows_of_unit ? left : job->rows_of_unit);
    for (size_t r = first; r < last; r++)
        multiply_row(job, r, job->steps + (size_t)worker * job->steps_of_worker);
}

enum gemv_result gemv(const struct gemv_plan *plan, const void *x, const uint8_t *codes, const uint8_t *scales, void *y)
{
    const size_t columns = plan->columns;
    struct gemv_job job = {.kernels = kernels_current(), .plan = plan, .codes = codes, .scales = scales, .y = y};
    job.rows_of_unit = 1 + HANDOUT / columns;
    job.steps_of_worker = (columns / 16 + LINE - 1) / LINE * LINE; /* threads that write to one cache line wait for each other */
    const int team = plan->rows <= ALONE / columns ? 1 : threads_get();
    float *expanded_x = aligned_alloc(64, plan->tokens * columns * sizeof(float)); /* each sixteen columns in one cache line */
    job.x = expanded_x;
    job.steps = aligned_alloc(64, (size_t)team * job.steps_of_worker * sizeof(float));
    enum gemv_result result = GEMV_NO_MEMORY;
    if (expanded_x && job.steps) {
        spread(plan, x, expanded_x);
        run_units((plan->rows + job.rows_of_unit - 1) / job.rows_of_unit, team, multiply_unit, &job);
        result = atomic_load(&job.invalid) ? GEMV_INVALID_SCALE : GEMV_DONE;
    }
    free(expanded_x);
    free(job.steps);
    return result;
}

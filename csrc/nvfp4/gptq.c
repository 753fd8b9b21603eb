/* GPTQ's inner loop (Frantar et al. 2022, algorithm 1) with NVFP4 block scales.
 *
 * Rows are independent and are distributed over threads. A block's scale is chosen from the weights at the time its first column is
 * rounded, including all corrections, by the variant's `pack`. The updates are the variant's (gptq_lanes.h).
 */
#include "gptq.h"

#include <float.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "pool.h"
#include "variant.h"

#define TILE_ROWS 64
#define PANEL 64 /* columns of the factor that are copied together: 128 rows of them are 32 KB */

/* Subtract the errors of a window from the columns to its right, for a tile of rows. The factor's columns are copied first:
 * its rows are a power of two apart and would map to the same cache sets. */
static void update_right(const struct gptq_plan *plan, const struct gptq_kernels *kernels, size_t first, size_t width, size_t rows,
                         const float *errors, float *w)
{
    const size_t columns = plan->columns;
    float panel[GPTQ_WINDOW * PANEL];
    for (size_t c = first + width; c < columns; c += PANEL) {
        const size_t count = columns - c < PANEL ? columns - c : PANEL;
        for (size_t j = 0; j < width; j++)
            for (size_t k = 0; k < count; k += GPTQ_LANES)
                memcpy(panel + (k * width + j * GPTQ_LANES), plan->factor + (first + j) * columns + c + k, GPTQ_LANES * sizeof(float));
        size_t r = 0;
        for (; r + 4 <= rows; r += 4)
            for (size_t k = 0; k < count; k += GPTQ_LANES)
                kernels->subtract_errors_four(width, errors + r * GPTQ_WINDOW, panel + k * width, columns, w + r * columns + c + k);
        for (; r < rows; r++)
            kernels->subtract_errors(count, width, errors + r * GPTQ_WINDOW, plan->factor + first * columns + c, columns,
                                     w + r * columns + c);
    }
}

/* Round one block of a row with scale code `code`, and correct each column's error in the block's later columns. codes: of the row. */
static bool round_block(const struct gptq_plan *plan, size_t start, uint8_t code, float *block, float *errors, uint8_t *codes)
{
    const size_t group = (size_t)plan->codec.group;
    const float step = plan->codec.step[code];
    bool finite = true;
    for (size_t i = 0; i < group; i++) {
        finite &= (block[i] < 0 ? -block[i] : block[i]) <= FLT_MAX; /* with the corrections of the columns before it */
        const size_t at = start + i;
        const float *factor = plan->factor + at * plan->columns;
        const float ratio = block[i] / step;
        const unsigned index = e2m1_index(ratio < 0 ? -ratio : ratio), sign = ratio < 0;
        const float value = (sign ? -E2M1_VALUE[index] : E2M1_VALUE[index]) * step;
        const float error = (block[i] - value) / factor[at];
        codes[at / 2] = (uint8_t)(at & 1 ? codes[at / 2] | (index | sign << 3) << 4 : index | sign << 3);
        errors[i] = error;
        block[i] = value;
        for (size_t k = i + 1; k < group; k++)
            block[k] -= error * factor[start + k];
    }
    return finite;
}

/* Round columns first .. first + width of a tile of rows. The scales of one block column are chosen together, as pack chooses them:
 * `tiled` is the codec's plan with each block's importance once per row of a tile. */
static bool round_window(const struct gptq_plan *plan, const struct pack_plan *tiled, const struct kernels *kernels, size_t first,
                         size_t width, size_t rows, float *w, float *errors, uint8_t *codes, uint8_t *scales)
{
    const size_t columns = plan->columns, group = (size_t)plan->codec.group, blocks = columns / group;
    float block[TILE_ROWS * MAX_GROUP];
    uint8_t unused[TILE_ROWS * MAX_GROUP / 2], chosen[TILE_ROWS];
    bool finite = true;
    for (size_t start = first; start < first + width; start += group) {
        for (size_t r = 0; r < rows; r++)
            memcpy(block + r * group, w + r * columns + start, group * sizeof(float));
        kernels->codec.pack(tiled, block, start / group * TILE_ROWS, rows, unused, chosen);
        const size_t next = start + group;
        for (size_t r = 0; r < rows; r++) {
            float *row = w + r * columns, *of_block = errors + r * GPTQ_WINDOW + (start - first);
            scales[r * blocks + start / group] = chosen[r];
            finite &= round_block(plan, start, chosen[r], row + start, of_block, codes + r * (columns / 2));
            kernels->gptq.subtract_errors(first + width - next, group, of_block, plan->factor + start * columns + next, columns,
                                          row + next);
        }
    }
    return finite;
}

/* Return a copy of the codec's plan whose importance has every block TILE_ROWS times, or NULL without memory. */
static struct pack_plan *tiled_plan(const struct pack_plan *codec, size_t columns)
{
    const size_t group = (size_t)codec->group, size = (sizeof(struct pack_plan) + 63) / 64 * 64;
    const size_t weights = codec->weight ? columns * TILE_ROWS * sizeof(float) : 0;
    struct pack_plan *tiled = aligned_alloc(64, (size + weights + 63) / 64 * 64);
    if (!tiled)
        return NULL;
    *tiled = *codec;
    if (codec->weight) {
        float *weight = (float *)(void *)((char *)tiled + size);
        for (size_t b = 0; b < columns / group; b++)
            for (size_t r = 0; r < TILE_ROWS; r++)
                memcpy(weight + (b * TILE_ROWS + r) * group, codec->weight + b * group, group * sizeof(float));
        tiled->weight = weight;
        tiled->columns = columns * TILE_ROWS;
    }
    return tiled;
}

/* One window of columns. A unit is a tile of rows. */
struct gptq_job {
    const struct gptq_plan *plan;
    const struct pack_plan *tiled;
    const struct kernels *kernels;
    size_t first, width;
    float *w, *errors;
    uint8_t *codes, *scales;
    atomic_bool bad;
};

static void round_tile(void *context, size_t tile, int worker)
{
    struct gptq_job *job = context;
    (void)worker;
    const struct gptq_plan *plan = job->plan;
    const size_t columns = plan->columns, blocks = columns / (size_t)plan->codec.group;
    const size_t top = tile * TILE_ROWS, rows = plan->rows - top < TILE_ROWS ? plan->rows - top : TILE_ROWS;
    float *errors = job->errors + top * GPTQ_WINDOW, *w = job->w + top * columns;
    if (!round_window(plan, job->tiled, job->kernels, job->first, job->width, rows, w, errors, job->codes + top * (columns / 2),
                      job->scales + top * blocks))
        atomic_store(&job->bad, true);
    update_right(plan, &job->kernels->gptq, job->first, job->width, rows, errors, w);
}

int gptq(const struct gptq_plan *plan, float *w, float *errors, uint8_t *codes, uint8_t *scales)
{
    const size_t columns = plan->columns, tiles = (plan->rows + TILE_ROWS - 1) / TILE_ROWS;
    struct pack_plan *tiled = tiled_plan(&plan->codec, columns);
    if (!tiled)
        return -1;
    struct gptq_job job = {plan, tiled, kernels_current(), 0, 0, w, errors, codes, scales, false};
    for (job.first = 0; job.first < columns; job.first += GPTQ_WINDOW) {
        job.width = columns - job.first < GPTQ_WINDOW ? columns - job.first : GPTQ_WINDOW;
        run_units(tiles, threads_get(), round_tile, &job);
    }
    free(tiled);
    return !atomic_load(&job.bad);
}

/* GPTQ's inner loop (Frantar et al. 2022, algorithm 1) with NVFP4 block scales.
 *
 * Rows are independent and are distributed over threads. A block's scale is chosen from the weights at the time its first column is
 * rounded, including all corrections. The updates are the variant's (gptq_lanes.h).
 */
#include "gptq.h"

#include "parallel.h"
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

/* Round columns first .. first + width of one row; its errors are written to errors[0 .. width). */
static bool round_window(const struct gptq_plan *plan, const struct gptq_kernels *kernels, size_t first, size_t width, float *row,
                         float *errors, uint8_t *codes, uint8_t *scales)
{
    const struct pack_plan *codec = &plan->codec;
    const size_t group = (size_t)codec->group;
    bool finite = true;
    for (size_t start = first; start < first + width; start += group) {
        float *block = row + start, amax = 0;
        for (size_t i = 0; i < group; i++) {
            float a = block[i] < 0 ? -block[i] : block[i];
            amax = a > amax ? a : amax;
            finite &= a <= 0x1.fffffep127f;
        }
        const float *weight = codec->weight ? codec->weight + start : NULL;
        const uint8_t code = codec->choice == CHOICE_AMAX ? block_code(codec, amax) : best_code(codec, block, weight);
        const float step = codec->step[code];
        scales[start / group] = code;
        for (size_t i = 0; i < group; i++) {
            const size_t at = start + i;
            const float *factor = plan->factor + at * plan->columns;
            const float ratio = block[i] / step;
            const unsigned index = e2m1_index(ratio < 0 ? -ratio : ratio), sign = ratio < 0;
            const float value = (sign ? -E2M1_VALUE[index] : E2M1_VALUE[index]) * step;
            const float error = (block[i] - value) / factor[at];
            codes[at / 2] = (uint8_t)(at & 1 ? codes[at / 2] | (index | sign << 3) << 4 : index | sign << 3);
            errors[at - first] = error;
            block[i] = value;
            for (size_t k = i + 1; k < group; k++)
                block[k] -= error * factor[start + k];
        }
        const size_t next = start + group;
        kernels->subtract_errors(first + width - next, group, errors + (start - first), plan->factor + start * plan->columns + next,
                                 plan->columns, row + next);
    }
    return finite;
}

bool gptq(const struct gptq_plan *plan, float *w, float *errors, uint8_t *codes, uint8_t *scales)
{
    const size_t columns = plan->columns, blocks = columns / (size_t)plan->codec.group;
    const size_t tiles = (plan->rows + TILE_ROWS - 1) / TILE_ROWS;
    const struct gptq_kernels *kernels = variant_current()->gptq;
    int bad = 0;
    for (size_t first = 0; first < columns; first += GPTQ_WINDOW) {
        const size_t width = columns - first < GPTQ_WINDOW ? columns - first : GPTQ_WINDOW;
#pragma omp parallel for schedule(dynamic) num_threads(threads_get()) reduction(| : bad)
        for (size_t t = 0; t < tiles; t++) {
            const size_t top = t * TILE_ROWS, end = top + TILE_ROWS < plan->rows ? top + TILE_ROWS : plan->rows;
            for (size_t r = top; r < end; r++)
                bad |= !round_window(plan, kernels, first, width, w + r * columns, errors + r * GPTQ_WINDOW, codes + r * (columns / 2),
                                     scales + r * blocks);
            update_right(plan, kernels, first, width, end - top, errors + top * GPTQ_WINDOW, w + top * columns);
        }
    }
    return !bad;
}

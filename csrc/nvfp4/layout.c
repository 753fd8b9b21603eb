/* Moves of bytes between layouts, without arithmetic on values. */
#include "layout.h"

#include <string.h>

void to_ggml(const uint8_t *codes, const uint8_t *scales, size_t super_blocks, struct ggml_nvfp4 *out)
{
    for (size_t b = 0; b < super_blocks; b++) {
        for (int s = 0; s < 4; s++) {
            const uint8_t *in = codes + b * 32 + s * 8;
            uint8_t *qs = out[b].qs + s * 8;
            out[b].d[s] = scales[b * 4 + s]; /* valid scales have no sign, and ggml's has none */
            for (int j = 0; j < 4; j++) {    /* bytes j and j + 4 have elements 2j, 2j+1 and 2j+8, 2j+9 */
                qs[2 * j] = (uint8_t)((in[j] & 0x0f) | in[j + 4] << 4);
                qs[2 * j + 1] = (uint8_t)(in[j] >> 4 | (in[j + 4] & 0xf0));
            }
        }
    }
}

void from_ggml(const struct ggml_nvfp4 *in, size_t super_blocks, uint8_t *codes, uint8_t *scales)
{
    for (size_t b = 0; b < super_blocks; b++) {
        for (int s = 0; s < 4; s++) {
            const uint8_t *qs = in[b].qs + s * 8;
            uint8_t *out = codes + b * 32 + s * 8;
            scales[b * 4 + s] = in[b].d[s];
            for (int j = 0; j < 4; j++) {
                out[j] = (uint8_t)((qs[2 * j] & 0x0f) | qs[2 * j + 1] << 4);
                out[j + 4] = (uint8_t)(qs[2 * j] >> 4 | (qs[2 * j + 1] & 0xf0));
            }
        }
    }
}

static size_t tiles(size_t columns)
{
    return columns / 4 + (columns % 4 != 0);
}

size_t swizzled_size(size_t rows, size_t columns)
{
    return (rows / 128 + (rows % 128 != 0)) * tiles(columns) * 512;
}

/* Position of the scale of row m, block column k (CUTLASS, cuBLASLt, FlashInfer, vLLM). */
static size_t swizzled_at(size_t m, size_t k, size_t across)
{
    return (m / 128 * across + k / 4) * 512 + m % 32 * 16 + m % 128 / 32 * 4 + k % 4;
}

void swizzle(const uint8_t *scales, size_t rows, size_t columns, uint8_t *out)
{
    memset(out, 0, swizzled_size(rows, columns));
    for (size_t m = 0; m < rows; m++)
        for (size_t k = 0; k < columns; k++)
            out[swizzled_at(m, k, tiles(columns))] = scales[m * columns + k];
}

void unswizzle(const uint8_t *in, size_t rows, size_t columns, uint8_t *scales)
{
    for (size_t m = 0; m < rows; m++)
        for (size_t k = 0; k < columns; k++)
            scales[m * columns + k] = in[swizzled_at(m, k, tiles(columns))];
}

/* The same bytes in other orders: ggml's NVFP4 super-blocks, and the 128x4 tiles of scales that GPU kernels read. */
#ifndef AQ_NVFP4_LAYOUT_H
#define AQ_NVFP4_LAYOUT_H

#include <stddef.h>
#include <stdint.h>

/* ggml's block_nvfp4 (GGML_TYPE_NVFP4 = 40): 64 elements; in each 16 the low nibbles are elements 0-7, the high ones 8-15. */
struct ggml_nvfp4 {
    uint8_t d[4];
    uint8_t qs[32];
};
_Static_assert(sizeof(struct ggml_nvfp4) == 36, "ggml's NVFP4 block has 36 bytes");

void to_ggml(const uint8_t *codes, const uint8_t *scales, size_t super_blocks, struct ggml_nvfp4 *out);
void from_ggml(const struct ggml_nvfp4 *in, size_t super_blocks, uint8_t *codes, uint8_t *scales);

/* Rows are padded to 128 and columns to 4 with zeros; out has swizzled_size(rows, columns) bytes. */
size_t swizzled_size(size_t rows, size_t columns);
void swizzle(const uint8_t *scales, size_t rows, size_t columns, uint8_t *out);
void unswizzle(const uint8_t *in, size_t rows, size_t columns, uint8_t *scales);

#endif

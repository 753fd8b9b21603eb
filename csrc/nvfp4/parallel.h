/* Operations on whole tensors: runs of blocks are distributed over threads, and the variant in use processes each run. */
#ifndef AQ_NVFP4_PARALLEL_H
#define AQ_NVFP4_PARALLEL_H

#include "codec.h"
#include "kquant.h"

uint32_t tensor_amax(const void *x, int kind, size_t count);
uint32_t tensor_pack(const struct pack_plan *plan, const void *x, size_t blocks, uint8_t *codes, uint8_t *scales);
/* Return whether all block scales are valid. */
bool tensor_unpack(const struct unpack_plan *plan, const uint8_t *codes, const uint8_t *scales, size_t blocks, void *out);
void tensor_fake_quant(const struct fake_plan *plan, const void *x, size_t blocks, void *out);

/* `rows` rows of `columns` elements; weight has `columns` entries or is NULL. Returns the first row with a block whose scale is too large
 * for a float16, `rows` if there is none. */
size_t tensor_kquantize(const struct kq_type *type, const void *x, int kind, size_t rows, size_t columns, const float *weight,
                        uint8_t *out);
void tensor_kdequantize(const struct kq_type *type, const uint8_t *raw, size_t blocks, float *out);

#endif

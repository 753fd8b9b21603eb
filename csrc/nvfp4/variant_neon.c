/* flags for aarch64: */
/* All kernels compiled for NEON. */
#include "codec_neon.h"
#include "gemv_lanes.h"
#include "gptq_lanes.h"
#include "kq_lanes.h"
#include "variant.h"

const struct kernels variant_neon = {
    .codec = {amax_bits, pack, unpack, fake_quant},
    .kquant = {affine_8, symmetric_16, KQ_DECODERS},
    .gemv = row_times_tokens,
    .gemv_steps = block_steps,
    .gptq = {subtract_errors, subtract_errors_four},
};

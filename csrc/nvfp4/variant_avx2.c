/* flags for x86_64: -mavx2 -mf16c -mbmi2 -mfma */
/* All kernels compiled for AVX2. */
#include "codec_x86.h"
#include "gemv_lanes.h"
#include "gptq_lanes.h"
#include "kq_lanes.h"
#include "variant.h"

const struct kernels variant_avx2 = {
    .codec = {amax_bits, pack, unpack, fake_quant},
    .kquant = {affine_8, symmetric_16, KQ_DECODERS},
    .gemv = row_times_tokens,
    .gemv_steps = block_steps,
    .gptq = {subtract_errors, subtract_errors_four},
};

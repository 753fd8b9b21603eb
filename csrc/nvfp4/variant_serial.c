/* The reference variant: plain C for any processor. */
#define AQ_SERIAL
#include "gemv_lanes.h"
#include "gptq_lanes.h"
#include "kq_decode.h"
#include "variant.h"

const struct kernels variant_serial = {
    .codec = {serial_amax, serial_pack, serial_unpack, serial_fake_quant},
    .kquant = {serial_affine_8, serial_symmetric_16, KQ_DECODERS},
    .gemv = row_times_tokens,
    .gemv_steps = block_steps,
    .gptq = {subtract_errors, subtract_errors_four},
};

/* The reference variant: plain C for any processor. */
#define AQ_SERIAL
#include "gemv_lanes.h"
#include "gptq_lanes.h"
#include "variant.h"

const struct variant variant_serial = {"serial", &codec_serial, &kq_serial, row_times_tokens, &gptq_kernels};

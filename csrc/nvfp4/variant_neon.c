/* All kernels compiled for NEON. */
#include "codec_neon.h"
#include "gemv_lanes.h"
#include "gptq_lanes.h"
#include "kq_lanes.h"
#include "variant.h"

const struct variant variant_neon = {"neon", &codec_kernels, &kq_search, row_times_tokens, &gptq_kernels};

/* All kernels compiled for AVX-512. */
#include "codec_x86.h"
#include "gemv_lanes.h"
#include "gptq_lanes.h"
#include "kq_lanes.h"
#include "variant.h"

const struct variant variant_avx512 = {"avx512", &codec_kernels, &kq_search, row_times_tokens, &gptq_kernels};

/* The NVFP4 kernels compiled for AVX2; the source is codec_x86.h. */
#include "codec_x86.h"

const struct codec_kernels codec_avx2 = {"avx2", amax_bits, pack, unpack, fake_quant};

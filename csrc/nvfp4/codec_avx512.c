/* The NVFP4 kernels compiled for AVX-512; the source is codec_x86.h. */
#include "codec_x86.h"

const struct codec_kernels codec_avx512 = {"avx512", amax_bits, pack, unpack, fake_quant};

/* The K-quant searches compiled for AVX-512; the source is kq_lanes.h. */
#include "kq_lanes.h"

KQ_SEARCH(avx512)

/* The K-quant searches compiled for AVX2; the source is kq_lanes.h. */
#include "kq_lanes.h"

KQ_SEARCH(avx2)

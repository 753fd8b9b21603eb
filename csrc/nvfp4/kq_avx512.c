/* The K-quant searches compiled for avx512; the text is kq_lanes.h. */
#include "kq_lanes.h"

KQ_SEARCH(avx512)

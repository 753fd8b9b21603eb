/* The K-quant searches compiled for avx2; the text is kq_lanes.h. */
#include "kq_lanes.h"

KQ_SEARCH(avx2)

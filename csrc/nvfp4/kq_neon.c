/* The K-quant searches compiled for NEON; the source is kq_lanes.h. */
#include "kq_lanes.h"

KQ_SEARCH(neon)

/* The K-quant searches compiled for neon; the text is kq_lanes.h. */
#include "kq_lanes.h"

KQ_SEARCH(neon)

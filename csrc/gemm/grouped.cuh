// The two ways to compute the products of a mixture's experts in one launch.
#pragma once
#include "gemm/paths.cuh"

// The products of one launch. The plan has been checked.
struct GroupedProduct {
    aq_grouped_shape shape;
    const uint16_t *x;
    int64_t ldx;
    const uint8_t *packed;
    const float *scales;
    const int32_t *sorted_pairs, *tile_experts, *padded;
    int64_t tiles;  // of tokens, that the alignment has space for
    void *out;
    int type;
    bool pdl;
    cudaStream_t stream;
};

const char *grouped_skinny_problem(const aq_grouped_shape &shape, const aq_limits &limits, const aq_grouped_plan &plan, int64_t tiles,
                                   aq_needs *needs);
int run_grouped_skinny(const GroupedProduct &product, const aq_grouped_plan &plan, const aq_limits &limits, const aq_needs &needs);

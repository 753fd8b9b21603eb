// The three ways to compute a W4A16 product. Each checks a plan and computes what memory it needs, then launches it.
#pragma once
#include "gemm/fragments.cuh"
#include "gemm/launch.cuh"

struct Shape {
    int64_t m, n, k;
    int tiles, chunks;  // row tiles and column chunks of the repacked weight
    Shape(int64_t m_, int64_t n_, int64_t k_) : m(m_), n(n_), k(k_), tiles(row_tiles(n_)), chunks(column_chunks(k_)) {}
};

// One product. The plan has been checked, and workspace has the bytes that it needs.
struct Product {
    Shape shape;
    const uint16_t *x;
    int64_t ldx;
    const uint8_t *packed;
    float scale;  // of the sums: the tensor scale, and the power of two that decode8 leaves out
    void *out, *workspace;
    int x_type, out_type;
    bool pdl;
    cudaStream_t stream;
};

const char *skinny_problem(const Shape &shape, const aq_limits &limits, const aq_skinny_plan &plan, aq_needs *needs);
const char *tiled_problem(const Shape &shape, const aq_limits &limits, const aq_tiled_plan &plan, aq_needs *needs);
const char *wgmma_problem(const Shape &shape, const aq_limits &limits, const aq_wgmma_plan &plan, aq_needs *needs);

// The best plan of the tiled path for `products` products of one shape in one launch.
bool plan_tiled(const Shape &shape, int64_t products, const aq_limits &limits, aq_tiled_plan *best);

int run_skinny(const Product &product, const aq_skinny_plan &plan, const aq_needs &needs);
int run_tiled(const Product &product, const aq_tiled_plan &plan, const aq_needs &needs);
int run_wgmma(const Product &product, const aq_wgmma_plan &plan, const aq_needs &needs);

// Clusters begin with sm_90.
inline bool cluster_possible(const aq_limits &limits, int size) { return size == 1 || limits.major >= 9; }

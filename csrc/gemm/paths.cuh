// The ways to compute a W4A16 product ("paths"): each plans, checks a plan and computes what memory it needs, and launches.
#pragma once
#include <cstring>
#include <type_traits>

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

// A path: its functions for a plan, which is a struct of ints of its own. The others see the ints only.
struct Path {
    aq_path about;
    // Set the best plan's ints, and return its estimated microseconds: 0 if no other path can be faster, kNever if there is no plan.
    double (*plan)(const Shape &shape, const aq_limits &limits, int *fields);
    // Return null and set *needs if the plan can compute the product on such a device, else what is wrong with it.
    const char *(*problem)(const Shape &shape, const aq_limits &limits, const int *fields, aq_needs *needs);
    int (*run)(const Product &product, const int *fields, const aq_needs &needs);
};
constexpr double kNever = 1e30, kLastResort = 1e29;

// The path NAME is the constant NAME_path of NAME.cu. Of equal estimates the first one's plan is chosen.
#define AQ_PATHS(X) X(skinny) X(wgmma) X(tiled)
#define AQ_DECLARE_PATH(name) extern const Path name##_path;
AQ_PATHS(AQ_DECLARE_PATH)

template <typename Plan>
Plan plan_of(const int *fields) {
    Plan plan;
    memcpy(&plan, fields, sizeof plan);
    return plan;
}
// A path from functions that take its own type of plan, whose members are `fields`.
template <typename Plan, auto kPlan, auto kProblem, auto kRun>
constexpr Path make_path(const char *name, const char *fields) {
    static_assert(std::is_trivially_copyable_v<Plan> && sizeof(Plan) <= sizeof(aq_plan::fields));
    return Path{{name, fields, sizeof(Plan) / sizeof(int)},
                [](const Shape &shape, const aq_limits &limits, int *to) {
                    Plan best;
                    const double us = kPlan(shape, limits, &best);
                    if (us < kNever) memcpy(to, &best, sizeof best);
                    return us;
                },
                [](const Shape &shape, const aq_limits &limits, const int *from, aq_needs *needs) {
                    return kProblem(shape, limits, plan_of<Plan>(from), needs);
                },
                [](const Product &product, const int *from, const aq_needs &needs) { return kRun(product, plan_of<Plan>(from), needs); }};
}

// Resident blocks in clusters of `size`. A cluster must be inside one GPC, so some multiprocessors of a GPC stay unused.
// From an occupancy query on an H200: 132, 132, 128, 120 (GPCs of 16 and 18). A rule, because a query is too slow here.
inline int resident(int sms, int size) { return size <= 2 ? sms / size * size : sms / (size == 4 ? 33 : 44) * (size == 4 ? 32 : 40); }

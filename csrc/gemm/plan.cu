// The choice of a path for a product, and the launch.
#include "gemm/paths.cuh"
#include "gemm/numerics.cuh"

namespace {

#define AQ_PATH_ADDRESS(name) &name##_path,
const Path *const kPaths[] = {AQ_PATHS(AQ_PATH_ADDRESS)};
constexpr int kPathCount = sizeof kPaths / sizeof *kPaths;

const char *product_problem(int64_t m, int64_t n, int64_t k, const aq_limits &limits) {
    constexpr int64_t kMost = (1ll << 31) - kBlockTiles * kRows;  // rows and columns are counted in 32 bits
    if (m < 1 || n < 1 || k < 16 || k % 16 || m > kMost || n > kMost || k > kMost)
        return "the shape must be positive, K a multiple of 16, and all below 2^31";
    const Shape shape(m, n, k);
    if ((int64_t)shape.tiles * shape.chunks >= 1ll << 31) return "the weight has too many chunks";
    return device_problem(limits);
}

}  // namespace

extern "C" const aq_path *aq_path_of(int number) { return number < 1 || number > kPathCount ? nullptr : &kPaths[number - 1]->about; }

extern "C" int aq_plan_w4a16(int64_t m, int64_t n, int64_t k, int path, const aq_limits *limits, aq_plan *plan) {
    if (product_problem(m, n, k, *limits)) return AQ_GEMM_NO_PLAN;
    const Shape shape(m, n, k);
    double best_us = kNever;
    for (int number = 1; number <= kPathCount && best_us > 0; number++) {
        if (path != AQ_PATH_AUTO && path != number) continue;
        aq_plan best{number, {}};
        const double us = kPaths[number - 1]->plan(shape, *limits, best.fields);
        if (us < best_us) best_us = us, *plan = best;
    }
    return best_us < kNever ? 0 : AQ_GEMM_NO_PLAN;
}

extern "C" const char *aq_plan_problem(int64_t m, int64_t n, int64_t k, const aq_limits *limits, const aq_plan *plan, aq_needs *needs) {
    if (const char *problem = product_problem(m, n, k, *limits)) return problem;
    if (!aq_path_of(plan->path)) return "there is no such path";
    return kPaths[plan->path - 1]->problem(Shape(m, n, k), *limits, plan->fields, needs);
}

extern "C" int aq_w4a16(const void *x, int64_t ldx, const uint8_t *packed, float tensor_scale, void *out, void *workspace,
                        int64_t workspace_bytes, int64_t m, int64_t n, int64_t k, int x_type, int out_type, const aq_plan *plan, int pdl,
                        void *stream) {
    DeviceState state;
    int status = current_device(&state);
    if (status) return status;
    aq_needs needs;
    if (aq_plan_problem(m, n, k, &state.limits, plan, &needs)) return AQ_GEMM_BAD_PLAN;
    if (workspace && workspace_bytes < needs.workspace_bytes) return AQ_GEMM_SMALL_WORKSPACE;
    Product p{Shape(m, n, k),
              (const uint16_t *)x,
              ldx,
              packed,
              x_type == AQ_F16 ? tensor_scale : tensor_scale * kUndo,
              out,
              workspace,
              x_type,
              out_type,
              pdl != 0,
              (cudaStream_t)stream};
    StreamMemory own(p.stream);
    if (!workspace && needs.workspace_bytes) {
        if ((status = own.allocate((size_t)needs.workspace_bytes))) return status;
        p.workspace = own.get();
        // In a graph the node before the first kernel is now the allocation, on which a launch cannot depend programmatically.
        bool captured = false;
        if (p.pdl && (status = stream_is_captured(p.stream, &captured))) return status;
        p.pdl = p.pdl && !captured;
    }
    status = kPaths[plan->path - 1]->run(p, plan->fields, needs);
    const int freed = own.release();
    return status ? status : freed;
}

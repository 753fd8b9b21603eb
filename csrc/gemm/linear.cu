// W4A16 products of layers: the plan is found here, once per device and shape, so that a caller in Python needs two short calls per product.
#include <mutex>
#include <unordered_map>

#include "gemm/launch.cuh"

namespace {

constexpr size_t kMostPlans = 8192;  // prompts have many lengths; beyond that all are computed again

struct Key {
    int device;
    int64_t m, n, k;
    bool operator==(const Key &o) const { return device == o.device && m == o.m && n == o.n && k == o.k; }
};
struct Hash {
    size_t operator()(const Key &key) const {
        uint64_t h = (uint64_t)key.device;
        for (const int64_t v : {key.m, key.n, key.k}) h = (h ^ (uint64_t)v) * 0x9E3779B97F4A7C15ull, h ^= h >> 29;
        return (size_t)h;
    }
};
struct Entry {
    aq_plan plan;
    aq_needs needs;
};

std::mutex lock;
std::unordered_map<Key, Entry, Hash> plans;

int find(int64_t m, int64_t n, int64_t k, DeviceState *state, Entry *out) {
    int status = current_device(state);
    if (status) return status;
    const Key key{state->device, m, n, k};
    {
        const std::lock_guard<std::mutex> guard(lock);
        const auto at = plans.find(key);
        if (at != plans.end()) {
            *out = at->second;
            return 0;
        }
    }
    if ((status = aq_plan_w4a16(m, n, k, AQ_PATH_AUTO, &state->limits, &out->plan))) return status;
    if (aq_plan_problem(m, n, k, &state->limits, &out->plan, &out->needs)) return AQ_GEMM_NO_PLAN;
    const std::lock_guard<std::mutex> guard(lock);
    if (plans.size() >= kMostPlans) plans.clear();
    plans[key] = *out;
    return 0;
}

}  // namespace

extern "C" int aq_linear_workspace(int64_t m, int64_t n, int64_t k, int64_t *bytes) {
    DeviceState state;
    Entry entry;
    const int status = find(m, n, k, &state, &entry);
    if (!status) *bytes = entry.needs.workspace_bytes;
    return status;
}

extern "C" int aq_linear(const void *x, int64_t ldx, const uint8_t *packed, int64_t packed_bytes, float tensor_scale, void *out,
                         void *workspace, int64_t workspace_bytes, int64_t m, int64_t n, int64_t k, int type, void *stream) {
    if (n < 1 || k < 1 || packed_bytes != (int64_t)aq_packed_bytes(n, k)) return AQ_GEMM_OTHER_SHAPE;
    DeviceState state;
    Entry entry;
    int status = find(m, n, k, &state, &entry);
    if (status) return status;
    bool programmatic;
    if ((status = programmatic_possible((cudaStream_t)stream, &programmatic))) return status;
    return aq_w4a16(x, ldx, packed, tensor_scale, out, workspace, workspace_bytes, m, n, k, type, type, &entry.plan, programmatic, stream);
}

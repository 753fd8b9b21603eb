// Devices, their limits, error texts, and memory in the order of a stream.
#include <cstdio>
#include <mutex>

#include "gemm/gemm.h"
#include "gemm/launch.cuh"

namespace {

constexpr unsigned long long kPoolKeepsBytes = 256ull << 20;  // memory that the pool does not give back when a stream is synchronised

std::mutex lock;  // for what is computed once per device
struct {
    std::atomic<bool> ready;
    aq_limits limits;
} states[kMaxDevices];
std::atomic<cudaMemPool_t> pools[kMaxDevices];

int read_limits(int device, aq_limits *out) {
    const RelaxedCapture relaxed;
    cudaError_t e = cudaDeviceGetAttribute(&out->sms, cudaDevAttrMultiProcessorCount, device);
    if (e == cudaSuccess) e = cudaDeviceGetAttribute(&out->smem_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    if (e == cudaSuccess) e = cudaDeviceGetAttribute(&out->major, cudaDevAttrComputeCapabilityMajor, device);
    if (e != cudaSuccess) return status_of(e);
    out->wgmma = wgmma_exists();
    out->native_fp4 = native_fp4_exists();
    return 0;
}

int pool_of(int device, cudaMemPool_t *out) {
    if (device >= kMaxDevices) return status_of(cudaDeviceGetDefaultMemPool(out, device));
    if ((*out = pools[device].load(std::memory_order_acquire))) return 0;
    const std::lock_guard<std::mutex> guard(lock);
    if ((*out = pools[device].load(std::memory_order_acquire))) return 0;
    const RelaxedCapture relaxed;
    cudaMemPoolProps properties = {};
    properties.allocType = cudaMemAllocationTypePinned;
    properties.location.type = cudaMemLocationTypeDevice;
    properties.location.id = device;
    cudaMemPool_t pool;
    int status = status_of(cudaMemPoolCreate(&pool, &properties));
    if (status) return status;
    unsigned long long keeps = kPoolKeepsBytes;
    if ((status = status_of(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &keeps)))) {
        status_of(cudaMemPoolDestroy(pool));
        return status;
    }
    pools[device].store(*out = pool, std::memory_order_release);
    return 0;
}

}  // namespace

int status_of(cudaError_t e) {
    if (e != cudaSuccess) cudaGetLastError();
    return (int)e;
}

int current_device(DeviceState *out) {
    int status = status_of(cudaGetDevice(&out->device));
    if (status) return status;
    if (out->device >= kMaxDevices) return read_limits(out->device, &out->limits);
    auto &state = states[out->device];
    if (!state.ready.load(std::memory_order_acquire)) {
        const std::lock_guard<std::mutex> guard(lock);
        if (!state.ready.load(std::memory_order_acquire)) {
            if ((status = read_limits(out->device, &state.limits))) return status;
            state.ready.store(true, std::memory_order_release);
        }
    }
    out->limits = state.limits;
    return 0;
}

int stream_is_captured(cudaStream_t stream, bool *captured) {
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    const int status = status_of(cudaStreamIsCapturing(stream, &capture));
    *captured = capture != cudaStreamCaptureStatusNone;
    return status;
}

int programmatic_possible(cudaStream_t stream, bool *possible) {
    *possible = false;
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    unsigned long long id;
    cudaGraph_t graph;
    const cudaGraphNode_t *nodes = nullptr;
    const cudaGraphEdgeData *edges = nullptr;
    size_t count = 0;
    int status = status_of(cudaStreamGetCaptureInfo(stream, &capture, &id, &graph, &nodes, &edges, &count));
    if (status) return status;
    *possible = capture == cudaStreamCaptureStatusNone;
    if (capture == cudaStreamCaptureStatusActive && count == 1) {
        cudaGraphNodeType type;
        status = status_of(cudaGraphNodeGetType(nodes[0], &type));
        *possible = !status && type == cudaGraphNodeTypeKernel;
    }
    return status;
}

int StreamMemory::allocate(size_t bytes) {
    DeviceState state;
    cudaMemPool_t pool;
    int status = current_device(&state);
    if (!status) status = pool_of(state.device, &pool);
    return status ? status : status_of(cudaMallocFromPoolAsync(&memory_, bytes, pool, stream_));
}

int StreamMemory::release() {
    if (!memory_) return 0;
    void *memory = memory_;
    memory_ = nullptr;
    return status_of(cudaFreeAsync(memory, stream_));
}

int ReportMemory::prepare() {
    if (!report_) return 0;
    int status = memory_.allocate(sizeof(DeviceReport));
    // Not a copy from this stack: a GPU that reads pageable memory itself may do so after this function has returned.
    if (!status) status = status_of(cudaMemsetAsync(&get()->first, 0xff, sizeof get()->first, stream_));
    if (!status) status = status_of(cudaMemsetAsync(&get()->count, 0, sizeof get()->count, stream_));
    return status;
}

int ReportMemory::read() {
    if (!report_) return 0;
    DeviceReport result;
    int status = status_of(cudaMemcpyAsync(&result, memory_.get(), sizeof result, cudaMemcpyDeviceToHost, stream_));
    const int freed = memory_.release(), synchronised = status_of(cudaStreamSynchronize(stream_));  // before `result` ends
    if (!status) status = freed ? freed : synchronised;
    if (!status) *report_ = aq_report{(int64_t)result.count, (int64_t)result.first};
    return status;
}

extern "C" const char *aq_error_text(int status) {
    switch (status) {
    case AQ_GEMM_NO_PLAN: return "no kernel of this path fits this shape on this device (compute capability 9.0 or later)";
    case AQ_GEMM_NO_NATIVE: return "this device has no native FP4 instruction (it needs sm_120a or sm_121a code)";
    case AQ_GEMM_BAD_PLAN: return "the plan does not fit this product on this device";
    case AQ_GEMM_SMALL_WORKSPACE: return "the workspace has fewer bytes than the plan needs";
    case AQ_GEMM_OTHER_SHAPE: return "the packed weight has another shape";
    default: return cudaGetErrorString((cudaError_t)status);
    }
}

extern "C" int aq_device_count(int *count) { return status_of(cudaGetDeviceCount(count)); }

extern "C" int aq_device_info(int device, aq_device *out) {
    cudaDeviceProp p;
    cudaError_t e = cudaGetDeviceProperties(&p, device);
    if (e != cudaSuccess) return status_of(e);
    snprintf(out->name, sizeof out->name, "%.127s", p.name);
    out->major = p.major;
    out->minor = p.minor;
    out->sms = p.multiProcessorCount;
    out->smem_block = (int)p.sharedMemPerBlockOptin;
    out->l2_bytes = p.l2CacheSize;
    out->memory_bytes = p.totalGlobalMem;
    e = cudaDeviceGetAttribute(&out->clock_khz, cudaDevAttrClockRate, device);
    if (e == cudaSuccess) e = cudaDriverGetVersion(&out->driver);
    if (e == cudaSuccess) e = cudaRuntimeGetVersion(&out->runtime);
    return status_of(e);
}

extern "C" int aq_pointer_device(const void *pointer, int *device) {
    cudaPointerAttributes a;
    const cudaError_t e = cudaPointerGetAttributes(&a, pointer);
    *device = e == cudaSuccess && (a.type == cudaMemoryTypeDevice || a.type == cudaMemoryTypeManaged) ? a.device : -1;
    return status_of(e);
}

extern "C" int aq_current_limits(aq_limits *out) {
    DeviceState state;
    const int status = current_device(&state);
    if (!status) *out = state.limits;
    return status;
}

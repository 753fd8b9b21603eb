// The host side of every launch: statuses, limits of devices, loading and shared memory of kernels, memory in the order of a stream.
#pragma once
#include <cuda_runtime.h>
#include <stdint.h>

#include <atomic>

#include "gemm/gemm.h"

constexpr int kMaxDevices = 64;  // with state of their own; for more, the state is read at each call
constexpr int kSharedWithoutOptIn = 48 << 10;

// The status of a CUDA call. An error is cleared, because the runtime would also report it at a later call.
int status_of(cudaError_t e);

// The current device, and its limits, which are read once.
struct DeviceState {
    int device;
    aq_limits limits;
};
int current_device(DeviceState *out);

// What prevents all kernels from running on such a device, or null: they use bulk copies, clusters and programmatic dependent launch.
inline const char *device_problem(const aq_limits &limits) {
    if (limits.sms < 1) return "the device must have a multiprocessor";
    return limits.major < 9 ? "the device must have compute capability 9.0 or later" : nullptr;
}

int stream_is_captured(cudaStream_t stream, bool *captured);
// Whether a launch on this stream can depend programmatically on what precedes it: outside a capture always; in a capture if the one node
// before it is a kernel. (After a copy, a memset or an allocation, or at a join of streams, such an edge would make the graph invalid.)
int programmatic_possible(cudaStream_t stream, bool *possible);

// Whether compiled code for the current device has a kernel. Without it the kernel is a stub with a smaller launch bound.
template <auto kKernel>
bool kernel_exists(int threads) {
    cudaFuncAttributes attributes;
    return status_of(cudaFuncGetAttributes(&attributes, kKernel)) == 0 && attributes.maxThreadsPerBlock >= threads;
}
bool wgmma_exists();       // in wgmma.cu
bool native_fp4_exists();  // in w4a4.cu

// Calls that the runtime refuses during another thread's capture, or during this thread's, are harmless to the captured stream here.
class RelaxedCapture {
  public:
    RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
    ~RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }

  private:
    cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

// Load a kernel, and let it have as much dynamic shared memory as its device has: once per kernel and device. So a launch makes no driver
// call for it, threads with different plans do not change each other's limit, and the first launch can be captured: a capture refuses to
// load code.
template <auto kKernel>
int prepare_kernel(bool more_shared_memory) {
    enum : uint8_t { kUnknown, kLoaded, kOptedIn };
    static std::atomic<uint8_t> states[kMaxDevices];
    DeviceState device;
    int status = current_device(&device);
    if (status) return status;
    const bool known = device.device < kMaxDevices;
    const uint8_t needed = more_shared_memory ? kOptedIn : kLoaded;
    if (known && states[device.device].load(std::memory_order_acquire) >= needed) return 0;
    const RelaxedCapture relaxed;
    cudaFuncAttributes attributes;
    if ((status = status_of(cudaFuncGetAttributes(&attributes, kKernel)))) return status;
    if (more_shared_memory) {
        const int bytes = device.limits.smem_bytes - (int)attributes.sharedSizeBytes;
        if ((status = status_of(cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes)))) return status;
    }
    if (known) {
        uint8_t before = kUnknown;
        while (before < needed && !states[device.device].compare_exchange_weak(before, needed, std::memory_order_release)) continue;
    }
    return 0;
}

struct Launch {
    dim3 blocks;
    int threads;
    cudaStream_t stream;
    bool pdl = false;  // may start before the previous kernel of the stream ends; the kernel waits for it
    int smem_bytes = 0, cluster_size = 1;
};

template <auto kKernel, typename... Args>
int launch(const Launch &how, const Args &...args) {
    const int status = prepare_kernel<kKernel>(how.smem_bytes > kSharedWithoutOptIn);
    if (status) return status;
    cudaLaunchAttribute attributes[2];
    unsigned count = 0;
    if (how.cluster_size > 1) {
        attributes[count].id = cudaLaunchAttributeClusterDimension;
        attributes[count].val.clusterDim.x = (unsigned)how.cluster_size;
        attributes[count].val.clusterDim.y = attributes[count].val.clusterDim.z = 1;
        count++;
    }
    if (how.pdl) {
        attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attributes[count].val.programmaticStreamSerializationAllowed = 1;
        count++;
    }
    cudaLaunchConfig_t config = {};
    config.gridDim = how.blocks;
    config.blockDim = dim3((unsigned)how.threads);
    config.dynamicSmemBytes = (size_t)how.smem_bytes;
    config.stream = how.stream;
    config.attrs = attributes;
    config.numAttrs = count;
    return status_of(cudaLaunchKernelEx(&config, kKernel, args...));
}

// Device memory of one call, from this module's own pool: allocated and freed in the order of the stream, so that calls of several threads
// on one stream never have the same memory. In a stream that is captured it belongs to the graph.
class StreamMemory {
  public:
    explicit StreamMemory(cudaStream_t stream) : stream_(stream) {}
    StreamMemory(const StreamMemory &) = delete;
    StreamMemory &operator=(const StreamMemory &) = delete;
    ~StreamMemory() { release(); }
    int allocate(size_t bytes);
    int release();
    void *get() const { return memory_; }

  private:
    cudaStream_t stream_;
    void *memory_ = nullptr;
};

// The report of a kernel that checks its input.
struct DeviceReport {
    unsigned long long first, count;
};
#ifdef __CUDACC__
__device__ __forceinline__ void report_bad(DeviceReport *report, unsigned long long index, unsigned long long count) {
    if (!report) return;
    atomicMin(&report->first, index);
    atomicAdd(&report->count, count);
}
#endif

// Memory for the report before the launch; the report itself after it, when the stream has finished.
class ReportMemory {
  public:
    ReportMemory(aq_report *report, cudaStream_t stream) : report_(report), stream_(stream), memory_(stream) {}
    int prepare();
    DeviceReport *get() const { return (DeviceReport *)memory_.get(); }  // null if the report is not needed
    int read();

  private:
    aq_report *report_;
    cudaStream_t stream_;
    StreamMemory memory_;
};

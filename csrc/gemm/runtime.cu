// Device memory, streams and timed graphs, for callers without torch.
#include <cuda_runtime.h>

#include "gemm/runtime.h"
#include "gemm/launch.cuh"

extern "C" int aq_stream_new(void **stream) { return status_of(cudaStreamCreateWithFlags((cudaStream_t *)stream, cudaStreamNonBlocking)); }
extern "C" int aq_stream_free(void *stream) { return status_of(cudaStreamDestroy((cudaStream_t)stream)); }
extern "C" int aq_stream_sync(void *stream) { return status_of(cudaStreamSynchronize((cudaStream_t)stream)); }
// While the stream is captured there is nothing to wait for: a graph is launched after its capture, in the order that its user chooses.
extern "C" int aq_stream_after(void *stream, void *earlier) {
    bool captured = false;
    int status = stream_is_captured((cudaStream_t)stream, &captured);
    if (status || captured) return status;
    cudaEvent_t event;
    if ((status = status_of(cudaEventCreateWithFlags(&event, cudaEventDisableTiming)))) return status;
    status = status_of(cudaEventRecord(event, (cudaStream_t)earlier));
    if (!status) status = status_of(cudaStreamWaitEvent((cudaStream_t)stream, event, 0));
    const int destroyed = status_of(cudaEventDestroy(event));
    return status ? status : destroyed;
}
extern "C" int aq_capture_begin(void *stream) {
    return status_of(cudaStreamBeginCapture((cudaStream_t)stream, cudaStreamCaptureModeThreadLocal));
}

extern "C" int aq_capture_end(void *stream, void **exec) {
    cudaGraph_t graph = nullptr;
    cudaError_t e = cudaStreamEndCapture((cudaStream_t)stream, &graph);
    if (e == cudaSuccess) e = cudaGraphInstantiate((cudaGraphExec_t *)exec, graph, 0);
    if (graph) cudaGraphDestroy(graph);
    return status_of(e);
}
extern "C" int aq_graph_free(void *exec) { return status_of(cudaGraphExecDestroy((cudaGraphExec_t)exec)); }

extern "C" int aq_graph_time(void *exec, void *stream, float *ms) {
    cudaEvent_t a = nullptr, b = nullptr;
    cudaError_t e = cudaEventCreate(&a);
    if (e == cudaSuccess) e = cudaEventCreate(&b);
    if (e == cudaSuccess) e = cudaEventRecord(a, (cudaStream_t)stream);
    if (e == cudaSuccess) e = cudaGraphLaunch((cudaGraphExec_t)exec, (cudaStream_t)stream);
    if (e == cudaSuccess) e = cudaEventRecord(b, (cudaStream_t)stream);
    if (e == cudaSuccess) e = cudaEventSynchronize(b);
    if (e == cudaSuccess) e = cudaEventElapsedTime(ms, a, b);
    if (a) cudaEventDestroy(a);
    if (b) cudaEventDestroy(b);
    return status_of(e);
}

// Also while this thread captures a stream: the memory is not the graph's.
extern "C" int aq_malloc(int64_t bytes, void **out) {
    const RelaxedCapture relaxed;
    return status_of(cudaMalloc(out, (size_t)bytes));
}
extern "C" int aq_free(void *p) {
    const RelaxedCapture relaxed;
    return status_of(cudaFree(p));
}
extern "C" int aq_copy(void *to, const void *from, int64_t bytes, void *stream) {
    return status_of(cudaMemcpyAsync(to, from, (size_t)bytes, cudaMemcpyDefault, (cudaStream_t)stream));
}
extern "C" int aq_fill(void *to, int value, int64_t bytes, void *stream) {
    return status_of(cudaMemsetAsync(to, value, (size_t)bytes, (cudaStream_t)stream));
}
extern "C" int aq_use_device(int device, int *before) {
    cudaError_t e = cudaGetDevice(before);
    if (e == cudaSuccess && *before != device) e = cudaSetDevice(device);
    return status_of(e);
}

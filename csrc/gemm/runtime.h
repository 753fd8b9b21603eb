/* Device memory, streams and timed graphs, in plain C. Status as in gemm.h. */
#ifndef ANNIE_QUANT_GEMM_RUNTIME_H
#define ANNIE_QUANT_GEMM_RUNTIME_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif
int aq_stream_new(void **stream);
int aq_stream_free(void *stream);
int aq_stream_sync(void *stream);
/* Work that is put on `stream` from now on waits for the work that `earlier` has now. */
int aq_stream_after(void *stream, void *earlier);
int aq_capture_begin(void *stream);
int aq_capture_end(void *stream, void **exec);
int aq_graph_free(void *exec);
int aq_graph_time(void *exec, void *stream, float *ms);
int aq_malloc(int64_t bytes, void **out);
int aq_free(void *p);
int aq_copy(void *to, const void *from, int64_t bytes, void *stream);
int aq_fill(void *to, int value, int64_t bytes, void *stream);
int aq_use_device(int device, int *before);
#ifdef __cplusplus
}
#endif
#endif

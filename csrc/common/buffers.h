/* Checks of the buffers that a caller passes: contiguous, of an exact size, disjoint. */
#ifndef AQ_COMMON_BUFFERS_H
#define AQ_COMMON_BUFFERS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* A buffer that is released where its scope ends. */
#define SCOPED_BUFFER __attribute__((cleanup(PyBuffer_Release))) Py_buffer

/* Set *out = a * b. Returns false if size_t overflows. */
static inline bool size_product(size_t a, size_t b, size_t *out)
{
    return !__builtin_mul_overflow(a, b, out);
}

/* Whether the buffer has exactly `expected` bytes. Sets ValueError with both sizes if not. */
static inline bool buffer_has_size(const Py_buffer *buffer, size_t expected, const char *what)
{
    if ((size_t)buffer->len == expected)
        return true;
    PyErr_Format(PyExc_ValueError, "%s: %zd bytes, expected %zu", what, buffer->len, expected);
    return false;
}

/* A buffer and its name in error messages. */
struct named_buffer {
    const Py_buffer *buffer;
    const char *name;
};

static inline bool buffers_share_a_byte(const Py_buffer *a, const Py_buffer *b)
{
    uintptr_t p = (uintptr_t)a->buf, q = (uintptr_t)b->buf;
    return a->len > 0 && b->len > 0 && p < q + (size_t)b->len && q < p + (size_t)a->len;
}

/* Whether no output shares a byte with another buffer. `all` lists the `outputs` outputs first, then the inputs; `buf` is NULL for an
 * optional one that was not passed. Sets ValueError with both names if not: kernels read and write in blocks, in several
 * threads, and would read what they have just written. */
static inline bool outputs_disjoint(const struct named_buffer *all, int outputs, int count)
{
    for (int i = 0; i < outputs; i++)
        for (int k = i + 1; k < count; k++)
            if (all[i].buffer->buf && all[k].buffer->buf && buffers_share_a_byte(all[i].buffer, all[k].buffer)) {
                PyErr_Format(PyExc_ValueError, "%s and %s overlap in memory", all[k].name, all[i].name);
                return false;
            }
    return true;
}

/* outputs_disjoint for a list that is written at the call, the outputs first. */
#define OUTPUTS_DISJOINT(outputs, ...)                                                                                                     \
    outputs_disjoint((const struct named_buffer[]){__VA_ARGS__}, (outputs),                                                                \
                     (int)(sizeof((const struct named_buffer[]){__VA_ARGS__}) / sizeof(struct named_buffer)))

#endif

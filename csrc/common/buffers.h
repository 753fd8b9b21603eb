/* Checks of the buffers that a caller passes: contiguous, of an exact size, disjoint. */
#ifndef AQ_COMMON_BUFFERS_H
#define AQ_COMMON_BUFFERS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

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

/* Whether two buffers share no byte. Sets ValueError if they do: kernels read and write in blocks and would read their own output. */
static inline bool buffers_disjoint(const Py_buffer *a, const Py_buffer *b, const char *what)
{
    uintptr_t p = (uintptr_t)a->buf, q = (uintptr_t)b->buf;
    if (a->len == 0 || b->len == 0 || p + (size_t)a->len <= q || q + (size_t)b->len <= p)
        return true;
    PyErr_Format(PyExc_ValueError, "%s overlap in memory", what);
    return false;
}

#endif

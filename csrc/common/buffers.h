/* Bytes that a caller lends to a call: contiguous, of a stated size, refused in one line otherwise. */
#ifndef AQ_COMMON_BUFFERS_H
#define AQ_COMMON_BUFFERS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* `a * b` in *out, or false where size_t cannot hold it. */
static inline bool size_product(size_t a, size_t b, size_t *out)
{
    return !__builtin_mul_overflow(a, b, out);
}

/* Is the buffer of exactly `want` bytes? Sets ValueError naming both sizes. */
static inline bool buffer_holds(const Py_buffer *buffer, size_t want, const char *what)
{
    if ((size_t)buffer->len == want)
        return true;
    PyErr_Format(PyExc_ValueError, "%s: %zd bytes, expected %zu", what, buffer->len, want);
    return false;
}

/* Do two buffers share no byte? Sets ValueError; kernels read and write in blocks and would see their own output. */
static inline bool buffers_apart(const Py_buffer *a, const Py_buffer *b, const char *what)
{
    uintptr_t p = (uintptr_t)a->buf, q = (uintptr_t)b->buf;
    if (a->len == 0 || b->len == 0 || p + (size_t)a->len <= q || q + (size_t)b->len <= p)
        return true;
    PyErr_Format(PyExc_ValueError, "%s overlap in memory", what);
    return false;
}

#endif

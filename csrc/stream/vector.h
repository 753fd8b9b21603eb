/* A growing array: rows of one size, grown by half, with an overflow check. The kernel moves the pages of large arrays (mremap) without
 * copying. */
#ifndef AQ_STREAM_VECTOR_H
#define AQ_STREAM_VECTOR_H

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

struct vector {
    uint8_t *base;
    size_t size, capacity; /* in bytes */
};

/* Return space for `more` bytes at the end, or NULL if memory is exhausted. The caller fills it. */
static inline void *vector_grow(struct vector *v, size_t more)
{
    if (more > SIZE_MAX / 2 - v->size)
        return NULL;
    size_t needed = v->size + more;
    if (needed > v->capacity || !v->base) {
        size_t capacity = needed + needed / 2 + 64;
        uint8_t *grown = realloc(v->base, capacity);
        if (!grown)
            return NULL;
        v->base = grown;
        v->capacity = capacity;
    }
    void *end = v->base + v->size;
    v->size = needed;
    return end;
}

static inline int vector_add(struct vector *v, const void *bytes, size_t size)
{
    void *end = vector_grow(v, size);
    if (!end)
        return -1;
    if (size)
        memcpy(end, bytes, size);
    return 0;
}

static inline void vector_free(struct vector *v)
{
    free(v->base);
    memset(v, 0, sizeof *v);
}

#endif

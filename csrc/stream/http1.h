/* A reader of HTTP/1.1 responses with the framing of RFC 9112: status line, fields, Content-Length, chunked with trailers, and bodies
 * that end with the connection. Reads may be split anywhere; the body is passed on without a copy.
 *
 * It is strict where leniency would guess the length of a body: a space before a colon, folded fields, two lengths, a length together
 * with a transfer coding, and codings other than chunked are errors. A bare LF ends a line of the head (RFC 9112 2.2 allows it), but not
 * one of the chunked framing. Every size is limited.
 */
#ifndef AQ_STREAM_HTTP1_H
#define AQ_STREAM_HTTP1_H

#include "vector.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    HTTP1_MAX_LINE = 64 << 10,      /* a status line or a field */
    HTTP1_MAX_HEAD = 256 << 10,     /* a head, or the trailers */
    HTTP1_MAX_INTERIM = 32,         /* 1xx answers before the final answer */
    HTTP1_MAX_CHUNK_LINE = 4 << 10, /* a chunk's size with its extensions */
    HTTP1_TYPE_SIZE = 64,
};

enum http1_status {
    HTTP1_MORE = 0, /* the answer is incomplete */
    HTTP1_DONE = 1, /* the answer is complete; bytes after it are not read */
    HTTP1_NOT_HTTP,
    HTTP1_BAD_FIELD,
    HTTP1_BAD_LENGTH,
    HTTP1_BAD_CODING,
    HTTP1_BAD_CHUNK,
    HTTP1_SWITCHED, /* 101: to a protocol that was not requested */
    HTTP1_TOO_LARGE,
    HTTP1_TRUNCATED, /* the connection ended inside the answer */
    HTTP1_NO_ANSWER, /* the connection ended before the first byte */
    HTTP1_NO_MEMORY,
    HTTP1_REFUSED, /* the sink stopped the reader */
};

/* Receives the result; returning false stops the reader. `line` gets each line of the head and of the trailers with its line end; a
 * status line begins a new head. */
struct http1_sink {
    bool (*line)(void *context, const char *line, size_t size);
    bool (*body)(void *context, const uint8_t *bytes, size_t size);
    void *context;
};

struct http1 {
    uint64_t left;         /* bytes of the body or of the chunk that are still expected */
    struct vector pending; /* the beginning of a line from earlier reads */
    size_t head_size;      /* bytes of this head, or of this chunk's size line */
    uint64_t length;       /* Content-Length */
    int interim, digits;
    uint16_t status;      /* 0: no status line yet */
    uint8_t state, minor; /* HTTP/1.minor */
    bool no_body;         /* the answer to a HEAD request */
    bool began, has_length, chunked, close, keep_alive;
    bool keep;                  /* after HTTP1_DONE: the connection may be reused */
    char type[HTTP1_TYPE_SIZE]; /* Content-Type, truncated */
};

void http1_init(struct http1 *h, bool no_body);
void http1_free(struct http1 *h);

/* Process one read. *used: number of bytes that belong to this answer. Returns an http1_status. */
int http1_feed(struct http1 *h, const uint8_t *bytes, size_t size, size_t *used, const struct http1_sink *sink);

/* Process the end of the connection. */
int http1_end(struct http1 *h);

/* Return the description of a status. */
const char *http1_explain(int status);

#endif

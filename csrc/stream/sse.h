/* Splits a byte stream into server-sent events as https://html.spec.whatwg.org/multipage/server-sent-events.html defines them: lines
 * end in LF, CR or CRLF, a blank line ends an event, a byte order mark may come first.
 *
 * Reads may be split anywhere. An event is passed on with the read that completes it, so a CR that ends a blank line ends the event at
 * once; an LF that follows in the next read belongs to the next frame. Every byte is passed on exactly once and in order: the frames of
 * a stream, joined, are the stream.
 *
 * Newline-delimited JSON (Ollama's streams) is read by the same framer with `lines` set: every line that ends in LF or CRLF and is not
 * blank is one event.
 */
#ifndef AQ_STREAM_SSE_H
#define AQ_STREAM_SSE_H

#include "vector.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum sse_kind {
    SSE_DATA = 1,   /* has data */
    SSE_DONE = 2,   /* data is exactly [DONE] */
    SSE_SILENT = 3, /* comments, event, id or retry without data: a ping */
    SSE_TAIL = 4,   /* bytes after the last blank line, when the stream ended */
    SSE_BODY = 5,   /* not an event stream: the whole body of an answer */
};

enum sse_flag {
    SSE_MERGED = 1,   /* its read completed other data events too: they share one stamp */
    SSE_EVENT = 2,    /* has an event field; the name is in the frame */
    SSE_COMMENT = 4,  /* has a comment line */
    SSE_OVERREAD = 8, /* its read took more than the kernel's stamp is valid for: it has no kernel stamp */
};

enum sse_status { SSE_OK = 0, SSE_TOO_LARGE = 1, SSE_NO_MEMORY = 2 };

struct sse_frame {
    uint32_t data_start; /* the first data line's value, from the start of the frame */
    uint32_t data_size;
    uint16_t data_lines; /* if over 1, the value is the frame's data lines joined with LF */
    uint8_t kind;
    uint8_t flags;
};

/* Receives one frame. Any value but 0 stops the framer, which returns it. */
typedef int (*sse_emit)(void *context, const uint8_t *frame, size_t size, const struct sse_frame *info);

struct sse {
    struct vector pending; /* the beginning of a frame from earlier reads */
    size_t scanned;        /* no line end before this position in the frame */
    size_t line_start;     /* position in the frame */
    size_t max_frame;
    struct sse_frame frame;
    bool after_cr;   /* the last byte was a CR that ended a line: a LF now belongs to it */
    bool first_line; /* a byte order mark may follow */
    bool any_field;  /* the frame has more than blank lines */
    bool lines;      /* newline-delimited JSON; set it before the first read */
};

/* max_frame: limit of an event's size, at most 2^32 - 1. */
void sse_init(struct sse *s, size_t max_frame);
void sse_free(struct sse *s);

/* Process one read. Returns an sse_status, or the value of `emit`. */
int sse_feed(struct sse *s, const uint8_t *bytes, size_t size, sse_emit emit, void *context);

/* Process the end of the stream: the rest becomes one SSE_TAIL frame, its last line read as if it had ended. */
int sse_finish(struct sse *s, sse_emit emit, void *context);

#endif

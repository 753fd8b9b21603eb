/* The framer of sse.h. Linear in the bytes fed: each byte is searched for a line end once, however the reads are split. */
#include "sse.h"

void sse_init(struct sse *s, size_t max_frame)
{
    memset(s, 0, sizeof *s);
    s->max_frame = max_frame < UINT32_MAX ? max_frame : UINT32_MAX;
    s->first_line = true;
}

void sse_free(struct sse *s)
{
    vector_free(&s->pending);
}

static void start_frame(struct sse *s)
{
    memset(&s->frame, 0, sizeof s->frame);
    s->line_start = s->scanned = 0;
    s->any_field = false;
}

/* Return the position of the first byte in [at, size) that ends a line, or size. A CR does not end a line of JSON. */
static size_t line_end(const struct sse *s, const uint8_t *bytes, size_t at, size_t size)
{
    const uint8_t *lf = memchr(bytes + at, '\n', size - at);
    size_t end = lf ? (size_t)(lf - bytes) : size;
    const uint8_t *cr = s->lines ? NULL : memchr(bytes + at, '\r', end - at);
    return cr ? (size_t)(cr - bytes) : end;
}

/* Read one line that is not blank: [start, end) of the frame at `bytes`. */
static void read_field(struct sse *s, const uint8_t *bytes, size_t start, size_t end)
{
    s->any_field = true;
    if (bytes[start] == ':') {
        s->frame.flags |= SSE_COMMENT;
        return;
    }
    const uint8_t *colon = memchr(bytes + start, ':', end - start);
    size_t name_end = colon ? (size_t)(colon - bytes) : end;
    size_t value = colon ? name_end + 1 : end;
    if (value < end && bytes[value] == ' ')
        value++;
    size_t name_size = name_end - start;
    if (name_size == 4 && memcmp(bytes + start, "data", 4) == 0) {
        if (s->frame.data_lines == 0) {
            s->frame.data_start = (uint32_t)value;
            s->frame.data_size = (uint32_t)(end - value);
        }
        if (s->frame.data_lines < UINT16_MAX)
            s->frame.data_lines++;
    } else if (name_size == 5 && memcmp(bytes + start, "event", 5) == 0) {
        s->frame.flags |= SSE_EVENT;
    }
}

static uint8_t kind_of(const struct sse *s, const uint8_t *bytes)
{
    static const char done[] = "[DONE]";
    if (s->frame.data_lines == 0)
        return SSE_SILENT;
    size_t size = s->frame.data_size;
    while (size && bytes[s->frame.data_start + size - 1] == ' ')
        size--;
    bool is_done = s->frame.data_lines == 1 && size == sizeof done - 1 && memcmp(bytes + s->frame.data_start, done, sizeof done - 1) == 0;
    return is_done ? SSE_DONE : SSE_DATA;
}

/* Read one line of newline-delimited JSON: [start, end) of the frame. Returns true unless it is blank. */
static bool read_record(struct sse *s, const uint8_t *bytes, size_t start, size_t end)
{
    while (end > start && (bytes[end - 1] == '\r' || bytes[end - 1] == ' ' || bytes[end - 1] == '\t'))
        end--;
    if (start == end)
        return false;
    s->any_field = true;
    s->frame.data_start = (uint32_t)start;
    s->frame.data_size = (uint32_t)(end - start);
    s->frame.data_lines = 1;
    return true;
}

/* Read the whole line [line_start, end). Returns true if it ends a frame with content: a blank line, or a line of JSON. */
static bool read_line(struct sse *s, const uint8_t *bytes, size_t end)
{
    size_t start = s->line_start;
    if (s->first_line) {
        s->first_line = false;
        if (end - start >= 3 && memcmp(bytes + start, "\xef\xbb\xbf", 3) == 0)
            start += 3;
    }
    if (s->lines)
        return read_record(s, bytes, start, end);
    if (start < end) {
        read_field(s, bytes, start, end);
        return false;
    }
    return s->any_field;
}

/* Emit every whole frame in `bytes`; *used is the start of the incomplete one. */
static int cut(struct sse *s, const uint8_t *bytes, size_t size, sse_emit emit, void *context, size_t *used)
{
    size_t frame = 0;
    *used = 0;
    if (s->after_cr && s->scanned < size) {
        s->after_cr = false;
        if (bytes[s->scanned] == '\n')
            s->line_start = ++s->scanned;
    }
    for (;;) {
        const uint8_t *at = bytes + frame;
        size_t left = size - frame;
        size_t end = line_end(s, at, s->scanned, left);
        if (end == left) {
            s->scanned = left;
            *used = frame;
            return left > s->max_frame ? SSE_TOO_LARGE : SSE_OK;
        }
        bool whole = read_line(s, at, end);
        size_t next = end + 1;
        if (at[end] == '\r') { /* only in an event stream */
            if (next == left)
                s->after_cr = true;
            else if (at[next] == '\n')
                next++;
        }
        s->line_start = s->scanned = next;
        if (!whole)
            continue;
        if (next > s->max_frame)
            return SSE_TOO_LARGE;
        s->frame.kind = kind_of(s, at);
        int status = emit(context, at, next, &s->frame);
        if (status)
            return status;
        frame += next;
        *used = frame;
        start_frame(s);
    }
}

int sse_feed(struct sse *s, const uint8_t *bytes, size_t size, sse_emit emit, void *context)
{
    size_t used = 0;
    if (s->pending.size == 0) {
        int status = cut(s, bytes, size, emit, context, &used);
        if (status || used == size)
            return status;
        return vector_add(&s->pending, bytes + used, size - used) ? SSE_NO_MEMORY : SSE_OK;
    }
    if (vector_add(&s->pending, bytes, size))
        return SSE_NO_MEMORY;
    int status = cut(s, s->pending.base, s->pending.size, emit, context, &used);
    /* After a failure, too: sse_finish must not pass on again what has been passed on. */
    s->pending.size -= used;
    memmove(s->pending.base, s->pending.base + used, s->pending.size);
    return status;
}

int sse_finish(struct sse *s, sse_emit emit, void *context)
{
    if (s->pending.size == 0)
        return SSE_OK;
    if (s->line_start < s->pending.size)
        read_line(s, s->pending.base, s->pending.size);
    s->frame.kind = s->any_field ? SSE_TAIL : SSE_SILENT;
    int status = emit(context, s->pending.base, s->pending.size, &s->frame);
    s->pending.size = 0;
    s->after_cr = false;
    start_frame(s);
    return status;
}

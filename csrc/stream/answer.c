/* Storing an answer: its header, its frames, one row per event and one per read. Used by both carriers (plain.c, libcurl.c). */
#define _GNU_SOURCE
#include "parts.h"

enum { ANSWER_HEAD_BYTES = HTTP1_MAX_HEAD }; /* libcurl ends a transfer at 300 KB, as if the connection had broken */

void answer_first_byte(struct transfer *t)
{
    struct client *c = t->client;
    if (!t->began) {
        struct request_row *row = client_row(c, t->index);
        t->began = true;
        row->first_byte_ns = c->now_ns;
        row->first_byte_kernel_ns = c->now_kernel_ns;
    }
    t->last_read_ns = c->now_ns;
}

/* RFC 9112 4: "HTTP/1.1 200", or "HTTP/2 200" as libcurl writes it. */
static bool is_final_status(const char *line, size_t size)
{
    const char *space = memchr(line, ' ', size);
    return space && (size_t)(space - line) + 1 < size && space[1] != '1';
}

bool answer_line(struct transfer *t, const char *line, size_t size)
{
    if (size > ANSWER_HEAD_BYTES - t->head_bytes) {
        t->cause = CAUSE_HEAD_SIZE;
        return false;
    }
    t->head_bytes += size;
    if (t->head_ended && t->final_head) /* a trailer */
        return true;
    if (!t->header.size || t->head_ended) { /* a status line; a 1xx answer may have been received before this one */
        t->header.size = 0;
        t->head_ended = false;
        t->final_head = is_final_status(line, size);
    }
    t->head_ended = size && (line[0] == '\n' || (size > 1 && line[0] == '\r' && line[1] == '\n'));
    if (text_begins((struct text){line, size}, "set-cookie:")) /* a secret that nothing needs */
        return true;
    if (vector_add(&t->header, line, size)) {
        t->client->no_memory = true;
        return false;
    }
    return true;
}

/* Events that one read completed share its stamp: set the flag in the rows written so far. */
static void flag_merged(const struct transfer *t)
{
    struct event_row *rows = (struct event_row *)t->client->result->events.base;
    size_t end = t->client->result->events.size / sizeof *rows;
    for (size_t i = t->first_event; i < end; i++)
        if (rows[i].request == t->index)
            rows[i].flags |= SSE_MERGED;
}

/* Store one frame and its row. */
static int store_frame(void *context, const uint8_t *frame, size_t size, const struct sse_frame *info)
{
    struct transfer *t = context;
    struct client *c = t->client;
    struct plan_result *r = c->result;
    if (++t->answer_events > c->plan->max_answer_events) {
        t->cause = CAUSE_ANSWER_SIZE;
        return SSE_TOO_LARGE;
    }
    t->read_events += info->kind == SSE_DATA;
    uint8_t merged = t->read_events > 1 ? SSE_MERGED : 0, overread = c->now_overread ? SSE_OVERREAD : 0;
    struct event_row row = {
        .user_ns = c->now_ns,
        .kernel_ns = c->now_kernel_ns,
        .offset = r->frames.size,
        .size = (uint32_t)size,
        .data_start = info->data_start,
        .data_size = info->data_size,
        .request = t->index,
        .read = (uint32_t)t->last_read,
        .data_lines = info->data_lines,
        .kind = info->kind,
        .flags = (uint8_t)(info->flags | merged | overread),
    };
    if (vector_add(&r->frames, frame, size) || vector_add(&r->events, &row, sizeof row))
        return SSE_NO_MEMORY;
    if (info->kind == SSE_DATA && t->read_events == 2)
        flag_merged(t);
    return SSE_OK;
}

/* One read may arrive in several parts (one per chunk); they are one row. */
static int store_read(struct transfer *t, size_t size)
{
    struct client *c = t->client;
    struct vector *reads = &c->result->reads;
    if (t->last_action == c->action) {
        struct read_row *last = (struct read_row *)reads->base + t->last_read;
        if (size <= UINT32_MAX - last->size) {
            last->size += (uint32_t)size;
            return SSE_OK;
        }
    }
    t->last_action = c->action;
    t->last_read = reads->size / sizeof(struct read_row);
    t->first_event = c->result->events.size / sizeof(struct event_row);
    t->read_events = 0;
    struct read_row row = {.user_ns = c->now_ns, .request = t->index, .size = (uint32_t)size};
    return vector_add(reads, &row, sizeof row) ? SSE_NO_MEMORY : SSE_OK;
}

static bool is_type(const char *type, const char *expected)
{
    return type && text_begins((struct text){type, strlen(type)}, expected);
}

/* Servers are lenient about the content type of an event stream, but not about that of an error page or of newline-delimited JSON. */
void answer_begin_body(struct transfer *t, int status, const char *type)
{
    t->status = status;
    t->framer.lines = is_type(type, "application/x-ndjson") || is_type(type, "application/ndjson") || is_type(type, "application/jsonl");
    /* is_type compares a prefix: application/jsonl begins with application/json */
    bool other = is_type(type, "application/json") || is_type(type, "text/html");
    t->event_stream = status >= 200 && status < 300 && (t->framer.lines || !other);
    t->body_began = true;
}

static int store_body(struct transfer *t, const char *bytes, size_t size)
{
    if (size > t->client->plan->max_answer_bytes - t->answer_bytes) {
        t->cause = CAUSE_ANSWER_SIZE;
        return SSE_TOO_LARGE;
    }
    t->answer_bytes += size;
    if (store_read(t, size))
        return SSE_NO_MEMORY;
    if (!t->event_stream) {
        if (size > t->client->plan->max_event_bytes - t->body.size)
            return SSE_TOO_LARGE;
        return vector_add(&t->body, bytes, size) ? SSE_NO_MEMORY : SSE_OK;
    }
    return sse_feed(&t->framer, (const uint8_t *)bytes, size, store_frame, t);
}

bool answer_body(struct transfer *t, const void *bytes, size_t size)
{
    int status = store_body(t, bytes, size);
    if (status == SSE_TOO_LARGE && t->cause == CAUSE_NONE)
        t->cause = CAUSE_EVENT_SIZE;
    else if (status == SSE_NO_MEMORY)
        t->client->no_memory = true;
    return status == SSE_OK;
}

void answer_end(struct transfer *t)
{
    int status = SSE_OK;
    if (t->event_stream) {
        status = sse_finish(&t->framer, store_frame, t);
    } else if (t->body.size) {
        struct sse_frame whole = {.data_size = (uint32_t)t->body.size, .kind = SSE_BODY};
        status = store_frame(t, t->body.base, t->body.size, &whole);
    }
    if (status == SSE_NO_MEMORY)
        t->client->no_memory = true;
}

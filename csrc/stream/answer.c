/* Checking and storing an answer: its header, its frames, one row per event and one per read.
 *
 * The checks are for what libcurl accepts and where leniency guesses the length of a body (RFC 9112 5 and 6): a space before a colon,
 * folded fields, control characters, lengths that are not plain numbers, two lengths, a length together with a transfer coding, codings
 * other than chunked, a switch of protocols. */
#define _GNU_SOURCE
#include "parts.h"
#include "text.h"

enum { ANSWER_HEAD_BYTES = 256 << 10, LENGTH_DIGITS = 18 }; /* libcurl ends a transfer at 300 KB, as if the connection had broken */

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

/* ---- the head */

static bool is_digit(char c)
{
    return c >= '0' && c <= '9';
}

/* Read a status line (RFC 9112 4): "HTTP/1.1 200 OK", or "HTTP/2 200" as libcurl writes it. Returns what is wrong with it, or NULL. */
static const char *read_status(struct transfer *t, struct text line)
{
    static const char *const versions[] = {"HTTP/1.1 ", "HTTP/1.0 ", "HTTP/2 "};
    size_t known = t->client->plan->http == PLAN_HTTP_1_1 ? 2 : 3;
    size_t version = 0;
    while (version < known && !text_begins(line, versions[version]))
        version++;
    size_t at = version < known ? strlen(versions[version]) : line.size;
    bool three_digits = at + 3 <= line.size && is_digit(line.at[at]) && is_digit(line.at[at + 1]) && is_digit(line.at[at + 2]);
    if (!three_digits || (at + 3 < line.size && line.at[at + 3] != ' '))
        return "the answer is not HTTP/1.0 or HTTP/1.1";
    if (memcmp(line.at + at, "101", 3) == 0)
        return "the server switched to a protocol that was not requested";
    size_t all_size = t->head.all_size;
    t->head = (struct head){.has_status = true, .final = line.at[at] != '1', .http_1_0 = version == 1, .all_size = all_size};
    t->header.size = 0; /* of a 1xx answer that was received before this one */
    return NULL;
}

static const char *read_length(struct head *head, struct text value)
{
    static const char *const malformed = "the answer's Content-Length is malformed or contradicts itself";
    int64_t length = 0;
    if (value.size == 0 || value.size > LENGTH_DIGITS || head->chunked)
        return malformed;
    for (size_t i = 0; i < value.size; i++) {
        if (!is_digit(value.at[i]))
            return malformed;
        length = length * 10 + (value.at[i] - '0');
    }
    if (head->has_length && head->length != length)
        return malformed;
    head->has_length = true;
    head->length = length;
    return NULL;
}

static const char *read_coding(struct head *head, struct text value)
{
    if (head->has_length)
        return "the answer's Content-Length is malformed or contradicts itself";
    if (head->chunked || head->http_1_0 || !text_is(value, "chunked"))
        return "the answer's Transfer-Encoding is not plainly chunked";
    head->chunked = true;
    return NULL;
}

/* Read a field of a head or of the trailers. Returns what is wrong with it, or NULL. */
static const char *read_field(struct head *head, struct text line)
{
    size_t name = 0;
    while (name < line.size && text_is_tchar(line.at[name]))
        name++;
    bool well_formed = name > 0 && name < line.size && line.at[name] == ':';
    for (size_t i = name; i < line.size; i++)
        well_formed &= ((unsigned char)line.at[i] >= ' ' || line.at[i] == '\t') && line.at[i] != 0x7f;
    if (!well_formed)
        return "the answer has a malformed header field";
    if (head->ended) /* a trailer cannot change the framing */
        return NULL;
    struct text key = {line.at, name};
    struct text value = text_trimmed((struct text){line.at + name + 1, line.size - name - 1});
    head->secret = text_is(key, "set-cookie");
    if (text_is(key, "content-length"))
        return read_length(head, value);
    return text_is(key, "transfer-encoding") ? read_coding(head, value) : NULL;
}

static struct text without_end(const char *line, size_t size)
{
    if (size && line[size - 1] == '\n')
        size--;
    if (size && line[size - 1] == '\r')
        size--;
    return (struct text){line, size};
}

bool answer_line(struct transfer *t, const char *line, size_t size)
{
    struct head *head = &t->head;
    if (size > ANSWER_HEAD_BYTES - head->all_size) {
        t->cause = CAUSE_HEAD_SIZE;
        return false;
    }
    head->all_size += size;
    struct text text = without_end(line, size);
    bool trailers = head->ended && head->final;
    head->secret = false; /* what nothing needs */
    if (!trailers && (!head->has_status || head->ended))
        t->fault = read_status(t, text);
    else if (text.size)
        t->fault = read_field(head, text);
    else
        head->ended = true;
    if (t->fault)
        return false;
    if (trailers || head->secret)
        return true;
    if (vector_add(&t->header, line, size)) {
        t->client->no_memory = true;
        return false;
    }
    return true;
}

/* ---- the body */

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
    return text_begins((struct text){type, strlen(type)}, expected);
}

/* Servers are lenient about the content type of an event stream, but not about that of an error page or of newline-delimited JSON. */
void answer_begin_body(struct transfer *t, int status, const char *type)
{
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

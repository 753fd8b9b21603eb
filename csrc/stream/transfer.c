/* One request: its start, and at its end its row and its notes (header and error text). */
#define _GNU_SOURCE
#include "parts.h"

#include <stdio.h>

static void link_active(struct transfer *t)
{
    struct client *c = t->client;
    t->next = c->active;
    if (c->active)
        c->active->previous = t;
    c->active = t;
    c->in_flight++;
}

struct transfer *transfer_begin(struct client *c, uint32_t index, const struct carrier *carrier)
{
    struct transfer *t = calloc(1, sizeof *t);
    if (!t)
        return NULL;
    t->client = c;
    t->index = index;
    t->fd = t->shared_fd = -1;
    t->carrier = carrier;
    t->plan = &c->plan->requests[index];
    t->request = &t->plan->request;
    sse_init(&t->framer, c->plan->max_event_bytes);
    http1_init(&t->reader, t->request->head);
    t->started_ns = t->last_read_ns = clock_monotonic_ns();
    client_row(c, index)->started_ns = t->started_ns;
    link_active(t);
    return t;
}

static void transfer_free(struct transfer *t)
{
    sse_free(&t->framer);
    http1_free(&t->reader);
    vector_free(&t->header);
    vector_free(&t->body);
    vector_free(&t->head);
    free(t);
}

static void store_notes(struct transfer *t, struct request_row *row)
{
    struct vector *notes = &t->client->result->notes;
    const char *error = t->error[0] ? t->error : row->curl_code ? curl_easy_strerror((CURLcode)row->curl_code) : "";
    size_t error_size = strlen(error);
    row->header_offset = notes->size;
    row->header_size = (uint32_t)t->header.size;
    row->error_offset = notes->size + t->header.size;
    row->error_size = (uint32_t)error_size;
    if (vector_add(notes, t->header.base, t->header.size) || vector_add(notes, error, error_size))
        t->client->no_memory = true;
}

void transfer_finish(struct transfer *t, CURLcode code, uint8_t cause)
{
    struct client *c = t->client;
    struct request_row *row = client_row(c, t->index);
    answer_end(t);
    row->ended_ns = c->now_ns;
    row->ended_kernel_ns = c->now_kernel_ns;
    row->curl_code = (int32_t)code;
    row->cause = cause != CAUSE_NONE ? cause : t->cause != CAUSE_NONE ? t->cause : code ? CAUSE_TRANSPORT : CAUSE_NONE;
    row->event_stream = t->event_stream;
    t->carrier->leave(t, row);
    store_notes(t, row);

    if (t->previous)
        t->previous->next = t->next;
    else
        c->active = t->next;
    if (t->next)
        t->next->previous = t->previous;
    c->in_flight--;
    transfer_free(t);
}

void transfer_sending(struct transfer *t)
{
    struct request_row *row = client_row(t->client, t->index);
    int64_t before_ns = t->sent_ns;
    t->sent_ns = clock_monotonic_ns();
    int64_t after_us = (t->sent_ns - t->started_ns) / NS_PER_US;
    if (before_ns)
        row->resent_us = after_us >= UINT32_MAX ? UINT32_MAX : (uint32_t)after_us + 1;
}

void transfer_store_errno(const struct transfer *t, struct request_row *row)
{
    long of_curl = 0;
    if (row->cause == CAUSE_NONE)
        return;
    if (t->easy)
        curl_easy_getinfo(t->easy, CURLINFO_OS_ERRNO, &of_curl);
    row->os_errno = t->socket_errno ? t->socket_errno : of_curl ? (int32_t)of_curl : t->client->now_errno;
}

void transfer_fail(struct transfer *t, CURLcode code, const char *error)
{
    snprintf(t->error, sizeof t->error, "%s", error);
    transfer_finish(t, code, CAUSE_NONE);
}

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

struct transfer *transfer_new(struct client *c, uint32_t index)
{
    struct transfer *t = calloc(1, sizeof *t);
    if (!t)
        return NULL;
    t->client = c;
    t->index = index;
    t->fd = t->shared_fd = -1;
    t->plan = &c->plan->requests[index];
    t->request = &t->plan->request;
    sse_init(&t->framer, c->plan->max_event_bytes);
    t->started_ns = t->last_read_ns = clock_monotonic_ns();
    client_row(c, index)->started_ns = t->started_ns;
    link_active(t);
    return t;
}

static void transfer_free(struct transfer *t)
{
    sse_free(&t->framer);
    vector_free(&t->header);
    vector_free(&t->body);
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
    if (t->fault && cause == CAUSE_NONE) {
        code = CURLE_WEIRD_SERVER_REPLY;
        snprintf(t->error, sizeof t->error, "%s", t->fault);
    }
    row->ended_ns = c->now_ns;
    row->ended_kernel_ns = c->now_kernel_ns;
    row->curl_code = (int32_t)code;
    row->cause = cause != CAUSE_NONE ? cause : t->cause != CAUSE_NONE ? t->cause : code ? CAUSE_TRANSPORT : CAUSE_NONE;
    row->event_stream = t->event_stream;
    handle_leave(t, row);
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

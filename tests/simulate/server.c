/* The server of server.h: it answers each request with a random answer, in random pieces, at random times. */
#define _GNU_SOURCE
#include "server.h"

#include <stdio.h>
#include <stdlib.h>

enum { READ = 64 << 10, WITHIN_CALLS = 8 };

struct order orders[MOST_REQUESTS];
bool server_is_quiet;
struct server_counts server_counts;

/* ---- answers */

static void add(struct vector *v, const void *bytes, size_t size)
{
    if (vector_add(v, bytes, size))
        abort();
}

static void add_text(struct vector *v, const char *text)
{
    add(v, text, strlen(text));
}

/* Bytes of the answer that are also bytes of the body. */
static void add_body(struct order *o, const void *bytes, size_t size)
{
    struct mark before = {o->wire.size, o->body.size}, after = {o->wire.size + size, o->body.size + size};
    add(&o->marks, &before, sizeof before);
    add(&o->wire, bytes, size);
    add(&o->body, bytes, size);
    add(&o->marks, &after, sizeof after);
}

size_t order_body(const struct order *o, size_t received)
{
    const struct mark *marks = (const struct mark *)o->marks.base;
    size_t body = 0;
    for (size_t i = 0; i < o->marks.size / sizeof *marks && marks[i].wire <= received; i++) {
        bool inside = i % 2 == 0 && i + 1 < o->marks.size / sizeof *marks;
        size_t more = inside ? (received < marks[i + 1].wire ? received : marks[i + 1].wire) - marks[i].wire : 0;
        body = marks[i].body + more;
    }
    return body;
}

static void add_head(struct order *o, const char *type, const char *framing, bool close)
{
    static const char *const more[] = {"", "Server: x\r\n", "Date: Thu, 26 Nov 2026 12:00:00 GMT\r\nX-Y:\r\n"};
    char line[64];
    if (one_in(8))
        add_text(&o->wire, "HTTP/1.1 100 Continue\r\n\r\n");
    snprintf(line, sizeof line, "HTTP/1.1 %d Text\r\n", o->status);
    add_text(&o->wire, line);
    add_text(&o->wire, more[random_below(3)]);
    if (*type) {
        add_text(&o->wire, "Content-Type: ");
        add_text(&o->wire, type);
        add_text(&o->wire, "\r\n");
    }
    add_text(&o->wire, framing);
    add_text(&o->wire, close ? "Connection: close\r\n\r\n" : "\r\n");
    o->head = o->wire.size;
}

/* The content: events, or one text. size: of it all, 0: any. Each content names its request. */
static struct vector make_content(const struct order *o, size_t size)
{
    struct vector content = {NULL, 0, 0};
    char line[160];
    int events = 1 + (int)random_below(6);
    for (int i = 0; i < events || (size && content.size + sizeof line < size); i++) {
        int fill = (int)random_below(size > READ ? 64 : 40) + (size > READ ? 60 : 0);
        snprintf(line, sizeof line, "data: %d.%d.%d %.*s\n\n", (int)(o - orders), o->attempts, i, fill,
                 "abcdefghijklmnopqrstuvwxyzabcdefghijklmnopqrstuvwxyzabcdefghijklmnopqrstuvwxyzabcdefghijklmnopqrstuvwxyzabcdefghijklmnopq"
                 "rstuvwxyz");
        if (size && content.size + strlen(line) + 3 > size)
            break;
        add_text(&content, line);
    }
    if (size > content.size + 3) { /* a comment */
        size_t left = size - content.size - 3;
        add_text(&content, ":");
        memset(vector_grow(&content, left), ' ', left);
        add_text(&content, "\n\n");
    }
    return content;
}

static void add_chunks(struct order *o, const struct vector *content)
{
    size_t most = one_in(2) ? content->size : 1 + random_below(60);
    if (content->size / most > 200)
        most = content->size / 100;
    for (size_t at = 0; at < content->size;) {
        size_t size = 1 + random_below((uint32_t)most);
        char line[32];
        size = size < content->size - at ? size : content->size - at;
        snprintf(line, sizeof line, one_in(8) ? "%zX ;a=b\r\n" : "%zx\r\n", size);
        add_text(&o->wire, line);
        add_body(o, content->base + at, size);
        add_text(&o->wire, "\r\n");
        at += size;
    }
    add_text(&o->wire, one_in(4) ? "0\r\nTrailer: x\r\n\r\n" : "0\r\n\r\n");
}

/* The wire positions at which the events of the body end. */
static void find_events(struct order *o)
{
    const struct mark *marks = (const struct mark *)o->marks.base;
    for (size_t at = 0, mark = 0; at + 1 < o->body.size; at++) {
        if (memcmp(o->body.base + at, "\n\n", 2) != 0)
            continue;
        while (marks[mark + 1].body < at + 2)
            mark += 2;
        size_t end = marks[mark].wire + (at + 2 - marks[mark].body);
        add(&o->events, &end, sizeof end);
    }
}

enum framing { LENGTH, CHUNKED, TO_END, BODILESS };

static enum framing make_answer(struct order *o, bool *close)
{
    static const int statuses[] = {200, 200, 200, 200, 201, 404, 500, 204, 304};
    static const char *const types[] = {"text/event-stream", "text/event-stream; charset=utf-8", "application/json", ""};
    static const size_t sizes[] = {READ - 1, READ, READ + 1, 2 * READ, 2 * READ + 1, 16 * READ, 17 * READ};
    const char *type = types[random_below(4)];
    enum framing framing = (enum framing)random_below(3);
    char line[64] = "";
    size_t size = one_in(16) ? sizes[random_below(one_in(6) ? 7 : 5)] : 0;
    o->status = statuses[random_below(9)];
    bool head = strcmp(o->method, "HEAD") == 0;
    if (head || o->status == 204 || o->status == 304)
        framing = BODILESS;
    o->event_stream = o->status >= 200 && o->status < 300 && strcmp(type, "application/json") != 0;
    *close = framing == TO_END || one_in(8);
    server_counts.large += size != 0;
    struct vector content = make_content(o, size ? size - (framing == LENGTH ? 200 : 0) : 0);
    if (framing == LENGTH || (framing == BODILESS && o->status != 204))
        snprintf(line, sizeof line, "Content-Length: %7zu\r\n", content.size);
    else if (framing == CHUNKED)
        snprintf(line, sizeof line, "Transfer-Encoding: %s\r\n", one_in(2) ? "chunked" : "Chunked");
    add_head(o, type, line, *close);
    if (framing == LENGTH && size) { /* so that the whole answer has this size */
        vector_free(&content);
        content = make_content(o, size - o->head);
        snprintf(line, sizeof line, "Content-Length: %7zu\r\n", content.size);
        memcpy(memmem(o->wire.base, o->wire.size, "Content-Length: ", 16), line, strlen(line));
    }
    if (framing == CHUNKED)
        add_chunks(o, &content);
    else if (framing != BODILESS)
        add_body(o, content.base, content.size);
    vector_free(&content);
    o->size = o->wire.size;
    o->fate = COMPLETES;
    o->needs_end = framing == TO_END;
    o->decides = o->wire.size;
    return framing;
}

/* Make the answer one that does not end well. Returns what the server does after the bytes that are left. */
static enum happening spoil(struct order *o, enum framing framing)
{
    size_t cut = 1 + random_below((uint32_t)o->wire.size - 1);
    if (server_is_quiet && cut == o->wire.size - 1) /* libcurl does not read the last byte of a chunked body */
        cut--;
    bool hangs = one_in(4), reset = one_in(2);
    if (one_in(4) && framing == CHUNKED && cut > o->head) { /* bytes that are not a chunk's size, at the end of a chunk */
        static const char *const bad[] = {"zz\r\n", "\r\n", "-1\r\n", "fffffffffffffffff\r\n"};
        const struct mark *marks = (const struct mark *)o->marks.base;
        size_t end = 0, known = 0;
        for (size_t i = 1; i < o->marks.size / sizeof *marks && marks[i].wire + 2 <= cut; i += 2) {
            end = marks[i].wire + 2;
            known = i + 1;
        }
        if (end) {
            o->wire.size = end;
            o->marks.size = known * sizeof *marks;
            add_text(&o->wire, bad[random_below(4)]);
            o->size = o->wire.size;
            o->decides = end + 1;
            o->fate = BREAKS;
            o->needs_end = false;
            return DRAINS;
        }
    }
    o->size = cut;
    o->decides = cut;
    o->fate = hangs ? HANGS : BREAKS;
    o->needs_end = true;
    if (framing == TO_END && cut >= o->head && !hangs && !reset)
        o->fate = COMPLETES; /* nobody can know */
    return hangs ? DRAINS : reset ? RESETS : ENDS;
}

/* ---- sending */

static int64_t pause_ns(void)
{
    switch (random_below(8)) {
    case 0:
    case 1:
    case 2:
        return 0;
    case 3:
    case 4:
        return random_below(20 * US);
    case 5:
    case 6:
        return random_below(400 * US);
    default:
        return random_below(one_in(8) ? 30 * MS : 2 * MS);
    }
}

static void transmit(int connection, enum happening what, const void *bytes, size_t size)
{
    struct connection_log *c = &connections[connection];
    int64_t soonest = kernel_now() + 1;
    c->server_ns = (c->server_ns > soonest ? c->server_ns : soonest) + pause_ns();
    kernel_schedule(what, c->server_ns, connection, bytes, size, 0);
    c->server_ended |= what == ENDS || what == RESETS;
}

/* In one piece, or in pieces of up to `most` bytes. */
static void transmit_pieces(int connection, const uint8_t *bytes, size_t size)
{
    static const size_t mosts[] = {SIZE_MAX / 2, SIZE_MAX / 2, 1000, 100, 30, 3};
    size_t most = mosts[random_below(6)];
    while (size) {
        size_t piece = most > size ? size : 1 + random_below((uint32_t)most);
        if (size > 4000 && most < 1000)
            piece = size > 70 * 1000 ? READ : 997;
        if (piece > size)
            piece = size;
        transmit(connection, ARRIVES, bytes, piece);
        bytes += piece;
        size -= piece;
    }
}

/* After an answer: nothing, the end of the connection, or bytes that no request asked for. */
static void after_answer(int connection)
{
    static const char stale[] = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: 13\r\n\r\ndata: stale\n\n";
    static const char late[] = "HTTP/1.1 408 Timeout\r\nConnection: close\r\nContent-Length: 0\r\n\r\n";
    switch (random_below(10)) {
    case 0:
        transmit(connection, ENDS, NULL, 0);
        break;
    case 1:
        transmit(connection, RESETS, NULL, 0);
        break;
    case 2:
    case 3: {
        static const char *const extras[] = {"x", stale, late};
        if (server_is_quiet)
            break;
        const char *extra = extras[random_below(3)];
        transmit_pieces(connection, (const uint8_t *)extra, strlen(extra));
        server_counts.extra++;
        if (one_in(2))
            transmit(connection, ENDS, NULL, 0);
        break;
    }
    default:
        break;
    }
}

static void drop(struct order *o, int connection)
{
    o->fate = connections[connection].requests > 1 ? DROPPED : BREAKS;
    o->size = o->head = o->decides = 0;
    o->needs_end = true;
    trace("  request %d on connection %d: no answer, fate %d", (int)(o - orders), connection, o->fate);
    transmit(connection, one_in(2) ? ENDS : RESETS, NULL, 0);
    o->dropped_ns = connections[connection].server_ns;
    server_counts.dropped += o->fate == DROPPED;
}

static void answer(struct order *o, int connection)
{
    struct connection_log *c = &connections[connection];
    bool close = false;
    enum happening then = DRAINS;
    vector_free(&o->wire), vector_free(&o->body), vector_free(&o->marks), vector_free(&o->events);
    o->attempts++;
    o->connection = connection;
    o->start = c->owed = c->scheduled;
    if (one_in(c->requests > 1 ? 8 : 40)) {
        drop(o, connection);
        return;
    }
    enum framing framing = make_answer(o, &close);
    if (one_in(40)) { /* not an answer */
        o->wire.size = 0;
        add_text(&o->wire, one_in(2) ? "SSH-2.0-x\r\n" : "HTTP/1.1 2x0 OK\r\n\r\n");
        o->size = o->wire.size;
        o->decides = 1;
        o->fate = BREAKS;
        o->needs_end = false;
        o->head = SIZE_MAX;
    } else if (one_in(8)) {
        then = spoil(o, framing);
    } else if (close) {
        then = ENDS;
    }
    if (o->event_stream)
        find_events(o);
    c->owed += o->size;
    if (one_in(4)) {
        c->server_ns = kernel_now() + random_below(5 * MS);
    }
    if (!server_is_quiet && one_in(16) && o->fate == COMPLETES && !o->needs_end &&
        then == DRAINS) { /* more than the answer, in one packet */
        add_text(&o->wire, one_in(2) ? "x" : "HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nx");
        transmit(connection, ARRIVES, o->wire.base, o->wire.size);
        server_counts.extra++;
        return;
    }
    size_t last = o->decides < o->size ? o->size - (o->decides - 1) : 0; /* what breaks it arrives in one piece */
    trace("  request %d on connection %d: %zu of %zu bytes, fate %d", (int)(o - orders), connection, o->size, o->wire.size, o->fate);
    transmit_pieces(connection, o->wire.base, o->size - last);
    if (last)
        transmit(connection, ARRIVES, o->wire.base + o->size - last, last);
    if (then != DRAINS)
        transmit(connection, then, NULL, 0);
    else if (o->fate == COMPLETES)
        after_answer(connection);
}

/* ---- the kernel's calls */

void server_connect(int connection)
{
    int port = connections[connection].port;
    int64_t later = kernel_now() + (port ? 1 + random_below(300 * US) : 0);
    if (port == REFUSING_PORT)
        kernel_schedule(REFUSES, one_in(2) ? later : kernel_now(), connection, NULL, 0, 0);
    else if (port != SILENT_PORT)
        kernel_schedule(CONNECTS, later, connection, NULL, 0, 0);
}

/* The number in "METHOD /NUMBER HTTP/1.1". */
static struct order *order_of(const char *head, size_t size)
{
    const char *slash = memchr(head, '/', size);
    int number = slash ? atoi(slash + 1) : -1;
    if (number < 0 || number >= MOST_REQUESTS || !orders[number].method)
        violated("a request for nothing: %.*s", (int)(size < 40 ? size : 40), head);
    return &orders[number];
}

void server_sending(int connection, const char *message, size_t size)
{
    struct connection_log *c = &connections[connection];
    if (c->in_request)
        return;
    c->in_request = true;
    bool unread = c->arrived.size > c->read;
    struct order *o = order_of(message, size);
    server_counts.reused += c->requests > 0;
    if (++c->requests > 1 && !server_is_quiet && (unread || c->ended || c->broken) && c->silent_call + WITHIN_CALLS < kernel_calls())
        violated("request %d is sent on a connection on which something had arrived", (int)(o - orders));
    if (c->requests > 1 && !c->unowed && c->read > c->owed)
        violated("request %d is sent on a connection on which more than an answer was read", (int)(o - orders));
    if (o->attempts && o->fate != DROPPED && !o->unowed && !server_is_quiet)
        violated("request %d is sent again, although it was answered or its connection was new", (int)(o - orders));
    o->sent_on = connection;
    o->unowed = unread || c->scheduled > c->arrived.size;
    c->unowed |= o->unowed;
    server_counts.unowed += o->unowed;
    if (c->ended || c->broken || c->server_ended)
        o->connection = -1;
}

static void check_request(const struct order *o, const char *head, size_t size)
{
    char line[64];
    snprintf(line, sizeof line, "%s /%d HTTP/1.1\r\n", o->method, (int)(o - orders));
    if (size < strlen(line) || memcmp(head, line, strlen(line)) != 0)
        violated("a request that nobody made: %.*s", (int)size, head);
}

void server_received(int connection, const char *bytes, size_t size)
{
    struct connection_log *c = &connections[connection];
    if (c->server_ended && !c->broken && c->ended)
        kernel_schedule(RESETS, kernel_now() + 1 + random_below(200 * US), connection, NULL, 0, 0);
    add(&c->request, bytes, size);
    const char *head = (const char *)c->request.base, *end = memmem(head, c->request.size, "\r\n\r\n", 4);
    if (!end)
        return;
    struct order *o = order_of(head, c->request.size);
    size_t body = (size_t)(end - head) + 4, received = c->request.size - body;
    if (received < o->sent_body.size) {
        if (!server_is_quiet && !c->server_ended && !c->answered && !o->unowed &&
            one_in(6)) { /* an answer to a request that is not read to its end */
            server_counts.early++;
            answer(o, connection);
            c->answered = true;
            if (!c->server_ended && o->fate != HANGS && one_in(2))
                transmit(connection, one_in(2) ? ENDS : RESETS, NULL, 0);
        }
        return;
    }
    check_request(o, head, c->request.size);
    if (received > o->sent_body.size || (received && memcmp(head + body, o->sent_body.base, received) != 0))
        violated("the body of request %d is not the one that was stated", (int)(o - orders));
    c->request.size = 0;
    c->in_request = false;
    if (!c->server_ended && !c->answered)
        answer(o, connection);
    c->answered = false;
}

/* ---- results */

int64_t arrival_of(const struct connection_log *c, size_t end)
{
    const struct arrival *a = (const struct arrival *)c->arrivals.base;
    size_t low = 0, high = c->arrivals.size / sizeof *a;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (a[middle].end >= end)
            high = middle;
        else
            low = middle + 1;
    }
    return low < c->arrivals.size / sizeof *a ? a[low].at_ns : 0;
}

int64_t order_decided(const struct order *o)
{
    const struct connection_log *c = &connections[o->connection];
    int64_t bytes_ns = o->decides ? arrival_of(c, o->start + o->decides) : 1;
    if (o->fate == HANGS || !bytes_ns || (o->needs_end && !c->ended_ns))
        return 0;
    return o->needs_end && c->ended_ns > bytes_ns ? c->ended_ns : bytes_ns;
}

void order_free(struct order *o)
{
    vector_free(&o->sent_body), vector_free(&o->wire), vector_free(&o->body), vector_free(&o->marks), vector_free(&o->events);
    memset(o, 0, sizeof *o);
}

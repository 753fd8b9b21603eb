/* One request: how libcurl is set up for it, what its callbacks keep, and the row it leaves. */
#define _GNU_SOURCE
#include "client.h"

#include <errno.h>
#include <strings.h>
#include <sys/socket.h>
#include <unistd.h>

struct request_row *client_row(const struct client *c, uint32_t index)
{
    return (struct request_row *)c->result->requests.base + index;
}

struct socket_state *client_socket(const struct client *c, int fd)
{
    bool known = fd >= 0 && (size_t)fd < c->sockets.size / sizeof(struct socket_state);
    return known ? (struct socket_state *)c->sockets.base + fd : NULL;
}

/* ---- what comes in */

/* libcurl may read a second socket in passing, when a timer of that transfer is due: the stamp is not its own. */
static int64_t kernel_stamp(const struct transfer *t)
{
    return t->fd == t->client->now_fd ? t->client->now_kernel_ns : 0;
}

static void note_first_byte(struct transfer *t)
{
    struct request_row *row = client_row(t->client, t->index);
    /* A request on a kept connection is sent by a timer's action, which also reads an answer that is there by then: the
     * stamp in hand is from before the sending. */
    if (t->client->now_fd < 0 || t->fd != t->client->now_fd)
        t->client->now_ns = clock_monotonic_ns();
    if (row->first_byte_ns == 0) {
        row->first_byte_ns = t->client->now_ns;
        row->first_byte_kernel_ns = kernel_stamp(t);
    }
    t->last_read_ns = t->client->now_ns;
}

static size_t on_header(char *line, size_t one, size_t size, void *context)
{
    struct transfer *t = context;
    size *= one;
    note_first_byte(t);
    if (size >= 5 && memcmp(line, "HTTP/", 5) == 0) { /* a 1xx answer came before this one */
        t->header.size = 0;
        t->body_began = false;
    }
    if (size >= 11 && strncasecmp(line, "set-cookie:", 11) == 0) /* a secret, and nothing here needs it */
        return size;
    if (t->header.size + size > 1 << 20 || vector_add(&t->header, line, size)) {
        t->client->no_memory = true;
        return 0;
    }
    return size;
}

/* Keeps one frame and its row. */
static int keep_frame(void *context, const uint8_t *frame, size_t size, const struct sse_frame *info)
{
    struct transfer *t = context;
    struct client *c = t->client;
    struct plan_result *r = c->result;
    struct event_row row = {
        .user_ns = c->now_ns,
        .kernel_ns = kernel_stamp(t),
        .offset = r->frames.size,
        .size = (uint32_t)size,
        .data_start = info->data_start,
        .data_size = info->data_size,
        .request = t->index,
        .read = (uint32_t)t->last_read,
        .data_lines = info->data_lines,
        .kind = info->kind,
        .flags = info->flags,
    };
    return vector_add(&r->frames, frame, size) || vector_add(&r->events, &row, sizeof row) ? SSE_NO_MEMORY : SSE_OK;
}

/* Events that one read completed share its stamp: say so in their rows. */
static void flag_merged(struct transfer *t)
{
    struct event_row *rows = (struct event_row *)t->client->result->events.base;
    size_t end = t->client->result->events.size / sizeof *rows, data = 0;
    for (size_t i = t->first_event; i < end; i++)
        data += rows[i].request == t->index && rows[i].kind == SSE_DATA;
    for (size_t i = t->first_event; i < end && data > 1; i++)
        if (rows[i].request == t->index)
            rows[i].flags |= SSE_MERGED;
}

/* libcurl hands one read on in several pieces (a chunk each): they are one row. */
static int keep_read(struct transfer *t, size_t size)
{
    struct client *c = t->client;
    struct vector *reads = &c->result->reads;
    struct read_row *last = (struct read_row *)reads->base + t->last_read;
    if (t->last_action == c->action && size <= UINT32_MAX - last->size) {
        last->size += (uint32_t)size;
        return SSE_OK;
    }
    t->last_action = c->action;
    t->last_read = reads->size / sizeof *last;
    t->first_event = c->result->events.size / sizeof(struct event_row);
    struct read_row row = {
        .user_ns = c->now_ns, .kernel_ns = kernel_stamp(t), .request = t->index, .size = (uint32_t)size};
    return vector_add(reads, &row, sizeof row) ? SSE_NO_MEMORY : SSE_OK;
}

static bool is_type(const char *type, const char *wanted)
{
    return type && strncasecmp(type, wanted, strlen(wanted)) == 0;
}

/* Servers are lenient about the type of an event stream, never about that of an error page. */
static void begin_body(struct transfer *t)
{
    long status = 0;
    char *type = NULL;
    curl_easy_getinfo(t->easy, CURLINFO_RESPONSE_CODE, &status);
    curl_easy_getinfo(t->easy, CURLINFO_CONTENT_TYPE, &type);
    t->status = (int32_t)status;
    t->event_stream = status >= 200 && status < 300 && !is_type(type, "application/json") && !is_type(type, "text/html");
    t->body_began = true;
}

static int keep_body(struct transfer *t, const char *bytes, size_t size)
{
    if (keep_read(t, size))
        return SSE_NO_MEMORY;
    if (!t->event_stream) {
        if (size > t->client->plan->max_event_bytes - t->body.size)
            return SSE_TOO_LARGE;
        return vector_add(&t->body, bytes, size) ? SSE_NO_MEMORY : SSE_OK;
    }
    int status = sse_feed(&t->framer, (const uint8_t *)bytes, size, keep_frame, t);
    if (t->client->result->events.size / sizeof(struct event_row) - t->first_event > 1)
        flag_merged(t);
    return status;
}

/* libcurl reads on while more is there. The pieces of one read lie one after the other in its buffer: a piece that lies
 * before the last one came with another read, later than the stamps in hand. */
static void stamp_later_read(struct transfer *t, const char *bytes)
{
    struct client *c = t->client;
    if (c->plan->http == PLAN_HTTP_1_1 && t->last_action == c->action && bytes <= t->last_bytes) {
        c->now_ns = clock_monotonic_ns();
        c->now_kernel_ns = 0;
        c->action++;
    }
    t->last_bytes = bytes;
}

static size_t on_body(char *bytes, size_t one, size_t size, void *context)
{
    struct transfer *t = context;
    size *= one;
    stamp_later_read(t, bytes);
    note_first_byte(t);
    if (!t->body_began)
        begin_body(t);
    int status = keep_body(t, bytes, size);
    if (status == SSE_OK)
        return size;
    if (status == SSE_TOO_LARGE)
        t->cause = CAUSE_EVENT_SIZE;
    else
        t->client->no_memory = true;
    return size ? 0 : 1; /* any other count than what came ends the transfer */
}

/* libcurl's own socket(), to keep the reason when there is none to be had, and to have arrivals stamped. */
static curl_socket_t on_open(void *context, curlsocktype purpose, struct curl_sockaddr *address)
{
    (void)purpose;
    struct transfer *t = context;
    int fd = socket(address->family, address->socktype | SOCK_CLOEXEC, address->protocol);
    if (fd < 0) {
        t->socket_errno = errno;
        return CURL_SOCKET_BAD;
    }
    struct client *c = t->client;
    if (!client_socket(c, fd)) {
        size_t more = ((size_t)fd + 1) * sizeof(struct socket_state) - c->sockets.size;
        void *added = vector_grow(&c->sockets, more);
        if (!added) {
            close(fd);
            c->no_memory = true;
            return CURL_SOCKET_BAD;
        }
        memset(added, 0, more);
    }
    bool stamped = c->plan->kernel_stamps && address->family != AF_UNIX && clock_stamp_socket(fd);
    *client_socket(c, fd) = (struct socket_state){.last_read_ns = c->now_ns, .stamped = stamped};
    return fd;
}

/* ---- the handle */

static long http_version(int http)
{
    switch (http) {
    case PLAN_HTTP_2:
        return CURL_HTTP_VERSION_2TLS;
    case PLAN_HTTP_2_PRIOR:
        return CURL_HTTP_VERSION_2_PRIOR_KNOWLEDGE;
    default:
        return CURL_HTTP_VERSION_1_1;
    }
}

static bool add_header(struct transfer *t, const char *line)
{
    struct curl_slist *longer = curl_slist_append(t->headers, line);
    if (longer)
        t->headers = longer;
    return longer != NULL;
}

static void set_protocols(CURL *easy)
{
#if LIBCURL_VERSION_NUM >= 0x075500
    curl_easy_setopt(easy, CURLOPT_PROTOCOLS_STR, "http,https");
#else
    curl_easy_setopt(easy, CURLOPT_PROTOCOLS, (long)(CURLPROTO_HTTP | CURLPROTO_HTTPS));
#endif
}

static void set_request(struct transfer *t)
{
    const struct plan_request *q = t->request;
    CURL *easy = t->easy;
    curl_easy_setopt(easy, CURLOPT_URL, q->url);
    if (q->body) {
        curl_easy_setopt(easy, CURLOPT_POSTFIELDSIZE_LARGE, (curl_off_t)q->body_size);
        curl_easy_setopt(easy, CURLOPT_POSTFIELDS, q->body);
    }
    if (strcmp(q->method, q->body ? "POST" : "GET") != 0)
        curl_easy_setopt(easy, CURLOPT_CUSTOMREQUEST, q->method);
    curl_easy_setopt(easy, CURLOPT_HTTPHEADER, t->headers);
}

static void set_connection(struct transfer *t)
{
    const struct plan *p = t->client->plan;
    CURL *easy = t->easy;
    set_protocols(easy);
    /* The second address's timer would fire once in every transfer, long after the connection is made, and read whatever
     * is there past our stamps. A refused first address goes on to the second without it. */
    curl_easy_setopt(easy, CURLOPT_HAPPY_EYEBALLS_TIMEOUT_MS, (long)INT32_MAX);
    curl_easy_setopt(easy, CURLOPT_HTTP_VERSION, http_version(p->http));
    curl_easy_setopt(easy, CURLOPT_PIPEWAIT, p->http != PLAN_HTTP_1_1 ? 1L : 0L);
    curl_easy_setopt(easy, CURLOPT_NOSIGNAL, 1L);
    curl_easy_setopt(easy, CURLOPT_PROXY, p->proxy ? p->proxy : ""); /* "": not even the environment's */
    curl_easy_setopt(easy, CURLOPT_FRESH_CONNECT, p->fresh_connections ? 1L : 0L);
    curl_easy_setopt(easy, CURLOPT_FORBID_REUSE, p->fresh_connections ? 1L : 0L);
    curl_easy_setopt(easy, CURLOPT_SSL_VERIFYPEER, p->verify_tls ? 1L : 0L);
    curl_easy_setopt(easy, CURLOPT_SSL_VERIFYHOST, p->verify_tls ? 2L : 0L);
    if (p->ca_file)
        curl_easy_setopt(easy, CURLOPT_CAINFO, p->ca_file);
    if (p->unix_socket)
        curl_easy_setopt(easy, CURLOPT_UNIX_SOCKET_PATH, p->unix_socket);
    if (p->user_agent)
        curl_easy_setopt(easy, CURLOPT_USERAGENT, p->user_agent);
    curl_easy_setopt(easy, CURLOPT_OPENSOCKETFUNCTION, on_open);
    curl_easy_setopt(easy, CURLOPT_OPENSOCKETDATA, t);
}

static void set_callbacks(struct transfer *t)
{
    CURL *easy = t->easy;
    curl_easy_setopt(easy, CURLOPT_PRIVATE, t);
    curl_easy_setopt(easy, CURLOPT_ERRORBUFFER, t->error);
    curl_easy_setopt(easy, CURLOPT_HEADERFUNCTION, on_header);
    curl_easy_setopt(easy, CURLOPT_HEADERDATA, t);
    curl_easy_setopt(easy, CURLOPT_WRITEFUNCTION, on_body);
    curl_easy_setopt(easy, CURLOPT_WRITEDATA, t);
}

static void transfer_free(struct transfer *t)
{
    if (!t)
        return;
    if (t->easy)
        curl_easy_cleanup(t->easy);
    curl_slist_free_all(t->headers);
    sse_free(&t->framer);
    vector_free(&t->header);
    vector_free(&t->body);
    free(t);
}

bool transfer_start(struct client *c, uint32_t index)
{
    struct transfer *t = calloc(1, sizeof *t);
    if (!t)
        return false;
    t->client = c;
    t->index = index;
    t->fd = -1;
    t->request = &c->plan->requests[index];
    sse_init(&t->framer, c->plan->max_event_bytes);
    t->easy = curl_easy_init();
    bool ok = t->easy && add_header(t, "Expect:"); /* no 100-continue: it would add a round trip to large prompts */
    for (const char *const *line = t->request->headers; ok && *line; line++)
        ok = add_header(t, *line);
    if (!ok)
        goto fail;
    set_request(t);
    set_connection(t);
    set_callbacks(t);
    t->started_ns = t->last_read_ns = clock_monotonic_ns();
    client_row(c, index)->started_ns = t->started_ns;
    if (curl_multi_add_handle(c->multi, t->easy) != CURLM_OK)
        goto fail;
    t->following = c->active;
    if (c->active)
        c->active->previous = t;
    c->active = t;
    c->in_flight++;
    return true;
fail:
    transfer_free(t);
    return false;
}

/* ---- the end */

static int64_t info_us(CURL *easy, CURLINFO which)
{
    curl_off_t us = 0;
    curl_easy_getinfo(easy, which, &us);
    return us;
}

static void keep_phases(struct transfer *t, struct request_row *row)
{
    long connects = 0, os_errno = 0, version = 0;
    row->name_lookup_us = info_us(t->easy, CURLINFO_NAMELOOKUP_TIME_T);
    row->connect_us = info_us(t->easy, CURLINFO_CONNECT_TIME_T);
    row->tls_us = info_us(t->easy, CURLINFO_APPCONNECT_TIME_T);
    row->pretransfer_us = info_us(t->easy, CURLINFO_PRETRANSFER_TIME_T);
    row->starttransfer_us = info_us(t->easy, CURLINFO_STARTTRANSFER_TIME_T);
    row->total_us = info_us(t->easy, CURLINFO_TOTAL_TIME_T);
    curl_easy_getinfo(t->easy, CURLINFO_NUM_CONNECTS, &connects);
    curl_easy_getinfo(t->easy, CURLINFO_OS_ERRNO, &os_errno);
    curl_easy_getinfo(t->easy, CURLINFO_HTTP_VERSION, &version);
    row->new_connection = connects > 0;
    row->os_errno = t->socket_errno ? t->socket_errno : os_errno ? (int32_t)os_errno : t->client->now_errno;
    row->http_version = (int32_t)version;
}

static void keep_notes(struct transfer *t, struct request_row *row)
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

static void keep_rest(struct transfer *t)
{
    int status = SSE_OK;
    if (t->event_stream) {
        status = sse_finish(&t->framer, keep_frame, t);
    } else if (t->body.size) {
        struct sse_frame whole = {.data_size = (uint32_t)t->body.size, .kind = SSE_BODY};
        status = keep_frame(t, t->body.base, t->body.size, &whole);
    }
    if (status == SSE_NO_MEMORY)
        t->client->no_memory = true;
}

void transfer_finish(struct transfer *t, CURLcode code, uint8_t cause)
{
    struct client *c = t->client;
    struct request_row *row = client_row(c, t->index);
    long status = 0;
    curl_easy_getinfo(t->easy, CURLINFO_RESPONSE_CODE, &status);
    keep_rest(t);
    row->status = (int32_t)status;
    row->ended_ns = c->now_ns;
    row->ended_kernel_ns = c->now_kernel_ns;
    row->curl_code = (int32_t)code;
    row->cause = cause != CAUSE_NONE ? cause : t->cause != CAUSE_NONE ? t->cause : code ? CAUSE_TRANSPORT : CAUSE_NONE;
    row->event_stream = t->event_stream;
    keep_phases(t, row);
    keep_notes(t, row);

    if (t->previous)
        t->previous->following = t->following;
    else
        c->active = t->following;
    if (t->following)
        t->following->previous = t->previous;
    c->in_flight--;
    curl_multi_remove_handle(c->multi, t->easy);
    transfer_free(t);
}

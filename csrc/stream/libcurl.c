/* The carrier of requests that libcurl transfers: TLS, HTTP/2, proxies, and URLs that plain.c cannot use. The loop lets libcurl use a
 * socket only after the socket's stamps have been taken (multi.c). */
#define _GNU_SOURCE
#include "parts.h"

/* ---- stamps */

/* A stream's connection may have been announced (multi.c) for another stream. */
static int socket_of(struct transfer *t)
{
    if (t->fd < 0 && t->shared_fd < 0) {
        curl_socket_t fd = CURL_SOCKET_BAD;
        curl_easy_getinfo(t->easy, CURLINFO_ACTIVESOCKET, &fd);
        t->shared_fd = fd;
    }
    return t->fd >= 0 ? t->fd : t->shared_fd;
}

static bool more_arrived(struct socket_state *socket, int fd)
{
    if (!socket->outrun)
        socket->outrun = clock_bytes_received(fd) != socket->received;
    return socket->outrun;
}

/* The stamps of a socket are valid for what had arrived when they were taken: for the data that libcurl passes on while no more bytes have
 * arrived, whether it reads them now or has held them since another stream's or a timer's action. All other data gets the current time
 * and no kernel stamp. */
static void take_stamps(struct transfer *t)
{
    struct client *c = t->client;
    struct socket_state *socket = client_socket(c, socket_of(t));
    bool known = socket && socket->kernel_ns;
    bool valid = known && socket->user_ns >= t->last_read_ns && !more_arrived(socket, socket_of(t));
    c->now_ns = valid ? socket->user_ns : clock_monotonic_ns();
    c->now_kernel_ns = valid ? socket->kernel_ns : 0;
    c->now_overread = known && !valid;
}

/* libcurl continues to read while there is data. The parts of one read are in order in its buffer: a part that is before the last one
 * is from another read. */
static void recognise_read(struct transfer *t, const char *bytes)
{
    struct client *c = t->client;
    if (c->plan->http == PLAN_HTTP_1_1 && t->last_action == c->action && bytes <= t->last_bytes)
        c->action++;
    t->last_bytes = bytes;
}

/* ---- libcurl's callbacks */

static size_t on_header(char *line, size_t one, size_t size, void *context)
{
    struct transfer *t = context;
    take_stamps(t);
    answer_first_byte(t);
    return answer_line(t, line, size * one) ? size * one : 0;
}

static void begin_body(struct transfer *t)
{
    long status = 0;
    char *type = NULL;
    curl_easy_getinfo(t->easy, CURLINFO_RESPONSE_CODE, &status);
    curl_easy_getinfo(t->easy, CURLINFO_CONTENT_TYPE, &type);
    answer_begin_body(t, (int)status, type ? type : "");
}

/* What one wake-up brought may be passed on in several actions: parts with the same stamps are one read. */
static void join_read(struct transfer *t)
{
    const struct client *c = t->client;
    if (c->now_kernel_ns && t->read_kernel_ns == c->now_kernel_ns && t->read_ns == c->now_ns)
        t->last_action = c->action;
    t->read_ns = c->now_ns;
    t->read_kernel_ns = c->now_kernel_ns;
}

static size_t on_body(char *bytes, size_t one, size_t size, void *context)
{
    struct transfer *t = context;
    size *= one;
    recognise_read(t, bytes);
    take_stamps(t);
    join_read(t);
    answer_first_byte(t);
    if (!t->body_began)
        begin_body(t);
    if (answer_body(t, bytes, size))
        return size;
    return size ? 0 : 1; /* any number other than the size ends the transfer */
}

static void on_done(struct transfer *t, CURLcode code)
{
    take_stamps(t);
    bool whole_head = t->head_ended && t->final_head;
    if (code == CURLE_OK && !whole_head) /* libcurl accepts a connection that ends inside the head */
        transfer_fail(t, CURLE_PARTIAL_FILE, http1_explain(HTTP1_TRUNCATED));
    else
        transfer_finish(t, code, CAUSE_NONE);
}

/* ---- the request */

static bool append(struct transfer *t, const char *line)
{
    struct curl_slist *longer = curl_slist_append(t->lines, line);
    if (longer)
        t->lines = longer;
    return longer != NULL;
}

/* libcurl's syntax: "Name;" for a field without a value. "Name:" removes a field, also one of libcurl's own. */
static bool append_field(struct transfer *t, const char *name, const char *value)
{
    struct vector line = {NULL, 0, 0};
    bool ok = vector_add(&line, name, strlen(name)) == 0 && vector_add(&line, *value ? ": " : ";", *value ? 2 : 1) == 0 &&
              vector_add(&line, value, strlen(value) + 1) == 0 && append(t, (const char *)line.base);
    vector_free(&line);
    return ok;
}

static bool add_lines(struct transfer *t)
{
    const struct request *r = t->request;
    bool ok = append(t, "Expect:"); /* no 100-continue, which would add a round trip to large prompts */
    if (ok && !r->has_type)
        ok = append(t, "Content-Type:");
    const char *name, *value;
    for (size_t at = 0; ok && request_next_field(r, &at, &name, &value);)
        ok = append_field(t, name, value);
    return ok;
}

static CURLcode set_request(struct transfer *t)
{
    const struct request *r = t->request;
    CURLcode code = CURLE_OK;
    const char *implied = "GET";
    if (r->head) {
        implied = "HEAD";
        code = handle_set(t, CURLOPT_NOBODY, 1L);
    } else if (r->states_length) {
        implied = "POST";
        code = handle_set(t, CURLOPT_POSTFIELDSIZE_LARGE, (curl_off_t)r->body_size);
        code = code ? code : handle_set(t, CURLOPT_POSTFIELDS, r->body ? r->body : "");
    }
    if (strcmp(r->method, implied) != 0)
        code = code ? code : handle_set(t, CURLOPT_CUSTOMREQUEST, r->method);
    return code ? code : handle_set(t, CURLOPT_HTTPHEADER, t->lines);
}

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

static CURLcode set_connection(struct transfer *t)
{
    const struct plan *p = t->client->plan;
    bool tls = text_begins((struct text){t->request->url, strlen(t->request->url)}, "https://");
    int http = p->http == PLAN_HTTP_2 && !tls ? PLAN_HTTP_1_1 : p->http; /* libcurl would wait for the first answer */
    CURLcode code = handle_set(t, CURLOPT_HTTP_VERSION, http_version(http));
    code = code ? code : handle_set(t, CURLOPT_PIPEWAIT, http != PLAN_HTTP_1_1 ? 1L : 0L);
    code = code ? code : handle_set(t, CURLOPT_FRESH_CONNECT, p->fresh_connections ? 1L : 0L);
    code = code ? code : handle_set(t, CURLOPT_FORBID_REUSE, p->fresh_connections ? 1L : 0L);
    code = code ? code : handle_set(t, CURLOPT_SSL_VERIFYPEER, p->verify_tls ? 1L : 0L);
    code = code ? code : handle_set(t, CURLOPT_SSL_VERIFYHOST, p->verify_tls ? 2L : 0L);
    /* The answer to CONNECT is the proxy's, not the origin's: it is not the first byte. */
    code = code ? code : handle_set(t, CURLOPT_SUPPRESS_CONNECT_HEADERS, 1L);
    if (p->ca_file)
        code = code ? code : handle_set(t, CURLOPT_CAINFO, p->ca_file);
    return code;
}

#if LIBCURL_VERSION_NUM >= 0x075000
static int on_sending(void *context, char *to, char *from, int to_port, int from_port)
{
    (void)to, (void)from, (void)to_port, (void)from_port;
    transfer_sending(context);
    return CURL_PREREQFUNC_OK;
}
#endif

static CURLcode set_callbacks(struct transfer *t)
{
    CURLcode code = handle_set(t, CURLOPT_HEADERFUNCTION, on_header);
#if LIBCURL_VERSION_NUM >= 0x075000
    code = code ? code : handle_set(t, CURLOPT_PREREQFUNCTION, on_sending);
    code = code ? code : handle_set(t, CURLOPT_PREREQDATA, t);
#endif
    code = code ? code : handle_set(t, CURLOPT_HEADERDATA, t);
    code = code ? code : handle_set(t, CURLOPT_WRITEFUNCTION, on_body);
    return code ? code : handle_set(t, CURLOPT_WRITEDATA, t);
}

static bool begin(struct transfer *t)
{
    if (!add_lines(t))
        return false;
    CURLcode code = handle_open(t, on_done);
    code = code ? code : set_request(t);
    code = code ? code : set_connection(t);
    return handle_start(t, code ? code : set_callbacks(t));
}

/* ---- the end */

static void store_row(struct transfer *t, struct request_row *row)
{
    long status = 0, connects = 0, version = 0;
    handle_store_phases(t, row);
    curl_easy_getinfo(t->easy, CURLINFO_RESPONSE_CODE, &status);
    row->pretransfer_us = handle_info_us(t->easy, CURLINFO_PRETRANSFER_TIME_T);
    curl_easy_getinfo(t->easy, CURLINFO_NUM_CONNECTS, &connects);
    curl_easy_getinfo(t->easy, CURLINFO_HTTP_VERSION, &version);
    row->new_connection = connects > 0;
    transfer_store_errno(t, row);
    row->http_version = (int32_t)version;
    row->status = (int32_t)status;
}

static void leave(struct transfer *t, struct request_row *row)
{
    if (t->easy)
        store_row(t, row);
    handle_close(t);
    curl_slist_free_all(t->lines);
    t->lines = NULL;
}

const struct carrier carrier_libcurl = {.begin = begin, .ready = multi_ready, .leave = leave};

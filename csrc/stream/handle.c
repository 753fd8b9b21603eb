/* libcurl's easy handles: a request as options, each of them checked, the sockets with their stamps, and the phases of a connection. */
#define _GNU_SOURCE
#include "parts.h"

#include <errno.h>
#include <stdio.h>
#include <sys/socket.h>
#include <unistd.h>

/* ---- sockets */

/* libcurl's socket(), to store the reason of a failure and to have arrivals stamped. */
static curl_socket_t on_open(void *context, curlsocktype purpose, struct curl_sockaddr *address)
{
    (void)purpose;
    struct transfer *t = context;
    struct client *c = t->client;
    int fd = socket(address->family, address->socktype | SOCK_CLOEXEC, address->protocol);
    if (fd < 0) {
        t->socket_errno = errno;
        return CURL_SOCKET_BAD;
    }
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
    ((struct socket_state *)c->sockets.base)[fd] = (struct socket_state){.open = true, .last_read_ns = c->now_ns, .stamped = stamped};
    return fd;
}

/* The state of a closed socket is cleared: the kernel reuses its number, also for descriptors that on_open does not make. */
static int on_close(void *context, curl_socket_t fd)
{
    struct socket_state *socket = client_socket(context, fd);
    if (socket)
        memset(socket, 0, sizeof *socket);
    return close(fd);
}

/* ---- options */

CURLcode handle_explain(struct transfer *t, const char *option, CURLcode code)
{
    if (code != CURLE_OK)
        snprintf(t->error, sizeof t->error, "this libcurl refuses %s: %s", option, curl_easy_strerror(code));
    return code;
}

static CURLcode set_protocols(struct transfer *t)
{
#if LIBCURL_VERSION_NUM >= 0x075500
    return handle_set(t, CURLOPT_PROTOCOLS_STR, "http,https");
#else
    return handle_set(t, CURLOPT_PROTOCOLS, (long)(CURLPROTO_HTTP | CURLPROTO_HTTPS));
#endif
}

/* The end of a request does not wait for its name lookup: otherwise a slow one would stop the loop beyond all limits of time. */
static CURLcode set_quick_exit(struct transfer *t)
{
#if LIBCURL_VERSION_NUM >= 0x075700
    return handle_set(t, CURLOPT_QUICK_EXIT, 1L);
#else
    (void)t;
    return CURLE_OK;
#endif
}

static CURLcode set_sockets(struct transfer *t)
{
    CURLcode code = handle_set(t, CURLOPT_NOSIGNAL, 1L);
    code = code ? code : handle_set(t, CURLOPT_OPENSOCKETFUNCTION, on_open);
    code = code ? code : handle_set(t, CURLOPT_OPENSOCKETDATA, t);
    code = code ? code : handle_set(t, CURLOPT_CLOSESOCKETFUNCTION, on_close);
    return code ? code : handle_set(t, CURLOPT_CLOSESOCKETDATA, t->client); /* a connection may outlive its request */
}

static CURLcode set_common(struct transfer *t)
{
    const struct plan *p = t->client->plan;
    CURLcode code = handle_set(t, CURLOPT_PRIVATE, t);
    code = code ? code : handle_set(t, CURLOPT_ERRORBUFFER, t->error);
    code = code ? code : set_protocols(t);
    code = code ? code : set_quick_exit(t);
    code = code ? code : handle_set(t, CURLOPT_URL, t->request->url);
    /* "": neither the environment's proxy, nor its list of hosts that are connected to without the plan's */
    code = code ? code : handle_set(t, CURLOPT_PROXY, p->proxy ? p->proxy : "");
    code = code ? code : handle_set(t, CURLOPT_NOPROXY, "");
    if (p->unix_socket)
        code = code ? code : handle_set(t, CURLOPT_UNIX_SOCKET_PATH, p->unix_socket);
    return code ? code : set_sockets(t);
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
    if (ok && t->client->plan->fresh_connections)
        ok = append(t, "Connection: close"); /* libcurl leaves it out of HTTP/2 */
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

/* ---- start and end */

static CURLcode set_all(struct transfer *t)
{
    CURLcode code = set_common(t);
    code = code ? code : set_request(t);
    code = code ? code : set_connection(t);
    return code ? code : receive_set(t);
}

bool handle_begin(struct transfer *t)
{
    t->easy = curl_easy_init();
    if (!t->easy || !add_lines(t))
        return false;
    CURLcode code = set_all(t);
    if (code == CURLE_OUT_OF_MEMORY)
        return false;
    if (code != CURLE_OK) {
        transfer_finish(t, code, CAUSE_NONE);
        return true;
    }
    return curl_multi_add_handle(t->client->multi, t->easy) == CURLM_OK;
}

static long info_long(CURL *easy, CURLINFO which)
{
    long value = 0;
    curl_easy_getinfo(easy, which, &value);
    return value;
}

static int64_t info_us(CURL *easy, CURLINFO which)
{
    curl_off_t us = 0;
    curl_easy_getinfo(easy, which, &us);
    return us;
}

/* The error number of a request that failed: the socket's own, else libcurl's, else what reading the stamp consumed. */
static int error_number(const struct transfer *t)
{
    long of_curl = info_long(t->easy, CURLINFO_OS_ERRNO);
    return t->socket_errno ? t->socket_errno : of_curl ? (int)of_curl : t->client->now_errno;
}

static void store_row(const struct transfer *t, struct request_row *row)
{
    row->name_lookup_us = info_us(t->easy, CURLINFO_NAMELOOKUP_TIME_T);
    row->connect_us = info_us(t->easy, CURLINFO_CONNECT_TIME_T);
    row->tls_us = info_us(t->easy, CURLINFO_APPCONNECT_TIME_T);
    row->pretransfer_us = info_us(t->easy, CURLINFO_PRETRANSFER_TIME_T);
    row->status = (int32_t)info_long(t->easy, CURLINFO_RESPONSE_CODE);
    row->http_version = (int32_t)info_long(t->easy, CURLINFO_HTTP_VERSION);
    row->new_connection = info_long(t->easy, CURLINFO_NUM_CONNECTS) > 0;
    row->os_errno = row->cause == CAUSE_NONE ? 0 : error_number(t);
}

void handle_leave(struct transfer *t, struct request_row *row)
{
    if (t->easy) {
        store_row(t, row);
        curl_multi_remove_handle(t->client->multi, t->easy);
        curl_easy_cleanup(t->easy);
        t->easy = NULL;
    }
    curl_slist_free_all(t->lines);
    t->lines = NULL;
}

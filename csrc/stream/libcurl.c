/* Requests that libcurl transfers (TLS, HTTP/2, proxies), and connections that it makes for plain.c: setup of a handle and its
 * callbacks. The loop lets libcurl use a socket only after the socket's stamp has been read. */
#define _GNU_SOURCE
#include "parts.h"

#include <errno.h>
#include <sys/socket.h>
#include <unistd.h>

/* ---- libcurl's callbacks */

/* The current stamp is valid for the data that had arrived when it was taken. It is not valid for what libcurl reads after that, for a
 * second socket that it reads because a timer of that transfer is due, or for what arrived after a timer's action had sent the
 * request: those get the current time and no kernel stamp. */
static void check_stamp(struct transfer *t)
{
    struct client *c = t->client;
    bool stamped = c->now_kernel_ns && t->fd == c->now_fd;
    if (stamped && clock_bytes_received(t->fd) == c->now_received)
        return;
    c->now_overread |= stamped;
    c->now_ns = clock_monotonic_ns();
    c->now_kernel_ns = 0;
}

/* libcurl continues to read while there is data. The parts of one read are in order in its buffer: a part that is before the last one
 * is from another read, later than the current stamps. */
static void stamp_later_read(struct transfer *t, const char *bytes)
{
    struct client *c = t->client;
    if (c->plan->http == PLAN_HTTP_1_1 && t->last_action == c->action && bytes <= t->last_bytes) {
        c->now_ns = clock_monotonic_ns();
        c->now_kernel_ns = 0;
        c->now_overread = true;
        c->action++;
    }
    t->last_bytes = bytes;
}

static size_t on_header(char *line, size_t one, size_t size, void *context)
{
    struct transfer *t = context;
    check_stamp(t);
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

static size_t on_body(char *bytes, size_t one, size_t size, void *context)
{
    struct transfer *t = context;
    size *= one;
    stamp_later_read(t, bytes);
    check_stamp(t);
    answer_first_byte(t);
    if (!t->body_began)
        begin_body(t);
    if (answer_body(t, bytes, size))
        return size;
    return size ? 0 : 1; /* any number other than the size ends the transfer */
}

/* libcurl's socket(), to store the reason of a failure and to have arrivals stamped. */
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
    ((struct socket_state *)c->sockets.base)[fd] = (struct socket_state){.last_read_ns = c->now_ns, .stamped = stamped};
    return fd;
}

/* A connection of the client's own stays open when libcurl releases its handle. */
static int on_close(void *context, curl_socket_t fd)
{
    struct socket_state *socket = client_socket(context, fd);
    return socket && socket->connection ? 0 : close(fd);
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
    if (t->host_port)
        return;
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
    if (t->host_port) {
        curl_easy_setopt(easy, CURLOPT_CONNECT_ONLY, 1L);
        curl_easy_setopt(easy, CURLOPT_BUFFERSIZE, 1024L); /* the smallest size: nothing is read through it */
    }
    /* The timer for the second address would fire once in every transfer, long after the connection is made, and read data without a
     * stamp. If the first address refuses, the second one is tried without this timer. */
    curl_easy_setopt(easy, CURLOPT_HAPPY_EYEBALLS_TIMEOUT_MS, (long)INT32_MAX);
    curl_easy_setopt(easy, CURLOPT_HTTP_VERSION, http_version(p->http));
    curl_easy_setopt(easy, CURLOPT_PIPEWAIT, p->http != PLAN_HTTP_1_1 ? 1L : 0L);
    curl_easy_setopt(easy, CURLOPT_NOSIGNAL, 1L);
    curl_easy_setopt(easy, CURLOPT_PROXY, p->proxy ? p->proxy : ""); /* "": not the environment's proxy either */
    bool fresh = p->fresh_connections && !t->host_port; /* plain.c stores or closes the client's own connections */
    curl_easy_setopt(easy, CURLOPT_FRESH_CONNECT, fresh ? 1L : 0L);
    curl_easy_setopt(easy, CURLOPT_FORBID_REUSE, fresh ? 1L : 0L);
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
    curl_easy_setopt(easy, CURLOPT_CLOSESOCKETFUNCTION, on_close);
    curl_easy_setopt(easy, CURLOPT_CLOSESOCKETDATA, t->client); /* a connection may outlive its request */
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

/* ---- release */

static int64_t info_us(CURL *easy, CURLINFO which)
{
    curl_off_t us = 0;
    curl_easy_getinfo(easy, which, &us);
    return us;
}

void libcurl_store_phases(struct transfer *t, struct request_row *row)
{
    row->name_lookup_us = info_us(t->easy, CURLINFO_NAMELOOKUP_TIME_T);
    row->connect_us = info_us(t->easy, CURLINFO_CONNECT_TIME_T);
    row->tls_us = info_us(t->easy, CURLINFO_APPCONNECT_TIME_T);
}

void libcurl_release(struct transfer *t)
{
    curl_multi_remove_handle(t->client->multi, t->easy);
    curl_easy_cleanup(t->easy);
    curl_slist_free_all(t->headers);
    t->easy = NULL;
    t->headers = NULL;
}

static void release_easy(struct transfer *t, struct request_row *row)
{
    long status = 0, connects = 0, os_errno = 0, version = 0;
    libcurl_store_phases(t, row);
    curl_easy_getinfo(t->easy, CURLINFO_RESPONSE_CODE, &status);
    row->pretransfer_us = info_us(t->easy, CURLINFO_PRETRANSFER_TIME_T);
    row->starttransfer_us = info_us(t->easy, CURLINFO_STARTTRANSFER_TIME_T);
    row->total_us = info_us(t->easy, CURLINFO_TOTAL_TIME_T);
    curl_easy_getinfo(t->easy, CURLINFO_NUM_CONNECTS, &connects);
    curl_easy_getinfo(t->easy, CURLINFO_OS_ERRNO, &os_errno);
    curl_easy_getinfo(t->easy, CURLINFO_HTTP_VERSION, &version);
    row->new_connection = connects > 0;
    row->os_errno = t->socket_errno ? t->socket_errno : os_errno ? (int32_t)os_errno : t->client->now_errno;
    row->http_version = (int32_t)version;
    row->status = (int32_t)status;
    libcurl_release(t);
}

/* ---- start */

static bool add_headers(struct transfer *t)
{
    bool ok = add_header(t, "Expect:"); /* no 100-continue, which would add a round trip to large prompts */
    for (const char *const *line = t->request->headers; ok && *line; line++)
        ok = add_header(t, *line);
    return ok;
}

bool libcurl_begin(struct transfer *t)
{
    t->easy = curl_easy_init();
    if (!t->easy)
        return false;
    t->release = release_easy;
    if (!t->host_port && !add_headers(t))
        return false;
    set_request(t);
    set_connection(t);
    set_callbacks(t);
    return curl_multi_add_handle(t->client->multi, t->easy) == CURLM_OK;
}

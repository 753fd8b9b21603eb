/* libcurl's easy handles, for both uses of libcurl (connect.c, libcurl.c): the options of every connection, each of them checked, the
 * sockets with their stamps, and the phases of a connection. */
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
    ((struct socket_state *)c->sockets.base)[fd] =
        (struct socket_state){.carrier = &carrier_libcurl, .last_read_ns = c->now_ns, .stamped = stamped};
    return fd;
}

/* A connection of the client's own stays open when libcurl releases its handle. The state of a closed socket is cleared: the kernel reuses
 * its number, also for descriptors that on_open does not make. */
static int on_close(void *context, curl_socket_t fd)
{
    struct socket_state *socket = client_socket(context, fd);
    if (socket && socket->connection)
        return 0;
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
    code = code ? code : handle_set(t, CURLOPT_URL, t->request->url);
    /* "": neither the environment's proxy, nor its list of hosts that are connected to without the plan's */
    code = code ? code : handle_set(t, CURLOPT_PROXY, p->proxy ? p->proxy : "");
    code = code ? code : handle_set(t, CURLOPT_NOPROXY, "");
    if (p->unix_socket)
        code = code ? code : handle_set(t, CURLOPT_UNIX_SOCKET_PATH, p->unix_socket);
    return code ? code : set_sockets(t);
}

CURLcode handle_open(struct transfer *t, void (*done)(struct transfer *t, CURLcode code))
{
    t->easy = curl_easy_init();
    t->done = done;
    return t->easy ? set_common(t) : CURLE_OUT_OF_MEMORY;
}

/* ---- start, phases, release */

bool handle_start(struct transfer *t, CURLcode code)
{
    if (code == CURLE_OUT_OF_MEMORY)
        return false;
    if (code != CURLE_OK) {
        transfer_finish(t, code, CAUSE_NONE);
        return true;
    }
    return curl_multi_add_handle(t->client->multi, t->easy) == CURLM_OK;
}

int64_t handle_info_us(CURL *easy, CURLINFO which)
{
    curl_off_t us = 0;
    curl_easy_getinfo(easy, which, &us);
    return us;
}

void handle_store_phases(struct transfer *t, struct request_row *row)
{
    row->name_lookup_us = handle_info_us(t->easy, CURLINFO_NAMELOOKUP_TIME_T);
    row->connect_us = handle_info_us(t->easy, CURLINFO_CONNECT_TIME_T);
    row->tls_us = handle_info_us(t->easy, CURLINFO_APPCONNECT_TIME_T);
}

void handle_close(struct transfer *t)
{
    if (!t->easy)
        return;
    curl_multi_remove_handle(t->client->multi, t->easy);
    curl_easy_cleanup(t->easy);
    t->easy = NULL;
}

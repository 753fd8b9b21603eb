/* What libcurl passes on of an answer, and its stamps. The loop lets libcurl use a socket only after the socket's stamps have been taken
 * (multi.c). */
#define _GNU_SOURCE
#include "parts.h"

#include <stdio.h>
#include <sys/ioctl.h>

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

/* Whether libcurl has read bytes that arrived after the stamps were taken. What has arrived is read last, so that the sum is never less
 * than what libcurl has read. */
static bool read_more(struct socket_state *socket, int fd)
{
    if (socket->outrun || clock_bytes_received(fd) == socket->received)
        return socket->outrun;
    int unread = 0;
    bool known = ioctl(fd, FIONREAD, &unread) == 0;
    socket->outrun = !known || clock_bytes_received(fd) - unread > socket->received;
    return socket->outrun;
}

/* The stamps of a socket are valid for what had arrived when they were taken, whether libcurl reads it now or has held it since another
 * stream's or a timer's action. All other data gets the current time and no kernel stamp. */
static void take_stamps(struct transfer *t)
{
    struct client *c = t->client;
    struct socket_state *socket = client_socket(c, socket_of(t));
    bool known = socket && socket->kernel_ns;
    bool valid = known && socket->user_ns >= t->last_read_ns && !read_more(socket, socket_of(t));
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

void receive_done(struct transfer *t, CURLcode code)
{
    take_stamps(t);
    bool whole_head = t->head.ended && t->head.final;
    if (code == CURLE_OK && !whole_head) { /* libcurl accepts a connection that ends inside the head */
        code = CURLE_PARTIAL_FILE;
        snprintf(t->error, sizeof t->error, "the connection ended inside the answer");
    }
    transfer_finish(t, code, CAUSE_NONE);
}

#if LIBCURL_VERSION_NUM >= 0x075000
/* libcurl sends the request, or sends it again because a reused connection had ended. */
static int on_sending(void *context, char *to, char *from, int to_port, int from_port)
{
    (void)to, (void)from, (void)to_port, (void)from_port;
    struct transfer *t = context;
    bool again = t->sent_ns != 0;
    t->sent_ns = clock_monotonic_ns();
    int64_t after_us = (t->sent_ns - t->started_ns) / NS_PER_US;
    if (again)
        client_row(t->client, t->index)->resent_us = after_us >= UINT32_MAX ? UINT32_MAX : (uint32_t)after_us + 1;
    return CURL_PREREQFUNC_OK;
}
#endif

CURLcode receive_set(struct transfer *t)
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

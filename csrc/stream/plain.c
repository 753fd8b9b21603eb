/* The carrier of HTTP/1.1 without TLS, on the client's own connections: sending the request, reading with one recvmsg per wake-up, reusing
 * connections. epoll watches them edge-triggered, so that each read is one system call. */
#define _GNU_SOURCE
#include "parts.h"

#include <errno.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

enum { READS_IN_A_ROW = 16 };

/* ---- connections */

static bool watch(struct client *c, int operation, int fd)
{
    struct epoll_event event = {.events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET, .data.fd = fd};
    return epoll_ctl(c->epoll_fd, operation, fd, &event) == 0;
}

static void close_connection(struct client *c, struct connection *connection)
{
    *client_socket(c, connection->fd) = (struct socket_state){.connection = NULL};
    close(connection->fd);
    free(connection->origin);
    free(connection);
}

void plain_close_idle(struct client *c)
{
    while (c->idle) {
        struct connection *connection = c->idle;
        c->idle = connection->next;
        close_connection(c, connection);
    }
}

static void remove_idle(struct client *c, struct connection *connection)
{
    struct connection **at = &c->idle;
    while (*at != connection)
        at = &(*at)->next;
    *at = connection->next;
    close_connection(c, connection);
}

static void drop_connection(struct transfer *t)
{
    close_connection(t->client, t->connection);
    t->connection = NULL;
    t->fd = -1;
}

/* The request has ended: its connection can be reused if it ended well. */
static void leave_connection(struct transfer *t, struct request_row *row)
{
    struct client *c = t->client;
    struct connection *connection = t->connection;
    transfer_store_errno(t, row);
    row->http_version = t->reader.minor ? CURL_HTTP_VERSION_1_1 : CURL_HTTP_VERSION_1_0;
    row->status = t->reader.status;
    if (row->cause != CAUSE_NONE || t->unsent || !t->reader.keep || c->plan->fresh_connections) {
        drop_connection(t);
        return;
    }
    client_socket(c, connection->fd)->transfer = NULL;
    connection->next = c->idle;
    c->idle = connection;
}

/* The request has ended before it had a connection. */
static void leave_handle(struct transfer *t, struct request_row *row)
{
    handle_store_phases(t, row);
    transfer_store_errno(t, row);
    handle_close(t);
}

static void leave(struct transfer *t, struct request_row *row)
{
    if (t->easy)
        leave_handle(t, row);
    if (t->connection)
        leave_connection(t, row);
}

/* ---- sending */

/* Send as much as the socket accepts. Returns false if the connection is broken, and stores the reason, which a read does not get then.
 * After EPIPE it does: whether the server had ended what it sent. */
static bool send_available(struct transfer *t)
{
    const struct request *q = t->request;
    while (t->unsent) {
        size_t of_head = t->unsent > q->body_size ? t->unsent - q->body_size : 0;
        size_t of_body = t->unsent - of_head;
        struct iovec parts[2] = {{t->head.base + (t->head.size - of_head), of_head}};
        if (of_body)
            parts[1] = (struct iovec){(char *)q->body + (q->body_size - of_body), of_body};
        struct msghdr message = {.msg_iov = parts, .msg_iovlen = q->body_size ? 2 : 1};
        ssize_t sent = sendmsg(t->fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent < 0 && errno == EINTR)
            continue;
        if (sent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
            return true;
        if (sent < 0) {
            if (errno != EPIPE)
                t->socket_errno = errno;
            return false;
        }
        t->unsent -= (size_t)sent;
    }
    return true;
}

/* A reused connection that ends before the first byte of the answer was closed by the server while the request was in transit: the
 * request is sent once more, on a new connection. */
static bool retry_on_new_connection(struct transfer *t)
{
    if (!t->reused || t->reader.began)
        return false;
    drop_connection(t);
    t->reused = false;
    t->socket_errno = 0;
    if (!connect_begin(t))
        transfer_fail(t, CURLE_OUT_OF_MEMORY, "no memory for a second connection");
    return true;
}

/* ---- reading */

static bool on_line(void *context, const char *line, size_t size)
{
    return answer_line(context, line, size);
}

static bool on_body(void *context, const uint8_t *bytes, size_t size)
{
    struct transfer *t = context;
    if (!t->body_began)
        answer_begin_body(t, t->reader.status, t->reader.type);
    return answer_body(t, bytes, size);
}

static CURLcode curl_code_of(int status)
{
    switch (status) {
    case HTTP1_DONE:
        return CURLE_OK;
    case HTTP1_TRUNCATED:
        return CURLE_PARTIAL_FILE;
    case HTTP1_NO_ANSWER:
        return CURLE_GOT_NOTHING;
    case HTTP1_NO_MEMORY:
        return CURLE_OUT_OF_MEMORY;
    case HTTP1_REFUSED:
        return CURLE_WRITE_ERROR;
    default:
        return CURLE_WEIRD_SERVER_REPLY;
    }
}

static void finish_with(struct transfer *t, int status)
{
    if (status == HTTP1_DONE)
        transfer_finish(t, CURLE_OK, CAUSE_NONE);
    else
        transfer_fail(t, curl_code_of(status), http1_explain(status));
}

/* Handle the data of one recvmsg. ending: the server has closed the connection. Returns false if the request has ended. */
static bool handle_read(struct transfer *t, size_t size, bool ending)
{
    struct client *c = t->client;
    struct http1_sink sink = {on_line, on_body, t};
    size_t used;
    c->action++;
    answer_first_byte(t);
    int status = http1_feed(&t->reader, c->buffer, size, &used, &sink);
    if (status == HTTP1_MORE)
        return true;
    if (used < size || ending) /* after unexpected bytes the connection must not be reused */
        t->reader.keep = false;
    finish_with(t, status);
    return false;
}

/* Nothing was read: `error`, or 0 at the end of the connection. */
static void handle_nothing(struct transfer *t, int error)
{
    if ((error == EAGAIN || error == EWOULDBLOCK) && !t->socket_errno)
        return;
    if (!t->socket_errno)
        t->socket_errno = error;
    if (retry_on_new_connection(t))
        return;
    if (t->socket_errno)
        transfer_fail(t, CURLE_RECV_ERROR, "the connection broke");
    else
        finish_with(t, http1_end(&t->reader));
}

/* Read until the socket is empty, which a short read shows unless the server has closed; after READS_IN_A_ROW reads, continue after the
 * other sockets. */
static void read_available(struct transfer *t, uint32_t events)
{
    struct client *c = t->client;
    struct socket_state *socket = client_socket(c, t->fd);
    bool ending = events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR);
    for (int i = 0; i < READS_IN_A_ROW; i++) {
        int64_t realtime_ns = 0;
        ssize_t got = clock_receive(t->fd, c->buffer, READ_BYTES, 0, socket->stamped ? &realtime_ns : NULL);
        if (got < 0 && errno == EINTR)
            continue;
        clock_stamp(&c->pair, realtime_ns, c->result->origin_ns, &c->now_ns, &c->now_kernel_ns);
        if (got <= 0) {
            handle_nothing(t, got == 0 ? 0 : errno);
            return;
        }
        socket->last_read_ns = c->now_ns;
        if (!handle_read(t, (size_t)got, ending))
            return;
        if (got < READ_BYTES && !ending)
            return;
    }
    watch(c, EPOLL_CTL_MOD, t->fd); /* reports at once what is left */
}

/* A server may answer and close before it has read the whole request: the answer is valid even if sending fails. What a reused connection
 * receives before any byte of the request was sent is not its answer. */
static void send_and_read(struct transfer *t, uint32_t events)
{
    bool can_send = send_available(t);
    bool nothing_sent = t->unsent == t->head.size + t->request->body_size;
    if (!can_send)
        events |= EPOLLERR;
    if (!(events & ~(uint32_t)EPOLLOUT) || (nothing_sent && retry_on_new_connection(t)))
        return;
    read_available(t, events);
}

/* ---- the start */

static void send_request(struct transfer *t)
{
    transfer_sending(t);
    client_row(t->client, t->index)->pretransfer_us = (t->sent_ns - t->started_ns) / NS_PER_US;
    send_and_read(t, 0);
}

static void use_connection(struct transfer *t, struct connection *connection)
{
    t->connection = connection;
    t->fd = connection->fd;
    t->unsent = t->head.size + t->request->body_size;
    client_socket(t->client, connection->fd)->transfer = t;
}

/* Whether nothing has arrived on an idle connection: neither its end, nor bytes, which would be taken for the next answer. epoll does not
 * always report them: a read that ended with its answer may have left them in the socket. */
static bool is_silent(const struct connection *connection)
{
    char byte;
    return recv(connection->fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT) < 0 && (errno == EAGAIN || errno == EWOULDBLOCK);
}

/* Take an idle connection to the request's origin out of the list, and close those to it that cannot be reused. Returns NULL if there is
 * none. */
static struct connection *take_idle(struct client *c, const char *origin)
{
    for (struct connection **at = &c->idle; *at;) {
        struct connection *connection = *at;
        if (strcmp(connection->origin, origin) != 0) {
            at = &connection->next;
            continue;
        }
        *at = connection->next;
        if (is_silent(connection))
            return connection;
        close_connection(c, connection);
    }
    return NULL;
}

/* Send on an idle connection to the request's origin. Returns false if there is none. */
static bool reuse(struct transfer *t)
{
    struct connection *connection = take_idle(t->client, t->request->origin);
    if (!connection)
        return false;
    t->reused = true;
    use_connection(t, connection);
    send_request(t);
    return true;
}

static bool begin(struct transfer *t)
{
    return request_write_head(t->request, &t->head) && (reuse(t) || connect_begin(t));
}

/* libcurl closes its connections when their handle is released; on_close in handle.c excludes the client's own sockets. */
void plain_connected(struct transfer *t)
{
    struct client *c = t->client;
    struct connection *connection = calloc(1, sizeof *connection);
    curl_socket_t fd = CURL_SOCKET_BAD; /* a socket that was connected at once has not been in on_socket of multi.c */
    curl_easy_getinfo(t->easy, CURLINFO_ACTIVESOCKET, &fd);
    t->fd = fd;
    struct socket_state *socket = client_socket(c, t->fd);
    if (!socket) {
        free(connection);
        transfer_finish(t, CURLE_COULDNT_CONNECT, CAUSE_NONE);
        return;
    }
    if (!connection || !(connection->origin = strdup(t->request->origin))) {
        free(connection);
        c->no_memory = true;
        return;
    }
    connection->fd = t->fd;
    socket->carrier = &carrier_plain;
    socket->connection = connection;
    use_connection(t, connection);
    client_row(c, t->index)->new_connection = 1;
    handle_store_phases(t, client_row(c, t->index));
    handle_close(t);
    if (!watch(c, EPOLL_CTL_ADD, t->fd)) {
        t->socket_errno = errno;
        transfer_fail(t, CURLE_COULDNT_CONNECT, "the connection cannot be watched");
        return;
    }
    send_request(t);
}

static void ready(struct client *c, int fd, uint32_t events)
{
    struct socket_state *socket = client_socket(c, fd);
    struct transfer *t = socket->transfer;
    if (t)
        send_and_read(t, events);
    else if (events & ~(uint32_t)EPOLLOUT)
        remove_idle(c, socket->connection); /* closed by the server, or unexpected data */
}

const struct carrier carrier_plain = {.begin = begin, .ready = ready, .leave = leave};

/* libcurl's multi handle in the client's loop: its sockets are in the client's epoll, its timer is the client's, and every socket is
 * stamped before libcurl reads it. */
#define _GNU_SOURCE
#include "parts.h"

#include <errno.h>
#include <sys/epoll.h>
#include <sys/socket.h>

enum { STALE_EVENTS = 16 };

/* ---- connections that no request uses
 *
 * What arrives on one belongs to no request. libcurl before 8.0 reuses it, and takes these bytes for the next answer; so it is shut down,
 * which libcurl notices. In HTTP/2 such bytes are frames of the connection. */

static void watch_idle(struct client *c, int fd)
{
    struct socket_state *socket = client_socket(c, fd);
    struct epoll_event event = {.events = EPOLLIN, .data.fd = fd};
    if (socket && socket->open && c->plan->http == PLAN_HTTP_1_1)
        socket->idle = epoll_ctl(c->idle_fd, EPOLL_CTL_ADD, fd, &event) == 0;
}

static void forget_idle(struct client *c, int fd)
{
    struct socket_state *socket = client_socket(c, fd);
    if (!socket || !socket->idle)
        return;
    epoll_ctl(c->idle_fd, EPOLL_CTL_DEL, fd, NULL);
    socket->idle = false;
}

void multi_drop_stale(struct client *c)
{
    struct epoll_event events[STALE_EVENTS];
    for (int count; (count = epoll_wait(c->idle_fd, events, STALE_EVENTS, 0)) > 0;) {
        for (int i = 0; i < count; i++) {
            int fd = events[i].data.fd;
            forget_idle(c, fd);
            shutdown(fd, SHUT_RDWR);
            while (recv(fd, c->buffer, READ_BYTES, MSG_DONTWAIT) > 0) {
            }
        }
    }
}

/* ---- libcurl's callbacks */

static int on_socket(CURL *easy, curl_socket_t fd, int what, void *context, void *known)
{
    struct client *c = context;
    struct transfer *t = NULL;
    if (what == CURL_POLL_REMOVE) {
        epoll_ctl(c->epoll_fd, EPOLL_CTL_DEL, fd, NULL);
        watch_idle(c, fd);
        return 0;
    }
    forget_idle(c, fd);
    struct epoll_event event = {.data.fd = fd};
    if (what & CURL_POLL_IN)
        event.events |= EPOLLIN;
    if (what & CURL_POLL_OUT)
        event.events |= EPOLLOUT;
    if (epoll_ctl(c->epoll_fd, known ? EPOLL_CTL_MOD : EPOLL_CTL_ADD, fd, &event) != 0) {
        int other = errno == ENOENT ? EPOLL_CTL_ADD : errno == EEXIST ? EPOLL_CTL_MOD : 0;
        if (!other || epoll_ctl(c->epoll_fd, other, fd, &event) != 0)
            return -1;
    }
    curl_multi_assign(c->multi, fd, c);
    curl_easy_getinfo(easy, CURLINFO_PRIVATE, (char **)&t);
    if (t) /* NULL: an internal handle of libcurl, which closes a connection */
        t->fd = fd;
    return 0;
}

static int on_timer(CURLM *multi, long timeout_ms, void *context)
{
    (void)multi;
    struct client *c = context;
    c->curl_due_ns = timeout_ms < 0 ? INT64_MAX : clock_monotonic_ns() + (int64_t)timeout_ms * NS_PER_MS;
    return 0;
}

bool multi_open(struct client *c)
{
    c->multi = curl_multi_init();
#if LIBCURL_VERSION_NUM >= 0x081400
    if (c->multi)
        curl_multi_setopt(c->multi, CURLMOPT_QUICK_EXIT, 1L); /* as CURLOPT_QUICK_EXIT in handle.c */
#endif
    return c->multi && curl_multi_setopt(c->multi, CURLMOPT_SOCKETFUNCTION, on_socket) == CURLM_OK &&
           curl_multi_setopt(c->multi, CURLMOPT_SOCKETDATA, c) == CURLM_OK &&
           curl_multi_setopt(c->multi, CURLMOPT_TIMERFUNCTION, on_timer) == CURLM_OK &&
           curl_multi_setopt(c->multi, CURLMOPT_TIMERDATA, c) == CURLM_OK;
}

/* ---- actions */

static void handle_finished(struct client *c)
{
    int left;
    CURLMsg *message;
    while ((message = curl_multi_info_read(c->multi, &left))) {
        if (message->msg != CURLMSG_DONE)
            continue;
        struct transfer *t = NULL;
        CURLcode code = message->data.result;
        curl_easy_getinfo(message->easy_handle, CURLINFO_PRIVATE, (char **)&t);
        receive_done(t, code);
    }
}

static void act(struct client *c, curl_socket_t fd, int events)
{
    int running;
    c->action++;
    c->now_overread = false;
    curl_multi_socket_action(c->multi, fd, events, &running);
    handle_finished(c);
    c->now_overread = false;
}

void multi_timer(struct client *c)
{
    c->now_ns = clock_monotonic_ns();
    c->now_kernel_ns = 0;
    c->now_errno = 0;
    c->curl_due_ns = INT64_MAX;
    act(c, CURL_SOCKET_TIMEOUT, 0);
}

/* Store the newest stamps of all data in the socket: a read of several packets is not timed before the last one arrived. If nothing has
 * arrived since the last time, the stored stamps stay valid for what libcurl still holds; at the end of the connection there are none. */
static void stamp_socket(struct client *c, int fd, struct socket_state *socket)
{
    int64_t realtime_ns, received = clock_bytes_received(fd);
    ssize_t waiting = clock_receive(fd, c->buffer, READ_BYTES, MSG_PEEK | MSG_TRUNC, &realtime_ns);
    if (waiting < 0 && errno != EAGAIN && errno != EWOULDBLOCK)
        c->now_errno = errno;
    if (waiting > 0 && received == socket->received && socket->kernel_ns)
        return;
    if (received < 0 || waiting == READ_BYTES) /* there may be more data, with a newer stamp */
        realtime_ns = 0;
    clock_stamp(&c->pair, realtime_ns, c->result->origin_ns, &socket->user_ns, &socket->kernel_ns);
    socket->received = received;
    socket->outrun = false;
}

void multi_ready(struct client *c, int fd, uint32_t events)
{
    struct socket_state *socket = client_socket(c, fd);
    c->now_ns = clock_monotonic_ns();
    c->now_kernel_ns = 0;
    c->now_errno = 0;
    if (socket && socket->open && (events & EPOLLIN)) {
        socket->last_read_ns = c->now_ns;
        if (socket->stamped && !(events & EPOLLERR))
            stamp_socket(c, fd, socket);
    }
    int what = 0;
    if (events & EPOLLIN)
        what |= CURL_CSELECT_IN;
    if (events & EPOLLOUT)
        what |= CURL_CSELECT_OUT;
    if (events & (EPOLLERR | EPOLLHUP))
        what |= CURL_CSELECT_ERR;
    act(c, fd, what);
}

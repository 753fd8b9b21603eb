/* The system calls that csrc/stream and libcurl use. Their behaviour is that of Linux 6: tcp(7), epoll(7), socket(7). */
#define _GNU_SOURCE
#include "kernel_state.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdarg.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/timerfd.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { MOST_CALLS = 200000 };

static void enter(void)
{
    if (++calls > MOST_CALLS)
        violated("a busy loop: %d system calls", MOST_CALLS);
    pass_time();
}

static int64_t result(const char *call, int fd, int64_t value)
{
    int error = errno;
    uint64_t parts[] = {(uint64_t)call[0] << 8 | (uint64_t)call[1], (uint64_t)fd, (uint64_t)value, (uint64_t)now_ns};
    for (int i = 0; i < 4; i++)
        counts.digest = (counts.digest ^ parts[i]) * 1099511628211u;
    if (value < 0)
        trace("%s(%d): %s", call, fd, strerrorname_np(error));
    else
        trace("%s(%d) = %lld", call, fd, (long long)value);
    errno = error;
    return value;
}

static int64_t fail(const char *call, int fd, int error)
{
    errno = error;
    return result(call, fd, -1);
}

static bool is_interrupted(const char *call, int fd)
{
    if (!one_in(24))
        return false;
    counts.interrupts++;
    fail(call, fd, EINTR);
    return true;
}

/* ---- sockets */

int socket(int family, int type, int protocol)
{
    (void)protocol;
    if (!running)
        return (int)syscall(SYS_socket, family, type, protocol);
    enter();
    bool stream = (type & 0xf) == SOCK_STREAM;
    if (stream && refused_sockets && one_in(2)) {
        refused_sockets--;
        return (int)fail("socket", -1, EMFILE);
    }
    int fd = open_descriptor(stream ? STREAM : OTHER);
    lookup(fd)->is_unix = family == AF_UNIX;
    return (int)result("socket", fd, fd);
}

int socketpair(int family, int type, int protocol, int pair[2])
{
    if (!running)
        return (int)syscall(SYS_socketpair, family, type, protocol, pair);
    pair[0] = open_descriptor(OTHER);
    pair[1] = open_descriptor(OTHER);
    return 0;
}

int connect(int fd, const struct sockaddr *address, socklen_t size)
{
    struct descriptor *d = opened(fd, "connect");
    if (!d)
        return (int)syscall(SYS_connect, fd, address, size);
    enter();
    if (connection_count == MOST_CONNECTIONS)
        violated("more than %d connections", MOST_CONNECTIONS);
    d->connection = connection_count++;
    struct connection_log *c = connection_of(d);
    *c = (struct connection_log){.space = SOCKET_SPACE};
    if (address->sa_family == AF_INET)
        c->port = ntohs(((const struct sockaddr_in *)address)->sin_port);
    server_connect(d->connection);
    let_happen();
    if (c->error) {
        c->error = 0;
        return (int)fail("connect", fd, ECONNREFUSED);
    }
    return (int)(c->connected ? result("connect", fd, 0) : fail("connect", fd, EINPROGRESS));
}

static ssize_t send_parts(int fd, const struct iovec *parts, size_t count, int flags)
{
    struct connection_log *c = connection_of(lookup(fd));
    size_t size = 0;
    enter();
    if (!(flags & MSG_NOSIGNAL))
        violated("a message that may raise SIGPIPE");
    if (!c || !c->connected)
        return fail("send", fd, ENOTCONN);
    if (is_interrupted("send", fd))
        return -1;
    if (stopped && !lookup(fd)->may_send)
        violated("a message is sent after the run was stopped");
    for (size_t i = 0; i < count; i++)
        size += parts[i].iov_len;
    if (!size)
        violated("a message without bytes");
    if (c->broken) {
        int error = c->error ? c->error : EPIPE;
        c->error = 0;
        return fail("send", fd, error);
    }
    size_t most = size < c->space ? size : c->space;
    if (most && one_in(6))
        most = 1 + random_below((uint32_t)most);
    if (most < size)
        c->full = true; /* whatever the reason: the kernel reports when there is space again */
    if (!most) {
        counts.full_sends++;
        return fail("send", fd, EAGAIN);
    }
    counts.partial_sends += most < size;
    char *bytes = malloc(size);
    size_t at = 0;
    for (size_t i = 0; i < count; i++) {
        memcpy(bytes + at, parts[i].iov_base, parts[i].iov_len);
        at += parts[i].iov_len;
    }
    server_sending(lookup(fd)->connection, bytes, size);
    c->space -= most;
    c->drained_ns = 0;
    kernel_schedule(DRAINS, now_ns + 1 + random_below(300 * US), lookup(fd)->connection, NULL, 0, 0);
    server_received(lookup(fd)->connection, bytes, most);
    free(bytes);
    return result("send", fd, (int64_t)most);
}

ssize_t sendmsg(int fd, const struct msghdr *message, int flags)
{
    if (!opened(fd, "sendmsg"))
        return syscall(SYS_sendmsg, fd, message, flags);
    return send_parts(fd, message->msg_iov, message->msg_iovlen, flags);
}

ssize_t send(int fd, const void *bytes, size_t size, int flags)
{
    struct iovec part = {(void *)bytes, size};
    if (!opened(fd, "send"))
        return syscall(SYS_sendto, fd, bytes, size, flags, NULL, 0);
    return send_parts(fd, &part, 1, flags);
}

static int64_t stamp_of(const struct connection_log *c, size_t end)
{
    const struct arrival *a = (const struct arrival *)c->arrivals.base;
    while (a->end < end)
        a++;
    return a->at_ns + offset_at(a->at_ns);
}

static ssize_t receive(int fd, void *into, size_t size, int flags, int64_t *stamp_ns)
{
    struct connection_log *c = connection_of(lookup(fd));
    bool peeks = flags & MSG_PEEK;
    *stamp_ns = 0;
    enter();
    if (!c || (!c->connected && !c->broken))
        return fail("recv", fd, c ? EAGAIN : ENOTCONN);
    if (is_interrupted("recv", fd))
        return -1;
    size_t most = c->arrived.size - c->read;
    if (most > size)
        most = size;
    if (!most) {
        int error = c->error;
        if (c->ended || (c->broken && !error))
            return result("recv", fd, 0);
        if (!c->broken && peeks)
            c->silent_call = calls;
        if (!c->broken)
            return fail("recv", fd, EAGAIN);
        c->error = 0;
        return fail("recv", fd, error);
    }
    if (!(flags & MSG_TRUNC))
        memcpy(into, c->arrived.base + c->read, most);
    *stamp_ns = lookup(fd)->stamped ? stamp_of(c, c->read + most) : 0;
    if (tracing)
        trace("  %.*s", (int)(most < 400 ? most : 400), (const char *)c->arrived.base + c->read);
    if (peeks)
        c->peeked = c->read + most;
    else
        c->read += most;
    return result(peeks ? "peek" : "recv", fd, (int64_t)most);
}

ssize_t recv(int fd, void *into, size_t size, int flags)
{
    int64_t stamp;
    if (!opened(fd, "recv"))
        return syscall(SYS_recvfrom, fd, into, size, flags, NULL, NULL);
    return receive(fd, into, size, flags, &stamp);
}

ssize_t recvmsg(int fd, struct msghdr *message, int flags)
{
    int64_t stamp = 0;
    if (!opened(fd, "recvmsg"))
        return syscall(SYS_recvmsg, fd, message, flags);
    ssize_t got = receive(fd, message->msg_iov->iov_base, message->msg_iov->iov_len, flags, &stamp);
    struct timespec t = {stamp / 1000000000, stamp % 1000000000};
    if (got > 0 && stamp && message->msg_controllen >= CMSG_SPACE(sizeof t)) {
        struct cmsghdr *control = CMSG_FIRSTHDR(message);
        *control = (struct cmsghdr){CMSG_LEN(sizeof t), SOL_SOCKET, SCM_TIMESTAMPNS};
        memcpy(CMSG_DATA(control), &t, sizeof t);
        message->msg_controllen = CMSG_SPACE(sizeof t);
    } else {
        message->msg_controllen = 0;
    }
    return got;
}

int getsockopt(int fd, int level, int name, void *value, socklen_t *size)
{
    struct descriptor *d = opened(fd, "getsockopt");
    if (!d)
        return (int)syscall(SYS_getsockopt, fd, level, name, value, size);
    enter();
    struct connection_log *c = connection_of(d);
    if (level == SOL_SOCKET && name == SO_ERROR) {
        *(int *)value = c ? c->error : 0;
        if (c)
            c->error = 0;
    } else if (level == IPPROTO_TCP && name == TCP_INFO && c && !d->is_unix) {
        /* the end of a connection has a place in the sequence of its bytes */
        struct tcp_info info = {.tcpi_bytes_received = c->arrived.size + c->ended};
        *size = *size < sizeof info ? *size : sizeof info;
        memcpy(value, &info, *size);
    } else {
        return (int)fail("getsockopt", fd, ENOPROTOOPT);
    }
    return (int)result("getsockopt", fd, 0);
}

int setsockopt(int fd, int level, int name, const void *value, socklen_t size)
{
    struct descriptor *d = opened(fd, "setsockopt");
    if (!d)
        return (int)syscall(SYS_setsockopt, fd, level, name, value, size);
    enter();
    if (level == SOL_SOCKET && name == SO_TIMESTAMPNS)
        d->stamped = true;
    return (int)result("setsockopt", fd, 0);
}

static int store_address(int fd, struct sockaddr *address, socklen_t *size)
{
    struct sockaddr_in in = {.sin_family = AF_INET, .sin_port = htons(1), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    memset(address, 0, *size);
    if (lookup(fd)->is_unix)
        address->sa_family = AF_UNIX;
    else
        memcpy(address, &in, *size < sizeof in ? *size : sizeof in);
    return 0;
}

int getpeername(int fd, struct sockaddr *address, socklen_t *size)
{
    return opened(fd, "getpeername") ? store_address(fd, address, size) : (int)syscall(SYS_getpeername, fd, address, size);
}

int getsockname(int fd, struct sockaddr *address, socklen_t *size)
{
    return opened(fd, "getsockname") ? store_address(fd, address, size) : (int)syscall(SYS_getsockname, fd, address, size);
}

static int control(int fd, int command, long argument)
{
    return opened(fd, "fcntl") ? 0 : (int)syscall(SYS_fcntl, fd, command, argument);
}

int fcntl(int fd, int command, ...)
{
    va_list arguments;
    va_start(arguments, command);
    long argument = va_arg(arguments, long);
    va_end(arguments);
    return control(fd, command, argument);
}

int close(int fd)
{
    struct descriptor *d = opened(fd, "close");
    if (!d)
        return (int)syscall(SYS_close, fd);
    enter();
    if (d->own)
        violated("the client closes descriptor %d, which it did not open", fd);
    if (connection_of(d))
        connection_of(d)->closed = true;
    d->kind = CLOSED;
    return (int)result("close", fd, 0);
}

/* ---- waiting */

static uint32_t ready_events(const struct descriptor *d)
{
    const struct connection_log *c = connection_of(d);
    uint32_t events = 0;
    if (d->kind == COUNTER)
        return d->count ? EPOLLIN : 0;
    if (d->kind == TIMER)
        return d->due_ns <= now_ns ? EPOLLIN : 0;
    if (d->kind == STREAM && !c)
        return EPOLLOUT | EPOLLHUP;
    if (!c)
        return 0;
    if (c->arrived.size > c->read || c->ended || c->broken)
        events |= EPOLLIN;
    if (c->ended || c->broken)
        events |= EPOLLRDHUP;
    if (c->broken)
        events |= EPOLLHUP | EPOLLOUT;
    if (c->error)
        events |= EPOLLERR;
    if (c->connected && !c->full && c->space)
        events |= EPOLLOUT;
    return events;
}

int epoll_create1(int flags)
{
    (void)flags;
    int fd = open_descriptor(EPOLL);
    return (int)result("epoll_create1", fd, fd);
}

int epoll_ctl(int epoll_fd, int operation, int fd, struct epoll_event *event)
{
    struct descriptor *d = lookup(fd);
    if (d && d->kind == CLOSED && operation == EPOLL_CTL_DEL) /* libcurl's last message about a socket may come after close */
        return (int)fail("epoll_ctl", fd, EBADF);
    if (!opened(fd, "epoll_ctl") || !opened(epoll_fd, "epoll_ctl"))
        violated("epoll_ctl of descriptor %d, which the client did not open", fd);
    enter();
    if (operation == EPOLL_CTL_ADD ? d->watched : !d->watched)
        return (int)fail("epoll_ctl", fd, d->watched ? EEXIST : ENOENT);
    d->watched = operation != EPOLL_CTL_DEL;
    d->pending = d->watched;
    if (d->watched)
        d->event = *event;
    return (int)result("epoll_ctl", fd, 0);
}

/* The events that a wait returns now. A descriptor that is watched edge-triggered is reported once per change. */
static int collect(struct epoll_event *events, int most)
{
    int order[MOST_FDS], count = 0, taken = 0;
    for (int i = 0; i < MOST_FDS; i++)
        descriptors[i].may_send = false;
    for (int i = 0; i < MOST_FDS; i++) {
        struct descriptor *d = &descriptors[i];
        bool edge = d->event.events & EPOLLET;
        if (d->kind == CLOSED || !d->watched || (edge && !d->pending && !one_in(64)))
            continue;
        if (ready_events(d) & (d->event.events | EPOLLERR | EPOLLHUP))
            order[count++] = i;
        else
            d->pending = false;
    }
    for (int i = count; i > 1; i--) {
        int other = (int)random_below((uint32_t)i), former = order[i - 1];
        order[i - 1] = order[other];
        order[other] = former;
    }
    if (count > 1 && one_in(8))
        count = 1 + (int)random_below((uint32_t)count);
    for (; taken < count && taken < most; taken++) {
        struct descriptor *d = &descriptors[order[taken]];
        events[taken] = d->event;
        events[taken].events = ready_events(d) & (d->event.events | EPOLLERR | EPOLLHUP);
        d->pending = false;
        trace("  ready: %d, %x", FIRST_FD + order[taken], events[taken].events);
        d->may_send = !stopped;
        stopped |= FIRST_FD + order[taken] == cancel_fd;
    }
    return taken;
}

int epoll_wait(int epoll_fd, struct epoll_event *events, int most, int timeout_ms)
{
    if (!opened(epoll_fd, "epoll_wait") || timeout_ms > 0)
        violated("epoll_wait of descriptor %d for %d ms", epoll_fd, timeout_ms);
    enter();
    counts.waits++;
    jumped_ns = 0;
    for (;;) {
        int taken = collect(events, most);
        if (taken || timeout_ms == 0)
            return (int)result("epoll_wait", epoll_fd, taken);
        if (is_interrupted("epoll_wait", epoll_fd))
            return -1;
        const struct step *next = next_step();
        int64_t until = next ? next->at_ns : INT64_MAX;
        for (int i = 0; i < MOST_FDS; i++)
            if (descriptors[i].kind == TIMER && descriptors[i].watched && descriptors[i].due_ns < until)
                until = descriptors[i].due_ns;
        if (until == INT64_MAX)
            violated("the client waits, and nothing will happen");
        if (until > now_ns)
            now_ns = until;
        let_happen();
        now_ns += random_below(20 * US); /* until the process runs */
        let_happen();
    }
}

int timerfd_create(int clock, int flags)
{
    (void)clock, (void)flags;
    int fd = open_descriptor(TIMER);
    return (int)result("timerfd_create", fd, fd);
}

int timerfd_settime(int fd, int flags, const struct itimerspec *when, struct itimerspec *before)
{
    struct descriptor *d = opened(fd, "timerfd_settime");
    if (!d || d->kind != TIMER || flags != TFD_TIMER_ABSTIME || before)
        violated("timerfd_settime of descriptor %d", fd);
    enter();
    int64_t due = when->it_value.tv_sec * INT64_C(1000000000) + when->it_value.tv_nsec;
    d->due_ns = due ? due : INT64_MAX;
    return (int)result("timerfd_settime", fd, 0);
}

int poll(struct pollfd *polled, nfds_t count, int timeout_ms)
{
    int ready = 0;
    if (!running)
        return (int)syscall(SYS_poll, polled, count, timeout_ms);
    if (timeout_ms)
        violated("poll for %d ms", timeout_ms);
    enter();
    for (nfds_t i = 0; i < count; i++) {
        polled[i].revents = 0;
        if (polled[i].fd < 0)
            continue;
        uint32_t events = ready_events(opened(polled[i].fd, "poll"));
        polled[i].revents = (short)(events & ((uint32_t)polled[i].events | POLLERR | POLLHUP));
        ready += polled[i].revents != 0;
        struct connection_log *c = connection_of(lookup(polled[i].fd));
        if (c && !(events & EPOLLIN))
            c->silent_call = calls;
    }
    return (int)result("poll", count ? polled[0].fd : -1, ready);
}

ssize_t read(int fd, void *into, size_t size)
{
    struct descriptor *d = opened(fd, "read");
    if (!d)
        return syscall(SYS_read, fd, into, size);
    enter();
    if (is_interrupted("read", fd))
        return -1;
    if (fd == cancel_fd)
        violated("the client reads the descriptor of the cancel");
    if (d->kind == TIMER && d->due_ns <= now_ns) {
        memset(into, 1, 8);
        d->due_ns = INT64_MAX;
        return result("read", fd, 8);
    }
    size_t got = d->kind == COUNTER && d->count < size ? d->count : size;
    if (d->kind != COUNTER || !got)
        return fail("read", fd, EAGAIN);
    memset(into, 'n', got);
    d->count -= got;
    return result("read", fd, (int64_t)got);
}

ssize_t write(int fd, const void *bytes, size_t size)
{
    struct descriptor *d = opened(fd, "write");
    if (!d)
        return syscall(SYS_write, fd, bytes, size);
    enter();
    d->count += size;
    return result("write", fd, (int64_t)size);
}

/* ---- clocks */

int clock_gettime(clockid_t which, struct timespec *t)
{
    if (!running || (which != CLOCK_MONOTONIC && which != CLOCK_REALTIME && which != CLOCK_MONOTONIC_RAW))
        return (int)syscall(SYS_clock_gettime, which, t);
    /* An interruption between two readings is rare, so that one of the tries of clock_pair_measure is without one. */
    if (++clock_calls_since_jump > 6 && one_in(8)) {
        clock_calls_since_jump = 0;
        pass_time();
    } else {
        now_ns += 10 + random_below(40);
        let_happen();
    }
    int64_t value = now_ns + (which == CLOCK_REALTIME ? clock_offset_ns : 0);
    *t = (struct timespec){value / 1000000000, value % 1000000000};
    return 0;
}

int gettimeofday(struct timeval *restrict t, void *restrict zone)
{
    if (!running)
        return (int)syscall(SYS_gettimeofday, t, zone);
    int64_t value = now_ns + clock_offset_ns;
    *t = (struct timeval){value / 1000000000, value % 1000000000 / 1000};
    return 0;
}

time_t time(time_t *into)
{
    time_t value = running ? (time_t)((now_ns + clock_offset_ns) / 1000000000) : (time_t)syscall(SYS_time, NULL);
    if (into)
        *into = value;
    return value;
}

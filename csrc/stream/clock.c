/* The clocks of clock.h. SO_TIMESTAMPNS: socket(7) and Documentation/networking/timestamping.rst of Linux. */
#define _GNU_SOURCE
#include "clock.h"

#include <linux/tcp.h>
#include <netinet/in.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>

static int64_t read_clock(clockid_t which)
{
    struct timespec t;
    clock_gettime(which, &t);
    return (int64_t)t.tv_sec * NS_PER_S + t.tv_nsec;
}

int64_t clock_monotonic_ns(void)
{
    return read_clock(CLOCK_MONOTONIC);
}

void clock_pair_measure(struct clock_pair *pair)
{
    int64_t best_width = INT64_MAX, best_offset = 0, at = 0;
    for (int i = 0; i < 4 && best_width > NS_PER_US; i++) {
        int64_t before = read_clock(CLOCK_MONOTONIC);
        int64_t real = read_clock(CLOCK_REALTIME);
        int64_t after = read_clock(CLOCK_MONOTONIC);
        if (after - before < best_width) {
            best_width = after - before;
            best_offset = real - (before + (after - before) / 2);
            at = after;
        }
    }
    pair->previous_ns = pair->measured_ns ? pair->offset_ns : best_offset;
    pair->offset_ns = best_offset;
    pair->measured_ns = at;
    pair->error_ns = best_width / 2;
}

bool clock_pair_stepped(const struct clock_pair *pair)
{
    int64_t step = pair->offset_ns - pair->previous_ns;
    return step > NS_PER_MS || step < -NS_PER_MS;
}

int64_t clock_map(const struct clock_pair *pair, int64_t realtime_ns, int64_t not_before_ns, int64_t user_ns)
{
    if (realtime_ns == 0 || clock_pair_stepped(pair))
        return 0;
    int64_t mapped = realtime_ns - pair->offset_ns;
    /* The offset is known to about a microsecond: a stamp that close to an end of its range is clamped to it. */
    if (mapped > user_ns && mapped - user_ns < 20 * NS_PER_US)
        return user_ns;
    return mapped < not_before_ns || mapped > user_ns ? 0 : mapped;
}

void clock_stamp(const struct clock_pair *pair, int64_t realtime_ns, int64_t not_before_ns, int64_t *user_ns, int64_t *kernel_ns)
{
    bool known_then = realtime_ns && realtime_ns - pair->offset_ns + pair->error_ns <= pair->measured_ns;
    *user_ns = known_then ? pair->measured_ns : clock_monotonic_ns();
    *kernel_ns = clock_map(pair, realtime_ns, not_before_ns, *user_ns);
    if (known_then && *kernel_ns == 0)
        *user_ns = clock_monotonic_ns();
}

bool clock_stamp_socket(int fd)
{
    int on = 1;
    return setsockopt(fd, SOL_SOCKET, SO_TIMESTAMPNS, &on, sizeof on) == 0;
}

ssize_t clock_receive(int fd, void *into, size_t size, int flags, int64_t *realtime_ns)
{
    union {
        char bytes[CMSG_SPACE(sizeof(struct timespec))];
        struct cmsghdr align;
    } control;
    struct iovec vector = {into, size};
    struct msghdr message = {.msg_iov = &vector, .msg_iovlen = 1, .msg_control = control.bytes, .msg_controllen = sizeof control.bytes};
    *realtime_ns = 0;
    ssize_t got = recvmsg(fd, &message, flags | MSG_DONTWAIT);
    if (got <= 0)
        return got;
    for (struct cmsghdr *c = CMSG_FIRSTHDR(&message); c; c = CMSG_NXTHDR(&message, c)) {
        if (c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_TIMESTAMPNS) {
            struct timespec t;
            memcpy(&t, CMSG_DATA(c), sizeof t);
            *realtime_ns = (int64_t)t.tv_sec * NS_PER_S + t.tv_nsec;
        }
    }
    return got;
}

int64_t clock_bytes_received(int fd)
{
    struct tcp_info info;
    socklen_t size = sizeof info;
    bool known = getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size) == 0 &&
                 size >= offsetof(struct tcp_info, tcpi_bytes_received) + sizeof info.tcpi_bytes_received;
    return known ? (int64_t)info.tcpi_bytes_received : -1;
}

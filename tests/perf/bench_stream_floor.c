/* The floor of bench_stream.py: the minimum that a client can do on this machine. It sends S requests, waits with epoll, receives with
 * the kernel's stamp, and records the delay; it does not split events or store data.
 *
 *   bench_stream_floor PORT STREAMS EVENTS QUERY CPU      prints {"user": [[ns, ...]], "kernel": ..., "cpu_s": ...}
 */
#define _GNU_SOURCE
#include <errno.h>
#include <netinet/in.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { MAX_STREAMS = 1024, BUFFER_BYTES = 64 << 10 };

struct lag {
    int64_t user_ns, kernel_ns;
};

static int64_t now_ns(clockid_t which)
{
    struct timespec t;
    clock_gettime(which, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static double cpu_s(void)
{
    struct rusage spent;
    getrusage(RUSAGE_SELF, &spent);
    return (double)(spent.ru_utime.tv_sec + spent.ru_stime.tv_sec) +
           (double)(spent.ru_utime.tv_usec + spent.ru_stime.tv_usec) / 1e6;
}

static int ask(int port, const char *query)
{
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), on = 1;
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK), .sin_port = htons(port)};
    char request[512];
    int size = snprintf(request, sizeof request, "POST /v1/chat/completions?%s HTTP/1.1\r\nContent-Length: 0\r\n\r\n", query);
    setsockopt(fd, SOL_SOCKET, SO_TIMESTAMPNS, &on, sizeof on);
    if (fd < 0 || connect(fd, (struct sockaddr *)&at, sizeof at) || send(fd, request, (size_t)size, 0) != size) {
        perror("bench_stream_floor");
        exit(1);
    }
    return fd;
}

static ssize_t receive(int fd, char *into, int64_t *realtime_ns)
{
    union {
        char bytes[CMSG_SPACE(sizeof(struct timespec))];
        struct cmsghdr align;
    } control;
    struct iovec vector = {into, BUFFER_BYTES};
    struct msghdr message = {
        .msg_iov = &vector, .msg_iovlen = 1, .msg_control = control.bytes, .msg_controllen = sizeof control.bytes};
    ssize_t got = recvmsg(fd, &message, MSG_DONTWAIT);
    struct timespec t = {0, 0};
    struct cmsghdr *c = got > 0 ? CMSG_FIRSTHDR(&message) : NULL;
    if (c)
        memcpy(&t, CMSG_DATA(c), sizeof t);
    *realtime_ns = (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
    return got;
}

static void print(const char *name, const struct lag *lags, size_t count, int kernel)
{
    printf("\"%s\": [[", name);
    for (size_t i = 0; i < count; i++)
        printf("%s%lld", i ? ", " : "", (long long)(kernel ? lags[i].kernel_ns : lags[i].user_ns));
    printf("]], ");
}

int main(int argc, char **argv)
{
    if (argc != 6)
        return 2;
    int port = atoi(argv[1]), streams = atoi(argv[2]), open = streams, epoll = epoll_create1(EPOLL_CLOEXEC);
    size_t most = (size_t)streams * (size_t)atoi(argv[3]), count = 0;
    struct lag *lags = malloc(most * sizeof *lags);
    static char buffer[BUFFER_BYTES];
    cpu_set_t cpus;
    CPU_ZERO(&cpus);
    CPU_SET(atoi(argv[5]), &cpus);
    sched_setaffinity(0, sizeof cpus, &cpus);
    if (!lags || streams > MAX_STREAMS)
        return 1;
    memset(lags, 1, most * sizeof *lags); /* its pages are there before the clock starts */
    double began = cpu_s();
    for (int i = 0; i < streams; i++) {
        struct epoll_event event = {.events = EPOLLIN | EPOLLET, .data.fd = ask(port, argv[4])};
        epoll_ctl(epoll, EPOLL_CTL_ADD, event.data.fd, &event);
    }
    int64_t offset = now_ns(CLOCK_REALTIME) - now_ns(CLOCK_MONOTONIC), wakes = 0;
    while (open) {
        struct epoll_event events[64];
        int ready = epoll_wait(epoll, events, 64, -1);
        wakes++;
        for (int i = 0; i < ready; i++) {
            int64_t realtime;
            ssize_t got = receive(events[i].data.fd, buffer, &realtime);
            int64_t now = now_ns(CLOCK_MONOTONIC);
            char *stamp = got > 0 ? memmem(buffer, (size_t)got, "\"content\":\"", 11) : NULL;
            if (stamp && count < most) {
                int64_t sent = strtoll(stamp + 11, NULL, 10);
                lags[count++] = (struct lag){now - sent, realtime - offset - sent};
            }
            open -= got >= 5 && memcmp(buffer + got - 5, "0\r\n\r\n", 5) == 0;
        }
    }
    double spent = cpu_s() - began;
    printf("{");
    print("user", lags, count, 0);
    print("kernel", lags, count, 1);
    printf("\"wakes\": %lld, \"cpu_s\": %.6f}\n", (long long)wakes, spent);
    return 0;
}

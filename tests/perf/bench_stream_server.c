/* The load server of bench_stream.py: streams events at fixed times and writes into each its send time (CLOCK_MONOTONIC), so that
 * the delay of a client on the same machine can be computed.
 *
 *   bench_stream_server CPU [PEM]      prints its port; serves until it is killed
 *       PEM, if built with -DWITH_TLS -lssl: a file with key and certificate, to serve over TLS
 *   POST /v1/chat/completions?streams=S&events=E&gap_us=G&stagger=0|1&tokens=T&split=0|1
 *
 * When S requests wait, event k of stream i is due at T0 + k G (+ i G / S if staggered). Each is sent as one chunk in one send; with
 * split=1 in two sends, split inside the event. Every event's text begins with the stamp; the answer's X-Received-Ns header is the time
 * at which the request was read.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>
#ifdef WITH_TLS
#include <openssl/ssl.h>

static SSL_CTX *tls;
#endif

enum { MAX_STREAMS = 1024, REQUEST_BYTES = 65536 };

struct stream {
    int fd;
    void *session; /* TLS's; NULL: plain */
    size_t held;
    int64_t received_ns;
    bool waiting;
    char request[REQUEST_BYTES];
};

struct schedule {
    int64_t gap_ns;
    int streams, events, tokens;
    bool stagger, split;
};

static struct stream streams[MAX_STREAMS];

static int64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static void sleep_until(int64_t due)
{
    struct timespec t = {due / 1000000000, due % 1000000000};
    while (now_ns() < due && clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, NULL) == EINTR)
        ;
}

static ssize_t receive(struct stream *s, char *into, size_t size)
{
#ifdef WITH_TLS
    if (s->session) /* blocks for the rest of a record, which a client sends in one go */
        return SSL_read(s->session, into, (int)size);
#endif
    return recv(s->fd, into, size, MSG_DONTWAIT);
}

static void send_all(struct stream *s, const char *bytes, size_t size)
{
    while (size) {
        ssize_t sent;
#ifdef WITH_TLS
        if (s->session)
            sent = SSL_write(s->session, bytes, (int)size);
        else
#endif
            sent = send(s->fd, bytes, size, MSG_NOSIGNAL);
        if (sent <= 0)
            return; /* the client left: its loss is the client's */
        bytes += sent;
        size -= (size_t)sent;
    }
}

static long number(const char *request, const char *name, long otherwise)
{
    const char *at = strstr(request, name);
    return at ? strtol(at + strlen(name), NULL, 10) : otherwise;
}

static struct schedule read_schedule(const char *request)
{
    return (struct schedule){
        .gap_ns = number(request, "gap_us=", 10000) * 1000,
        .streams = (int)number(request, "streams=", 1),
        .events = (int)number(request, "events=", 100),
        .tokens = (int)number(request, "tokens=", 1),
        .stagger = number(request, "stagger=", 0) != 0,
        .split = number(request, "split=", 0) != 0,
    };
}

static void send_event(struct stream *s, int index, const struct schedule *plan)
{
    char words[256] = "", body[1024], out[1200];
    for (int t = 1; t < plan->tokens && t < 16; t++)
        strcat(words, " token");
    /* The stamp is taken with everything else ready. */
    int size = snprintf(body, sizeof body,
                        "data: {\"id\":\"chatcmpl-%08d\",\"object\":\"chat.completion.chunk\",\"created\":1,\"model\":\"load\","
                        "\"choices\":[{\"index\":0,\"delta\":{\"content\":\"%019lld%s \"},\"finish_reason\":null}]}\n\n",
                        index, (long long)now_ns(), words);
    int total = snprintf(out, sizeof out, "%x\r\n%s\r\n", size, body);
    if (plan->split) {
        send_all(s, out, (size_t)total / 2);
        send_all(s, out + total / 2, (size_t)(total - total / 2));
    } else {
        send_all(s, out, (size_t)total);
    }
}

static void send_head(struct stream *s)
{
    char head[256];
    int size = snprintf(head, sizeof head,
                        "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nX-Received-Ns: %lld\r\n"
                        "Transfer-Encoding: chunked\r\n\r\n",
                        (long long)s->received_ns);
    send_all(s, head, (size_t)size);
}

static void send_end(struct stream *s, int events)
{
    char usage[256], out[400];
    int size = snprintf(usage, sizeof usage,
                        "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":1,\"completion_tokens\":%d}}\n\n"
                        "data: [DONE]\n\n", events);
    int total = snprintf(out, sizeof out, "%x\r\n%s\r\n0\r\n\r\n", size, usage);
    send_all(s, out, (size_t)total);
}

static void run_schedule(struct schedule plan)
{
    struct stream *ready[MAX_STREAMS];
    int count = 0;
    for (int i = 0; i < MAX_STREAMS && count < plan.streams; i++)
        if (streams[i].waiting)
            ready[count++] = &streams[i];
    for (int i = 0; i < count; i++)
        send_head(ready[i]);
    int64_t start = now_ns() + 20000000;
    for (int k = 0; k < plan.events; k++) {
        for (int i = 0; i < count; i++) {
            sleep_until(start + k * plan.gap_ns + (plan.stagger ? i * plan.gap_ns / count : 0));
            send_event(ready[i], k, &plan);
        }
    }
    sleep_until(start + plan.events * plan.gap_ns + 5000000);
    for (int i = 0; i < count; i++) {
        send_end(ready[i], plan.events * plan.tokens);
        ready[i]->waiting = false;
    }
}

static int waiting_count(void)
{
    int count = 0;
    for (int i = 0; i < MAX_STREAMS; i++)
        count += streams[i].waiting;
    return count;
}

/* True when a whole request has been read. */
static bool read_some(struct stream *s, int epoll)
{
    ssize_t got = receive(s, s->request + s->held, REQUEST_BYTES - 1 - s->held);
    if (got == 0 || (got < 0 && errno != EAGAIN)) {
        epoll_ctl(epoll, EPOLL_CTL_DEL, s->fd, NULL);
#ifdef WITH_TLS
        SSL_free(s->session);
#endif
        close(s->fd);
        memset(s, 0, sizeof *s);
        return false;
    }
    if (got < 0)
        return false;
    s->held += (size_t)got;
    s->request[s->held] = 0;
    char *end = strstr(s->request, "\r\n\r\n");
    if (!end)
        return false;
    char *length = strcasestr(s->request, "content-length:");
    size_t body = length && length < end ? (size_t)strtol(length + 15, NULL, 10) : 0;
    if (s->held < (size_t)(end - s->request) + 4 + body)
        return false;
    s->received_ns = now_ns();
    s->waiting = true;
    s->held = 0;
    return true;
}

static void accept_one(int listener, int epoll)
{
    int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC), one = 1;
    if (fd < 0)
        return;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    for (int i = 0; i < MAX_STREAMS; i++) {
        if (streams[i].fd == 0) {
            streams[i].fd = fd;
#ifdef WITH_TLS
            streams[i].session = tls ? SSL_new(tls) : NULL;
            if (tls && (!SSL_set_fd(streams[i].session, fd) || SSL_accept(streams[i].session) != 1))
                break;
#endif
            struct epoll_event event = {.events = EPOLLIN, .data.ptr = &streams[i]};
            epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event);
            return;
        }
    }
    close(fd);
}

static bool begin_tls(const char *pem)
{
#ifdef WITH_TLS
    signal(SIGPIPE, SIG_IGN); /* OpenSSL's writes have no MSG_NOSIGNAL */
    tls = SSL_CTX_new(TLS_server_method());
    return tls && SSL_CTX_use_certificate_chain_file(tls, pem) == 1 && SSL_CTX_use_PrivateKey_file(tls, pem, SSL_FILETYPE_PEM) == 1;
#else
    (void)pem;
    return false;
#endif
}

int main(int argc, char **argv)
{
    cpu_set_t cpus;
    CPU_ZERO(&cpus);
    CPU_SET(argc > 1 ? atoi(argv[1]) : 0, &cpus);
    sched_setaffinity(0, sizeof cpus, &cpus);

    int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), epoll = epoll_create1(EPOLL_CLOEXEC);
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof at;
    if (listener < 0 || bind(listener, (struct sockaddr *)&at, sizeof at) || listen(listener, MAX_STREAMS) ||
        getsockname(listener, (struct sockaddr *)&at, &size)) {
        perror("bench_stream_server");
        return 1;
    }
    if (argc > 2 && !begin_tls(argv[2])) {
        fprintf(stderr, "bench_stream_server: no TLS with %s\n", argv[2]);
        return 1;
    }
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = NULL}, got[64];
    epoll_ctl(epoll, EPOLL_CTL_ADD, listener, &event);
    printf("%d\n", ntohs(at.sin_port));
    fflush(stdout);
    for (;;) {
        int count = epoll_wait(epoll, got, 64, -1);
        for (int i = 0; i < count; i++) {
            struct stream *s = got[i].data.ptr;
            if (!s) {
                accept_one(listener, epoll);
            } else if (s->fd && read_some(s, epoll)) {
                struct schedule plan = read_schedule(s->request);
                if (waiting_count() >= plan.streams)
                    run_schedule(plan);
            }
        }
    }
}

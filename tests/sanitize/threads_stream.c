/* The streaming client in threads, for ThreadSanitizer: plans that run at once in separate threads, and one that another thread stops. Each must return all that its server sent.
 *
 * Built and run by `make tsan`. The server is a few threads in this process, on a port of the loopback. Argument: rounds (10).
 */
#define _GNU_SOURCE
#include "stream/plan.h"
#include "stream/sse.h"

#include <arpa/inet.h>
#include <curl/curl.h>
#include <netinet/in.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

enum { EVENTS = 20, REQUESTS = 12, MOST_URL = 64 };

static int listener, port, rounds = 10;

static void must(bool holds, const char *what)
{
    if (!holds) {
        printf("broken: %s\n", what);
        exit(1);
    }
}

static bool send_text(int fd, const char *text)
{
    return send(fd, text, strlen(text), MSG_NOSIGNAL) >= 0;
}

/* Answers each request of a connection: /events with EVENTS chunks, anything else with one chunk and then silence. */
static void *serve_connection(void *context)
{
    const int fd = *(int *)context;
    char request[4096];
    size_t size = 0;
    free(context);
    for (ssize_t got; (got = recv(fd, request + size, sizeof request - 1 - size, 0)) > 0;) {
        size += (size_t)got;
        request[size] = 0;
        if (!strstr(request, "\r\n\r\n"))
            continue;
        const bool whole = strncmp(request, "GET /events ", 12) == 0;
        size = 0;
        send_text(fd, "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n");
        for (int i = 0; i < (whole ? EVENTS : 1); i++)
            send_text(fd, "b\r\ndata: abc\n\n\r\n");
        if (whole)
            send_text(fd, "0\r\n\r\n");
    }
    close(fd);
    return NULL;
}

static void *serve(void *unused)
{
    (void)unused;
    for (int fd; (fd = accept(listener, NULL, NULL)) >= 0;) {
        pthread_t thread;
        int *own = malloc(sizeof *own);
        must(own != NULL, "memory");
        *own = fd;
        must(pthread_create(&thread, NULL, serve_connection, own) == 0, "a thread for a connection");
        pthread_detach(thread);
    }
    return NULL;
}

struct stop {
    int fd; /* an eventfd as a semaphore: one count per run */
    int64_t count;
};

static void run_plan(int http, const char *path, struct stop *stop)
{
    char url[MOST_URL];
    struct plan_request requests[REQUESTS];
    const int size = snprintf(url, sizeof url, "http://127.0.0.1:%d%s", port, path);
    const struct request_spec spec = {.url = {url, (size_t)size}, .method = {"GET", 3}, .user_agent = "threads"};
    for (int i = 0; i < REQUESTS; i++) {
        size_t at;
        requests[i] = (struct plan_request){.start_ns = -1, .timeout_ns = INT64_C(60000000000), .idle_ns = INT64_C(60000000000)};
        must(request_normalise(&spec, &requests[i].request, &at) == REQUEST_OK, "the request is valid");
    }
    struct plan plan = {.requests = requests,
                        .count = REQUESTS,
                        .concurrency = 4,
                        .max_event_bytes = 1 << 16,
                        .max_answer_bytes = 1 << 24,
                        .max_answer_events = 1 << 20,
                        .cancel_fd = stop ? stop->fd : -1,
                        .http = http,
                        .signal_fd = -1,
                        .forward_fd = -1,
                        .kernel_stamps = true};
    struct plan_result result;
    memset(&result, 0, sizeof result);
    must(plan_run(&plan, &result) == PLAN_OK, "the plan runs");
    size_t data = 0;
    for (size_t i = 0; i < result.events.size / sizeof(struct event_row); i++)
        data += ((struct event_row *)result.events.base)[i].kind == SSE_DATA;
    must(result.stopped == (stop != NULL), "stopped if and only if it was requested");
    must(!stop || read(stop->fd, &stop->count, sizeof stop->count) == sizeof stop->count, "the run does not read the descriptor");
    must(stop ? data <= REQUESTS : data == REQUESTS * EVENTS, "every event came once");
    plan_result_free(&result);
    for (int i = 0; i < REQUESTS; i++)
        request_free(&requests[i].request);
}

static void *run_http_1(void *unused)
{
    for (int i = 0; i < rounds; i++)
        run_plan(PLAN_HTTP_1_1, "/events", NULL);
    return unused;
}

/* HTTP/2 is requested and not supported by the server. */
static void *run_http_2(void *unused)
{
    for (int i = 0; i < rounds; i++)
        run_plan(PLAN_HTTP_2, "/events", NULL);
    return unused;
}

static void *run_until_stopped(void *context)
{
    for (int i = 0; i < rounds; i++)
        run_plan(PLAN_HTTP_1_1, "/silence", context);
    return NULL;
}

static void *ask_to_stop(void *context)
{
    const struct stop *stop = context;
    const int64_t one = 1;
    for (int i = 0; i < rounds; i++) {
        usleep(100000);
        must(write(stop->fd, &one, sizeof one) == sizeof one, "the stop is written");
    }
    return NULL;
}

int main(int argc, char **argv)
{
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof at;
    struct stop stop = {.fd = eventfd(0, EFD_SEMAPHORE | EFD_NONBLOCK)};
    pthread_t server, threads[6];
    if (argc > 1)
        rounds = atoi(argv[1]);
    must(curl_global_init(CURL_GLOBAL_DEFAULT) == CURLE_OK, "libcurl starts"); /* as the module does when it is imported */
    listener = socket(AF_INET, SOCK_STREAM, 0);
    must(bind(listener, (struct sockaddr *)&at, size) == 0 && listen(listener, 64) == 0 &&
             getsockname(listener, (struct sockaddr *)&at, &size) == 0,
         "the server listens");
    port = ntohs(at.sin_port);
    pthread_create(&server, NULL, serve, NULL);
    void *(*const parts[])(void *) = {run_http_1, run_http_1, run_http_2, run_http_2, run_until_stopped, ask_to_stop};
    for (int i = 0; i < 6; i++)
        pthread_create(&threads[i], NULL, parts[i], &stop);
    for (int i = 0; i < 6; i++)
        pthread_join(threads[i], NULL);
    printf("stream: five clients at once, %d plans each, every event came\n", rounds);
    fflush(stdout);
    _exit(0); /* the server's threads wait for ever */
}

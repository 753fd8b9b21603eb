/* The loop: epoll over the sockets of all requests.
 *
 * Starts, timeouts, libcurl's timer and the deadline share one timerfd, which is set to the earliest; nothing polls. Sockets are handled
 * between two starts, so that a burst of requests does not delay the answers to its first ones.
 */
#define _GNU_SOURCE
#include "parts.h"
#include "priority.h"

#include <errno.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <unistd.h>

enum { WAKE_EVENTS = 64 };

/* ---- times of the plan */

static int64_t due_ns(const struct transfer *t)
{
    const struct socket_state *socket = client_socket(t->client, t->fd);
    int64_t last = socket && socket->last_read_ns > t->last_read_ns ? socket->last_read_ns : t->last_read_ns;
    int64_t whole = t->started_ns + t->plan->timeout_ns;
    int64_t idle = last + t->plan->idle_ns;
    return whole < idle ? whole : idle;
}

static void finish_overdue(struct client *c, int64_t now)
{
    c->check_due_ns = INT64_MAX;
    c->now_ns = now;
    c->now_kernel_ns = 0;
    for (struct transfer *t = c->active, *next; t; t = next) {
        next = t->next;
        int64_t due = due_ns(t);
        if (due > now) {
            if (due < c->check_due_ns)
                c->check_due_ns = due;
            continue;
        }
        bool whole = t->started_ns + t->plan->timeout_ns <= now;
        transfer_finish(t, CURLE_OK, whole ? CAUSE_TIMEOUT : CAUSE_IDLE);
    }
}

static int64_t next_start_ns(const struct client *c)
{
    if (c->next == c->plan->count || (c->plan->concurrency && c->in_flight >= c->plan->concurrency))
        return INT64_MAX;
    int64_t start = c->plan->requests[c->order[c->next]].start_ns;
    return start < 0 ? 0 : c->result->origin_ns + start;
}

static void start_next(struct client *c)
{
    uint32_t index = c->order[c->next++];
    c->now_ns = clock_monotonic_ns();
    c->now_kernel_ns = 0;
    multi_drop_stale(c);
    struct transfer *t = transfer_new(c, index);
    if (!t || !handle_begin(t)) {
        c->no_memory = true;
        return;
    }
    int64_t due = c->active ? due_ns(c->active) : INT64_MAX; /* a request may end in its start */
    if (due < c->check_due_ns)
        c->check_due_ns = due;
    if (c->curl_due_ns <= clock_monotonic_ns())
        multi_timer(c);
}

static void stop_all(struct client *c, uint8_t cause)
{
    c->now_ns = clock_monotonic_ns();
    c->now_kernel_ns = 0;
    while (c->active)
        transfer_finish(c->active, CURLE_OK, cause);
    for (; c->next < c->plan->count; c->next++) {
        struct request_row *row = client_row(c, c->order[c->next]);
        row->cause = CAUSE_NOT_STARTED;
        row->started_ns = row->ended_ns = c->now_ns;
    }
}

/* Let the program handle signals. Returns true if it stops the run. */
static bool was_interrupted(struct client *c)
{
    char numbers[64];
    for (ssize_t got; c->plan->signal_fd >= 0 && (got = read(c->plan->signal_fd, numbers, sizeof numbers)) > 0;)
        if (c->plan->forward_fd >= 0)
            (void)!write(c->plan->forward_fd, numbers, (size_t)got);
    return c->plan->interrupted && c->plan->interrupted(c->plan->context);
}

static bool is_cancelled(const struct client *c)
{
    struct pollfd cancel = {.fd = c->plan->cancel_fd, .events = POLLIN}; /* a negative fd is ignored */
    return poll(&cancel, 1, 0) > 0;
}

/* ---- waiting */

static void set_timer(struct client *c, int64_t due)
{
    if (due == c->armed_ns)
        return;
    struct itimerspec when = {{0, 0}, {0, 0}}; /* all zero: the timer is off */
    if (due != INT64_MAX) {
        when.it_value.tv_sec = due / NS_PER_S;
        when.it_value.tv_nsec = due % NS_PER_S;
    }
    timerfd_settime(c->timer_fd, TFD_TIMER_ABSTIME, &when, NULL);
    c->armed_ns = due;
}

static int64_t earliest(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* A step of CLOCK_REALTIME is detected at the next wake-up: the stamps since the last one may be on either side of it. */
static void clear_kernel_stamps_since(struct client *c, int64_t woken_ns)
{
    struct event_row *events = (struct event_row *)c->result->events.base;
    struct request_row *requests = (struct request_row *)c->result->requests.base;
    for (size_t i = c->result->events.size / sizeof *events; i-- > 0 && events[i].user_ns >= woken_ns;)
        events[i].kernel_ns = 0;
    for (size_t i = 0; i < c->plan->count; i++) {
        if (requests[i].first_byte_ns >= woken_ns)
            requests[i].first_byte_kernel_ns = 0;
        if (requests[i].ended_ns >= woken_ns)
            requests[i].ended_kernel_ns = 0;
    }
}

static void update_clock_pair(struct client *c)
{
    int64_t woken_ns = c->pair.measured_ns;
    clock_pair_measure(&c->pair);
    if (clock_pair_stepped(&c->pair))
        clear_kernel_stamps_since(c, woken_ns);
}

/* Wait once and handle all events. Returns false if the run was interrupted. */
static bool wait_and_handle(struct client *c, int64_t due, int64_t now)
{
    struct epoll_event events[WAKE_EVENTS];
    if (due > now)
        set_timer(c, due);
    int count = epoll_wait(c->epoll_fd, events, WAKE_EVENTS, due > now ? -1 : 0);
    if (count < 0)
        return errno == EINTR && !was_interrupted(c);
    if (count > 0)
        update_clock_pair(c);
    for (int i = 0; i < count; i++) {
        int fd = events[i].data.fd;
        if (fd == c->timer_fd) {
            uint64_t expirations;
            (void)!read(fd, &expirations, sizeof expirations);
            c->armed_ns = INT64_MAX;
        } else if (fd == c->plan->cancel_fd) {
            return false;
        } else if (fd == c->plan->signal_fd) {
            if (was_interrupted(c))
                return false;
        } else {
            multi_ready(c, fd, events[i].events);
        }
    }
    return true;
}

static void run_loop(struct client *c)
{
    const struct plan *p = c->plan;
    int64_t deadline = p->deadline_ns > 0 ? c->result->origin_ns + p->deadline_ns : INT64_MAX;
    if (is_cancelled(c)) { /* a run that was cancelled before it began sends nothing */
        c->result->stopped = true;
        stop_all(c, CAUSE_CANCELLED);
        return;
    }
    while ((c->in_flight || c->next < p->count) && !c->no_memory) {
        int64_t now = clock_monotonic_ns();
        if (now >= deadline) {
            stop_all(c, CAUSE_DEADLINE);
            return;
        }
        if (now >= next_start_ns(c))
            start_next(c);
        else if (now >= c->curl_due_ns)
            multi_timer(c);
        if (now >= c->check_due_ns)
            finish_overdue(c, now);
        int64_t due = earliest(earliest(c->curl_due_ns, c->check_due_ns), earliest(next_start_ns(c), deadline));
        if (c->in_flight || c->next < p->count)
            if (!wait_and_handle(c, due, now)) {
                c->result->stopped = true;
                stop_all(c, CAUSE_CANCELLED);
                return;
            }
    }
    stop_all(c, CAUSE_CANCELLED);
}

/* ---- setup */

struct start {
    int64_t at;
    uint32_t index;
};

static int compare_starts(const void *a, const void *b)
{
    const struct start *x = a, *y = b;
    if (x->at != y->at)
        return x->at < y->at ? -1 : 1;
    return x->index < y->index ? -1 : 1;
}

static bool order_starts(struct client *c)
{
    size_t count = c->plan->count;
    struct start *starts = calloc(count + 1, sizeof *starts);
    c->order = calloc(count + 1, sizeof *c->order);
    if (starts && c->order) {
        for (size_t i = 0; i < count; i++)
            starts[i] = (struct start){c->plan->requests[i].start_ns, (uint32_t)i};
        qsort(starts, count, sizeof *starts, compare_starts);
        for (size_t i = 0; i < count; i++)
            c->order[i] = starts[i].index;
    }
    bool ok = starts && c->order;
    free(starts);
    return ok;
}

static bool prepare_rows(struct client *c)
{
    size_t count = c->plan->count;
    if (count > SIZE_MAX / 2 / sizeof(struct request_row) || count > UINT32_MAX)
        return false;
    void *rows = vector_grow(&c->result->requests, count * sizeof(struct request_row));
    if (!rows)
        return false;
    memset(rows, 0, count * sizeof(struct request_row));
    for (size_t i = 0; i < count; i++) {
        int64_t start = c->plan->requests[i].start_ns;
        if (start >= 0)
            client_row(c, (uint32_t)i)->scheduled_ns = c->result->origin_ns + start;
    }
    return true;
}

static bool watch(struct client *c, int fd)
{
    struct epoll_event event = {.events = EPOLLIN, .data.fd = fd};
    return epoll_ctl(c->epoll_fd, EPOLL_CTL_ADD, fd, &event) == 0;
}

static int open_all(struct client *c)
{
    c->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    c->timer_fd = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC);
    c->idle_fd = epoll_create1(EPOLL_CLOEXEC);
    if (c->epoll_fd < 0 || c->idle_fd < 0 || c->timer_fd < 0 || !watch(c, c->timer_fd))
        return PLAN_NO_EPOLL;
    if ((c->plan->cancel_fd >= 0 && !watch(c, c->plan->cancel_fd)) || (c->plan->signal_fd >= 0 && !watch(c, c->plan->signal_fd)))
        return PLAN_NO_EPOLL;
    return multi_open(c) ? PLAN_OK : PLAN_NO_CURL;
}

int plan_run(const struct plan *plan, struct plan_result *result)
{
    struct client c = {
        .plan = plan,
        .result = result,
        .epoll_fd = -1,
        .timer_fd = -1,
        .idle_fd = -1,
        .curl_due_ns = INT64_MAX,
        .check_due_ns = INT64_MAX,
        .armed_ns = INT64_MAX,
    };
    /* The kernel stamps packets only while a socket requests it, and starts with a delay: request it before the first connection. */
    int early = plan->kernel_stamps ? socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0) : -1;
    if (early >= 0)
        clock_stamp_socket(early);

    struct priority priority = {.raised = false};
    result->realtime = plan->realtime && priority_raise(&priority);

    int status = open_all(&c);
    if (status != PLAN_OK)
        goto cleanup;
    clock_pair_measure(&c.pair);
    result->origin_ns = clock_monotonic_ns();
    result->origin_realtime_ns = result->origin_ns + c.pair.offset_ns;
    status = PLAN_NO_MEMORY;
    c.buffer = malloc(READ_BYTES);
    if (!c.buffer || !prepare_rows(&c) || !order_starts(&c))
        goto cleanup;
    run_loop(&c);
    status = c.no_memory ? PLAN_NO_MEMORY : PLAN_OK;

cleanup:
    priority_restore(&priority);
    if (c.multi)
        curl_multi_cleanup(c.multi);
    free(c.order);
    free(c.buffer);
    vector_free(&c.sockets);
    int opened[] = {c.timer_fd, c.epoll_fd, c.idle_fd, early};
    for (size_t i = 0; i < sizeof opened / sizeof *opened; i++)
        if (opened[i] >= 0)
            close(opened[i]);
    return status;
}

void plan_result_free(struct plan_result *result)
{
    vector_free(&result->requests);
    vector_free(&result->events);
    vector_free(&result->reads);
    vector_free(&result->frames);
    vector_free(&result->notes);
}

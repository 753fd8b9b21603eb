/* Schedules of the streaming client in a simulated kernel (kernel.h) with a simulated server (server.h): each is a run of csrc/stream's
 * client with a few requests, and everything that happens in it follows from its seed.
 *
 *   simulate SCHEDULES [FIRST_SEED]      run them, print what happened in them
 *   simulate --replay SEED               run one and print each system call
 *
 * Checked in each schedule: every request ends as its answer was made, with exactly the body that arrived for it, and as soon as it has
 * arrived; limits of time, the deadline and a cancel end it within TICK_NS; stamps are in order, and a kernel stamp is that of the packet;
 * no answer is another request's; nothing is sent twice, on a connection on which something had arrived, or after a cancel; no call is
 * made with a closed descriptor, and all are closed at the end; nothing waits for ever or without end for nothing.
 */
#define _GNU_SOURCE
#include "server.h"
#include "stream/plan.h"
#include "stream/sse.h"

#include <curl/curl.h>
#include <stdio.h>

/* The most that the client may be late: what its calls take in one turn of its loop, and the interruptions (MOST_JUMPED_NS). */
static const int64_t TICK_NS = 3 * MS;

static struct {
    struct plan plan;
    struct plan_request requests[MOST_REQUESTS];
    char urls[MOST_REQUESTS][48];
    struct plan_result result;
    bool stops; /* `interrupted` stops the run */
    int64_t started_ns, stopped_ns, step_ns;
    int refused_sockets, signals;
} run;

static struct {
    uint64_t requests, causes[10], retried, kernel_stamps, connections, signals;
} totals;

/* ---- the plan */

static bool interrupted(void *context)
{
    (void)context;
    if (!run.stops || kernel_now() < run.stopped_ns)
        return false;
    kernel_forbid_sending();
    return true;
}

static void make_request(int i, bool is_unix)
{
    static const char *const methods[] = {"GET", "POST", "HEAD", "POST"};
    struct order *o = &orders[i];
    struct plan_request *q = &run.requests[i];
    size_t at, size = one_in(5) ? 20000 + random_below(80000) : random_below(200);
    *o = (struct order){.method = methods[random_below(4)], .connection = -1, .sent_on = -1, .port = PORT};
    if (!is_unix && one_in(4))
        o->port = one_in(4) ? REFUSING_PORT + (int)random_below(2) : OTHER_PORT;
    int length = snprintf(run.urls[i], sizeof run.urls[i], "http://127.0.0.1:%d/%d", o->port, i);
    if (strcmp(o->method, "POST") == 0)
        memset(vector_grow(&o->sent_body, size), 'a' + i, size);
    struct request_spec spec = {
        .url = {run.urls[i], (size_t)length},
        .method = {o->method, strlen(o->method)},
        .body = (const char *)o->sent_body.base,
        .body_size = o->sent_body.size,
        .user_agent = "simulate",
    };
    *q = (struct plan_request){.start_ns = -1, .timeout_ns = INT64_C(20) * 1000 * MS, .idle_ns = INT64_C(20) * 1000 * MS};
    if (one_in(6))
        q->timeout_ns = 1 + random_below(one_in(2) ? 3 * MS : 60 * MS);
    if (one_in(6))
        q->idle_ns = 1 + random_below(one_in(2) ? 3 * MS : 60 * MS);
    if (request_normalise(&spec, &q->request, &at) != REQUEST_OK)
        abort();
}

static void make_plan(void)
{
    static const int64_t steps[] = {50 * MS, -50 * MS, 3 * MS, -3 * MS, -INT64_C(3600) * 1000 * MS};
    bool is_unix = one_in(8);
    memset(&run, 0, sizeof run);
    run.plan = (struct plan){
        .requests = run.requests,
        .count = 1 + random_below(one_in(4) ? MOST_REQUESTS : 4),
        .concurrency = random_below(4),
        .max_event_bytes = 4 << 20,
        .max_answer_bytes = 8 << 20,
        .max_answer_events = 1 << 20,
        .cancel_fd = kernel_open_counter(),
        .signal_fd = kernel_open_counter(),
        .forward_fd = kernel_open_counter(),
        .http = one_in(8) ? PLAN_HTTP_2 : PLAN_HTTP_1_1, /* without TLS: libcurl, HTTP/1.1 */
        .fresh_connections = one_in(10),
        .kernel_stamps = !one_in(4),
        .unix_socket = is_unix ? "/socket" : NULL,
        .interrupted = interrupted,
    };
    server_is_quiet = run.plan.http != PLAN_HTTP_1_1;
    for (size_t i = 0; i < run.plan.count; i++)
        make_request((int)i, is_unix);
    if (one_in(3))
        for (size_t i = 0; i < run.plan.count; i++)
            run.requests[i].start_ns = random_below(one_in(2) ? 2 * MS : 20 * MS);
    if (one_in(12))
        run.plan.deadline_ns = 1 + random_below(40 * MS);
    run.started_ns = kernel_now();
    int64_t within = run.started_ns + random_below(one_in(2) ? 2 * MS : 30 * MS);
    if (one_in(10))
        kernel_schedule(CANCELS, run.stopped_ns = one_in(8) ? run.started_ns : within, run.plan.cancel_fd, NULL, 0, 0);
    for (run.signals = one_in(8) ? 1 + (int)random_below(3) : 0; totals.signals++, run.signals; run.signals--)
        kernel_schedule(SIGNALS, run.started_ns + random_below(10 * MS), run.plan.signal_fd, NULL, 0, 0);
    if (!run.stopped_ns && one_in(20)) {
        run.stops = true;
        kernel_schedule(SIGNALS, run.stopped_ns = within, run.plan.signal_fd, NULL, 0, 0);
    }
    if (one_in(16))
        kernel_schedule(CLOCK_STEPS, within, 0, NULL, 0, steps[random_below(5)]);
    if (one_in(30))
        refused_sockets = run.refused_sockets = 1;
}

/* ---- checks */

static const struct request_row *row_of(size_t i)
{
    return (const struct request_row *)run.result.requests.base + i;
}

static bool later(int64_t a, int64_t b) /* by more than a tick */
{
    return a > b + TICK_NS;
}

/* The frames of a request, which are its body, are the first bytes of what was made for it: at least what had arrived a tick before its
 * end. */
static void check_body(size_t i, bool whole)
{
    const struct order *o = &orders[i];
    const struct event_row *events = (const struct event_row *)run.result.events.base;
    size_t size = 0;
    for (size_t e = 0; e < run.result.events.size / sizeof *events; e++) {
        if (events[e].request != i)
            continue;
        if (size + events[e].size > o->body.size ||
            memcmp(run.result.frames.base + events[e].offset, o->body.base + size, events[e].size) != 0)
            violated("the body of answer %zu is not its own at byte %zu", i, size);
        size += events[e].size;
    }
    size_t least = order_body(o, o->size), arrived = 0;
    if (!whole) {
        const struct connection_log *c = &connections[o->connection];
        const struct arrival *a = (const struct arrival *)c->arrivals.base;
        for (size_t k = 0; k < c->arrivals.size / sizeof *a && a[k].at_ns + TICK_NS < row_of(i)->ended_ns; k++)
            arrived = a[k].end;
        size_t received = arrived > o->start ? arrived - o->start : 0;
        least = order_body(o, received < o->size ? received : o->size);
    }
    if (size < least || size > order_body(o, o->size))
        violated("answer %zu, which ended with cause %d, has %zu bytes of its body, expected %zu", i, row_of(i)->cause, size, least);
}

/* Longest time from the start to `until` in which nothing was received on any connection that carried the request. */
static int64_t longest_silence(const struct order *o, int64_t from, int64_t until)
{
    int64_t longest = 0;
    if (o->dropped_ns > from && o->dropped_ns < until) {
        longest = o->dropped_ns - from;
        from = o->dropped_ns;
    }
    const struct connection_log *c = o->connection >= 0 ? &connections[o->connection] : NULL;
    const struct arrival *a = c ? (const struct arrival *)c->arrivals.base : NULL;
    for (size_t k = 0; c && k < c->arrivals.size / sizeof *a; k++) {
        if (a[k].at_ns <= from || a[k].at_ns > until)
            continue;
        longest = a[k].at_ns - from > longest ? a[k].at_ns - from : longest;
        from = a[k].at_ns;
    }
    return until - from > longest ? until - from : longest;
}

/* When the request must have ended, whatever its answer. */
static int64_t latest_end(size_t i)
{
    int64_t end = row_of(i)->started_ns + run.requests[i].timeout_ns;
    int64_t deadline = run.plan.deadline_ns ? run.result.origin_ns + run.plan.deadline_ns : INT64_MAX;
    end = deadline < end ? deadline : end;
    return run.result.stopped && run.stopped_ns < end ? run.stopped_ns : end;
}

static void check_outcome(size_t i)
{
    const struct order *o = &orders[i];
    const struct request_row *row = row_of(i);
    bool reached = o->port != REFUSING_PORT && o->port != SILENT_PORT;
    enum fate fate = o->port == REFUSING_PORT ? BREAKS : !reached || o->connection < 0 ? HANGS : o->fate;
    int64_t decided = o->connection >= 0 ? order_decided(o) : 0;
    /* libcurl may read on until a reset, which does not change the number of received bytes */
    int64_t early_ns = server_is_quiet && fate == BREAKS && o->needs_end ? TICK_NS : 1;
    bool by_time = row->cause == CAUSE_TIMEOUT || row->cause == CAUSE_IDLE || row->cause == CAUSE_DEADLINE || row->cause == CAUSE_CANCELLED;
    if (row->cause == CAUSE_TRANSPORT && row->os_errno == 24 && run.refused_sockets) {
        run.refused_sockets--;
        return;
    }
    trace("request %zu: port %d, cause %d, %.3f to %.3f us", i, o->port, row->cause, (double)(row->started_ns - run.started_ns) / US,
          (double)(row->ended_ns - run.started_ns) / US);
    if (later(row->ended_ns, latest_end(i)))
        violated("request %zu ended %lld us after its limit", i, (long long)(row->ended_ns - latest_end(i)) / US);
    const struct connection_log *sent_on = o->sent_on >= 0 ? &connections[o->sent_on] : NULL;
    if (by_time && sent_on && sent_on->in_request && !sent_on->server_ended && !sent_on->broken && sent_on->drained_ns &&
        later(row->ended_ns, sent_on->drained_ns))
        violated("request %zu was not sent to its end, although the socket accepted it", i);
    if (by_time) {
        if (decided && later(row->ended_ns, decided))
            violated("request %zu ended with cause %d, although its answer was decided %lld us before", i, row->cause,
                     (long long)(row->ended_ns - decided) / US);
    } else if (row->cause == CAUSE_TRANSPORT && server_is_quiet && reached && (fate == DROPPED || o->connection < 0)) {
        return; /* libcurl sends a request again in most cases only: not after an error in the middle of sending */
    } else if (fate == HANGS || fate == DROPPED) {
        violated("request %zu ended with cause %d (libcurl's %d, error %d), and nothing had ended it", i, row->cause, row->curl_code,
                 row->os_errno);
    } else if ((fate == COMPLETES) != (row->cause == CAUSE_NONE) || (row->cause != CAUSE_NONE && row->cause != CAUSE_TRANSPORT)) {
        violated("request %zu ended with cause %d (libcurl's %d), expected fate %d", i, row->cause, row->curl_code, fate);
    } else if (reached && (!decided || decided > row->ended_ns + early_ns || later(row->ended_ns, decided))) {
        violated("request %zu ended at %lld us, and its answer was decided at %lld us", i, (long long)(row->ended_ns - run.started_ns) / US,
                 (long long)(decided - run.started_ns) / US);
    }
    int64_t silence = longest_silence(o, row->started_ns, row->ended_ns);
    if (silence > run.requests[i].idle_ns + 2 * TICK_NS)
        violated("request %zu received nothing for %lld us", i, (long long)silence / US);
    if (row->cause == CAUSE_IDLE && silence + TICK_NS < run.requests[i].idle_ns)
        violated("request %zu was ended as idle after %lld us", i, (long long)silence / US);
    if (o->connection >= 0) {
        check_body(i, !by_time);
        bool head_arrived = o->size >= o->head && o->head && !by_time;
        if (row->status != o->status && (head_arrived || (row->status && row->status != 100)))
            violated("request %zu has status %d", i, row->status);
    }
}

/* Causes that need no answer, and the order of a request's times. */
static void check_times(size_t i)
{
    const struct request_row *row = row_of(i);
    int64_t end_of_run = run.plan.deadline_ns ? run.result.origin_ns + run.plan.deadline_ns : INT64_MAX;
    if (row->cause == CAUSE_NOT_STARTED ? !run.result.stopped && row->ended_ns < end_of_run : row->started_ns < run.result.origin_ns)
        violated("request %zu was not started", i);
    if (row->ended_ns < row->started_ns ||
        (row->first_byte_ns && (row->first_byte_ns < row->started_ns || row->first_byte_ns > row->ended_ns)))
        violated("the times of request %zu are not in order", i);
    if (row->first_byte_kernel_ns > row->first_byte_ns || row->ended_kernel_ns > row->ended_ns)
        violated("a kernel stamp of request %zu is after its user stamp", i);
    if (row->cause == CAUSE_TIMEOUT && row->ended_ns < row->started_ns + run.requests[i].timeout_ns)
        violated("request %zu was ended before its limit", i);
    if (row->cause == CAUSE_DEADLINE && row->ended_ns < end_of_run)
        violated("request %zu was ended before the deadline", i);
    if (row->cause == CAUSE_CANCELLED && (!run.result.stopped || row->ended_ns < run.stopped_ns))
        violated("request %zu was cancelled, and nobody had cancelled it", i);
    if (row->cause != CAUSE_NOT_STARTED && row->scheduled_ns && row->started_ns < row->scheduled_ns)
        violated("request %zu was started too early", i);
    if (row->cause != CAUSE_NOT_STARTED && row->scheduled_ns && !run.plan.concurrency && later(row->started_ns, row->scheduled_ns))
        violated("request %zu was started too late", i);
    size_t others = 0;
    for (size_t k = 0; k < run.plan.count; k++)
        others += k != i && row_of(k)->started_ns <= row->started_ns && row_of(k)->ended_ns > row->started_ns;
    if (run.plan.concurrency && others >= run.plan.concurrency && row->cause != CAUSE_NOT_STARTED)
        violated("more than %zu requests at once", run.plan.concurrency);
}

/* Stamps of the events: in order, not before the event had arrived, and a kernel stamp is the arrival of a packet. */
static void check_stamps(size_t i)
{
    const struct order *o = &orders[i];
    const struct event_row *events = (const struct event_row *)run.result.events.base;
    const size_t *ends = (const size_t *)o->events.base;
    int64_t before = row_of(i)->first_byte_ns;
    size_t count = 0;
    for (size_t e = 0; e < run.result.events.size / sizeof *events; e++) {
        if (events[e].request != i)
            continue;
        if (events[e].user_ns < before || events[e].user_ns > row_of(i)->ended_ns)
            violated("the stamps of request %zu are not in order", i);
        before = events[e].user_ns;
        if (!o->event_stream || events[e].kind == SSE_TAIL || count >= o->events.size / sizeof *ends)
            continue;
        int64_t arrived = arrival_of(&connections[o->connection], o->start + ends[count++]), kernel = events[e].kernel_ns;
        totals.kernel_stamps += kernel != 0;
        if (events[e].user_ns + 1 < arrived || (kernel && (kernel + 2 * US < arrived || kernel > events[e].user_ns)))
            violated("an event of request %zu has the stamps %lld and %lld ns, and arrived at %lld", i, (long long)events[e].user_ns,
                     (long long)kernel, (long long)arrived);
        const struct connection_log *c = &connections[o->connection];
        const struct arrival *a = (const struct arrival *)c->arrivals.base;
        bool is_packets = !kernel;
        for (size_t k = 0; k < c->arrivals.size / sizeof *a && !is_packets; k++)
            is_packets = a[k].at_ns <= kernel + 2 * US && a[k].at_ns + 2 * US >= kernel;
        if (!is_packets)
            violated("the kernel stamp of an event of request %zu is not a packet's", i);
    }
}

static void check_run(void)
{
    for (size_t i = 0; i < run.plan.count; i++) {
        const struct request_row *row = row_of(i);
        totals.requests++;
        totals.causes[row->cause]++;
        totals.retried += row->resent_us != 0;
        check_times(i);
        if (row->cause == CAUSE_NOT_STARTED || orders[i].unowed)
            continue;
        check_outcome(i);
        if (orders[i].connection >= 0)
            check_stamps(i);
    }
    if (run.result.stopped && run.stopped_ns == run.started_ns && !run.stops && connection_count)
        violated("a run that was cancelled before it began connects");
    if (kernel_counter(run.plan.signal_fd) && !run.result.stopped && !kernel_counter(run.plan.forward_fd) && later(row_of(0)->ended_ns, 0))
        trace("signals after the end");
    totals.connections += (uint64_t)connection_count;
}

static void run_schedule(uint64_t seed)
{
    kernel_begin(seed);
    make_plan();
    int status = plan_run(&run.plan, &run.result);
    if (status != PLAN_OK)
        violated("the run ended with status %d", status);
    check_run();
    kernel_end();
    for (size_t i = 0; i < run.plan.count; i++) {
        order_free(&orders[i]);
        request_free(&run.requests[i].request);
    }
    plan_result_free(&run.result);
}

int main(int argc, char **argv)
{
    bool replay = argc > 2 && strcmp(argv[1], "--replay") == 0;
    uint64_t schedules = replay ? 1 : argc > 1 ? strtoull(argv[1], NULL, 10) : 10000;
    uint64_t first = argc > 2 ? strtoull(argv[2], NULL, 10) : 1;
    if (curl_global_init(CURL_GLOBAL_DEFAULT) != CURLE_OK)
        return 2;
    run_schedule(0); /* libcurl asks once per process whether there is IPv6 */
    tracing = replay;
    memset(&counts, 0, sizeof counts);
    for (uint64_t i = 0; i < schedules; i++)
        run_schedule(first + i);
    printf("%llu schedules, %llu requests, nothing violated\n", (unsigned long long)schedules, (unsigned long long)totals.requests);
    printf("complete %llu, transport %llu, timeout %llu, idle %llu, deadline %llu, cancelled %llu, not started %llu\n",
           (unsigned long long)totals.causes[CAUSE_NONE], (unsigned long long)totals.causes[CAUSE_TRANSPORT],
           (unsigned long long)totals.causes[CAUSE_TIMEOUT], (unsigned long long)totals.causes[CAUSE_IDLE],
           (unsigned long long)totals.causes[CAUSE_DEADLINE], (unsigned long long)totals.causes[CAUSE_CANCELLED],
           (unsigned long long)totals.causes[CAUSE_NOT_STARTED]);
    printf("connections %llu, reused %llu, dropped %llu, sent again %llu, extra bytes %llu, unowed %llu, large %llu, early %llu, stamps "
           "%llu\n",
           (unsigned long long)totals.connections, (unsigned long long)server_counts.reused, (unsigned long long)server_counts.dropped,
           (unsigned long long)totals.retried, (unsigned long long)server_counts.extra, (unsigned long long)server_counts.unowed,
           (unsigned long long)server_counts.large, (unsigned long long)server_counts.early, (unsigned long long)totals.kernel_stamps);
    printf("calls %llu, waits %llu, EINTR %llu, partial sends %llu, full sends %llu, interruptions %llu, digest %016llx\n",
           (unsigned long long)counts.calls, (unsigned long long)counts.waits, (unsigned long long)counts.interrupts,
           (unsigned long long)counts.partial_sends, (unsigned long long)counts.full_sends, (unsigned long long)counts.jumps,
           (unsigned long long)counts.digest);
    return 0;
}

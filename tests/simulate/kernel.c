/* Descriptors, virtual time, and what happens outside of the process. */
#define _GNU_SOURCE
#include "kernel_state.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <unistd.h>

enum { JUMP_NS = 200 * US, MOST_JUMPED_NS = 1 * MS };
static const int64_t START_NS = INT64_C(1000000000000), START_OFFSET_NS = INT64_C(1700000000000000000);

struct connection_log connections[MOST_CONNECTIONS];
int connection_count, refused_sockets;
struct kernel_counts counts;
bool tracing;

struct descriptor descriptors[MOST_FDS];
int cancel_fd, clock_calls_since_jump;
uint64_t calls;
int64_t now_ns, jumped_ns, clock_offset_ns;
bool running, stopped;

static struct vector steps; /* struct step, a heap: the first one is what happens next */
static uint64_t seed, state, step_number;
static int64_t step_at_ns, step_before_ns;

/* ---- reports, random numbers */

void trace(const char *format, ...)
{
    va_list arguments;
    if (!tracing)
        return;
    va_start(arguments, format);
    fprintf(stderr, "%12.3f us  ", (double)(now_ns - START_NS) / US);
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
    va_end(arguments);
}

void violated(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    fprintf(stderr, "violated in the schedule of seed %llu at %.3f us: ", (unsigned long long)seed, (double)(now_ns - START_NS) / US);
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
    va_end(arguments);
    fflush(NULL);
    _exit(1);
}

/* splitmix64 */
static uint64_t random_bits(void)
{
    uint64_t z = state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

uint32_t random_below(uint32_t bound)
{
    return (uint32_t)((random_bits() >> 32) * bound >> 32);
}

bool one_in(uint32_t n)
{
    return random_below(n) == 0;
}

/* ---- descriptors */

struct descriptor *lookup(int fd)
{
    return fd >= FIRST_FD && fd < FIRST_FD + MOST_FDS ? &descriptors[fd - FIRST_FD] : NULL;
}

struct descriptor *opened(int fd, const char *call)
{
    struct descriptor *d = running ? lookup(fd) : NULL;
    if (d && d->kind == CLOSED)
        violated("%s of descriptor %d, which is closed", call, fd);
    return d;
}

struct connection_log *connection_of(const struct descriptor *d)
{
    return d->kind == STREAM && d->connection >= 0 ? &connections[d->connection] : NULL;
}

int open_descriptor(enum kind kind)
{
    for (int i = 0; i < MOST_FDS; i++)
        if (descriptors[i].kind == CLOSED) {
            descriptors[i] = (struct descriptor){.kind = kind, .connection = -1, .due_ns = INT64_MAX};
            return FIRST_FD + i;
        }
    violated("more than %d descriptors are open", MOST_FDS);
}

int kernel_open_counter(void)
{
    int fd = open_descriptor(COUNTER);
    lookup(fd)->own = true;
    return fd;
}

uint64_t kernel_counter(int fd)
{
    return lookup(fd)->count;
}

int64_t kernel_now(void)
{
    return now_ns;
}

uint64_t kernel_calls(void)
{
    return calls;
}

void kernel_forbid_sending(void)
{
    stopped = true;
}

int64_t offset_at(int64_t at_ns)
{
    return at_ns < step_at_ns ? step_before_ns : clock_offset_ns;
}

static void wake(int connection)
{
    for (int i = 0; i < MOST_FDS; i++)
        if (descriptors[i].kind == STREAM && descriptors[i].connection == connection)
            descriptors[i].pending = true;
}

/* ---- what happens */

static bool is_before(const struct step *a, const struct step *b)
{
    return a->at_ns < b->at_ns || (a->at_ns == b->at_ns && a->number < b->number);
}

static void exchange(struct step *a, struct step *b)
{
    struct step former = *a;
    *a = *b;
    *b = former;
}

void kernel_schedule(enum happening what, int64_t at_ns, int connection, const void *bytes, size_t size, int64_t value)
{
    struct step s = {what, at_ns, step_number++, connection, NULL, size, value};
    if (size) {
        s.bytes = malloc(size);
        if (!s.bytes)
            abort();
        memcpy(s.bytes, bytes, size);
        connections[connection].scheduled += size;
    }
    if (vector_add(&steps, &s, sizeof s))
        abort();
    struct step *heap = (struct step *)steps.base;
    for (size_t at = steps.size / sizeof s - 1; at && is_before(&heap[at], &heap[(at - 1) / 2]); at = (at - 1) / 2)
        exchange(&heap[at], &heap[(at - 1) / 2]);
}

struct step *next_step(void)
{
    return steps.size ? (struct step *)steps.base : NULL;
}

static struct step take_step(void)
{
    struct step *heap = (struct step *)steps.base, first = heap[0];
    size_t count = steps.size / sizeof first - 1;
    heap[0] = heap[count];
    steps.size -= sizeof first;
    for (size_t at = 0, child; (child = 2 * at + 1) < count; at = child) {
        child += child + 1 < count && is_before(&heap[child + 1], &heap[child]);
        if (!is_before(&heap[child], &heap[at]))
            break;
        exchange(&heap[child], &heap[at]);
    }
    return first;
}

static void arrive(struct connection_log *c, const struct step *s)
{
    if (c->broken || c->closed)
        return;
    size_t count = c->arrivals.size / sizeof(struct arrival);
    struct arrival *all = (struct arrival *)c->arrivals.base, next = {c->arrived.size + s->size, now_ns};
    size_t last = count > 1 ? all[count - 2].end : 0;
    bool last_waits = count && c->read <= last && c->peeked <= last;
    if (vector_add(&c->arrived, s->bytes, s->size))
        abort();
    if (last_waits && one_in(4)) /* the kernel merges packets that wait; they have the last one's time */
        all[count - 1] = next;
    else if (vector_add(&c->arrivals, &next, sizeof next))
        abort();
    wake(s->connection);
}

static void happen(const struct step *s)
{
    struct connection_log *c = &connections[s->what < CANCELS ? s->connection : 0];
    static const char *const names[] = {"connects", "refuses", "arrives", "ends", "resets", "drains", "cancels", "signals", "clock steps"};
    trace("  %s, %d, %zu bytes", names[s->what], s->connection, s->size);
    switch (s->what) {
    case CONNECTS:
        c->connected = true;
        wake(s->connection);
        break;
    case REFUSES:
        c->error = ECONNREFUSED;
        c->broken = true;
        wake(s->connection);
        break;
    case ARRIVES:
        arrive(c, s);
        break;
    case ENDS:
    case RESETS:
        if (c->broken)
            break;
        if (!c->ended)
            c->ended_ns = now_ns;
        c->ended |= s->what == ENDS;
        if (s->what == RESETS) {
            c->broken = true;
            c->error = c->ended ? EPIPE : ECONNRESET;
        }
        wake(s->connection);
        break;
    case DRAINS:
        c->space = SOCKET_SPACE;
        c->drained_ns = now_ns;
        if (c->full)
            wake(s->connection);
        c->full = false;
        break;
    case CANCELS:
    case SIGNALS:
        lookup(s->connection)->count++;
        if (s->what == CANCELS)
            cancel_fd = s->connection;
        break;
    case CLOCK_STEPS:
        step_at_ns = now_ns;
        step_before_ns = clock_offset_ns;
        clock_offset_ns += s->value;
        break;
    }
}

void let_happen(void)
{
    for (struct step *s; (s = next_step()) && s->at_ns <= now_ns;) {
        struct step taken = take_step();
        int64_t after_ns = now_ns;
        now_ns = taken.at_ns;
        happen(&taken);
        now_ns = after_ns;
        free(taken.bytes);
    }
}

void pass_time(void)
{
    const struct step *next = next_step();
    now_ns += 20 + random_below(400);
    if (one_in(8) && next && next->at_ns > now_ns && next->at_ns - now_ns < JUMP_NS && jumped_ns < MOST_JUMPED_NS) {
        jumped_ns += next->at_ns - now_ns;
        now_ns = next->at_ns;
        counts.jumps++;
    }
    let_happen();
}

/* ---- a schedule */

void kernel_begin(uint64_t new_seed)
{
    seed = state = new_seed;
    now_ns = START_NS;
    clock_offset_ns = START_OFFSET_NS;
    step_at_ns = 0;
    calls = step_number = 0;
    jumped_ns = clock_calls_since_jump = 0;
    connection_count = refused_sockets = 0;
    memset(descriptors, 0, sizeof descriptors);
    running = true;
    stopped = false;
    cancel_fd = -1;
}

void kernel_end(void)
{
    for (int i = 0; i < MOST_FDS; i++)
        if (descriptors[i].kind != CLOSED && !descriptors[i].own)
            violated("descriptor %d was not closed", FIRST_FD + i);
    running = false;
    counts.calls += calls;
    for (size_t i = 0; i < steps.size / sizeof(struct step); i++)
        free(((struct step *)steps.base)[i].bytes);
    vector_free(&steps);
    for (int i = 0; i < connection_count; i++) {
        vector_free(&connections[i].arrived);
        vector_free(&connections[i].arrivals);
        vector_free(&connections[i].request);
    }
}

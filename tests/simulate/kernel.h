/* A simulated kernel for the streaming client: sockets, epoll, timer and clocks of one process, without any other process.
 *
 * syscalls.c defines the system calls that csrc/stream and libcurl use, so that the linker prefers them to the C library's. Time is
 * virtual: each system call takes a little of it, and a wait lasts until something happens. What happens is scheduled by the server
 * (server.c). A random generator with the schedule's seed decides about everything that a kernel leaves open: the order of ready sockets,
 * how much of a message is accepted, interrupted calls, and between which two calls something happens.
 */
#ifndef SIMULATE_KERNEL_H
#define SIMULATE_KERNEL_H

#include "stream/vector.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { FIRST_FD = 40, MOST_FDS = 64, MOST_CONNECTIONS = 128, US = 1000, MS = 1000000 };
/* What can happen outside of the process, and when. */
enum happening { CONNECTS, REFUSES, ARRIVES, ENDS, RESETS, DRAINS, CANCELS, SIGNALS, CLOCK_STEPS };

/* All bytes that a connection received up to `end` had arrived at this time. */
struct arrival {
    size_t end;
    int64_t at_ns;
};

/* A connection as the kernel and its server know it. Connections are numbered in the order of connect(). */
struct connection_log {
    int port; /* 0: a Unix socket */
    bool connected, ended, closed;
    int error; /* that the next call returns */
    bool broken;
    bool full; /* a message was not accepted as a whole */
    size_t space;
    int64_t drained_ns;    /* when the last message had left the socket; 0: it has not */
    struct vector arrived; /* bytes, also those that were read */
    size_t read;
    size_t peeked;          /* bytes of which a look has given the stamp */
    struct vector arrivals; /* struct arrival */
    int64_t ended_ns;       /* when its end or its reset arrived */
    size_t scheduled;       /* bytes that have arrived or will */
    uint64_t silent_call;   /* number of the last call that found it silent */
    /* server.c */
    struct vector request; /* bytes of the current one */
    int requests;          /* that began on it */
    bool in_request;
    bool answered;     /* the current one, before its end */
    bool server_ended; /* nothing is sent any more */
    int64_t server_ns; /* when the server's last bytes arrive */
    size_t owed;       /* bytes up to the end of the last answer */
    bool unowed;       /* it has carried bytes that no request asked for and that were on the way when one was sent */
};

extern struct connection_log connections[MOST_CONNECTIONS];
extern int connection_count;

/* What happened in a schedule, or in all. */
struct kernel_counts {
    uint64_t calls, waits, interrupts, partial_sends, full_sends, jumps;
    uint64_t digest; /* of all calls and their results */
};
extern struct kernel_counts counts;

extern bool tracing;
void trace(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* A property does not hold: print the seed and end the program. */
_Noreturn void violated(const char *format, ...) __attribute__((format(printf, 1, 2)));

uint32_t random_below(uint32_t bound);
bool one_in(uint32_t n);

void kernel_begin(uint64_t seed);
int64_t kernel_now(void);
uint64_t kernel_calls(void);
/* A descriptor of the program that starts the run: readable after CANCELS or SIGNALS, or one that takes bytes. */
int kernel_open_counter(void);
uint64_t kernel_counter(int fd);
void kernel_forbid_sending(void); /* the run was stopped */
void kernel_end(void);            /* check that the client has closed all that it opened, and free everything */

/* connection: or the descriptor for CANCELS and SIGNALS; bytes are copied; value: for CLOCK_STEPS, ns. */
void kernel_schedule(enum happening what, int64_t at_ns, int connection, const void *bytes, size_t size, int64_t value);

/* No more socket can be opened, this many times. */
extern int refused_sockets;

/* ---- server.c: called by the kernel */

void server_connect(int connection);                                   /* schedule what becomes of it */
void server_sending(int connection, const char *message, size_t size); /* before any of it is accepted */
void server_received(int connection, const char *bytes, size_t size);

#endif

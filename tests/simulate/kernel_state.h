/* What kernel.c and syscalls.c share: descriptors and virtual time. */
#ifndef SIMULATE_KERNEL_STATE_H
#define SIMULATE_KERNEL_STATE_H

#include "kernel.h"

#include <sys/epoll.h>

enum { SOCKET_SPACE = 24 << 10 };

enum kind { CLOSED, STREAM, OTHER, EPOLL, TIMER, COUNTER };

struct descriptor {
    enum kind kind;
    bool own;       /* of the program that starts the run */
    bool may_send;  /* although the run is stopped: its events were reported before */
    int connection; /* -1: not connected */
    bool is_unix, stamped;
    uint64_t count; /* of a counter */
    int64_t due_ns; /* of a timer; INT64_MAX: off */
    /* its registration */
    bool watched, pending;
    struct epoll_event event;
};

struct step {
    enum happening what;
    int64_t at_ns;
    uint64_t number;
    int connection;
    uint8_t *bytes;
    size_t size;
    int64_t value;
};

extern struct descriptor descriptors[MOST_FDS];
extern int cancel_fd, clock_calls_since_jump;
extern uint64_t calls;
extern int64_t now_ns, jumped_ns, clock_offset_ns;
extern bool running, stopped;

struct descriptor *lookup(int fd);

/* An open descriptor of the simulation; NULL: one of the real kernel. */
struct descriptor *opened(int fd, const char *call);

struct connection_log *connection_of(const struct descriptor *d);
int open_descriptor(enum kind kind);

/* CLOCK_REALTIME - CLOCK_MONOTONIC; there is at most one step in a schedule. */
int64_t offset_at(int64_t at_ns);

struct step *next_step(void); /* what happens next; NULL: nothing */
void let_happen(void);        /* all that is due */

/* The time that a call takes. In one of eight calls the process is interrupted until the next thing happens, if that is soon. */
void pass_time(void);

#endif

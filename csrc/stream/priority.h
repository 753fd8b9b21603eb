/* The calling thread's priority during a run. A process that does not get the processor in time reads its sockets late: user stamps are
 * late, and events that arrived meanwhile are read together and share one stamp. With SCHED_FIFO it runs at once (sched(7)). Root may
 * use it, and a process with CAP_SYS_NICE or a limit RLIMIT_RTPRIO of at least 1. */
#ifndef AQ_STREAM_PRIORITY_H
#define AQ_STREAM_PRIORITY_H

#include <stdbool.h>

struct priority {
    int policy;  /* the thread's original policy */
    bool raised; /* priority_raise changed it */
};

/* Request SCHED_FIFO. Returns false if it is not permitted; nothing is changed then. */
bool priority_raise(struct priority *p);
void priority_restore(const struct priority *p);

#endif

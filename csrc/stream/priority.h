/* The calling thread's priority while it measures. A process that others keep off the processor comes late to its sockets:
 * user stamps are late, and events that came meanwhile are read together and share one stamp. Under SCHED_FIFO it waits for
 * nobody (sched(7)); root may ask for it, and whoever has CAP_SYS_NICE or a limit RLIMIT_RTPRIO of 1 or more.
 */
#ifndef AQ_STREAM_PRIORITY_H
#define AQ_STREAM_PRIORITY_H

#include <stdbool.h>

struct priority {
    int policy;  /* the thread's own, to be given back */
    bool raised; /* by us */
};

/* Asks for SCHED_FIFO. False: the thread may not have it, and stays as it is. */
bool priority_raise(struct priority *p);
void priority_restore(const struct priority *p);

#endif

/* See priority.h. 0 means the calling thread. */
#define _GNU_SOURCE
#include "priority.h"

#include <sched.h>

bool priority_raise(struct priority *p)
{
    struct sched_param lowest = {.sched_priority = sched_get_priority_min(SCHED_FIFO)};
    p->policy = sched_getscheduler(0);
    p->raised = false;
    int own = p->policy & ~SCHED_RESET_ON_FORK;
    if (own == SCHED_FIFO || own == SCHED_RR)
        return true;
    p->raised = p->policy >= 0 && sched_setscheduler(0, SCHED_FIFO | SCHED_RESET_ON_FORK, &lowest) == 0;
    return p->raised;
}

void priority_restore(const struct priority *p)
{
    struct sched_param none = {.sched_priority = 0};
    if (p->raised && sched_setscheduler(0, p->policy, &none) != 0)
        sched_setscheduler(0, p->policy | SCHED_RESET_ON_FORK, &none); /* without CAP_SYS_NICE the flag cannot be removed (sched(7)) */
}

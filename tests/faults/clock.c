/* LD_PRELOAD: the wall clock goes back an hour one second after the start, and forward by a day one second later.
 * The monotonic clock does not change, as with ntpd or the date command. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/time.h>
#include <time.h>

static long step_s(void) {
    static __thread int inside;
    static struct timespec start;
    static int (*real)(clockid_t, struct timespec *);
    struct timespec now;
    if (inside) return 0;
    inside = 1;
    if (!real) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    real(CLOCK_MONOTONIC, &now);
    if (!start.tv_sec) start = now;
    inside = 0;
    long past = now.tv_sec - start.tv_sec;
    return past < 1 ? 0 : past < 2 ? -3600 : 86400;
}

int clock_gettime(clockid_t clock, struct timespec *at) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int code = real(clock, at);
    if (!code && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) at->tv_sec += step_s();
    return code;
}

int gettimeofday(struct timeval *at, void *zone) {
    static int (*real)(struct timeval *, void *);
    if (!real) real = (int (*)(struct timeval *, void *))dlsym(RTLD_NEXT, "gettimeofday");
    int code = real(at, zone);
    if (!code) at->tv_sec += step_s();
    return code;
}

time_t time(time_t *at) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (at) *at = now.tv_sec;
    return now.tv_sec;
}

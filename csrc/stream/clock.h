/* The two clocks of a read: when user space came to it, and when the kernel received it.
 *
 * The kernel stamps a packet with CLOCK_REALTIME (SO_TIMESTAMPNS), which an administrator or NTP may step; everything
 * else here is CLOCK_MONOTONIC. `clock_pair` is the distance between the two, measured again on every wake-up, so a
 * stamp is mapped with the distance of its own moment and refused when the clock was stepped in between.
 */
#ifndef AQ_STREAM_CLOCK_H
#define AQ_STREAM_CLOCK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

enum { NS_PER_US = 1000, NS_PER_MS = 1000000, NS_PER_S = 1000000000 };

struct clock_pair {
    int64_t offset_ns;   /* CLOCK_REALTIME - CLOCK_MONOTONIC */
    int64_t previous_ns; /* the same at the wake-up before */
    int64_t measured_ns; /* CLOCK_MONOTONIC when it was taken */
    int64_t error_ns;    /* the distance is known to this much either way */
};

int64_t clock_monotonic_ns(void);

/* Takes the distance again: the tightest of a few tries, so that being descheduled between two reads does no harm. */
void clock_pair_measure(struct clock_pair *pair);

/* CLOCK_REALTIME was stepped, by over a millisecond, between the last two measurements. */
bool clock_pair_stepped(const struct clock_pair *pair);

/* The monotonic time of a kernel stamp, or 0 when it cannot be known: the clock was stepped since the wake-up before, or
 * the stamp falls outside [not_before_ns, user_ns]. */
int64_t clock_map(const struct clock_pair *pair, int64_t realtime_ns, int64_t not_before_ns, int64_t user_ns);

/* Both stamps of a read. What the kernel had received when the pair was measured, at the wake-up, was known of then, whatever
 * was read before it; what came later, or may have, or bears no stamp (0), is known of now. */
void clock_stamp(const struct clock_pair *pair, int64_t realtime_ns, int64_t not_before_ns, int64_t *user_ns, int64_t *kernel_ns);

/* Asks the kernel to stamp what this socket receives. */
bool clock_stamp_socket(int fd);

/* recvmsg with the kernel's stamp (CLOCK_REALTIME) of what it brings; 0 if there is none. Where several packets come
 * together, it is the newest one's. */
ssize_t clock_receive(int fd, void *into, size_t size, int flags, int64_t *realtime_ns);

/* What a TCP socket has received in all, read or not; -1: not known. */
int64_t clock_bytes_received(int fd);

#endif

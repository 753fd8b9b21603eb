/* The two times of a read: when user space read the data, and when the kernel received it.
 *
 * The kernel stamps a packet with CLOCK_REALTIME (SO_TIMESTAMPNS), which an administrator or NTP may step. All other times here are
 * CLOCK_MONOTONIC. `clock_pair` is the offset between the two clocks, measured at every wake-up. A stamp is mapped with the offset of
 * its own wake-up, and refused if the clock was stepped in between.
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
    int64_t previous_ns; /* the same at the previous wake-up */
    int64_t measured_ns; /* CLOCK_MONOTONIC at the measurement */
    int64_t error_ns;    /* uncertainty of the offset in either direction */
};

int64_t clock_monotonic_ns(void);

/* Measure the offset: the best of a few tries, so that being descheduled between two reads does no harm. */
void clock_pair_measure(struct clock_pair *pair);

/* Whether CLOCK_REALTIME was stepped, by over a millisecond, between the last two measurements. */
bool clock_pair_stepped(const struct clock_pair *pair);

/* Return the monotonic time of a kernel stamp, or 0 if it is unknown: the clock was stepped since the previous wake-up, or the
 * stamp is outside [not_before_ns, user_ns]. */
int64_t clock_map(const struct clock_pair *pair, int64_t realtime_ns, int64_t not_before_ns, int64_t user_ns);

/* Set both stamps of a read. Data that the kernel had received when the pair was measured, at the wake-up, gets that time as user stamp,
 * independent of what was read before it. Data that came or may have come later, or has no stamp (0), gets the current time. */
void clock_stamp(const struct clock_pair *pair, int64_t realtime_ns, int64_t not_before_ns, int64_t *user_ns, int64_t *kernel_ns);

/* Make the kernel stamp what this socket receives. */
bool clock_stamp_socket(int fd);

/* recvmsg with the kernel's stamp (CLOCK_REALTIME) of the data, 0 if there is none. For several packets it is the newest stamp. Not
 * for Unix sockets: descriptors that the peer passes would stay open (unix(7)). */
ssize_t clock_receive(int fd, void *into, size_t size, int flags, int64_t *realtime_ns);

/* Return the number of bytes that a TCP socket has received in total, read or not; -1: unknown. */
int64_t clock_bytes_received(int fd);

#endif

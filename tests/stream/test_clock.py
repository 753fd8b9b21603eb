"""A simulated step of CLOCK_REALTIME during a run: only this process sees the stepped clock.

A preloaded library (LD_PRELOAD) shifts clock_gettime and the kernel's stamps in recvmsg, so both step at the same moment, as
when an administrator or NTP sets the clock.
"""

from __future__ import annotations

import json
import time

import pytest
from preloaded import run_preloaded
from stream_server import DONE, HEAD, RawServer, chunk, event

pytest.importorskip(
    "annie_quant._stream", reason="annie_quant._stream is not built: it needs libcurl's headers"
)

SHIM = r"""
#include <stdint.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static int64_t step_ns, from_ns = INT64_MAX; /* CLOCK_MONOTONIC: the clock is stepped from then on */
static int reads_until = -1, before_packet;

void step_clock(int64_t by_ns, int at_read, int before)
{
    step_ns = by_ns;
    reads_until = at_read;
    before_packet = before;
    from_ns = INT64_MAX;
}

static int64_t ns(const struct timespec *t) { return (int64_t)t->tv_sec * 1000000000 + t->tv_nsec; }

static int64_t now(clockid_t which)
{
    struct timespec t;
    syscall(SYS_clock_gettime, which, &t);
    return ns(&t);
}

static struct timespec moved(int64_t real_ns, int64_t at_ns)
{
    real_ns += at_ns >= from_ns ? step_ns : 0;
    return (struct timespec){real_ns / 1000000000, real_ns % 1000000000};
}

int clock_gettime(clockid_t which, struct timespec *t)
{
    int failed = (int)syscall(SYS_clock_gettime, which, t);
    if (!failed && which == CLOCK_REALTIME)
        *t = moved(ns(t), now(CLOCK_MONOTONIC));
    return failed;
}

ssize_t recvmsg(int fd, struct msghdr *message, int flags)
{
    ssize_t (*next)(int, struct msghdr *, int) = (ssize_t (*)(int, struct msghdr *, int))dlsym(RTLD_NEXT, "recvmsg");
    ssize_t got = next(fd, message, flags);
    struct cmsghdr *c = got > 0 && message->msg_controllen ? CMSG_FIRSTHDR(message) : NULL;
    if (!c || c->cmsg_type != SO_TIMESTAMPNS)
        return got;
    struct timespec t;
    memcpy(&t, CMSG_DATA(c), sizeof t);
    int64_t came_ns = ns(&t) - (now(CLOCK_REALTIME) - now(CLOCK_MONOTONIC));
    if (reads_until >= 0 && reads_until-- == 0)
        from_ns = before_packet ? came_ns : now(CLOCK_MONOTONIC);
    t = moved(ns(&t), came_ns);
    memcpy(CMSG_DATA(c), &t, sizeof t);
    return got;
}
"""

CLIENT = """
    import ctypes, json, os, sys
    import annie_quant as aq
    library = ctypes.CDLL(os.environ["SHIM"])
    library.step_clock.argtypes = [ctypes.c_int64, ctypes.c_int, ctypes.c_int]
    for by_ns, before in json.loads(sys.argv[2]):
        library.step_clock(by_ns, 150, before)
        timings = aq.stream.run([aq.stream.Request(sys.argv[1], timeout_s=20)] * 4, 4)
        rows = [(int(r["user_ns"]), int(r["kernel_ns"]), timings.raw(i)[6:].decode())
                for i, r in enumerate(timings.events) if r["kind"] == 1]
        print(json.dumps([rows, [r["e2e_ms"] for r in timings.records()], timings.origin_ns]))
"""
STEPS = [
    (by_ns, before)
    for by_ns in (3600_000_000_000, -3600_000_000_000, 50_000_000, -50_000_000)
    for before in (0, 1)
]


def paced(connection, request) -> None:
    """80 events over 0.16 s; each contains its send time (CLOCK_MONOTONIC)."""
    connection.sendall(HEAD)
    for _ in range(80):
        time.sleep(0.002)
        connection.sendall(chunk(event({"content": str(time.monotonic_ns())})))
    connection.sendall(chunk(DONE) + b"0\r\n\r\n")


def test_a_stepped_clock_removes_stamps_and_changes_none(tmp_path) -> None:
    """Stepped in either direction, before or after a packet arrives: no stamp is early or late, and later events have stamps."""
    with RawServer(paced) as server:
        out = run_preloaded(tmp_path, SHIM, CLIENT, server.url, json.dumps(STEPS))
    for (by_ns, before), line in zip(STEPS, out.splitlines(), strict=True):
        rows, e2e_ms, origin_ns = json.loads(line)
        sent = [int(json.loads(raw)["choices"][0]["delta"]["content"]) for _, _, raw in rows]
        assert len(rows) == 320 and all(0 < ms < 20_000 for ms in e2e_ms)
        for (user_ns, kernel_ns, _), sent_ns in zip(rows, sent, strict=True):
            assert user_ns > sent_ns > origin_ns
            assert kernel_ns == 0 or sent_ns - 50_000 < kernel_ns <= user_ns, (
                by_ns,
                before,
                kernel_ns - sent_ns,
            )
        stamped = [kernel_ns != 0 for _, kernel_ns, _ in rows]
        assert not all(stamped), f"a step of {by_ns} ns was not seen"
        assert sum(stamped) > 160 and any(stamped[-40:]), (
            f"the stamps did not come back after {by_ns} ns"
        )

"""The loop: nothing outside can stop or delay it, and it leaves nothing behind in its process."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from preloaded import run_preloaded
from stream_server import DONE, HEAD, HELLO, RawServer, chunk, event, stream

_stream = pytest.importorskip(
    "annie_quant._stream", reason="_stream is not built: libcurl's headers are missing"
)

import annie_quant as aq  # noqa: E402

# ---- name lookups

SLOW_LOOKUP = r"""
#include <fcntl.h>
#include <netdb.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

int getaddrinfo(const char *name, const char *port, const struct addrinfo *hints, struct addrinfo **found)
{
    int (*own)(const char *, const char *, const struct addrinfo *, struct addrinfo **) = dlsym(RTLD_NEXT, "getaddrinfo");
    if (!name || strcmp(name, "slow.test"))
        return own(name, port, hints, found);
    sleep(6);
    close(open(getenv("LOOKUP_ENDED"), O_CREAT | O_WRONLY, 0600));
    return EAI_AGAIN;
}
"""
STOPPED = """
    import json, os, signal, sys, threading
    import annie_quant as aq
    url, how = sys.argv[1:]
    slow = aq.stream.Request("http://slow.test/", timeout_s=0.4 if how == "timeout" else 30)
    cancel = aq.stream.Cancel()
    if how == "cancel":
        threading.Timer(0.4, cancel.cancel).start()
    if how == "Ctrl-C":
        threading.Timer(0.4, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        requests = [slow, aq.stream.Request(url, timeout_s=30)]
        timings = aq.stream.run(requests, 2, cancel=cancel, deadline_s=0.4 if how == "deadline" else None)
    except KeyboardInterrupt as stop:
        timings = stop.timings
    records = timings.records()
    print(json.dumps([[r["cause"] for r in records], os.path.exists(os.environ["LOOKUP_ENDED"])]))
"""


@pytest.mark.parametrize(
    ("how", "causes"),
    [
        ("timeout", ["timeout", None]),
        ("deadline", ["deadline", "deadline"]),
        ("cancel", ["cancelled", "cancelled"]),
        ("Ctrl-C", ["cancelled", "cancelled"]),
    ],
)
def test_a_slow_name_lookup_does_not_hold_the_run(
    how: str, causes: list[str], tmp_path: Path
) -> None:
    """The run ends before the lookup does, and so does the stream next to it."""

    def respond(connection, request: bytes) -> None:
        connection.sendall(HEAD)
        for _ in range(20 if how == "timeout" else 2000):
            connection.sendall(chunk(event({"content": "x"})))
            time.sleep(0.05)
        connection.sendall(chunk(event({}, "stop")) + chunk(DONE) + b"0\r\n\r\n")

    with RawServer(respond) as server:
        ended = str(tmp_path / "ended")
        out = run_preloaded(tmp_path, SLOW_LOOKUP, STOPPED, server.url, how, LOOKUP_ENDED=ended)
    assert json.loads(out) == [causes, False]


# ---- large requests

SENT_PER_WAKE_UP = r"""
#include <stdio.h>
#include <sys/epoll.h>
#include <sys/socket.h>

static size_t sent, most;

static ssize_t count(ssize_t size)
{
    sent += size > 0 ? (size_t)size : 0;
    most = sent > most ? sent : most;
    return size;
}

int epoll_wait(int fd, struct epoll_event *events, int size, int timeout)
{
    int (*own)(int, struct epoll_event *, int, int) = dlsym(RTLD_NEXT, "epoll_wait");
    sent = 0;
    return own(fd, events, size, timeout);
}

ssize_t send(int fd, const void *bytes, size_t size, int flags)
{
    ssize_t (*own)(int, const void *, size_t, int) = dlsym(RTLD_NEXT, "send");
    return count(own(fd, bytes, size, flags));
}

ssize_t sendmsg(int fd, const struct msghdr *message, int flags)
{
    ssize_t (*own)(int, const struct msghdr *, int) = dlsym(RTLD_NEXT, "sendmsg");
    return count(own(fd, message, flags));
}

size_t most_sent(void)
{
    return most;
}
"""
LARGE = """
    import ctypes, os, sys
    import annie_quant as aq
    timings = aq.stream.run([aq.stream.Request(sys.argv[1], body=bytes(20_000_000), timeout_s=50)])
    assert timings.records()[0]["error"] is None, timings.records()
    print(ctypes.CDLL(os.environ["SHIM"]).most_sent())
"""


def test_a_large_request_is_sent_in_bounded_pieces(tmp_path: Path) -> None:
    """Between two looks at the other sockets: a stream next to it has to wait for no more than that."""
    with RawServer(stream(HELLO)) as server:
        most = int(run_preloaded(tmp_path, SENT_PER_WAKE_UP, LARGE, server.url))
    assert 0 < most <= 256 << 10


# ---- the thread's priority

POLICY = """
    import os, sys, threading
    import annie_quant as aq
    during, done = set(), threading.Event()
    def watch():
        while not done.is_set():
            during.update(os.sched_getscheduler(int(t)) & ~os.SCHED_RESET_ON_FORK for t in os.listdir("/proc/self/task"))
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    timings = aq.stream.run([aq.stream.Request(sys.argv[1])])
    done.set()
    watcher.join()
    asked_not = aq.stream.run([aq.stream.Request(sys.argv[1])], realtime=False)
    after = os.sched_getscheduler(0) & ~os.SCHED_RESET_ON_FORK
    print(timings.realtime, timings.records()[0]["realtime"], asked_not.realtime, os.SCHED_FIFO in during,
          after == os.SCHED_OTHER, timings.records()[0]["text"])
"""
USER = ["setpriv", "--reuid=65534", "--clear-groups", "--bounding-set=-all", "--inh-caps=-all"]
COMMANDS = {
    "root": [],
    "a user with a limit of 1": ["prlimit", "--rtprio=1", *USER],
    "a user without a limit": ["prlimit", "--rtprio=0", *USER],
}


def slow_hello(connection, request: bytes) -> None:
    time.sleep(0.05)
    stream(HELLO)(connection, request)


def is_possible(command: list[str]) -> bool:
    """Containers may not permit a real-time priority, even to root, nor a higher limit."""
    ask = "import os; os.sched_setscheduler(0, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(1))"
    return (
        subprocess.run([*command, sys.executable, "-c", ask], capture_output=True).returncode == 0
    )


@pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("setpriv"), reason="root gives and takes the right to it"
)
@pytest.mark.parametrize("who", COMMANDS)
def test_the_loop_uses_a_real_time_priority_and_restores_the_threads_own(who: str) -> None:
    command = COMMANDS[who]
    raised = is_possible(command)
    if who == "a user with a limit of 1" and not raised:
        pytest.skip("this container does not permit a limit of real-time priorities")
    with RawServer(slow_hello) as server:
        command = [*command, sys.executable, "-c", textwrap.dedent(POLICY), server.url]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split(None, 5) == [
        str(raised), str(raised), "False", str(raised), "True", "Hello there.\n",
    ]  # fmt: skip


# The rules of sched(7) for a thread without CAP_SYS_NICE whose RLIMIT_RTPRIO is 1.
USERS_SCHEDULER = r"""
#include <errno.h>
#include <sched.h>

static __thread int policy = SCHED_OTHER;

int sched_getscheduler(pid_t pid)
{
    return policy;
}

int sched_setscheduler(pid_t pid, int wanted, const struct sched_param *param)
{
    if ((policy & SCHED_RESET_ON_FORK) && !(wanted & SCHED_RESET_ON_FORK)) {
        errno = EPERM;
        return -1;
    }
    policy = wanted;
    return 0;
}

int policy_of_thread(void)
{
    return policy & ~SCHED_RESET_ON_FORK;
}
"""
USERS_RUN = """
    import ctypes, os, sys
    import annie_quant as aq
    timings = aq.stream.run([aq.stream.Request(sys.argv[1])])
    print(timings.realtime, ctypes.CDLL(os.environ["SHIM"]).policy_of_thread() == os.SCHED_OTHER)
"""


def test_a_user_who_cannot_remove_the_flag_gets_the_threads_policy_back(tmp_path: Path) -> None:
    with RawServer(stream(HELLO)) as server:
        out = run_preloaded(tmp_path, USERS_SCHEDULER, USERS_RUN, server.url)
    assert out == "True True\n"


# ---- descriptors and memory

LEAK = """
    import os, sys
    import annie_quant as aq
    def rss_kb():
        return int(open("/proc/self/statm").read().split()[1]) * 4
    def thousand():
        aq.stream.run([aq.stream.Request(sys.argv[1], body=b"{}") for _ in range(1000)], concurrency=16)
    thousand()
    before, fds = rss_kb(), len(os.listdir("/proc/self/fd"))
    for _ in range(int(sys.argv[2]) // 1000 - 1):
        thousand()
    print(rss_kb() - before, len(os.listdir("/proc/self/fd")) - fds)
"""


def test_nothing_leaks() -> None:
    """Ten thousand requests, or ANNIE_QUANT_LEAK: memory and descriptors do not grow after the first thousand."""
    count = int(os.environ.get("ANNIE_QUANT_LEAK", "10000"))
    with RawServer(stream([event({"content": "a"}, "stop") + DONE])) as server:
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(LEAK), server.url, str(count)],
            capture_output=True,
            text=True,
            timeout=80 + count // 200,
        )
    assert done.returncode == 0, done.stderr
    grown_kb, fds = map(int, done.stdout.split())
    assert grown_kb < 1500 and fds == 0, (grown_kb, fds)


def test_a_cancel_that_is_dropped_releases_its_descriptors() -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(20):
        aq.stream.Cancel()
        aq.stream.run([], cancel=aq.stream.Cancel())
    assert len(list(Path("/proc/self/fd").iterdir())) == before


# ---- what a caller gives


@pytest.mark.parametrize("form", [os.fsencode, Path, str])
def test_paths_that_are_not_utf_8(form, tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    folder.mkdir()
    with RawServer(stream(HELLO), path=str(folder / "s")) as server:
        request = aq.stream.Request(server.url)
        timings = aq.stream.run(
            [request], unix_socket=form(folder / "s"), ca_file=form(folder / "x")
        )
    assert timings.records()[0]["text"] == "Hello there."


@pytest.mark.parametrize(
    ("path", "target"),
    [
        ("/a?q=ü&x=%20 b", b"/a?q=%C3%BC&x=%20%20b"),
        ("/münchen/漢?q=🦊#é", b"/m%C3%BCnchen/%E6%BC%A2?q=%F0%9F%A6%8A"),
        ("?q=é", b"/?q=%C3%A9"),
    ],
)
def test_a_path_and_a_query_that_are_not_ascii_are_encoded(path: str, target: bytes) -> None:
    with RawServer(stream(HELLO)) as server:
        url = server.url.replace("/v1/chat/completions", path)
        assert aq.stream.run([aq.stream.Request(url)]).records()[0]["error"] is None
    assert server.requests[0].split(b" ")[1] == target


@pytest.mark.parametrize("fresh", [True, False])
def test_fresh_connections_announce_their_end(fresh: bool) -> None:
    with RawServer(stream(HELLO)) as server:
        aq.stream.run([aq.stream.Request(server.url)] * 2, fresh_connections=fresh)
        assert server.connections == 1 + fresh
    assert [b"\r\nConnection: close\r\n" in r for r in server.requests] == [fresh] * 2

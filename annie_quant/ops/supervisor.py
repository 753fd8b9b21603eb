"""A small process between annie-quant and a server: it ends the server, and every process that the server started.

    python -I -S supervisor.py STATUS_FD CONTAINER_FILE KEEP_FREE_BYTES MEMINFO COMMAND...

It runs in its own session. The server ends when this process's standard input closes (annie-quant holds the other
end, and the kernel closes it however annie-quant ends), on SIGTERM, SIGINT and SIGHUP, and when its main process ends. If
this process is killed, the kernel sends SIGTERM to the server (PR_SET_PDEATHSIG; annie-quant cannot use it itself,
because it fires when the thread that started the server ends).

STATUS_FD       receives the server's process id and a line break
CONTAINER_FILE  where `docker run --cidfile` writes the container's id, or "-": a container survives its killed client, so
                it is removed by its id
KEEP_FREE_BYTES the server is killed when less memory is available; 0: no limit
MEMINFO         the file with MemAvailable: /proc/meminfo

A machine whose GPU shares the memory freezes as a whole when it has none left, and nothing is killed then
(vllm-project/vllm#46307, NVIDIA/dgx-spark-playbooks#97). So this process watches, and ends its own server in time.

It imports the standard library only, and not site-packages, to start in milliseconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable

# linux/prctl.h
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
GRACE_S = 5.0  # from SIGTERM to SIGKILL
REMOVE_TIMEOUT_S = 30.0
SAMPLE_S = 0.1
GUARD_WORD = "memory guard"  # starts its line in the log
MCL_CURRENT_AND_FUTURE = 3  # linux/mman.h
DOCKER_SOCKET = "/var/run/docker.sock"
DOCKER_TIMEOUT_S = 2.0
_POLL_S = 0.05
CANNOT_RUN = 127  # exit code of a shell for a command that cannot be run
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def main() -> None:
    status_fd = int(sys.argv[1])
    container_file = sys.argv[2]
    guard = MemoryGuard(int(sys.argv[3]), sys.argv[4])
    command = sys.argv[5:]
    os.set_inheritable(status_fd, False)
    library = ctypes.CDLL(None, use_errno=True)
    process_control = library.prctl
    if guard.keep_free_bytes:
        # Without memory its own pages would be read again from the disk; it may fail.
        library.mlockall(MCL_CURRENT_AND_FUTURE)
    # Processes whose parent ended become children of this one, so that they can be found.
    process_control(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    wake_read, wake_write = os.pipe()
    for fd in (wake_read, wake_write):
        os.set_blocking(fd, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    for number in (*STOP_SIGNALS, signal.SIGCHLD):
        signal.signal(
            number, lambda *_: None
        )  # the default again in the server, as for every caught signal
    child = _start(command, process_control)
    os.write(status_fd, b"%d\n" % child)
    os.close(status_fd)
    status = watch(child, wake_read, guard)
    if guard.message:
        kill_container(container_file)
    status = stop_all(child, status, at_once=bool(guard.message))
    if guard.message:
        sys.stderr.write(f"{guard.message}\n")
        sys.stderr.flush()
    remove_container(command[0], container_file)
    leave(status)


def _start(command: list[str], process_control: Callable[..., int]) -> int:
    """Start the server and return its process id."""
    supervisor = os.getpid()

    def before_exec() -> None:
        process_control(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != supervisor:  # it ended before the line above
            os._exit(CANNOT_RUN)

    try:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=before_exec).pid
    except (OSError, subprocess.SubprocessError) as error:
        sys.stderr.write(f"error: {command[0]} cannot be run: {error}\n")
        sys.stderr.flush()
        os._exit(CANNOT_RUN)


class MemoryGuard:
    """Tells when the machine, or this process's control group, has too little memory left.

    message: why the server has to end; "" until then.
    """

    def __init__(self, keep_free_bytes: int, meminfo: str) -> None:
        self.keep_free_bytes = keep_free_bytes
        self.message = ""
        self._meminfo = meminfo
        self._groups = group_files() if keep_free_bytes else []

    @property
    def period_s(self) -> float | None:
        return SAMPLE_S if self.keep_free_bytes else None

    def has_tripped(self) -> bool:
        """Sample the memory, and return whether less is available than has to stay free."""
        left = self.available_bytes()
        if left is None or left >= self.keep_free_bytes:
            return False
        self.message = (
            f"{GUARD_WORD}: {left / 1e9:.1f} GB of memory were available, and {self.keep_free_bytes / 1e9:.1f} GB "
            "have to stay free; the server was stopped"
        )
        return True

    def available_bytes(self) -> int | None:
        """Return the bytes that can still be used; None where no file reports them."""
        known = [_mem_available(self._meminfo)]
        known += [_left_in_group(*files) for files in self._groups]
        return min((size for size in known if size is not None), default=None)


def _mem_available(meminfo: str) -> int | None:
    for line in _text(meminfo).splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _left_in_group(limit: str, used: str, statistics: str) -> int | None:
    """Return what a control group may still use: its limit, less what it uses, more its cached files."""
    most = _text(limit).strip()
    now = _text(used).strip()
    if not most.isdigit() or not now.isdigit():
        return None  # "max": no limit
    cached = 0
    for line in _text(statistics).splitlines():
        name, _, value = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file"):
            cached = int(value)
    return int(most) - int(now) + cached


def group_files() -> list[tuple[str, str, str]]:
    """Return the limit, use and statistics files of the control groups (versions 1 and 2) that this process is in."""
    groups = []
    for line in _text("/proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            home = "/sys/fs/cgroup"
            names = ("memory.max", "memory.current", "memory.stat")
        elif "memory" in controllers.split(","):
            home = "/sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat")
        else:
            continue
        parts = path.strip("/").split("/")
        # In a container the path may be that of the host, and the group's files are in the root.
        for depth in range(len(parts), -1, -1):
            folder = "/".join([home, *parts[:depth]]).rstrip("/")
            files = [f"{folder}/{name}" for name in names]
            if os.path.exists(files[0]):  # noqa: PTH110
                groups.append((files[0], files[1], files[2]))
    return groups


def _text(path: str) -> str:
    try:
        with open(path) as file:  # noqa: PTH123
            return file.read()
    except OSError:
        return ""


def watch(child: int, wake_read: int, guard: MemoryGuard) -> int | None:
    """Return the server's wait status when it has ended, or None when it has to be stopped."""
    sources = [0, wake_read]
    while True:
        readable, _, _ = select.select(sources, [], [], guard.period_s)
        if guard.keep_free_bytes and guard.has_tripped():
            return None
        if wake_read in readable:
            numbers = os.read(wake_read, 512)
            if any(number in STOP_SIGNALS for number in numbers):
                return None
            status = reap(child)
            if status is not None:
                return status
        if 0 in readable and not os.read(0, 512):
            return None


def stop_all(child: int, status: int | None, at_once: bool = False) -> int:
    """End the server and all its descendants: SIGTERM, then SIGKILL after GRACE_S. Returns the server's wait status.

    at_once: SIGKILL from the beginning.
    """
    deadline = time.monotonic() + GRACE_S
    number = signal.SIGKILL if at_once else signal.SIGTERM
    if status is None:
        send([child], number)  # the main process first: many servers end their workers in order
    while True:
        ended = reap(child)
        if ended is not None:
            status = ended
        left = descendants()
        if not left:
            return signal.SIGTERM if status is None else status
        if time.monotonic() > deadline:
            number = signal.SIGKILL
        if status is not None or number == signal.SIGKILL:
            send(left, number)
        time.sleep(_POLL_S)


def reap(child: int) -> int | None:
    """Collect all processes that ended. Returns the wait status of `child` if it is one of them."""
    result = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return result
        if pid == 0:
            return result
        if pid == child:
            result = status


def descendants() -> list[int]:
    """Return the ids of all processes below this one, from /proc."""
    parents = {}
    for name in os.listdir("/proc"):  # noqa: PTH208 - pathlib costs 10 ms here
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:  # noqa: PTH123
                    parents[int(name)] = int(file.read().rpartition(b")")[2].split()[1])
            except (OSError, ValueError, IndexError):
                continue
    below = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in below} - below:
        below |= more
    return sorted(below - {os.getpid()})


def send(pids: list[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, number)


def kill_container(container_file: str) -> None:
    """Kill the container through docker's socket: to start docker's client takes memory, and a container survives it."""
    container = _text(container_file).strip()
    if not container.isalnum():
        return
    request = (
        f"POST /containers/{container}/kill HTTP/1.0\r\nHost: docker\r\nContent-Length: 0\r\n\r\n"
    )
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(DOCKER_TIMEOUT_S)
        connection.connect(DOCKER_SOCKET)
        connection.sendall(request.encode())
        connection.recv(64)


def remove_container(program: str, container_file: str) -> None:
    """Remove the container, if one was started and is still there."""
    try:
        with open(container_file) as file:  # noqa: PTH123
            container = file.read().strip()
        os.unlink(container_file)  # noqa: PTH108
    except OSError:
        container = ""
    if container_file != "-":
        with contextlib.suppress(OSError):
            os.rmdir(os.path.dirname(container_file))  # noqa: PTH106, PTH120
    if container:
        try:
            subprocess.run(
                [program, "rm", "--force", container],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=REMOVE_TIMEOUT_S,
            )
        except (OSError, subprocess.SubprocessError) as error:
            sys.stderr.write(f"error: the container {container} was not removed: {error}\n")


def leave(status: int) -> None:
    """End as the server ended: with its exit code, or by its signal."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


if __name__ == "__main__":
    main()

"""A small process between annie-quant and a server: it ends the server, and every process that the server started.

    python -I -S supervisor.py STATUS_FD CONTAINER_FILE COMMAND...

It runs in its own session. The server ends when this process's standard input closes (annie-quant holds the other
end, and the kernel closes it however annie-quant ends), on SIGTERM, SIGINT and SIGHUP, and when its main process ends. If
this process is killed, the kernel sends SIGTERM to the server (PR_SET_PDEATHSIG; annie-quant cannot use it itself,
because it fires when the thread that started the server ends).

STATUS_FD       receives the server's process id and a line break
CONTAINER_FILE  where `docker run --cidfile` writes the container's id, or "-": a container survives its killed client, so
                it is removed by its id

It imports the standard library only, and not site-packages, to start in milliseconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable

# linux/prctl.h
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
GRACE_S = 5.0  # from SIGTERM to SIGKILL
REMOVE_TIMEOUT_S = 30.0
_POLL_S = 0.05
CANNOT_RUN = 127  # exit code of a shell for a command that cannot be run
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def main() -> None:
    status_fd = int(sys.argv[1])
    container_file = sys.argv[2]
    command = sys.argv[3:]
    os.set_inheritable(status_fd, False)
    process_control = ctypes.CDLL(None, use_errno=True).prctl
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
    status = watch(child, wake_read)
    status = stop_all(child, status)
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


def watch(child: int, wake_read: int) -> int | None:
    """Return the server's wait status when it has ended, or None when it has to be stopped."""
    sources = [0, wake_read]
    while True:
        readable, _, _ = select.select(sources, [], [])
        if wake_read in readable:
            numbers = os.read(wake_read, 512)
            if any(number in STOP_SIGNALS for number in numbers):
                return None
            status = reap(child)
            if status is not None:
                return status
        if 0 in readable and not os.read(0, 512):
            return None


def stop_all(child: int, status: int | None) -> int:
    """End the server and all its descendants: SIGTERM, then SIGKILL after GRACE_S. Returns the server's wait status."""
    deadline = time.monotonic() + GRACE_S
    number = signal.SIGTERM
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

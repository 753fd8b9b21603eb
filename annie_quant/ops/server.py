"""One server process: start it, wait until it is ready, and stop it in any case.

It runs below a supervisor (supervisor.py) in its own session, so that Ctrl-C reaches this process only. However this
process ends, SIGKILL included, the supervisor ends the server and all processes that the server started.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from annie_quant.core.errors import ServerError
from annie_quant.core.progress import SILENT, Progress
from annie_quant.core.text import printable
from annie_quant.ops import known_faults
from annie_quant.ops.supervisor import GUARD_WORD
from annie_quant.stream.client import fetch

SUPERVISOR = Path(__file__).with_name("supervisor.py")
HEALTH = "/health"
STOP_S = 10.0  # longer than the supervisor's own limit, so that it can remove a container
_POLL_S = 0.02
PROBE_S = 2.0
PHASE_S = 0.5
# Words in log lines about errors; the first such line is the cause, later ones are consequences.
ERROR_WORDS = ("error", "failed", "abort", "exception", "cannot", "unknown", "invalid")
_STAMP = re.compile(r"^[\d.]+ [A-Z] ")  # llama.cpp's time and level
_ERROR = re.compile(r"^[\d.]+ E ")


@dataclass(frozen=True)
class Guard:
    """When the supervisor kills its server for want of memory.

    keep_free_bytes: as soon as less is available; 0: never.
    meminfo: the file with MemAvailable.
    """

    keep_free_bytes: int = 0
    meminfo: str = "/proc/meminfo"


NO_GUARD = Guard()
_running: weakref.WeakSet[Server] = weakref.WeakSet()


class Server:
    """A running server. Use it as a context manager, or call `stop`. It is stopped at exit in any case."""

    def __init__(
        self, process: subprocess.Popen, log: Path, name: str, pid: int | None = None
    ) -> None:
        self.process = process  # the supervisor
        self.pid = pid or process.pid  # the server itself, whose memory is measured
        self.log = log
        self.name = name
        self.url = ""
        _running.add(self)

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def wait(self) -> int:
        """Block until the server ends by itself. Raises ServerError if it failed."""
        code = self.process.wait()
        if code not in (0, -signal.SIGTERM):
            raise ServerError(
                f"{self.name} stopped with code {code}: {cause_line(self.log)}", hint(self.log)
            )
        return code

    def stop(self) -> None:
        """End the server and all its processes: SIGTERM, then SIGKILL. Does nothing if it has ended."""
        _running.discard(self)
        if self.process.stdin:
            with contextlib.suppress(OSError):
                self.process.stdin.close()
        if self.alive:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(STOP_S)
        if self.process.poll() not in (None, -signal.SIGKILL):
            return
        # The supervisor does not respond or was killed. The server's processes are in its group unless they started a group.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(STOP_S)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def spawn(
    command: Sequence[str],
    log: str | os.PathLike | None,
    name: str,
    env: dict[str, str] | None = None,
    container_file: str | None = None,
    guard: Guard = NO_GUARD,
) -> Server:
    """Start `command` below a supervisor, with its output in `log` (None: a temporary file).

    container_file: the file that `docker run --cidfile` writes, for a command that starts a container
    """
    if log is None:
        handle, path = tempfile.mkstemp(prefix=f"annie-quant-{name}-", suffix=".log")
        os.close(handle)
        log = path
    log = Path(log)
    log.parent.mkdir(parents=True, exist_ok=True)
    status_read, status_write = os.pipe()
    arguments = [
        sys.executable,
        "-I",
        "-S",
        str(SUPERVISOR),
        str(status_write),
        container_file or "-",
        str(guard.keep_free_bytes),
        guard.meminfo,
        *command,
    ]
    with os.fdopen(status_read, "rb", buffering=0) as status:
        with os.fdopen(status_write, "wb"), log.open("wb") as out:
            process = subprocess.Popen(
                arguments,
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=(status_write,),
                env=env,
            )
        pid = status.read(32)  # empty if the supervisor ended without starting the server
    return Server(process, log, name, int(pid) if pid.strip().isdigit() else None)


def wait_ready(
    server: Server, address: Callable[[], str | None], timeout_s: float, progress: Progress = SILENT
) -> None:
    """Poll until /health answers 200, and set the server's url. On any failure the server is stopped first.

    progress: gets a message when the start phase in the log changes
    """
    deadline = time.monotonic() + timeout_s
    checked = 0.0
    phase = ""
    try:
        while time.monotonic() < deadline:
            if not server.alive:
                raise ServerError(
                    f"{server.name} stopped while starting: {cause_line(server.log)}",
                    hint(server.log),
                )
            url = address()
            if url and fetch(url.rstrip("/") + HEALTH, timeout_s=PROBE_S).status == 200:
                server.url = url
                return
            if time.monotonic() - checked > PHASE_S:
                checked, previous, phase = (
                    time.monotonic(),
                    phase,
                    known_faults.phase(read(server.log)),
                )
                if phase != previous:
                    progress.message(phase)
            time.sleep(_POLL_S)
        raise ServerError(
            f"{server.name} was not ready in {timeout_s:g} s ({known_faults.phase(read(server.log))}): {cause_line(server.log)}",
            f"{hint(server.log)}, or use a longer timeout",
        )
    except BaseException:
        server.stop()
        raise


def start_at(
    port: int,
    words: Sequence[str],
    log: str | os.PathLike | None,
    name: str,
    env: dict[str, str] | None,
    timeout_s: float,
    progress: Progress = SILENT,
    guard: Guard = NO_GUARD,
) -> Server:
    """Start a command that serves at a port, and return its server when /health answers.

    A `docker run` command writes its container's id into a file, so that the container can be removed.
    """
    words, container_file = list(words), None
    if words[:2] == ["docker", "run"]:
        container_file = str(Path(tempfile.mkdtemp(prefix="annie-quant-")) / "container")
        words[2:2] = ["--cidfile", container_file]
    server = spawn(words, log, name, env, container_file, guard)
    wait_ready(server, lambda: f"http://127.0.0.1:{port}", timeout_s, progress)
    return server


def check_port(port: int) -> None:
    """Raise ServerError if the port is in use. Port 0 is always free."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise ServerError(
                f"port {port} cannot be used: {str(error.strerror).lower()}",
                "choose another --port (0 takes a free one)",
            ) from None
        except OverflowError:
            raise ServerError(
                f"port {port} is not a port number", "choose one from 0 to 65535"
            ) from None


def free_port() -> int:
    """Return a port that no program listens at now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def read(log: Path) -> str:
    try:
        return log.read_text(errors="replace")
    except OSError:
        return ""


def hint(log: Path) -> str:
    """Return the fix of a known error in the log, and the log's path."""
    known = known_faults.find_error(cause_line(log)) or known_faults.find_error(read(log))
    return f"{known.cause}: {known.fix}  (log: {log})" if known else f"see {log}"


def cause_line(log: Path) -> str:
    """Return the log's first line about an error, or its last line if it has none."""
    lines = [line.strip() for line in read(log).splitlines() if line.strip()]
    if lines and lines[-1].startswith(GUARD_WORD):
        return printable(lines[-1])
    errors = [line for line in lines if _ERROR.match(line)]
    errors = errors or [line for line in lines if any(word in line.lower() for word in ERROR_WORDS)]
    line = (errors or lines[-1:] or ["no output"])[0]
    return _STAMP.sub("", printable(line))[:300]


@atexit.register
def _stop_all() -> None:
    for server in list(_running):
        server.stop()

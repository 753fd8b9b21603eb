"""One server process: started, waited for, watched, and always stopped.

The child runs in a session of its own, so that Ctrl-C reaches this process alone, and holds the read end of a pipe
whose write end lives here: when this process ends in whatever way, the pipe closes and the child stops itself. (The
kernel's PR_SET_PDEATHSIG would fire already when the thread that started the server ends.)
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import signal
import socket
import subprocess
import tempfile
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

from annie_quant.errors import ServerError
from annie_quant.serve import known_errors
from annie_quant.stream.fetch import fetch

STOP_S = 5.0
POLL_S = 0.02
PROBE_S = 2.0
PHASE_S = 0.5
# Words of the log lines that say what went wrong; the first such line is the cause, the rest follow from it.
TELLING = ("error", "failed", "abort", "exception", "cannot", "unknown", "invalid")
_STAMP = re.compile(r"^[\d.]+ [A-Z] ")  # llama.cpp's time and level
_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_ERROR = re.compile(r"^[\d.]+ E ")

_running: weakref.WeakSet[Server] = weakref.WeakSet()


class Server:
    """A running server. Use it as a context manager, or call `stop`; it is stopped at exit in any case."""

    def __init__(self, process: subprocess.Popen, log: Path, name: str) -> None:
        self.process = process
        self.log = log
        self.name = name
        self.url = ""
        _running.add(self)

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def wait(self) -> int:
        """Block until the server ends by itself; raises ServerError when that was a fault."""
        code = self.process.wait()
        if code not in (0, -signal.SIGTERM):
            raise ServerError(f"{self.name} stopped with code {code}: {telling_line(self.log)}", hint(self.log))
        return code

    def stop(self) -> None:
        """End the process, politely first; nothing happens where it has ended already."""
        _running.discard(self)
        if self.process.stdin:
            with contextlib.suppress(OSError):
                self.process.stdin.close()
        if not self.alive:
            return
        self.process.terminate()
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(STOP_S)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def spawn(
    command: Sequence[str], log: str | os.PathLike | None, name: str, env: dict[str, str] | None = None
) -> Server:
    """Start `command` with its output going to `log` (a temporary file by default)."""
    if log is None:
        handle, path = tempfile.mkstemp(prefix=f"annie-quant-{name}-", suffix=".log")
        os.close(handle)
        log = path
    log = Path(log)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=out, stderr=subprocess.STDOUT, start_new_session=True, env=env
        )
    return Server(process, log, name)


def wait_ready(
    server: Server,
    address: Callable[[], str | None],
    path: str,
    timeout_s: float,
    say: Callable[[str], None] | None = None,
) -> None:
    """Poll until `path` answers 200, and set the server's url. On any failure the server is stopped first.

    say: told the phase that the log shows, whenever it changes.
    """
    deadline, shown, phase = time.monotonic() + timeout_s, 0.0, ""
    try:
        while time.monotonic() < deadline:
            if not server.alive:
                raise ServerError(f"{server.name} stopped while starting: {telling_line(server.log)}", hint(server.log))
            if (url := address()) and answers(url, path):
                server.url = url
                return
            if say is not None and time.monotonic() - shown > PHASE_S:
                shown, before, phase = time.monotonic(), phase, known_errors.phase(read(server.log))
                if phase != before:
                    say(phase)
            time.sleep(POLL_S)
        raise ServerError(
            f"{server.name} was not ready in {timeout_s:g} s ({known_errors.phase(read(server.log))}): {telling_line(server.log)}",
            f"{hint(server.log)}, or give it more time",
        )
    except BaseException:
        server.stop()
        raise


def answers(url: str, path: str) -> bool:
    """Whether GET url/path answers 200 now."""
    return fetch(url.rstrip("/") + path, timeout_s=PROBE_S).status == 200


def check_port(port: int, host: str = "127.0.0.1") -> None:
    """Raise ServerError where somebody listens on the port already. 0 is always free."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ServerError(
                f"port {port} cannot be used: {str(error.strerror).lower()}",
                "choose another --port (0 takes a free one)",
            ) from None
        except OverflowError:
            raise ServerError(f"port {port} is no port number", "choose one from 0 to 65535") from None


def read(log: Path) -> str:
    try:
        return log.read_text(errors="replace")
    except OSError:
        return ""


def hint(log: Path) -> str:
    """The remedy where the log holds a known error, and where the log is."""
    found = known_errors.recognise(read(log))
    return f"{found[0]}: {found[1]}  (log: {log})" if found else f"see {log}"


def telling_line(log: Path) -> str:
    """The log's first line that tells of a fault, or its last line where none does."""
    lines = [line.strip() for line in read(log).splitlines() if line.strip()]
    telling = [line for line in lines if _ERROR.match(line)]
    telling = telling or [line for line in lines if any(word in line.lower() for word in TELLING)]
    line = telling[0] if telling else lines[-1] if lines else "it said nothing"
    # A log may hold a terminal's commands: colours, and worse.
    return "".join(c if c.isprintable() else " " for c in _STAMP.sub("", _COLOUR.sub("", line))).strip()[:300]


@atexit.register
def _stop_all() -> None:
    for server in list(_running):
        server.stop()

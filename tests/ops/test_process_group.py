"""However annie-quant ends, the server it started ends with all its processes; also those in other sessions, and those
that ignore SIGTERM.

The servers are fakes: what is tested is the process tree, which has the shape of vLLM's (an API server with workers).
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

import annie_quant as aq

ENDS_WITHIN_S = 12.0
STUBBORN = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
FAKE_VLLM = """#!{python}
import http.server, os, signal, subprocess, sys
def worker(code, **options):
    return subprocess.Popen([sys.executable, "-c", "import signal, time; " + code + "; time.sleep(300)"], **options).pid
pids = [
    os.getpid(),
    worker("pass"),
    worker("{worker}"),
    worker("pass", start_new_session=True),
]
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *_):
        pass
server = http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler)
with open(os.environ["PIDS"] + ".part", "w") as file:
    file.write(" ".join(map(str, pids)))
os.rename(os.environ["PIDS"] + ".part", os.environ["PIDS"])
{then}
server.serve_forever()
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def assert_end(pids: list[int]) -> None:
    deadline = time.monotonic() + ENDS_WITHIN_S
    while left := [pid for pid in pids if running(pid)]:
        if time.monotonic() > deadline:
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            pytest.fail(f"{len(left)} of {len(pids)} processes of the server are left")
        time.sleep(0.05)


@pytest.fixture
def program(tmp_path):
    """Write a fake vLLM. Returns (environment, port, function that waits for the processes' ids)."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    file = tmp_path / "vllm"
    env = {
        **os.environ,
        "ANNIE_QUANT_VLLM": str(file),
        "PIDS": str(tmp_path / "pids"),
        "PYTHONUNBUFFERED": "1",
    }

    def write(then: str = "", worker: str = "pass") -> dict[str, str]:
        file.write_text(FAKE_VLLM.format(python=sys.executable, then=then, worker=worker))
        file.chmod(0o755)
        return env

    return write


def wait_for_pids(tmp_path: Path) -> list[int]:
    deadline = time.monotonic() + 30
    while not (tmp_path / "pids").exists():
        assert time.monotonic() < deadline, "the fake server did not start"
        time.sleep(0.05)
    return [int(word) for word in (tmp_path / "pids").read_text().split()]


@pytest.mark.parametrize("moment", ["ready", "starting"])
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP", "SIGKILL"])
def test_serve_ends_the_whole_tree(tmp_path, program, name, moment):
    if moment == "starting" and name in ("SIGINT", "SIGHUP"):
        pytest.skip("the same code as SIGTERM")
    then = "" if moment == "ready" else "server.server_close(); import time; time.sleep(300)"
    env = program(then, STUBBORN if name == "SIGKILL" else "pass")
    port = free_port()
    words = [
        sys.executable,
        "-m",
        "annie_quant",
        "serve",
        str(tmp_path / "model"),
        "--runtime",
        "vllm",
        "--use",
        "cpu",
    ]
    # As a shell starts a background command: SIGINT is ignored.
    command = subprocess.Popen(
        [*words, "--port", str(port)],
        env=env,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )
    pids = wait_for_pids(tmp_path)
    assert len(pids) == 4 and all(map(running, pids))
    if moment == "ready":
        assert any("ready" in line for line in command.stderr)
    command.send_signal(getattr(signal, name))
    code = command.wait(30)
    assert_end(pids)
    # systemd and docker count the end by SIGTERM as a clean stop.
    assert code == (130 if name == "SIGINT" else -getattr(signal, name))


def test_a_stopped_server_has_no_processes_left(tmp_path, program, monkeypatch):
    for key, value in program().items():
        monkeypatch.setenv(key, value)
    with aq.serve.start(
        tmp_path / "model", runtime="vllm", port=free_port(), recipe="cpu"
    ) as server:
        pids = wait_for_pids(tmp_path)
        assert server.pid == pids[0]
    assert not any(map(running, pids))


def test_a_server_that_ends_takes_its_workers_along(tmp_path, program, monkeypatch):
    for key, value in program("import time; time.sleep(2); os._exit(7)").items():
        monkeypatch.setenv(key, value)
    with pytest.raises(aq.errors.ServerError, match="stopped while starting"):
        aq.serve.start(tmp_path / "model", runtime="vllm", port=free_port(), recipe="cpu")
    assert not any(map(running, wait_for_pids(tmp_path)))


def test_a_killed_supervisor_ends_the_server(tmp_path, program, monkeypatch):
    for key, value in program().items():
        monkeypatch.setenv(key, value)
    server = aq.serve.start(tmp_path / "model", runtime="vllm", port=free_port(), recipe="cpu")
    pids = wait_for_pids(tmp_path)
    server.process.kill()
    server.process.wait()
    assert_end(pids[:1])
    server.stop()
    assert_end(pids[:3])  # its group; the fourth has its own session
    os.kill(pids[3], signal.SIGKILL)


def test_a_container_is_removed_by_its_id(tmp_path, monkeypatch):
    """A container survives its killed client. The fake docker notes what it is called with."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    fake = tmp_path / "docker"
    fake.write_text(
        f'#!/bin/sh\necho "$@" >>{tmp_path}/calls\n[ "$1" = rm ] && exit\n'
        'shift; [ "$1" = --cidfile ] && echo 0123456789ab >"$2"\n'
        'for a in "$@"; do case "$a" in *:*[0-9]) p=${a%%:*};; esac; done\n'
        f'cd {tmp_path}/www && exec {sys.executable} -m http.server "$p" --bind 127.0.0.1\n'
    )
    fake.chmod(0o755)
    (tmp_path / "www").mkdir()
    (tmp_path / "www/health").write_text("ok")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with aq.serve.start(tmp_path / "model", runtime="sglang", port=free_port(), timeout_s=20):
        assert "rm" not in (tmp_path / "calls").read_text().split()[:1]
    assert (tmp_path / "calls").read_text().splitlines()[-1] == "rm --force 0123456789ab"
    assert not list(tmp_path.glob("annie-quant-*/"))


def test_a_program_that_cannot_be_run_is_named(tmp_path, program, monkeypatch):
    for key, value in program().items():
        monkeypatch.setenv(key, value)
    (tmp_path / "vllm").write_text("#!/no/such/interpreter\n")
    with pytest.raises(aq.errors.ServerError, match="cannot be run"):
        aq.serve.start(tmp_path / "model", runtime="vllm", port=free_port(), recipe="cpu")

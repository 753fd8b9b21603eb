"""The memory guard: a server that eats the memory is killed in time, with all its processes, and no other process is.

The eater is real, and its resident memory is what it really has. The memory of the machine is a file that another thread keeps
as /proc/meminfo would be on a machine of LIMIT bytes with nothing else on it: control groups cannot be made in every test machine.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import psutil
import pytest
from memory_eater import LIMIT, Machine, eater

from annie_quant.core.errors import ServerError
from annie_quant.ops import server as process
from annie_quant.ops import supervisor

KEEP_FREE = 150_000_000


@pytest.fixture
def machine(tmp_path) -> Iterator[Machine]:
    with Machine(tmp_path / "meminfo") as machine:
        yield machine


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen]:
    """A process of the same user with more memory than the server, which the kernel's killer might choose."""
    code = "x = b'a' * 200_000_000; import time; time.sleep(60)"
    other = subprocess.Popen([sys.executable, "-c", code])
    yield other
    other.kill()
    other.wait()


@pytest.mark.parametrize("workers", [0, 2])
def test_the_server_is_killed_before_the_limit_and_no_other_process(
    tmp_path, machine, bystander, workers
):
    guard = process.Guard(KEEP_FREE, str(machine.path))
    server = process.spawn(
        eater(tmp_path / "limit", workers), tmp_path / "log", "eater", guard=guard
    )
    machine.watch(server.pid)
    with pytest.raises(ServerError, match=r"memory guard: .* GB have to stay free") as caught:
        server.wait()
    assert "--streams" in caught.value.hint
    assert not (tmp_path / "limit").exists()
    assert 0 < machine.least < KEEP_FREE and machine.peak > 0.5 * LIMIT
    assert bystander.poll() is None
    assert not psutil.pid_exists(server.pid) and not any(map(psutil.pid_exists, machine.pids))


def test_without_a_guard_the_same_program_reaches_the_limit(tmp_path, machine):
    server = process.spawn(eater(tmp_path / "limit", 0), tmp_path / "log", "eater")
    machine.watch(server.pid)
    with pytest.raises(ServerError, match="code 9"):
        server.wait()
    assert (tmp_path / "limit").exists()


def test_a_server_with_enough_memory_is_left_alone(tmp_path):
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:   1000000 kB\n")
    guard = process.Guard(999_000_000, str(tmp_path / "meminfo"))
    code = "import time; time.sleep(1.0)"
    with process.spawn([sys.executable, "-c", code], tmp_path / "log", "x", guard=guard) as server:
        assert server.wait() == 0


def test_a_control_group_counts_what_it_can_still_use(tmp_path):
    files = [tmp_path / name for name in ("max", "current", "stat")]
    for path, text in zip(files, ("1000\n", "900\n", "anon 5\ninactive_file 300\n"), strict=True):
        path.write_text(text)
    names = [str(path) for path in files]
    assert supervisor._left_in_group(*names) == 400
    files[0].write_text("max\n")
    assert supervisor._left_in_group(*names) is None
    files[0].unlink()
    assert supervisor._left_in_group(*names) is None
    guard = supervisor.MemoryGuard(1, "/proc/meminfo")
    now = psutil.virtual_memory()
    assert 0 < guard.available_bytes() <= now.total
    assert not supervisor.MemoryGuard(0, "/proc/meminfo").has_tripped()


def test_only_the_own_container_is_killed(tmp_path, monkeypatch):
    path = tmp_path / "docker.sock"
    monkeypatch.setattr(supervisor, "DOCKER_SOCKET", str(path))
    asked = []

    def serve(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        asked.append(connection.recv(4096).decode())
        connection.sendall(b"HTTP/1.0 204 No Content\r\n\r\n")
        connection.close()

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        (tmp_path / "none").write_text("")
        for file, content in (("none", ""), ("odd", "../x\r\n"), ("id", "0123abcd\n")):
            (tmp_path / file).write_text(content)
            supervisor.kill_container(str(tmp_path / file))
        thread.join(5)
    supervisor.kill_container("-")
    assert len(asked) == 1 and asked[0].startswith("POST /containers/0123abcd/kill HTTP/1.0\r\n")
